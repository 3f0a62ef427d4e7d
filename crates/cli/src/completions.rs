//! `nvfp4 completions`: what a shell needs to complete our commands.

use crate::{Cli, until_closed};
use anyhow::Result;
use clap::CommandFactory;
use std::io::{Write, stdout};
use std::process::ExitCode;

/// Print a shell completion script.
#[derive(clap::Args)]
pub struct Args {
    /// The shell.
    shell: clap_complete::Shell,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "nvfp4", &mut script);
    until_closed(stdout().lock().write_all(&script).map_err(Into::into))?;
    Ok(ExitCode::SUCCESS)
}
