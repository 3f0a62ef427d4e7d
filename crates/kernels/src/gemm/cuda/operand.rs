//! Operands in the memory of a GPU.

use super::PreparedWeight;
use crate::Result;
use crate::cuda::{Device, Input};
use crate::dequantize::cuda::View;
use crate::fp8::cuda::View as Fp8View;
use crate::input::check_len;
use nvfp4_spec::fp8::{Scales, Tile};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{GlobalScale, area};

/// The left side of a product, with rows along K.
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
    /// A quantized matrix. Its bytes are brought into the order of the tensor cores before each product.
    Nvfp4(View<'a>),
    /// An FP8 or MXFP8 matrix; one with tiles of 32 in a column is taken transposed.
    Fp8(Fp8View<'a>),
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

    /// That of FP8: the scale of the whole matrix, if it is one.
    fn of_fp8(view: &Fp8View<'_>) -> Self {
        match (view.scales, view.tile) {
            (Scales::F32(scale), Tile::Tensor) => Global { stored: scale.address(), ..Global::NONE },
            _ => Global::NONE,
        }
    }

    pub fn of_view(view: &View<'_>) -> Self {
        Global { stored: view.stored.address(), of: view.global, unit: view.unit }
    }
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

impl<'a> From<View<'a>> for Weights<'a> {
    fn from(view: View<'a>) -> Self {
        Weights::Nvfp4(view)
    }
}

impl<'a> From<Fp8View<'a>> for Weights<'a> {
    fn from(view: Fp8View<'a>) -> Self {
        Weights::Fp8(view)
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
            Operand::Fp8(view) => check_fp8(view, device),
            Operand::Plain(input) => Ok(input.check(device)?),
        }
    }
}

impl Weights<'_> {
    /// Number of rows: N.
    pub fn rows(&self) -> usize {
        match self {
            Weights::Nvfp4(view) => view.rows,
            Weights::Fp8(view) => view.tile.along_k((view.rows, view.cols)).0,
            Weights::Plain(input) => input.rows(),
            Weights::Prepared(weight) => weight.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Weights::Nvfp4(view) => view.cols,
            Weights::Fp8(view) => view.tile.along_k((view.rows, view.cols)).1,
            Weights::Plain(input) => input.cols(),
            Weights::Prepared(weight) => weight.cols(),
        }
    }

    pub(super) fn global(&self) -> Global {
        match self {
            Weights::Nvfp4(view) => Global::of_view(view),
            Weights::Fp8(view) => Global::of_fp8(view),
            Weights::Plain(_) => Global::NONE,
            Weights::Prepared(weight) => weight.global(),
        }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        match self {
            Weights::Nvfp4(view) => view.check(device),
            Weights::Fp8(view) => check_fp8(view, device),
            Weights::Plain(input) => Ok(input.check(device)?),
            Weights::Prepared(weight) => weight.check(device),
        }
    }
}

/// Checks that the buffers have the lengths that the shape asks for, and lie on this GPU.
fn check_fp8(view: &Fp8View<'_>, device: Device) -> Result<()> {
    let scale_count = view.tile.scale_count(view.rows, view.cols)?;
    check_len("codes", area(view.rows, view.cols)?, view.codes.len())?;
    view.codes.check(device, "codes")?;
    match view.scales {
        Scales::F32(scales) => {
            check_len("scales", scale_count, scales.len())?;
            scales.check(device, "scales")?;
            Ok(scales.check_aligned(size_of::<f32>(), "scales")?)
        }
        Scales::E8m0(scales) => {
            check_len("scales", scale_count, scales.len())?;
            Ok(scales.check(device, "scales")?)
        }
    }
}
