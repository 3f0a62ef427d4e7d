//! The command line, for the program that comes with the package.

use crate::threads;
use nvfp4_cli::Host;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the command line, whose first word is the program's name, and gives its exit status.
///
/// `program` says that this process is for the command alone: it may then start itself again, and
/// signals are the command's to handle.
#[pyfunction]
#[pyo3(signature = (words, *, program=false))]
pub fn command(py: Python<'_>, words: Vec<OsString>, program: bool) -> PyResult<u8> {
    let host = if program { Host::Program } else { Host::Library };
    let status = threads::run(py, || nvfp4_cli::main(words, host))?;
    Ok((0..=u8::MAX).find(|&code| ExitCode::from(code) == status).unwrap_or(1))
}
