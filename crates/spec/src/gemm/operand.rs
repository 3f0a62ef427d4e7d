//! The operands of a product.

use crate::matrix::{Matrix, View};
use crate::{BLOCK, GlobalScale, Result, e2m1, e4m3, fp8};

/// One side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix.
    Nvfp4(View<'a>),
    /// An FP8 or MXFP8 matrix (numerics §14.8). A scale of the whole matrix is its global scale,
    /// and its values are those of the codes; otherwise its values are those that it decodes to in
    /// binary32, and its global scale is 1.
    ///
    /// Tiles lie along K: what has tiles of 32 in a column, as MXFP8's column direction, is taken
    /// transposed.
    Fp8(fp8::View<'a>),
    /// A matrix of bf16, f16 or f32; its global scale is 1.
    Plain(&'a Matrix),
}

impl<'a> From<&View<'a>> for Operand<'a> {
    fn from(view: &View<'a>) -> Self {
        Operand::Nvfp4(*view)
    }
}

impl<'a> From<&fp8::View<'a>> for Operand<'a> {
    fn from(view: &fp8::View<'a>) -> Self {
        Operand::Fp8(*view)
    }
}

impl<'a> From<&'a Matrix> for Operand<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Operand::Plain(matrix)
    }
}

impl Operand<'_> {
    /// Number of rows: M or N.
    pub fn rows(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.rows,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).0,
            Operand::Plain(matrix) => matrix.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.cols,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).1,
            Operand::Plain(matrix) => matrix.cols(),
        }
    }

    /// What its 32-bit scale belongs to.
    pub fn global(&self) -> GlobalScale {
        match self {
            Operand::Nvfp4(view) => view.global,
            Operand::Fp8(_) | Operand::Plain(_) => GlobalScale::PerTensor,
        }
    }

    /// The scale of row `i` as a fraction.
    pub(super) fn fraction(&self, i: usize) -> (f32, f32) {
        match self {
            Operand::Nvfp4(view) => view.unit.fraction(view.row_stored(i)),
            Operand::Fp8(view) => (view.tensor_scale().unwrap_or(1.0), 1.0),
            Operand::Plain(_) => (1.0, 1.0),
        }
    }

    /// Element (i, k) without its global scale; exact. A NaN scale gives NaN.
    pub(super) fn value(&self, i: usize, k: usize) -> f64 {
        match self {
            Operand::Nvfp4(view) => {
                let scale = e4m3::decode(view.scale_row(i)[k / BLOCK]);
                f64::from(e2m1::decode(e2m1::code_at(view.code_row(i), k)) * scale)
            }
            Operand::Fp8(view) => {
                let (r, c) = if view.tile == fp8::Tile::Column32 { (k, i) } else { (i, k) };
                f64::from(match view.tensor_scale() {
                    Some(_) => view.format.decode(view.code_row(r)[c]),
                    None => view.value(r, c),
                })
            }
            Operand::Plain(matrix) => f64::from(matrix.row(i)[k]),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check(),
            Operand::Fp8(view) => view.check(),
            Operand::Plain(_) => Ok(()),
        }
    }
}
