//! Operands in the memory of a GPU.

use super::PreparedWeight;
use crate::Result;
use crate::cuda::{Device, Input};
use crate::dequantize::cuda::View;
use nvfp4_spec::GlobalScale;
use nvfp4_spec::scale::Unit;

/// The left side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix.
    Nvfp4(View<'a>),
    /// Elements as they are.
    Plain(Input<'a>),
}

/// The right side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// A quantized matrix. Its bytes are brought into the order of the tensor cores before each product.
    Nvfp4(View<'a>),
    /// Elements as they are.
    Plain(Input<'a>),
    /// A quantized matrix in the order of the tensor cores.
    Prepared(&'a PreparedWeight),
}

/// The 32-bit scale of an operand: its kind, and the address of what is stored; 0 where the operand is plain.
#[derive(Clone, Copy)]
pub(super) struct Global {
    pub stored: u64,
    pub of: GlobalScale,
    pub unit: Unit,
}

impl Global {
    const NONE: Global = Global { stored: 0, of: GlobalScale::PerTensor, unit: Unit::Multiplier };

    pub fn of_view(view: &View<'_>) -> Self {
        Global { stored: view.stored.address(), of: view.global, unit: view.unit }
    }
}

impl<'a> From<View<'a>> for Operand<'a> {
    fn from(view: View<'a>) -> Self {
        Operand::Nvfp4(view)
    }
}

impl<'a> From<Input<'a>> for Operand<'a> {
    fn from(input: Input<'a>) -> Self {
        Operand::Plain(input)
    }
}

impl<'a> From<View<'a>> for Weights<'a> {
    fn from(view: View<'a>) -> Self {
        Weights::Nvfp4(view)
    }
}

impl<'a> From<Input<'a>> for Weights<'a> {
    fn from(input: Input<'a>) -> Self {
        Weights::Plain(input)
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
            Operand::Plain(input) => input.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.cols,
            Operand::Plain(input) => input.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Operand::Nvfp4(view) => Global::of_view(view),
            Operand::Plain(_) => Global::NONE,
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check(device),
            Operand::Plain(input) => Ok(input.check(device)?),
        }
    }
}

impl Weights<'_> {
    /// Number of rows: N.
    pub fn rows(&self) -> usize {
        match self {
            Weights::Nvfp4(view) => view.rows,
            Weights::Plain(input) => input.rows(),
            Weights::Prepared(weight) => weight.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Weights::Nvfp4(view) => view.cols,
            Weights::Plain(input) => input.cols(),
            Weights::Prepared(weight) => weight.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Weights::Nvfp4(view) => Global::of_view(view),
            Weights::Plain(_) => Global::NONE,
            Weights::Prepared(weight) => weight.global(),
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Weights::Nvfp4(view) => view.check(device),
            Weights::Plain(input) => Ok(input.check(device)?),
            Weights::Prepared(weight) => weight.check(device),
        }
    }
}
