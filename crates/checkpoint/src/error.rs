//! What can go wrong with a checkpoint, and what to change.

use crate::target::Target;
use nvfp4::Precision;
use std::ops::Range;
use std::path::Path;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that a caller or a file can get wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A weight that holds NaN or infinity, which no block scale can represent.
    #[error(
        "weight '{module}' holds {value} at row {row}, column {col}; mend the checkpoint, or leave it as it is with --skip"
    )]
    WeightNotFinite {
        /// The module.
        module: String,
        /// Where the value is.
        row: usize,
        /// Where the value is.
        col: usize,
        /// The value.
        value: f32,
    },

    /// A value of a weight that the type it is decoded to cannot hold.
    #[error(
        "weight '{module}' holds {value} at row {row}, column {col}, and {precision:?} ends at {}; \
         {} and start over with --force",
        precision.max(),
        match (target, precision) {
            (Target::Plain(_), Precision::F16) => "decode it to --dtype bf16 or f32",
            (Target::Plain(_), _) => "decode it to --dtype f32",
            _ => "quantize it too, or convert what `nvfp4 dequant --dtype f32` makes of the source,",
        }
    )]
    WeightDoesNotFit {
        /// The module.
        module: String,
        /// Where the value is.
        row: usize,
        /// Where the value is.
        col: usize,
        /// The value.
        value: f32,
        /// The type that weights are decoded to.
        precision: Precision,
        /// What was to be written.
        target: Target,
    },

    /// A conversion that was stopped. What is done is kept.
    #[error("interrupted; run the same command with --resume to continue")]
    Interrupted,

    /// A request that cannot be carried out; the text names the fix.
    #[error("{0}")]
    Refused(String),

    /// A file.
    #[error(transparent)]
    File(#[from] nvfp4_files::Error),

    /// A tensor.
    #[error(transparent)]
    Tensor(#[from] nvfp4::Error),
}

impl Error {
    /// The system's error about a file.
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        nvfp4_files::Error::io(path, source).into()
    }

    /// Rows outside a tensor, which has `of` of them.
    pub(crate) fn out_of_range(rows: &Range<usize>, of: usize) -> Self {
        nvfp4::Error::OutOfRange { start: rows.start, end: rows.end, rows: of }.into()
    }

    /// A file that does not hold what it must, and why.
    pub(crate) fn content(path: &Path, reason: impl Into<String>) -> Self {
        nvfp4_files::Error::content(path, reason).into()
    }
}

impl From<nvfp4_spec::Error> for Error {
    fn from(error: nvfp4_spec::Error) -> Self {
        Error::Tensor(error.into())
    }
}

impl From<nvfp4_kernels::Error> for Error {
    fn from(error: nvfp4_kernels::Error) -> Self {
        Error::Tensor(error.into())
    }
}
