//! How many threads each run gets.
//!
//! candle has one pool for the whole process, lends it to one tensor at a time, and takes its size
//! from an environment variable when it is first used. Runs side by side would wait for each other;
//! so the variable has to be right before the program starts, and the program starts itself again
//! where it is not. In another program's process, which cannot start again, runs go one after the
//! other.

use anyhow::{Context, Result};
use std::process::{Command, ExitCode};

/// Read by candle and rayon.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Threads of a command: how many runs go at a time, and how many threads each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    pub runs: usize,
    pub each: usize,
}

impl Threads {
    /// Shares threads among runs: as many runs at a time as there are threads, and where there are
    /// fewer runs, several threads for each.
    pub fn share(threads: usize, runs: usize) -> Self {
        let at_a_time = threads.min(runs).max(1);
        Threads { runs: at_a_time, each: threads / at_a_time }
    }

    /// Starts the program again where candle would have another number of threads; `None` where it
    /// has this one.
    pub fn enforce(self) -> Result<Option<ExitCode>> {
        let wanted = self.each.to_string();
        if std::env::var(VARIABLE).is_ok_and(|found| found == wanted) {
            return Ok(None);
        }
        // As it was called: where that is Python, the file of that name would be an interpreter
        // without its packages.
        let mut words = std::env::args_os();
        let program = words.next().context("cannot find this program to start it with its threads")?;
        let mut again = Command::new(program);
        again.args(words).env(VARIABLE, wanted);
        start(again).map(Some)
    }
}

/// In place of this process, which keeps its number: signals reach the one that trains.
#[cfg(unix)]
fn start(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec()).context("cannot start this program again")
}

#[cfg(not(unix))]
fn start(mut command: Command) -> Result<ExitCode> {
    let status = command.status().context("cannot start this program again")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or_else(crate::exit::error, ExitCode::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_go_to_runs_first() {
        assert_eq!(Threads::share(16, 27), Threads { runs: 16, each: 1 });
        assert_eq!(Threads::share(16, 3), Threads { runs: 3, each: 5 });
        assert_eq!(Threads::share(1, 2), Threads { runs: 1, each: 1 });
    }
}
