//! Scale bytes from row-major order to the 128 × 4 tiles of block-scaled tensor cores, and back.
//! **Exact.**

#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::swizzle::{self as spec, TILE_COLS, offset};
use rayon::prelude::*;

/// Row-major `rows` × `cols` scales to swizzled ones; the padding becomes zero.
pub fn swizzle(
    implementation: Implementation,
    scales: &[u8],
    rows: usize,
    cols: usize,
    swizzled: &mut [u8],
) -> Result<()> {
    check_len("swizzled scales", spec::len(rows, cols)?, swizzled.len())?;
    check_len("scales", rows * cols, scales.len())?;
    match implementation {
        Implementation::Scalar => swizzled.copy_from_slice(&spec::swizzle(scales, rows, cols)?),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, cuda::Way::ToTiles, scales, rows, cols, swizzled)?,
        _ if rows == 0 || cols == 0 => {}
        #[allow(unreachable_patterns)] // where there are no vectors
        _ => {
            let band = offset(spec::TILE_ROWS, 0, cols);
            swizzled.par_chunks_mut(band).enumerate().for_each(|(t, out)| {
                let first = t * spec::TILE_ROWS;
                let rows = &scales[first * cols..rows.min(first + spec::TILE_ROWS) * cols];
                out.fill(0);
                for_each_four(rows.len() / cols, cols, |linear, at, n| {
                    out[at..at + n].copy_from_slice(&rows[linear..linear + n]);
                });
            });
        }
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
    check_len("swizzled scales", spec::len(rows, cols)?, swizzled.len())?;
    check_len("scales", rows * cols, scales.len())?;
    match implementation {
        Implementation::Scalar => scales.copy_from_slice(&spec::unswizzle(swizzled, rows, cols)?),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, cuda::Way::FromTiles, swizzled, rows, cols, scales)?,
        _ if rows == 0 || cols == 0 => {}
        #[allow(unreachable_patterns)] // where there are no vectors
        _ => {
            let band = offset(spec::TILE_ROWS, 0, cols);
            scales.par_chunks_mut(spec::TILE_ROWS * cols).zip(swizzled.par_chunks(band)).for_each(|(out, tiles)| {
                for_each_four(out.len() / cols, cols, |linear, at, n| {
                    out[linear..linear + n].copy_from_slice(&tiles[at..at + n]);
                });
            });
        }
    }
    Ok(())
}

/// Four neighbouring scales of a row stay neighbours. Visits the fours of up to 128 rows: the
/// row-major index, the swizzled index and the count. Vector instructions would not be faster than
/// these copies of four bytes: memory bandwidth is the bottleneck.
fn for_each_four(rows: usize, cols: usize, mut visit: impl FnMut(usize, usize, usize)) {
    for r in 0..rows {
        for c in (0..cols).step_by(TILE_COLS) {
            visit(r * cols + c, offset(r, c, cols), TILE_COLS.min(cols - c));
        }
    }
}
