//! The elements of a tile and their codes.
//!
//! A tile is `H` rows of 16 elements: one row in 1×16 mode, sixteen in 16×16 mode. Elements outside
//! the matrix are zeros. Source: numerics §3, §4.

use crate::{BLOCK, Specials, e2m1};

/// `H` rows of 16 values.
pub type Rows<T, const H: usize> = [[T; BLOCK]; H];

/// A quantized tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized<const H: usize> {
    /// The E4M3 byte that all rows share.
    pub scale: u8,
    /// The E2M1 codes, one per byte.
    pub codes: Rows<u8, H>,
}

/// The codes of a tile whose elements are multiplied by `inverse` and rounded to nearest.
pub fn encode<const H: usize>(tile: &Rows<f32, H>, inverse: f32, specials: Specials) -> Rows<u8, H> {
    tile.map(|row| row.map(|x| e2m1::encode(x * inverse, specials)))
}
