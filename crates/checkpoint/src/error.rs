//! What can go wrong with a checkpoint, and what to change.

use super::portion::Portion;
use nvfp4::Precision;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that a caller or a file can get wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A weight that holds NaN or infinity, which no block scale can represent.
    #[error("weight '{module}' holds {value} at row {row}, column {col}; repair the checkpoint, or skip the weight")]
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

    /// A value that is too large for the type that its weight is decoded to.
    #[error(
        "weight '{module}' holds {value} at row {row}, column {col}, and the largest {precision:?} \
         is {}; {}, and start over",
        precision.max(),
        match (decoding, precision) {
            (Decoding::All, Precision::F16) => "decode to BF16 or F32",
            (Decoding::All, _) => "decode to F32",
            (Decoding::Rest, _) => "quantize it too, or decode the source to F32 and convert that",
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
        /// Which weights are decoded.
        decoding: Decoding,
    },

    /// A conversion that was stopped. What is done is kept.
    #[error("interrupted; what is done is kept, and can be continued")]
    Interrupted,

    /// A target that already exists and may not be replaced: see
    /// [`Existing`](crate::Existing).
    #[error("{} already exists; choose another target, or replace it", path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },

    /// An earlier conversion to the same target that did not finish: see
    /// [`Existing`](crate::Existing).
    #[error("{} holds an unfinished conversion; continue it, or start over", path.display())]
    Unfinished {
        /// The folder that holds what is done.
        path: PathBuf,
    },

    /// An unfinished conversion that cannot be continued with these settings or this source.
    #[error("{} was begun with other settings or another source; repeat them, or start over", path.display())]
    OtherRequest {
        /// The folder that holds what is done.
        path: PathBuf,
    },

    /// An unfinished conversion whose journal is damaged.
    #[error("{}: {reason}; start over", path.display())]
    DamagedJournal {
        /// The journal.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Parts of a conversion that are not there, or not whole.
    #[error("{}: {} missing or not complete: {}; make {}, and finish then",
        path.display(),
        if missing.len() == 1 { "this part is" } else { "these parts are" },
        listed(missing),
        if missing.len() == 1 { "it" } else { "them" }
    )]
    MissingParts {
        /// The folder of the parts.
        path: PathBuf,
        /// Which.
        missing: Vec<Portion>,
    },

    /// A part that does not belong to the others.
    #[error(
        "part {} in {} was made with {difference}; repeat what it was made with, or remove the \
         folder and start over",
        part, path.display()
    )]
    OtherPart {
        /// The folder of the parts.
        path: PathBuf,
        /// The part that is there.
        part: Portion,
        /// What is different, there and here.
        difference: String,
    },

    /// A file of the source that changed during the conversion.
    #[error("{} changed while it was read; start over when it is complete", path.display())]
    SourceChanged {
        /// The file.
        path: PathBuf,
    },

    /// A result that could not be read back, and so did not get its name.
    #[error("the result cannot be read back: {error}; {}", if error.is_of_the_system() {
        "continue when that is fixed"
    } else {
        "start over"
    })]
    NotReadBack {
        /// Why.
        error: Box<Error>,
    },

    /// A conversion that would change no weight.
    #[error("no weight would be quantized; the plan says why")]
    NothingToQuantize,

    /// A pattern of names that none of the weights has.
    #[error("the pattern '{pattern}' matches no weight")]
    UnknownWeight {
        /// The pattern.
        pattern: String,
    },

    /// A checkpoint whose dialect cannot be detected.
    #[error(
        "{}: the names fit both ModelOpt and ComfyUI, whose nibbles and scales are in opposite \
         orders, and nothing says which it is; name the dialect",
        path.display()
    )]
    UnclearDialect {
        /// The checkpoint.
        path: PathBuf,
    },

    /// A setting that does not fit the source, the target or another setting.
    #[error("{reason}")]
    Setting {
        /// What to change.
        setting: Setting,
        /// Why.
        reason: String,
    },

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

/// `0/8, 3/8`.
fn listed(parts: &[Portion]) -> String {
    parts.iter().map(Portion::to_string).collect::<Vec<_>>().join(", ")
}

/// Which weights a conversion decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decoding {
    /// All of them: nothing is quantized.
    All,
    /// Those that it does not quantize.
    Rest,
}

/// A setting of a conversion that an error is about, so that a program can name its own option for
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Setting {
    /// Which architectures are converted.
    Architectures,
    /// Activation scales.
    Acts,
    /// How keys and values are kept.
    Kv,
    /// Which weights are left as they are.
    Skip,
    /// Which weights get which form.
    Rules,
    /// Which weights are joined.
    Fuse,
    /// What becomes of joined weights with different tensor scales.
    Differing,
    /// Whose arithmetic is reproduced.
    Profile,
    /// Statistics of activations, and what is chosen by them.
    Statistics,
    /// What is written.
    Target,
}

impl Error {
    /// Whether it is an error of the system, such as a full disk, which says nothing about what is
    /// in files.
    pub fn is_of_the_system(&self) -> bool {
        matches!(self, Error::File(nvfp4_files::Error::Io { .. }))
    }

    /// A setting that does not fit.
    pub(crate) fn setting(setting: Setting, reason: impl Into<String>) -> Self {
        Error::Setting { setting, reason: reason.into() }
    }

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
