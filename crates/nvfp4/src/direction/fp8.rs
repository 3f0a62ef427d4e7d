//! A direction in FP8 or MXFP8.

use crate::format::Family;
use crate::{Element, Fp8Code, Fp8Scales, Fp8Tile, Implementation, Result};
use nvfp4_kernels::fp8::dequantize;
use nvfp4_spec::fp8::{ScaleRef, Scales, View};
use nvfp4_spec::{Error as RuleError, area, zeros};
use std::fmt;
use std::ops::Range;

/// A matrix quantized to FP8 along its rows. For a tensor's column direction that matrix is the transposed one.
///
/// Codes and scales lie as numerics §14 has them: MXFP8's column direction ([`Fp8Tile::Column32`]) is not transposed in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Direction {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) code: Fp8Code,
    pub(crate) tile: Fp8Tile,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Fp8Scales,
}

impl Fp8Direction {
    /// A direction of `rows` × `cols` over existing bytes. Lengths are checked, and the kind of the scales: MXFP8 tiles have E8M0 bytes, others
    /// 32-bit multipliers.
    pub fn from_parts(
        rows: usize,
        cols: usize,
        code: Fp8Code,
        tile: Fp8Tile,
        codes: Vec<u8>,
        scales: Fp8Scales,
    ) -> Result<Self> {
        match (tile, &scales) {
            (Fp8Tile::Row32 | Fp8Tile::Column32, Scales::E8m0(_)) => {}
            (Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128, Scales::F32(_)) => {}
            _ => {
                return Err(RuleError::Combination(
                    "tiles of 32 have E8M0 scales, other tiles 32-bit ones: give scales of that kind, or another tile",
                )
                .into());
            }
        }
        let direction = Fp8Direction { rows, cols, code, tile, codes, scales };
        direction.view().check()?;
        Ok(direction)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// What a code is.
    pub fn code(&self) -> Fp8Code {
        self.code
    }

    /// Which elements share a scale.
    pub fn tile(&self) -> Fp8Tile {
        self.tile
    }

    /// A byte per element: `rows` × `cols`, or with [`Fp8Tile::Column32`] `cols` × `rows`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// What code values are multiplied by, one per tile, row by row as the codes lie.
    pub fn scales(&self) -> ScaleRef<'_> {
        self.scales.view()
    }

    /// Bytes that codes and scales take.
    pub fn byte_len(&self) -> usize {
        let scales = match &self.scales {
            Scales::F32(scales) => 4 * scales.len(),
            Scales::E8m0(scales) => scales.len(),
        };
        self.codes.len() + scales
    }

    pub(crate) fn family(&self) -> Family {
        Family::of_fp8(self.tile)
    }

    /// As kernels take it.
    pub(crate) fn view(&self) -> View<'_> {
        // Transposing twice is nothing, so this is also the way back.
        let (rows, cols) = self.tile.along_k((self.rows, self.cols));
        View { rows, cols, format: self.code, tile: self.tile, codes: &self.codes, scales: self.scales.view() }
    }

    pub(crate) fn dequantize_with<T: Element>(&self, implementation: Implementation) -> Result<Vec<T>> {
        let mut out = zeros(area(self.rows, self.cols)?, self.rows, self.cols)?;
        dequantize::dequantize(implementation, &self.view(), &mut out)?;
        Ok(match self.tile {
            Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128 | Fp8Tile::Row32 => out,
            Fp8Tile::Column32 => transposed(&out, (self.cols, self.rows)),
        })
    }

    /// At multiples of how many rows, and of how many columns, it can be cut.
    pub(crate) fn grain(&self) -> (usize, usize) {
        match self.tile {
            Fp8Tile::Tensor => (1, 1),
            tile => {
                let view = self.view();
                tile.along_k(tile.size(view.rows, view.cols))
            }
        }
    }

    /// A part of it, cut at multiples of its tiles or at the end.
    pub(crate) fn slice(&self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let (view, part) = (self.view(), (rows.len(), cols.len()));
        let (down, across) = match self.tile {
            Fp8Tile::Column32 => (cols, rows),
            _ => (rows, cols),
        };
        let (height, width) = self.tile.size(view.rows, view.cols);
        let scaled = |range: &Range<usize>, side: usize| range.start / side..range.end.div_ceil(side);
        let tiles = (scaled(&down, height), scaled(&across, width));
        let per_row = self.tile.grid(view.rows, view.cols).1;
        let scales = match (&self.scales, self.tile) {
            (scales, Fp8Tile::Tensor) => scales.clone(),
            (Scales::F32(scales), _) => Scales::F32(cut(scales, per_row, tiles)),
            (Scales::E8m0(scales), _) => Scales::E8m0(cut(scales, per_row, tiles)),
        };
        let codes = cut(&self.codes, view.cols, (down, across));
        Fp8Direction { rows: part.0, cols: part.1, codes, scales, ..*self }
    }
}

/// Rows and columns of a matrix whose rows are `width` long.
pub(super) fn cut<T: Copy>(data: &[T], width: usize, (rows, cols): (Range<usize>, Range<usize>)) -> Vec<T> {
    match cols.is_empty() {
        // Without columns there may be any number of rows.
        true => Vec::new(),
        false => rows.flat_map(|r| &data[r * width..][cols.clone()]).copied().collect(),
    }
}

/// The transposed matrix of one of `rows` × `cols`.
pub(crate) fn transposed<T: Copy>(data: &[T], (rows, cols): (usize, usize)) -> Vec<T> {
    match data.is_empty() {
        true => Vec::new(),
        false => (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect(),
    }
}

/// In the words of a spec.
impl fmt::Display for Fp8Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.code {
            Fp8Code::E4m3 => "e4m3",
            Fp8Code::E5m2 => "e5m2",
        };
        match self.tile {
            Fp8Tile::Tensor => write!(f, "fp8({code})"),
            Fp8Tile::Row128 => write!(f, "fp8-block({code})"),
            Fp8Tile::Square128 => write!(f, "fp8-block({code}, 128x128)"),
            Fp8Tile::Row32 | Fp8Tile::Column32 => write!(f, "mxfp8({code})"),
        }
    }
}
