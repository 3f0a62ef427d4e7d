//! FP8 and MXFP8: eight bits an element, beside NVFP4. Source: numerics §14.
//!
//! 1. this file: the choices (format, scaling, direction) and what follows from them;
//! 2. [`scale`]: from an amax to a scale;
//! 3. [`delayed`]: from the amaxes of earlier steps to a scale;
//! 4. [`matrix`]: whole matrices, both directions, and back.
//!
//! A code is an E4M3 or E5M2 byte. What scales it belongs to a tile: the whole matrix, 128
//! neighbours or a square of 128 × 128 with a 32-bit scale each, or 32 neighbours with an E8M0 byte
//! (MXFP8), which a square of 32 × 32 may share.

pub mod delayed;
pub mod matrix;
pub mod scale;

pub use matrix::{Quantized, ScaleRef, ScaleVec, Scales, View, dequantize, quantize};
pub use scale::{AmaxRule, BLOCK, MX_BLOCK, ScaleValues};

use crate::{Error, Precision, Result, area, e4m3, e5m2, e8m0};

/// What a code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Format {
    /// [`e4m3`]: more precision, up to 448. For activations and weights.
    #[default]
    E4m3,
    /// [`e5m2`]: more range, up to 57344. For gradients.
    E5m2,
}

impl Format {
    /// Both formats.
    pub const ALL: [Format; 2] = [Format::E4m3, Format::E5m2];

    /// The largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Format::E4m3 => e4m3::MAX,
            Format::E5m2 => e5m2::MAX,
        }
    }

    /// The code nearest to `x`.
    pub fn encode(self, x: f32) -> u8 {
        match self {
            Format::E4m3 => e4m3::encode(x),
            Format::E5m2 => e5m2::encode(x),
        }
    }

    /// The value of a code, exact in binary32.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Format::E4m3 => e4m3::decode(code),
            Format::E5m2 => e5m2::decode(code),
        }
    }
}

/// Where scales come from, and which elements share one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// One scale for the whole matrix, which the caller has: current scaling takes it from the
    /// matrix's amax ([`AmaxRule::tensor_scale`]), delayed scaling from those of earlier steps
    /// ([`delayed`]).
    Tensor {
        /// What elements are multiplied by. Any number: products are what arithmetic makes them.
        scale: f32,
    },
    /// One scale for 128 neighbours in a row of the direction.
    Row128(AmaxRule),
    /// One scale for a square of 128 × 128.
    Square128(AmaxRule),
    /// MXFP8: an E8M0 byte for 32 neighbours.
    Mx,
    /// MXFP8 in squares: 32 × 32 elements share the E8M0 byte of their largest magnitude. It is
    /// stored once for every 32 neighbours of a direction, as in [`Scaling::Mx`], so both
    /// directions have the same codes.
    MxSquare,
}

impl Scaling {
    /// Whether it is MXFP8: scales are E8M0 bytes, and the column direction is not transposed.
    pub fn is_mx(&self) -> bool {
        match self {
            Scaling::Mx | Scaling::MxSquare => true,
            Scaling::Tensor { .. } | Scaling::Row128(_) | Scaling::Square128(_) => false,
        }
    }
}

/// Which way a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// As it is, tiles along its rows.
    Row,
    /// Tiles along its columns, from the same values. The transposed matrix, but for MXFP8, which
    /// leaves it as it lies.
    Column,
}

/// Which elements of a quantized matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// All of them.
    Tensor,
    /// 128 neighbours in a row.
    Row128,
    /// A square of 128 × 128.
    Square128,
    /// 32 neighbours in a row.
    Row32,
    /// 32 neighbours in a column.
    Column32,
}

impl Tile {
    /// Every tile.
    pub const ALL: [Tile; 5] = [Tile::Tensor, Tile::Row128, Tile::Square128, Tile::Row32, Tile::Column32];

