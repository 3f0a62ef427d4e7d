//! `nvfp4 calibrate`: the statistics of activations that `convert --acts` reads.

use crate::interrupt::interrupts;
use crate::progress::Voice;
use crate::say::out;
use crate::sizes::counted;
use crate::text::{Bar, Text};
use crate::{Host, json, until_closed};
use anyhow::{Result, ensure};
use nvfp4_model::{Source, calibrate, open};
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
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Show no progress.
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let extension = args.output.extension().is_some_and(|extension| extension == "safetensors");
    ensure!(extension, "-o {}: expected a name that ends in .safetensors", args.output.display());
    ensure!((0.0..=100.0).contains(&args.percentile), "--percentile: expected a number from 0 to 100");
    let checkpoint = open(&args.model)?;
    let source = Source::new(&checkpoint, args.text.from.map(|from| from.dialect()))?;
    let (rows, _) = args.text.rows(&args.model, source.config())?;
    let mut bar = Bar::new(if args.quiet { Voice::Quiet } else { Voice::Normal });
    let found = calibrate(&source, &rows, &mut bar, interrupts(host)?);
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
