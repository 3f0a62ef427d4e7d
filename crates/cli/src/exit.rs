//! Exit codes, which every command shares; 130 and 143 are in [`crate::interrupt`].

use std::process::ExitCode;

/// What `--help` says about them.
pub const HELP: &str = "Exit codes: 0 done, 1 checks failed, 2 wrong usage, 3 error, 130 interrupted (143 by SIGTERM).";

/// A command ran, and a check failed.
pub const CHECKS_FAILED: u8 = 1;

/// The command line is wrong.
pub const USAGE: u8 = 2;

/// A command could not do its work.
pub const ERROR: u8 = 3;

/// The end of a command that checked something.
pub fn checked(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::from(CHECKS_FAILED) }
}

/// The end of a command that could not do its work.
#[cfg(feature = "train")]
pub fn error() -> ExitCode {
    ExitCode::from(ERROR)
}
