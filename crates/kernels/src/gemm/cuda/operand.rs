//! Operands in the memory of a GPU.

use super::global::Global;
use super::prepared::PreparedWeight;
use crate::Result;
use crate::cuda::{Device, Input};
use crate::dequantize::cuda::View;
use crate::fp8::cuda::View as Fp8View;

/// A side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix.
    Nvfp4(View<'a>),
    /// An FP8 or MXFP8 matrix; one with tiles of 32 in a column is taken transposed.
    Fp8(Fp8View<'a>),
    /// Elements as they are.
    Plain(Input<'a>),
}

/// The right side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// An operand as it is. One in NVFP4 is reordered for the tensor cores before each product.
    Operand(Operand<'a>),
    /// A quantized matrix in the order of the tensor cores.
    Prepared(&'a PreparedWeight),
}

impl<'a> From<View<'a>> for Operand<'a> {
    fn from(view: View<'a>) -> Self {
        Operand::Nvfp4(view)
    }
}

impl<'a> From<Fp8View<'a>> for Operand<'a> {
    fn from(view: Fp8View<'a>) -> Self {
        Operand::Fp8(view)
    }
}

impl<'a> From<Input<'a>> for Operand<'a> {
    fn from(input: Input<'a>) -> Self {
        Operand::Plain(input)
    }
}

impl<'a, T: Into<Operand<'a>>> From<T> for Weights<'a> {
    fn from(operand: T) -> Self {
        Weights::Operand(operand.into())
    }
}

impl<'a> From<&'a PreparedWeight> for Weights<'a> {
    fn from(weight: &'a PreparedWeight) -> Self {
        Weights::Prepared(weight)
    }
}

impl Operand<'_> {
    /// Number of rows: M.
    pub fn rows(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.rows,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).0,
            Operand::Plain(input) => input.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.cols,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).1,
            Operand::Plain(input) => input.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Operand::Nvfp4(view) => Global::of_view(view),
            Operand::Fp8(view) => Global::of_fp8(view),
            Operand::Plain(_) => Global::NONE,
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check(device),
            Operand::Fp8(view) => view.check(device),
            Operand::Plain(input) => Ok(input.check(device)?),
        }
    }
}

impl Weights<'_> {
    /// Number of rows: N.
    pub fn rows(&self) -> usize {
        match self {
            Weights::Operand(operand) => operand.rows(),
            Weights::Prepared(weight) => weight.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Weights::Operand(operand) => operand.cols(),
            Weights::Prepared(weight) => weight.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Weights::Operand(operand) => operand.global(),
            Weights::Prepared(weight) => weight.global(),
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Weights::Operand(operand) => operand.check(device),
            Weights::Prepared(weight) => weight.check(device),
        }
    }
}
