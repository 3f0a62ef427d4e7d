//! Opening files that strangers provide: regular files only, and never waiting.
//!
//! A pipe in place of a file would block whoever opens it until somebody writes to it, and a device has no end.

use crate::json::{named, unique_keys};
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file for reading. Anything else (a folder, a pipe, a socket, a device) is an error.
pub fn open(path: &Path) -> Result<File> {
    open_regular(path).map_err(|source| Error::io(path, source))
}

/// All bytes of a regular file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let io = |source| Error::io(path, source);
    let mut bytes = Vec::new();
    open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => Err(Error::content(path, format!("more than {most} bytes"))),
    }
}

/// The text of a regular file of at most `most` bytes.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    let text = String::from_utf8(read(path, most)?);
    text.map_err(|_| Error::content(path, "not UTF-8"))
}

/// Reads a JSON file of at most `most` bytes in which no object has a key twice.
pub fn read_json<T: DeserializeOwned>(path: &Path, most: u64) -> Result<T> {
    let bytes = read(path, most)?;
    parse_json(&bytes).map_err(|e| Error::content(path, e.to_string()))
}

/// JSON in which no object has a key twice. A byte order mark, which some editors write, is passed over.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    unique_keys(bytes).map_err(|error| named(bytes, error)).and_then(|()| serde_json::from_slice(bytes))
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
