//! `nvfp4 convert --part`: one part of a conversion.

use crate::interrupt::interrupts;
use crate::progress::{Progress, Voice};
use crate::sizes::{self, counted};
use crate::{Host, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::{Model, Outcome, Plan, Portion, Settings, convert_part, shares};
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
