//! The journal of a conversion: what it was asked for, and what it has done so far.

use super::existing::Existing;
use super::measure::Measure;
use super::stamp::Stamp;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const JOURNAL: &str = ".nvfp4-journal.json";
pub(super) const LOCK: &str = ".nvfp4-lock";

/// What has been done so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Journal {
    /// What was asked for, and from what: a resumed run must ask for the same.
    pub request: Value,
    /// What was to happen to a target that exists. A continued conversion does the same.
    pub existing: Existing,
    /// The bits of the amax of every weight that is quantized, by module; for MXFP4, the largest
    /// exponent of each matrix.
    pub amaxes: Option<BTreeMap<String, Vec<u32>>>,
    /// Files that are whole.
    pub done: BTreeMap<String, Done>,
    /// The name that the replaced checkpoint moves to, noted just before it moves.
    pub replaced: Option<String>,
}

/// A file that is whole.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// Its stamp at that time: a file that was changed since is written again.
    pub stamp: Stamp,
    /// What it did to its weights.
    pub measures: BTreeMap<String, Measure>,
}

/// The journal of an unfinished conversion; `None` where it was stopped before it wrote one.
pub(super) fn read_journal(folder: &Path) -> Result<Option<Journal>> {
    let path = folder.join(JOURNAL);
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::DamagedJournal { path, reason: e.to_string() })
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(&path, e)),
    }
}

/// The path of a checkpoint that was replaced. A journal may name nothing else.
pub(super) fn replaced(target: &Path, journal: &Journal) -> Option<PathBuf> {
    let name = journal.replaced.as_deref()?;
    let start = format!("{}.replaced-", target.file_name()?.to_string_lossy());
    let number = name.strip_prefix(&start)?;
    let counted = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    counted.then(|| target.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_names_nothing_but_a_numbered_checkpoint_beside_the_target() {
        let named = |name: &str| {
            let journal = Journal { replaced: Some(name.to_string()), ..Journal::default() };
            replaced(Path::new("a/t"), &journal)
        };
        assert_eq!(named("t.replaced-12"), Some(PathBuf::from("a/t.replaced-12")));
        for name in ["t.replaced-", "t.replaced-1/..", "t.replaced-x", "other", "../t.replaced-1"] {
            assert_eq!(named(name), None, "{name}");
        }
    }
}
