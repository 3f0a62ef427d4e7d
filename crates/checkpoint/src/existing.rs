//! What becomes of a target that already exists.

use serde::{Deserialize, Serialize};

/// What to do if the target, or an unfinished conversion to it, already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Existing {
    /// Stop with an error, unless it is an empty folder.
    #[default]
    Refuse,
    /// Continue an unfinished conversion, if there is one. A finished one is no error.
    Resume,
    /// Throw an unfinished conversion away, and replace a finished checkpoint when the new one is
    /// whole.
    Replace,
}

/// Whether a conversion had anything to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It wrote the target.
    Written,
    /// The target already existed, and every byte of its tensors and configuration is what it
    /// would have written.
    AlreadyThere,
}
