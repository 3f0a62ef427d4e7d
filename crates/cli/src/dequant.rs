//! `nvfp4 dequant`: a quantized checkpoint back to BF16, F16 or F32.

use crate::interrupt::interrupts;
use crate::progress::Progress;
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From};
use crate::writing::Writing;
use crate::{Host, sizes, until_closed};
use anyhow::Result;
use clap::ValueEnum;
use nvfp4::Precision;
use nvfp4_checkpoint::{Checkpoint, Finished, Outcome, Settings, Shards, Summary, Target, convert};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Decode a checkpoint (NVFP4 of any dialect, MXFP4 experts, or FP8 with block scales) to plain numbers.
///
/// What the source has not quantized (embeddings, norms) keeps its type.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Folder to write.
    target: PathBuf,
    /// Type of the decoded weights. A value beyond its range is an error; values that it rounds to 0 are counted.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Whose checkpoint the source is, if it does not say.
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
    let weights = source::model(&Checkpoint::open(&args.source)?, args.from)?.weights.len();
    let progress = Progress::new(args.writing.voice(), weights);
    let summary = convert(&args.source, &args.target, &settings, &progress, interrupts(host)?);
    progress.finish();
    until_closed(conclude(&mut out(), args, &summary?))?;
    Ok(ExitCode::SUCCESS)
}

fn conclude(out: &mut impl Write, args: &Args, summary: &Summary) -> Result<()> {
    let (before, after, name) = (sizes::show(summary.before), sizes::show(summary.after), args.dtype.name());
    let vanished: u64 = summary.decoded.iter().map(|w| w.measure.zeroed).sum();
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
