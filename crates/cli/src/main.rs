//! The `nvfp4` command line: one file or folder per subcommand.

mod agreement;
mod bench;
mod completions;
mod conformance;
mod convert;
mod demo;
mod dequant;
mod device;
mod diff;
mod doctor;
mod inspect;
mod modes;
mod normal;
mod page;
mod plan;
mod progress;
mod recipe;
mod report;
mod sizes;
mod source;
mod train;
mod verify;

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
    Convert(Box<convert::Args>),
    Plan(plan::Args),
    Inspect(inspect::Args),
    Diff(diff::Args),
    Verify(verify::Args),
    Dequant(dequant::Args),
    Train(Box<train::Args>),
    Modes(modes::Args),
    Conformance(conformance::Args),
    Bench(bench::Args),
    Agreement(agreement::Args),
    Doctor(doctor::Args),
    Recipe(recipe::Args),
    Completions(completions::Args),
}

fn main() -> ExitCode {
    run(Cli::parse().command).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::demonstrate(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Dequant(args) => dequant::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Modes(args) => modes::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Agreement(args) => agreement::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Recipe(args) => recipe::run(&args),
        Command::Completions(args) => completions::run(&args),
    }
}

/// The result of writing to standard output. A reader that closes the pipe early (`nvfp4 modes | head`) has all that it
/// wants: that is no error.
fn until_closed(written: Result<()>) -> Result<()> {
    written.or_else(|error| match error.downcast_ref::<io::Error>() {
        Some(io) if io.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}
