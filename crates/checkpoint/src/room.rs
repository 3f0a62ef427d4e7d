//! Whether a disk has room for what will be written.

use crate::{Error, Result};
use std::path::Path;

/// An error if fewer bytes are free than needed. If the system does not say, there is room.
pub(super) fn check(folder: &Path, needed: u64) -> Result<()> {
    match free(folder) {
        Some(free) if free < needed => Err(Error::Refused(format!(
            "{}: no space left: {:.1} MB are needed, {:.1} MB are free; make room, or choose a target on another disk",
            folder.display(),
            needed as f64 / 1e6,
            free as f64 / 1e6
        ))),
        _ => Ok(()),
    }
}

/// Bytes that an unfinished conversion already takes. A file that was just begun has its whole
/// length at once, and takes only what is written.
#[cfg(unix)]
pub(super) fn taken(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let len = |entry: std::fs::DirEntry| {
        let metadata = entry.metadata().ok().filter(|metadata| metadata.is_file())?;
        let begun = entry.path().extension().is_some_and(|e| e == "part");
        Some(if begun { metadata.blocks() * 512 } else { metadata.len() })
    };
    entries.filter_map(len).sum()
}

#[cfg(not(unix))]
pub(super) fn taken(_: &Path) -> u64 {
    0
}

/// Bytes that may be written to the disk that a folder is on, or will be on.
#[cfg(unix)]
fn free(folder: &Path) -> Option<u64> {
    let folder = std::path::absolute(folder).ok()?;
    let there = folder.ancestors().find(|ancestor| ancestor.is_dir())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    // Some file systems do not count blocks.
    (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn what_no_disk_holds_is_refused_and_a_byte_is_not() {
        let folder = std::env::temp_dir().join("not/made/yet");
        check(&folder, 1).unwrap();
        let refused = check(&folder, u64::MAX).unwrap_err().to_string();
        assert!(refused.contains("no space left: 18446744073709.6 MB are needed"), "{refused}");
    }
}
