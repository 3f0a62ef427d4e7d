//! The command line, for the program that comes with the package.

use crate::threads;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the command line, whose first word is the program's name, and gives its exit status.
#[pyfunction]
pub fn command(py: Python<'_>, words: Vec<OsString>) -> PyResult<u8> {
    let status = threads::run(py, || nvfp4_cli::main(words))?;
    Ok((0..=u8::MAX).find(|&code| ExitCode::from(code) == status).unwrap_or(1))
}
