//! Reading and writing at an offset, from several threads at once, without a shared position.

use std::fs::File;
use std::io::Result;

/// Fills `bytes` from `offset` on. A file that ends before is an error.
pub(crate) fn read_exact(file: &File, bytes: &mut [u8], offset: u64) -> Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], offset + done as u64)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }
}

/// Writes all of `bytes` from `offset` on.
pub(crate) fn write_all(file: &File, bytes: &[u8], offset: u64) -> Result<()> {
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
