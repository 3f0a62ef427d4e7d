//! Arguments of the commands that write a checkpoint.

use crate::progress::Voice;
use crate::sizes;
use nvfp4_checkpoint::Existing;

/// How a checkpoint is written.
#[derive(clap::Args)]
pub struct Writing {
    /// Largest size of a written file.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = sizes::parse)]
    pub max_shard: u64,
    /// Memory to stay below.
    #[arg(long, value_name = "SIZE", default_value = "2GB", value_parser = sizes::parse)]
    pub mem: u64,
    /// Continue an interrupted run; a target that is complete is compared, and no error.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// Replace a target that is a checkpoint and nothing else, and throw an interrupted run away.
    #[arg(long)]
    force: bool,
    /// No progress.
    #[arg(long, short)]
    quiet: bool,
    /// A line for every weight: what happens to it, and why.
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
