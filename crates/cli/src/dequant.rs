//! `nvfp4 dequant`: a quantized checkpoint back to BF16.

use crate::convert::interrupts;
use crate::progress::{Progress, Voice};
use crate::source::From;
use crate::{sizes, until_closed};
use anyhow::Result;
use nvfp4::checkpoint::{Existing, Settings, Shards, Target, convert};
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

/// Decode a checkpoint (NVFP4 of any dialect, MXFP4 experts, or FP8 with block scales) to plain BF16.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Folder to write.
    target: PathBuf,
    /// Whose checkpoint the source is, if it does not say.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Largest size of a written file.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = sizes::parse)]
    max_shard: u64,
    /// Memory to stay below.
    #[arg(long, value_name = "SIZE", default_value = "2GB", value_parser = sizes::parse)]
    mem: u64,
    /// Continue an interrupted run.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// Replace the target.
    #[arg(long)]
    force: bool,
    /// No progress.
    #[arg(long, short)]
    quiet: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let settings = Settings {
        target: Target::Bf16,
        source: args.from.map(From::dialect),
        shards: Shards::AtMost(args.max_shard),
        memory: args.mem,
        existing: match (args.resume, args.force) {
            (true, _) => Existing::Resume,
            (_, true) => Existing::Replace,
            _ => Existing::Refuse,
        },
        ..Settings::default()
    };
    let progress = Progress::new(if args.quiet { Voice::Quiet } else { Voice::Normal }, 0);
    let summary = convert(&args.source, &args.target, &settings, &progress, interrupts()?);
    progress.finish();
    let summary = summary?;
    let (before, after) = (sizes::show(summary.before), sizes::show(summary.after));
    until_closed(
        writeln!(stdout().lock(), "result   {}: {before} -> {after} BF16", args.target.display()).map_err(Into::into),
    )?;
    Ok(ExitCode::SUCCESS)
}
