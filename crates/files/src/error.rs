//! What can go wrong with a file.

use std::path::{Path, PathBuf};

/// The result of work on files.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with a file. Every message begins with its path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },

    /// A file that is not valid safetensors.
    #[error("{path}: not a valid safetensors file: {source}")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },

    /// A file that does not hold what it must.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What was expected; it names the tensor.
        reason: String,
    },

    /// A file that is there already, and is not what would be written.
    #[error("{path} is there already, and not what this would write; choose another target")]
    Differs {
        /// The file.
        path: PathBuf,
    },
}

impl Error {
    /// The system's error about a file.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io { path: path.to_path_buf(), source }
    }

    /// A file that does not hold what it must, and why.
    pub fn content(path: &Path, reason: impl Into<String>) -> Self {
        Error::Content { path: path.to_path_buf(), reason: reason.into() }
    }
}
