//! Scale bytes from row-major order to the 128 × 4 tiles of block-scaled tensor cores, and back. **Exact.**

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::swizzle as spec;

/// Row-major `rows` × `cols` scales to swizzled ones; the padding becomes zero.
pub fn swizzle(
    implementation: Implementation,
    scales: &[u8],
    rows: usize,
    cols: usize,
    swizzled: &mut [u8],
) -> Result<()> {
    check_len("swizzled scales", spec::len(rows, cols)?, swizzled.len())?;
    match implementation {
        _ => swizzled.copy_from_slice(&spec::swizzle(scales, rows, cols)?),
    }
    Ok(())
}

/// Swizzled scales back to row-major `rows` × `cols` ones.
pub fn unswizzle(
    implementation: Implementation,
    swizzled: &[u8],
    rows: usize,
    cols: usize,
    scales: &mut [u8],
) -> Result<()> {
    spec::len(rows, cols)?;
    check_len("scales", rows * cols, scales.len())?;
    match implementation {
        _ => scales.copy_from_slice(&spec::unswizzle(swizzled, rows, cols)?),
    }
    Ok(())
}
