//! The `nvfp4` command line: one file or folder per subcommand.

mod advice;
mod agreement;
mod bench;
mod calibrate;
mod calibrated;
mod chart;
mod completions;
mod conformance;
mod convert;
mod demo;
mod dequant;
mod device;
mod diff;
mod doctor;
mod eval;
mod exit;
mod fold;
mod generate;
mod help;
mod inspect;
mod interrupt;
mod json;
mod modes;
mod names;
mod normal;
mod order;
mod page;
mod part;
mod plan;
mod progress;
mod recipe;
mod recipes;
mod report;
mod say;
mod shares;
mod sizes;
mod source;
mod table;
mod text;
#[cfg(feature = "train")]
mod train;
#[cfg(not(feature = "train"))]
#[path = "train/absent.rs"]
mod train;
mod tune;
mod verify;
mod writing;

use anyhow::{Result, anyhow};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use say::say;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

/// Convert models to NVFP4, check the result, and train with it.
#[derive(Parser)]
#[command(name = "nvfp4", version, arg_required_else_help = true, after_help = exit::HELP)]
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
    Eval(eval::Args),
    Calibrate(calibrate::Args),
    Generate(generate::Args),
    Train(Box<train::Args>),
    Modes(modes::Args),
    Conformance(conformance::Args),
    Bench(bench::Args),
    Agreement(agreement::Args),
    Doctor(doctor::Args),
    Tune(tune::Args),
    Recipe(recipe::Args),
    Completions(completions::Args),
}

impl Command {
    /// Its name, as it is typed.
    fn name(&self) -> &'static str {
        match self {
            Command::Demo(_) => "demo",
            Command::Convert(_) => "convert",
            Command::Plan(_) => "plan",
            Command::Inspect(_) => "inspect",
            Command::Diff(_) => "diff",
            Command::Verify(_) => "verify",
            Command::Dequant(_) => "dequant",
            Command::Eval(_) => "eval",
            Command::Calibrate(_) => "calibrate",
            Command::Generate(_) => "generate",
            Command::Train(_) => "train",
            Command::Modes(_) => "modes",
            Command::Conformance(_) => "conformance",
            Command::Bench(args) => args.name(),
            Command::Agreement(_) => "agreement",
            Command::Doctor(_) => "doctor",
            Command::Tune(_) => "tune",
            Command::Recipe(args) => args.name(),
            Command::Completions(_) => "completions",
        }
    }
}

/// Whose process a command runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The command's own: it may start itself again, and signals are its to handle.
    Program,
    /// Another program's, which goes on after the command.
    Library,
}

/// Runs the command line, whose first word is the program's name. Prints help, or what is wrong
/// with the words.
pub fn main(words: impl IntoIterator<Item = OsString>, host: Host) -> ExitCode {
    let words: Vec<OsString> = words.into_iter().collect();
    let as_json = json::is_asked_for(&words);
    let parsed = help::grouped(Cli::command()).try_get_matches_from(&words);
    let command = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli.command,
        Err(answer) => {
            let _ = answer.print(); // a closed pipe has all that it wants
            if !answer.use_stderr() {
                return ExitCode::SUCCESS;
            }
            if as_json {
                let _ = json::print_error(None, answer.to_string().trim_end(), None, exit::USAGE);
            }
            return ExitCode::from(exit::USAGE);
        }
    };
    let name = command.name();
    if host == Host::Program {
        interrupt::survive_full_files();
    }
    run(command, host).unwrap_or_else(|error| {
        let (message, known) = (chain(&error), error.downcast_ref());
        let hint = known.and_then(|known| advice::advice(known, &words));
        let code = match known {
            Some(nvfp4_checkpoint::Error::Interrupted) => interrupt::status(),
            _ => exit::ERROR,
        };
        if as_json {
            let _ = json::print_error(Some(name), &message, hint.as_deref(), code);
        }
        say(format_args!("error: {}", names::shown_lines(&message)));
        if let Some(hint) = hint {
            say(format_args!("hint: {}", names::shown(&hint)));
        }
        ExitCode::from(code)
    })
}

/// An error and its causes, each said once: many errors already end in the text of their cause.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(|cause| cause.to_string()).filter(|cause| !cause.is_empty()) {
        match text.is_empty() {
            true => text = cause,
            false if text.ends_with(&cause) => {}
            false => text = format!("{text}: {cause}"),
        }
    }
    text
}

fn run(command: Command, host: Host) -> Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::demonstrate(&args, host),
        Command::Convert(args) => convert::run(&args, host),
        Command::Plan(args) => plan::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Dequant(args) => dequant::run(&args, host),
        Command::Eval(args) => eval::run(&args, host),
        Command::Calibrate(args) => calibrate::run(&args, host),
        Command::Generate(args) => generate::run(&args, host),
        Command::Train(args) => train::run(&args, host),
        Command::Modes(args) => modes::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Agreement(args) => agreement::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Recipe(args) => recipe::run(&args),
        Command::Completions(args) => completions::run(&args),
    }
}

/// The result of writing to standard output. A reader that closes the pipe early (`nvfp4 modes |
/// head`) has all that it wants: that is no error.
fn until_closed(written: Result<()>) -> Result<()> {
    written.or_else(|error| match error.downcast_ref::<io::Error>() {
        Some(io) if io.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        // The system's own error says nothing about where it happened.
        Some(io) if io.raw_os_error().is_some() => Err(anyhow!("standard output: {io}")),
        _ => Err(error),
    })
}
