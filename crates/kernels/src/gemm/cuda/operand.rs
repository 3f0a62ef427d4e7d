//! Operands in the memory of a GPU.

use super::global::Global;
use super::prepared::PreparedWeight;
use crate::Result;
use crate::cuda::{Device, Input, Slice};
use crate::dequantize::cuda::View;
use crate::fp8::cuda::View as Fp8View;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Error, Precision, check_len};

/// A side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix.
    Nvfp4(View<'a>),
    /// A quantized matrix as values.
    Values(NvfpValues<'a>),
    /// An FP8 or MXFP8 matrix; one with tiles of 32 in a column is taken transposed.
    Fp8(Fp8View<'a>),
    /// Elements as they are.
    Plain(Input<'a>),
}

/// An NVFP4 matrix with one global scale as the values that quantization
/// [wrote](crate::quantize::cuda::Written::Values) instead of codes.
#[derive(Clone, Copy, Debug)]
pub struct NvfpValues<'a> {
    /// In bf16, without the global scale and times 2⁻⁷.
    pub values: Input<'a>,
    /// The stored 32-bit number.
    pub stored: Slice<'a, f32>,
    /// What it means.
    pub unit: Unit,
}

impl NvfpValues<'_> {
    fn check(&self, device: Device) -> Result<()> {
        check_len("global scale", 1, self.stored.len())?;
        self.stored.check(device, "global scale")?;
        self.stored.check_aligned(4, "global scale")?;
        if self.values.values().precision() != Precision::Bf16 {
            return Err(Error::Combination("the values of NVFP4 are bf16").into());
        }
        Ok(self.values.check(device)?)
    }
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

impl<'a> From<NvfpValues<'a>> for Operand<'a> {
    fn from(values: NvfpValues<'a>) -> Self {
        Operand::Values(values)
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
            Operand::Values(of) => of.values.rows(),
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).0,
            Operand::Plain(input) => input.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.cols,
            Operand::Values(of) => of.values.cols(),
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).1,
            Operand::Plain(input) => input.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Operand::Nvfp4(view) => Global::of_view(view),
            Operand::Values(of) => Global { stored: of.stored.address(), unit: of.unit, ..Global::NONE },
            Operand::Fp8(view) => Global::of_fp8(view),
            Operand::Plain(_) => Global::NONE,
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check(device),
            Operand::Values(of) => of.check(device),
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
