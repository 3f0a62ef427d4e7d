//! Errors of operations: an argument that a rule refuses or, on a GPU, a failure of the machine.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::fmt;

/// The result of an operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation did not run.
///
/// Exhaustive on purpose: whoever wraps it gives each variant a place in an error of its own.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// A length, a shape or a combination that the rules refuse.
    Rule(nvfp4_spec::Error),
    /// The GPU, its driver or its compiler.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Error),
}

impl From<nvfp4_spec::Error> for Error {
    fn from(error: nvfp4_spec::Error) -> Self {
        Error::Rule(error)
    }
}

#[cfg(feature = "cuda")]
impl From<cuda::Error> for Error {
    fn from(error: cuda::Error) -> Self {
        Error::Cuda(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Rule(error) => error.fmt(f),
            #[cfg(feature = "cuda")]
            Error::Cuda(error) => error.fmt(f),
        }
    }
}

// No `source`: the message is the cause's own, and a chain would repeat it.
impl std::error::Error for Error {}
