//! `nvfp4 train` in a build without the feature `train`: it says how to get one that trains.

use crate::Host;
use anyhow::{Result, bail};
use std::ffi::OsString;
use std::process::ExitCode;

/// Train a small language model: not in this build, which is without the feature `train`.
#[derive(clap::Args)]
pub struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _words: Vec<OsString>,
}

pub fn run(_: &Args, _: Host) -> Result<ExitCode> {
    bail!("train: this build cannot train: install it with `--features train`")
}
