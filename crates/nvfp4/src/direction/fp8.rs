//! A direction in FP8 or MXFP8.

use super::cut::{cut, transposed};
use super::memory::{Array, HostMemory, MemorySpace};
use crate::format::Family;
use crate::{Element, Fp8Code, Fp8Tile, Implementation, Result};
use nvfp4_kernels::fp8::dequantize;
use nvfp4_spec::fp8::{ScaleRef, Scales, View};
use nvfp4_spec::{Error as RuleError, area, check_len, zeros};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// What a matrix in FP8 is, wherever its bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Description {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub cols: usize,
    /// What a code is.
    pub code: Fp8Code,
    /// Which elements share a scale.
    pub tile: Fp8Tile,
}

impl Fp8Description {
    /// Rows and columns as the codes lie: MXFP8's column direction is not transposed in memory.
    pub fn stored_shape(&self) -> (usize, usize) {
        self.tile.along_k((self.rows, self.cols))
    }

    /// How many codes there are, a byte each.
    pub fn code_len(&self) -> Result<usize> {
        Ok(area(self.rows, self.cols)?)
    }

    /// How many scales there are.
    pub fn scale_len(&self) -> Result<usize> {
        let (rows, cols) = self.stored_shape();
        Ok(self.tile.scale_count(rows, cols)?)
    }

    /// An error unless arrays of these lengths and this kind fit it.
    fn check<F: Array, B: Array>(&self, codes: usize, scales: &Scales<F, B>) -> Result<()> {
        let count = match (self.tile, scales) {
            (Fp8Tile::Row32 | Fp8Tile::Column32, Scales::E8m0(scales)) => scales.count(),
            (Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128, Scales::F32(scales)) => scales.count(),
            _ => {
                return Err(RuleError::Combination(
                    "tiles of 32 have E8M0 scales, other tiles 32-bit ones: give scales of that kind, or another tile",
                )
                .into());
            }
        };
        check_len("codes", self.code_len()?, codes)?;
        Ok(check_len("scales", self.scale_len()?, count)?)
    }
}

impl Fp8Description {
    fn view<'a>(&self, codes: &'a [u8], scales: ScaleRef<'a>) -> View<'a> {
        let ((rows, cols), Fp8Description { code, tile, .. }) = (self.stored_shape(), *self);
        View { rows, cols, format: code, tile, codes, scales }
    }
}

/// The arrays of a direction as the kernels read them.
pub(crate) struct Fp8Parts<'a> {
    pub about: Fp8Description,
    pub codes: &'a [u8],
    pub scales: Scales<Cow<'a, [f32]>, &'a [u8]>,
}

impl Fp8Parts<'_> {
    pub fn view(&self) -> View<'_> {
        let scales = match &self.scales {
            Scales::F32(scales) => ScaleRef::F32(scales),
            Scales::E8m0(scales) => ScaleRef::E8m0(scales),
        };
        self.about.view(self.codes, scales)
    }
}

/// A matrix quantized to FP8 along its rows. For a tensor's column direction that matrix is the transposed one.
///
/// Codes and scales lie as numerics §14 has them: MXFP8's column direction ([`Fp8Tile::Column32`]) is not transposed in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Direction<M: MemorySpace = HostMemory> {
    pub(crate) about: Fp8Description,
    pub(crate) codes: M::Bytes,
    pub(crate) scales: Scales<M::Floats, M::Bytes>,
}

impl<M: MemorySpace> Fp8Direction<M> {
    /// A direction over existing bytes. Lengths are checked, and the kind of the scales: MXFP8 tiles have E8M0 bytes,
    /// others 32-bit multipliers.
    pub fn from_parts(about: Fp8Description, codes: M::Bytes, scales: Scales<M::Floats, M::Bytes>) -> Result<Self> {
        about.check(codes.count(), &scales)?;
        Ok(Fp8Direction { about, codes, scales })
    }

    /// What it is, without its bytes.
    pub fn description(&self) -> &Fp8Description {
        &self.about
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.about.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.about.cols
    }

    /// What a code is.
    pub fn code(&self) -> Fp8Code {
        self.about.code
    }

    /// Which elements share a scale.
    pub fn tile(&self) -> Fp8Tile {
        self.about.tile
    }

    /// Bytes that codes and scales take.
    pub fn byte_len(&self) -> usize {
        let scales = match &self.scales {
            Scales::F32(scales) => 4 * scales.count(),
            Scales::E8m0(scales) => scales.count(),
        };
        self.codes.count() + scales
    }

    pub(crate) fn family(&self) -> Family {
        Family::of_fp8(self.about.tile)
    }
}

impl Fp8Direction {
    /// A byte per element: `rows` × `cols`, or with [`Fp8Tile::Column32`] `cols` × `rows`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// What code values are multiplied by, one per tile, row by row as the codes lie.
    pub fn scales(&self) -> ScaleRef<'_> {
        self.scales.view()
    }

    /// As kernels take it.
    pub(crate) fn view(&self) -> View<'_> {
        self.about.view(&self.codes, self.scales.view())
    }

    /// Its arrays as the kernels read them.
    pub(crate) fn parts(&self) -> Fp8Parts<'_> {
        let scales = match self.scales.view() {
            ScaleRef::F32(scales) => Scales::F32(Cow::Borrowed(scales)),
            ScaleRef::E8m0(scales) => Scales::E8m0(scales),
        };
        Fp8Parts { about: self.about, codes: &self.codes, scales }
    }

    pub(crate) fn dequantize_with<T: Element>(&self, implementation: Implementation) -> Result<Vec<T>> {
        let mut out = zeros(self.about.code_len()?, self.rows(), self.cols())?;
        dequantize::dequantize(implementation, &self.view(), &mut out)?;
        Ok(match self.about.tile {
            Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128 | Fp8Tile::Row32 => out,
            Fp8Tile::Column32 => transposed(&out, (self.cols(), self.rows())),
        })
    }

    /// At multiples of how many rows, and of how many columns, it can be cut.
    pub(crate) fn grain(&self) -> (usize, usize) {
        match self.about.tile {
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
        let (down, across) = match self.about.tile {
            Fp8Tile::Column32 => (cols, rows),
            _ => (rows, cols),
        };
        let (height, width) = self.about.tile.size(view.rows, view.cols);
        let scaled = |range: &Range<usize>, side: usize| range.start / side..range.end.div_ceil(side);
        let tiles = (scaled(&down, height), scaled(&across, width));
        let per_row = self.about.tile.grid(view.rows, view.cols).1;
        let scales = match (&self.scales, self.about.tile) {
            (scales, Fp8Tile::Tensor) => scales.clone(),
            (Scales::F32(scales), _) => Scales::F32(cut(scales, per_row, tiles)),
            (Scales::E8m0(scales), _) => Scales::E8m0(cut(scales, per_row, tiles)),
        };
        let codes = cut(&self.codes, view.cols, (down, across));
        let about = Fp8Description { rows: part.0, cols: part.1, ..self.about };
        Fp8Direction { about, codes, scales }
    }
}

/// In recipe syntax.
impl<M: MemorySpace> fmt::Display for Fp8Direction<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.about.code {
            Fp8Code::E4m3 => "e4m3",
            Fp8Code::E5m2 => "e5m2",
        };
        match self.about.tile {
            Fp8Tile::Tensor => write!(f, "fp8({code})"),
            Fp8Tile::Row128 => write!(f, "fp8-block({code})"),
            Fp8Tile::Square128 => write!(f, "fp8-block({code}, 128x128)"),
            Fp8Tile::Row32 | Fp8Tile::Column32 => write!(f, "mxfp8({code})"),
        }
    }
}
