//! `nvfp4 convert --part`: one part of a conversion; and `nvfp4 plan --parts`: what each has to do.

use crate::interrupt::interrupts;
use crate::progress::{Progress, Voice};
use crate::sizes::{self, counted};
use crate::table::{Table, right};
use crate::{Host, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::{Model, Outcome, Plan, Portion, Settings, Share, convert_part, shares};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// One part of a conversion.
pub struct Job<'a> {
    pub source: &'a Path,
    pub target: &'a Path,
    pub settings: &'a Settings,
    pub portion: Portion,
}

impl Job<'_> {
    /// Makes the part. Returns what was done, as JSON.
    pub fn perform(
        &self,
        voice: Voice,
        (model, plan): (&Model<'_>, &Plan<'_>),
        host: Host,
        out: &mut impl Write,
    ) -> Result<Value> {
        let Job { source, target, settings, portion } = *self;
        let share = shares(model, plan, settings, portion.of())?.swap_remove(portion.index());
        let weights = if voice == Voice::Verbose { share.weights } else { share.quantized };
        let progress = Progress::new(voice, weights);
        let start = Instant::now();
        let summary = convert_part(source, target, settings, portion, &progress, interrupts(host)?);
        progress.finish();
        let summary = summary?;
        let seconds = start.elapsed().as_secs_f64();
        let (there, outcome) = match summary.outcome {
            Outcome::Written => ("", "written"),
            Outcome::AlreadyThere => ("complete already: ", "complete already"),
        };
        let (folder, weights) = (summary.folder.display(), counted(summary.weights, "weight"));
        let (before, after) = (sizes::show(summary.before), sizes::show(summary.after));
        let line = format!("part     {portion} in {folder}: {there}{weights}, {before} -> {after}, {seconds:.1} s");
        let next = "next     the same command with --finish in place of --part, when all parts are there";
        until_closed(writeln!(out, "{line}\n{next}").map_err(Into::into))?;
        Ok(json!({
            "source": source, "target": target, "part": portion.index(), "parts": portion.of(),
            "outcome": outcome, "folder": summary.folder, "files": summary.files, "weights": summary.weights,
            "bytes": summary.before, "new_bytes": summary.after, "seconds": seconds,
        }))
    }
}

/// Bytes of the source that a core converts in a second: see docs/checkpoints.md, "Speed and
/// memory".
const PER_CORE: f64 = 0.3e9;

/// About how long a part takes on a machine of so many cores, where the disk is fast enough. Of what
/// it reads only for an amax, it does a fourth of the work.
fn seconds(share: &Share, cores: usize) -> f64 {
    (share.read as f64 + share.shared as f64 / 4.0) / (PER_CORE * cores as f64)
}

/// One line per part, and what the end has to do.
pub fn print(out: &mut impl Write, shares: &[Share], cores: usize) -> Result<()> {
    let columns = ["PART", "WEIGHTS", "FILES", "DIVIDED", "READS", "AMAX ONLY", "WRITES", "SECONDS"];
    let mut table = Table::new(columns.map(right));
    for share in shares {
        table.row([
            share.part.to_string(),
            share.weights.to_string(),
            share.files.to_string(),
            share.divided.to_string(),
            sizes::show(share.read),
            sizes::show(share.shared),
            sizes::show(share.written),
            format!("{:.1}", seconds(share, cores)),
        ]);
    }
    table.write(out)?;
    let copied: u64 = shares.iter().filter(|s| s.divided > 0).map(|s| s.written).sum();
    let end = match copied {
        0 => "copies nothing".to_string(),
        copied => format!("copies up to {}: more parts than files", sizes::show(copied)),
    };
    let (cores, speed) = (counted(cores, "core"), sizes::show(PER_CORE as u64));
    Ok(writeln!(out, "--finish {end}; seconds are an estimate, for {cores} at {speed} each a second")?)
}

/// The same as JSON.
pub fn to_json(shares: &[Share], cores: usize) -> Value {
    let part = |share: &Share| {
        json!({
            "part": share.part.index(), "weights": share.weights, "files": share.files, "divided": share.divided,
            "bytes": share.read, "amax_bytes": share.shared, "new_bytes": share.written,
            "seconds": seconds(share, cores),
        })
    };
    shares.iter().map(part).collect()
}
