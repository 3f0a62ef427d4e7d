//! What is wrong with a recipe, a model or a plan.

use super::problem::Problems;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that a caller or a file can get wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// All that is wrong with a recipe, with a model, or with both together.
    #[error(transparent)]
    Problems(#[from] Problems),

    /// A setting that has no meaning; the text names the fix.
    #[error("{0}")]
    Setting(String),

    /// A tensor, or how it is quantized.
    #[error(transparent)]
    Tensor(#[from] nvfp4::Error),

    /// A file.
    #[error(transparent)]
    File(#[from] nvfp4_files::Error),

    /// Workers that could not agree on amaxes.
    #[error("the reduction among workers failed: {0}")]
    Collective(Box<dyn std::error::Error + Send + Sync>),
}

impl From<nvfp4::format::Error> for Error {
    fn from(error: nvfp4::format::Error) -> Self {
        Error::Tensor(error.into())
    }
}
