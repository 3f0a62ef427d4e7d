//! `nvfp4 plan --parts`: what each part of a conversion has to do.

use crate::sizes::{self, counted};
use crate::table::{Table, right};
use anyhow::Result;
use nvfp4_checkpoint::Share;
use serde_json::{Value, json};
use std::io::Write;

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