    /// Rows and columns of a tile in a matrix of `rows` × `cols` elements, at least 1 × 1.
    pub fn size(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Tile::Tensor => (rows.max(1), cols.max(1)),
            Tile::Row128 => (1, BLOCK),
            Tile::Square128 => (BLOCK, BLOCK),
            Tile::Row32 => (1, MX_BLOCK),
            Tile::Column32 => (MX_BLOCK, 1),
        }
    }

    /// How many tiles a matrix has: rows and columns of them. One that reaches beyond the matrix
    /// has fewer elements; the tile of the whole matrix is there even without elements.
    pub fn grid(self, rows: usize, cols: usize) -> (usize, usize) {
        let (height, width) = self.size(rows, cols);
        match self {
            Tile::Tensor => (1, 1),
            _ => (rows.div_ceil(height), cols.div_ceil(width)),
        }
    }

    /// Which tile an element is in, in the order of the scales.
    pub fn index(self, (rows, cols): (usize, usize), (r, c): (usize, usize)) -> usize {
        let ((height, width), (_, across)) = (self.size(rows, cols), self.grid(rows, cols));
        r / height * across + c / width
    }

    /// Rows and columns of a matrix as a product takes it, tiles lying along K: transposed where
    /// they lie in columns.
    pub fn along_k(self, (rows, cols): (usize, usize)) -> (usize, usize) {
        match self {
            Tile::Tensor | Tile::Row128 | Tile::Square128 | Tile::Row32 => (rows, cols),
            Tile::Column32 => (cols, rows),
        }
    }

    /// How many scales a matrix has.
    pub fn scale_count(self, rows: usize, cols: usize) -> Result<usize> {
        let (down, across) = self.grid(rows, cols);
        area(down, across).map_err(|_| Error::TooLarge { rows, cols })
    }
}

/// How a matrix becomes FP8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mode {
    /// What a code is.
    pub format: Format,
    /// Where scales come from.
    pub scaling: Scaling,
}

/// What a tile's elements are multiplied by, and what is stored for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TileScale {
    /// An element `x` becomes the code nearest to `fl(x · multiplier)`.
    pub multiplier: f32,
    /// The scale that decoding uses.
    pub stored: Scales<f32, u8>,
}

impl Mode {
    /// Which elements share a scale in the matrix that a direction writes.
    pub fn tile(&self, side: Side) -> Tile {
        match (self.scaling, side) {
            (Scaling::Tensor { .. }, _) => Tile::Tensor,
            (Scaling::Row128(_), _) => Tile::Row128,
            (Scaling::Square128(_), _) => Tile::Square128,
            (Scaling::Mx | Scaling::MxSquare, Side::Row) => Tile::Row32,
            (Scaling::Mx | Scaling::MxSquare, Side::Column) => Tile::Column32,
        }
    }

    /// Rows and columns of what a direction writes for a matrix of `rows` × `cols`.
    pub fn shape(&self, side: Side, (rows, cols): (usize, usize)) -> (usize, usize) {
        match side {
            Side::Column if !self.scaling.is_mx() => (cols, rows),
            Side::Row | Side::Column => (rows, cols),
        }
    }

    /// The scale of a tile whose largest magnitude, or that of its square, is `amax`, of elements
    /// that came in the type `precision`.
    pub fn tile_scale(&self, amax: f32, precision: Precision) -> TileScale {
        let inverse = |scale: f32| TileScale { multiplier: scale, stored: Scales::F32(1.0 / scale) };
        match self.scaling {
            Scaling::Tensor { scale } => inverse(scale),
            Scaling::Row128(rule) | Scaling::Square128(rule) => inverse(rule.block_scale(amax, self.format, precision)),
            Scaling::Mx | Scaling::MxSquare => {
                let byte = scale::mx_byte(amax, self.format);
                TileScale { multiplier: e8m0::reciprocal(byte), stored: Scales::E8m0(byte) }
            }
        }
    }
}
