//! How a change of a file is noticed: by its length and the time of its last change.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Length and time of the last change. A byte that a disk corrupts is not noticed: that would take
/// another pass over every file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    len: u64,
    modified: Option<String>,
}

impl Stamp {
    pub fn of(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|source| Error::io(path, source))?;
        let modified = metadata.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let modified = modified.map(|d| format!("{}.{:09}", d.as_secs(), d.subsec_nanos()));
        Ok(Stamp { len: metadata.len(), modified })
    }
}
