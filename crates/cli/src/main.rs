//! The `nvfp4` command line: one file or folder per subcommand.

mod agreement;
mod bench;
mod conformance;
mod demo;
mod device;
mod doctor;
mod normal;
mod recipe;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::io;
use std::process::ExitCode;

/// NVFP4: quantize, multiply and check, exact to the bit.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Args),
    Conformance(conformance::Args),
    Bench(bench::Args),
    Agreement(agreement::Args),
    Doctor(doctor::Args),
    Recipe(recipe::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Agreement(args) => agreement::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Recipe(args) => recipe::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The result of writing to standard output. A reader that closes the pipe early (`nvfp4 demo | head`) has all that it
/// wants: that is no error.
fn until_closed(written: Result<()>) -> Result<()> {
    written.or_else(|error| match error.downcast_ref::<io::Error>() {
        Some(io) if io.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}
