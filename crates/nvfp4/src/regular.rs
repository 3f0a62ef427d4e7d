//! Opening files that strangers provide: regular files only, and never waiting.
//!
//! A pipe in place of a file would block whoever opens it until somebody writes to it, and a device has no end.

use crate::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file for reading. Anything else (a folder, a pipe, a socket, a device) is an error.
pub(crate) fn open(path: &Path) -> Result<File> {
    open_regular(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

/// All bytes of a regular file of at most `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => Err(Error::Format { path: path.to_path_buf(), reason: format!("more than {most} bytes") }),
    }
}

fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // What is asked after opening is asked of the very file that is read; opening itself must not wait for a writer.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path).map_err(|e| explained(path, e))?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, what_it_is(kind.is_dir()))),
    }
}

fn what_it_is(folder: bool) -> &'static str {
    if folder { "a folder, where a file is expected" } else { "a pipe, socket or device, where a file is expected" }
}

/// The error of something that cannot be opened at all, as a socket, by what it is.
fn explained(path: &Path, error: io::Error) -> io::Error {
    match std::fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            io::Error::new(io::ErrorKind::InvalidInput, what_it_is(metadata.is_dir()))
        }
        _ => error,
    }
}
