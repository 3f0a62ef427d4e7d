//! NVFP4 weights in an order that products with few rows read straight through.
//!
//! Eight rows and two blocks are a tile of 144 bytes. Vectors of 32 bytes have a doubleword of each
//! row: two bytes of its first block and the same two of its second. Products of bytes that add up
//! in pairs then leave the sum of each block in a word of its own, and one more multiplication by
//! pairs of scales adds up both. After four such vectors come the scales of each row's two blocks.
//! A scale is four significant bits and a shift, in the unit of its row.
//!
//! Tiles of eight rows follow each other, row by row. After all tiles comes what is known of the
//! rows: the smallest scale of each, which says the unit, and the largest range of eight. Where
//! scales of a row are too far apart for a shift of three bits, negative or NaN, the matrix is read
//! as it is.

use crate::Result;
use crate::gemm::exact::scales::Range;
use crate::input::check_len;
use crate::pages;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Error, e4m3};
use rayon::prelude::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 8;
/// Bytes of a vector: a doubleword of each row.
const VECTOR: usize = 4 * ROWS;
/// Bytes of a tile's codes.
pub(super) const CODES: usize = 4 * VECTOR;
/// Bytes of a tile.
pub(super) const TILE: usize = CODES + 2 * ROWS;
/// Bytes of what is known of eight rows.
const ABOUT: usize = ROWS + 2;

/// Tiles: of eight rows, and along K.
fn tiles(rows: usize, cols: usize) -> (usize, usize) {
    (rows.div_ceil(ROWS), cols.div_ceil(2 * BLOCK))
}

/// Bytes of a prepared matrix.
fn prepared_len(rows: usize, cols: usize) -> Result<usize> {
    let (strips, across) = tiles(rows, cols);
    let strip = across.checked_mul(TILE).and_then(|strip| strip.checked_add(ABOUT));
    Ok(strip.and_then(|strip| strip.checked_mul(strips)).ok_or(Error::TooLarge { rows, cols })?)
}

/// A matrix in the order of this module.
pub(super) fn prepare(b: &View<'_>) -> Result<Vec<u8>> {
    let (strips, across) = tiles(b.rows, b.cols);
    let mut bytes = vec![0; prepared_len(b.rows, b.cols)?];
    pages::large(&mut bytes);
    let (all, about) = bytes.split_at_mut(strips * across * TILE);
    all.par_chunks_mut(across * TILE).zip(about.par_chunks_mut(ABOUT)).enumerate().for_each(|(s, (tiles, about))| {
        let width = ROWS.min(b.rows - s * ROWS);
        let ranges: Vec<[u8; 2]> = (0..width).map(|r| extremes(b.scale_row(s * ROWS + r))).collect();
        let widest = ranges.iter().copied().max_by_key(|&range| Range::of(&range).largest()).expect("a tile has rows");
        let fits = ranges.iter().all(|range| Range::of(range).has_shifts());
        about[ROWS..].copy_from_slice(&if fits { widest } else { [NONE; 2] });
        for (r, range) in ranges.iter().enumerate().filter(|_| fits) {
            about[r] = range[0];
            let (i, range) = (s * ROWS + r, Range::of(range));
            for (k, bytes) in b.code_row(i).chunks(BLOCK / 2).enumerate() {
                let tile = &mut tiles[k / 2 * TILE..][..TILE];
                for (at, &byte) in bytes.iter().enumerate() {
                    tile[at / 2 * VECTOR + 4 * r + k % 2 * 2 + at % 2] = byte;
                }
                tile[CODES + 2 * r + k % 2] = range.shifted(b.scale_row(i)[k]);
            }
        }
    });
    Ok(bytes)
}

/// The largest range of eight rows that have no integers.
const NONE: u8 = 0xFF;

/// The smallest and the largest positive scale; [`NONE`] twice if one is negative or NaN.
fn extremes(scales: &[u8]) -> [u8; 2] {
    if scales.iter().any(|&byte| byte > e4m3::MAX_BYTE) {
        return [NONE; 2];
    }
    let positive = || scales.iter().copied().filter(|&byte| byte != 0);
    [positive().min().unwrap_or(0), positive().max().unwrap_or(0)]
}

/// A prepared matrix.
#[derive(Clone, Copy)]
pub(super) struct Prepared<'a> {
    pub view: &'a View<'a>,
    across: usize,
    tiles: &'a [[u8; TILE]],
    about: &'a [[u8; ABOUT]],
}

/// Eight rows of one.
pub(super) struct Strip<'a> {
    pub tiles: &'a [[u8; TILE]],
    /// The units of their scales.
    pub units: [f32; ROWS],
}

impl<'a> Prepared<'a> {
    pub fn new(view: &'a View<'a>, bytes: &'a [u8]) -> Result<Self> {
        check_len("prepared weight", prepared_len(view.rows, view.cols)?, bytes.len())?;
        let (strips, across) = tiles(view.rows, view.cols);
        let (tiles, about) = bytes.split_at(strips * across * TILE);
        Ok(Prepared { view, across, tiles: tiles.as_chunks().0, about: about.as_chunks().0 })
    }

    /// The number of strips.
    pub fn strips(&self) -> usize {
        self.about.len()
    }

    /// The largest range of the rows of each strip, in units of its own. Those that have no integers
    /// are not to be read from tiles.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + use<'a> {
        self.about.iter().map(|about| Range::of(&about[ROWS..]))
    }

    /// Strip `s`.
    pub fn strip(&self, s: usize) -> Strip<'a> {
        let mut units = [0.0; ROWS];
        units.iter_mut().zip(self.about[s]).for_each(|(unit, smallest)| *unit = Range::of(&[smallest]).unit());
        Strip { tiles: &self.tiles[s * self.across..][..self.across], units }
    }
}
