//! `nvfp4 calibrate`: the statistics of activations that `convert --acts` reads.

use crate::device::Device;
use crate::interrupt::interrupts;
use crate::progress::Voice;
use crate::say::out;
use crate::sizes::counted;
use crate::text::{Bar, Text};
use crate::{Host, json, until_closed};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use nvfp4_model::{Hessians, Source, calibrate_with, open};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Find activation scales on a text, for `convert --acts`; also experts, keys and values.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the original model.
    model: PathBuf,
    #[command(flatten)]
    text: Text,
    /// File of statistics to write.
    #[arg(long, short, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Also write the magnitude that this many percent of blocks stay below.
    #[arg(long, default_value_t = 99.9)]
    percentile: f64,
    /// Also write products of inputs: local, of the 16 columns of each block (for --scale
    /// local-hessian), or full, of all columns (for --round gptq too).
    #[arg(long, value_enum, default_value = "none")]
    hessian: HessianArg,
    /// Inputs with more columns than this have local products with --hessian full too. N columns
    /// take 8·N² bytes of memory, and 4·N² in the file.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    hessian_columns: usize,
    /// Where products with weights are computed: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Show no progress.
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum HessianArg {
    None,
    Local,
    Full,
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let extension = args.output.extension().is_some_and(|extension| extension == "safetensors");
    ensure!(extension, "-o {}: expected a name that ends in .safetensors", args.output.display());
    ensure!((0.0..=100.0).contains(&args.percentile), "--percentile: expected a number from 0 to 100");
    let (place, checkpoint) = (args.device.place()?, open(&args.model)?);
    let source = Source::new(&checkpoint, args.text.from.map(|from| from.dialect()))?.on(place);
    let (rows, _) = args.text.rows(&args.model, source.config())?;
    let mut bar = Bar::new(if args.quiet { Voice::Quiet } else { Voice::Normal });
    let hessians = match args.hessian {
        HessianArg::None => Hessians::None,
        HessianArg::Local => Hessians::Local,
        HessianArg::Full => Hessians::Full(args.hessian_columns),
    };
    let found = calibrate_with(&source, &rows, hessians, &args.output, &mut bar, interrupts(host)?);
    bar.finish();
    let found = found?;
    found.save(&args.output, &source, args.percentile)?;
    let (tokens, modules, unseen) = (found.tokens(), found.modules(), found.unseen());
    if args.json {
        let report = json!({ "output": args.output, "tokens": tokens, "modules": modules, "unseen_experts": unseen });
        json::print("calibrate", &report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = out();
    for (module, count) in unseen {
        until_closed(
            writeln!(out, "unseen   {module}: {} saw no token", counted(count, "expert")).map_err(Into::into),
        )?;
    }
    let (tokens, modules) = (counted(tokens, "token"), counted(modules, "module"));
    let file = args.output.display();
    let text = format!("result   {file}: {tokens}, {modules}\nnext     nvfp4 convert … --acts {file}");
    until_closed(writeln!(out, "{text}").map_err(Into::into))?;
    Ok(ExitCode::SUCCESS)
}
