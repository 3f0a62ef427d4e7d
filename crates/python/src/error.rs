//! What goes wrong, as Python's exceptions, in the words of this package.

use nvfp4::Error;
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// An error of the library as an exception: `OSError` for files, `RuntimeError` for the machine, `ValueError` for what was asked.
pub fn raised(error: Error) -> PyErr {
    match &error {
        Error::Io { source, .. } => {
            let text = error.to_string();
            match source.raw_os_error() {
                Some(code) => PyOSError::new_err((code, text)),
                None => PyOSError::new_err(text),
            }
        }
        Error::Interrupted => {
            PyKeyboardInterrupt::new_err("interrupted; the same call with existing='resume' continues")
        }
        Error::Exhausted | Error::Collective(_) => PyRuntimeError::new_err(error.to_string()),
        #[cfg(feature = "cuda")]
        Error::Cuda(_) => PyRuntimeError::new_err(error.to_string()),
        Error::NoRandomness => {
            PyValueError::new_err("stochastic rounding needs `seed` (and `offset`), or a `generator`")
        }
        Error::UnusedRandomness => {
            PyValueError::new_err("random numbers were given, but rounding is 'nearest'; use 'stochastic' or drop them")
        }
        Error::TransformWithoutColumn => PyValueError::new_err(
            "the Hadamard transform acts on the column direction, which is not asked for; \
             use directions='column' or 'both', or transform=None",
        ),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// The library's results as Python's.
pub trait OrRaise<T> {
    /// The value, or the exception to raise.
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for nvfp4::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(raised)
    }
}
