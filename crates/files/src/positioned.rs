//! Reading and writing at an offset, from several threads at once, without a shared position.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};

#[cfg(not(any(unix, windows)))]
compile_error!("files are read and written at offsets, which the standard library has for Unix and Windows only");

/// Where the bytes of a file are.
#[derive(Debug)]
pub enum Bytes {
    /// On disk.
    File(File),
    /// In memory.
    Memory(Vec<u8>),
}

impl Bytes {
    /// How many there are.
    pub fn byte_len(&self) -> Result<u64> {
        match self {
            Bytes::File(file) => file.metadata().map(|m| m.len()),
            Bytes::Memory(bytes) => Ok(bytes.len() as u64),
        }
    }

    /// Fills `bytes` from `offset` on. Bytes that end before are an error.
    pub fn read_exact(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        match self {
            Bytes::File(file) => read_exact(file, bytes, offset),
            Bytes::Memory(all) => {
                let rest = usize::try_from(offset).ok().and_then(|start| all.get(start..)?.get(..bytes.len()));
                bytes.copy_from_slice(rest.ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))?);
                Ok(())
            }
        }
    }
}

/// Fills `bytes` from `offset` on. A file that ends before is an error.
pub fn read_exact(file: &File, bytes: &mut [u8], offset: u64) -> Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], offset + done as u64)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }
}

/// Writes all of `bytes` from `offset` on.
pub fn write_all(file: &File, bytes: &[u8], offset: u64) -> Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::write_all_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            done += std::os::windows::fs::FileExt::seek_write(file, &bytes[done..], offset + done as u64)?;
        }
        Ok(())
    }
}
