//! The layout of block scales that block-scaled tensor cores read: tiles of 128 × 4 scales, 512
//! contiguous bytes each, a tile being 32 lines that hold rows r, r+32, r+64, r+96. Source:
//! numerics §10.

use crate::{Error, Result, area, check_len, zeros};

/// Rows of a tile.
pub const TILE_ROWS: usize = 128;

/// Columns of a tile.
pub const TILE_COLS: usize = 4;

/// Length of the swizzled form of a `rows` × `cols` scale matrix, padding included.
pub fn len(rows: usize, cols: usize) -> Result<usize> {
    area(rows, cols)?;
    let round_up = |x: usize, to: usize| x.checked_next_multiple_of(to).ok_or(Error::TooLarge { rows, cols });
    area(round_up(rows, TILE_ROWS)?, round_up(cols, TILE_COLS)?)
}

/// Where the scale of row `r`, column `c` goes in a matrix of `cols` columns.
pub const fn offset(r: usize, c: usize, cols: usize) -> usize {
    let tile = r / TILE_ROWS * cols.div_ceil(TILE_COLS) + c / TILE_COLS;
    tile * TILE_ROWS * TILE_COLS + r % 32 * 16 + r % TILE_ROWS / 32 * 4 + c % TILE_COLS
}

/// Row-major scales to swizzled ones; the padding is zero.
pub fn swizzle(scales: &[u8], rows: usize, cols: usize) -> Result<Vec<u8>> {
    check_len("scales", area(rows, cols)?, scales.len())?;
    let mut swizzled = zeros(len(rows, cols)?, rows, cols)?;
    for (i, &scale) in scales.iter().enumerate() {
        swizzled[offset(i / cols, i % cols, cols)] = scale;
    }
    Ok(swizzled)
}

/// Swizzled scales back to row-major ones; the padding is dropped.
pub fn unswizzle(swizzled: &[u8], rows: usize, cols: usize) -> Result<Vec<u8>> {
    check_len("swizzled scales", len(rows, cols)?, swizzled.len())?;
    Ok((0..rows * cols).map(|i| swizzled[offset(i / cols, i % cols, cols)]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_hold_rows_32_apart() {
        assert_eq!([offset(0, 0, 8), offset(32, 0, 8), offset(64, 0, 8), offset(96, 3, 8)], [0, 4, 8, 15]);
        assert_eq!([offset(1, 0, 8), offset(0, 4, 8), offset(128, 0, 8)], [16, 512, 1024]);
    }

    #[test]
    fn empty_and_wrong_lengths() {
        assert_eq!(swizzle(&[], 0, 7), Ok(vec![]));
        assert_eq!(unswizzle(&[], 5, 0), Ok(vec![]));
        assert_eq!(swizzle(&[1, 2], 1, 3).unwrap_err().to_string(), "scales: expected length 3, got 2");
        assert_eq!(
            unswizzle(&[0; 100], 1, 3).unwrap_err().to_string(),
            "swizzled scales: expected length 512, got 100"
        );
        assert!(swizzle(&[], usize::MAX, 2).is_err());
    }
}
