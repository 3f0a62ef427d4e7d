//! Arguments of the commands that write a checkpoint.

use crate::progress::Voice;
use crate::sizes;
use nvfp4_checkpoint::Existing;

/// How a checkpoint is written.
#[derive(clap::Args)]
pub struct Writing {
    /// Largest size of an output file.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = sizes::parse)]
    pub max_shard: u64,
    /// Memory limit.
    #[arg(long, value_name = "SIZE", default_value = "2GB", value_parser = sizes::parse)]
    pub mem: u64,
    /// Continue an interrupted run. If the target is already complete, check it and exit with 0.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// Replace an existing checkpoint (a folder with other files is never replaced), and discard an
    /// interrupted run.
    #[arg(long)]
    force: bool,
    /// Print JSON when done: what was written, how large it is, and what the checks found.
    #[arg(long)]
    pub json: bool,
    /// Show no progress.
    #[arg(long, short)]
    quiet: bool,
    /// Print one line per weight: what happens to it, and why.
    #[arg(long, short, conflicts_with = "quiet")]
    verbose: bool,
}

impl Writing {
    pub fn existing(&self) -> Existing {
        match (self.resume, self.force) {
            (true, _) => Existing::Resume,
            (_, true) => Existing::Replace,
            _ => Existing::Refuse,
        }
    }

    pub fn voice(&self) -> Voice {
        match (self.quiet, self.verbose) {
            (true, _) => Voice::Quiet,
            (_, true) => Voice::Verbose,
            _ => Voice::Normal,
        }
    }
}
