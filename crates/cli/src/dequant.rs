//! `nvfp4 dequant`: a quantized checkpoint back to BF16, F16 or F32.

use crate::interrupt::interrupts;
use crate::progress::Progress;
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From};
use crate::writing::Writing;
use crate::{Host, json, sizes, until_closed};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use nvfp4::Precision;
use nvfp4_checkpoint::{Checkpoint, Finished, Outcome, Settings, Shards, Stored, Summary, Target, check_free, convert};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Decode a quantized checkpoint (NVFP4, MXFP4 experts, FP8, MXFP8, or several of them) to BF16, F16
/// or F32.
///
/// Tensors that are not quantized (embeddings, norms) keep their type.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Folder to write.
    target: PathBuf,
    /// Type of the decoded weights. Values out of range are an error; values that round to 0 are
    /// counted.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Format of the source, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    #[command(flatten)]
    writing: Writing,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    Bf16,
    F16,
    F32,
}

impl Dtype {
    fn precision(self) -> Precision {
        match self {
            Dtype::Bf16 => Precision::Bf16,
            Dtype::F16 => Precision::F16,
            Dtype::F32 => Precision::F32,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
        }
    }
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let settings = Settings {
        target: Target::Plain(args.dtype.precision()),
        source: args.from.map(From::dialect),
        shards: Shards::AtMost(args.writing.max_shard),
        memory: args.writing.mem,
        existing: args.writing.existing(),
        ..Settings::default()
    };
    check_free(&args.target, &settings)?;
    let checkpoint = Checkpoint::open(&args.source)?;
    let model = source::model(&checkpoint, args.from)?;
    ensure!(
        model.weights.iter().any(|weight| !matches!(weight.stored, Stored::Plain(_))),
        "{}: no weight is quantized, so there is nothing to decode",
        args.source.display()
    );
    let progress = Progress::new(args.writing.voice(), model.weights.len());
    let summary = convert(&args.source, &args.target, &settings, &progress, interrupts(host)?);
    progress.finish();
    let summary = summary?;
    match args.writing.json {
        true => json::print("dequant", &to_json(args, &summary))?,
        false => until_closed(conclude(&mut out(), args, &summary))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// How many values became 0.
fn zeroed(summary: &Summary) -> u64 {
    summary.decoded.iter().map(|w| w.measure.zeroed).sum()
}

fn to_json(args: &Args, summary: &Summary) -> Value {
    let mut report = crate::convert::written(&args.source, &args.target, summary);
    report["dtype"] = json!(args.dtype.name());
    report["decoded"] = json!(summary.decoded.len());
    report["zeroed"] = json!(zeroed(summary));
    report
}

fn conclude(out: &mut impl Write, args: &Args, summary: &Summary) -> Result<()> {
    let (before, after, name) = (sizes::show(summary.before), sizes::show(summary.after), args.dtype.name());
    let vanished = zeroed(summary);
    if let (Some(most), 1..) = (summary.decoded.iter().max_by_key(|w| w.measure.zeroed), vanished) {
        let all: u64 = summary.decoded.iter().map(|w| w.measure.elements).sum();
        let Finished { module, measure, .. } = most;
        writeln!(
            out,
            "note     {vanished} of {all} values are too small for {name} and became 0, {} of them in {module}",
            measure.zeroed
        )?;
    }
    crate::verify::print(out, &summary.findings)?;
    let (weights, target) = (counted(summary.decoded.len(), "weight"), args.target.display());
    let there = if summary.outcome == Outcome::AlreadyThere { "complete already: " } else { "" };
    Ok(writeln!(out, "result   {target}: {there}{before} -> {after}, {weights} decoded to {name}")?)
}
