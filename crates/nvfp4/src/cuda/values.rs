//! Directions that are written as values for a product that comes right after.

use super::{Direction, Gpu, Input, Memory, Owned, Values};
use crate::format::{Family, Side};
use crate::{Layout, Nvfp4Description, Result};
use half::bf16;
use nvfp4_kernels::cuda::Along;
use nvfp4_kernels::gemm::cuda::{self as gemm, NvfpValues, Operand};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{GlobalScale, area};

/// Values begin at a multiple of so many bytes, as decoded codes do: libraries choose an algorithm by that.
pub(super) const ALIGNED: usize = 256;

/// A direction in NVFP4 as the values of its codes, which a product reads as they are. Products have the same bits as with the codes, where
/// those are decoded before them.
#[derive(Debug)]
pub struct DirectionValues {
    pub(super) about: Nvfp4Description,
    pub(super) values: Owned<bf16>,
    pub(super) stored: Owned<f32>,
}

impl DirectionValues {
    /// Everything but the numbers.
    pub fn description(&self) -> &Nvfp4Description {
        &self.about
    }

    /// The values without the global scale, times 2⁻⁷.
    pub fn values(&self) -> &Owned<bf16> {
        &self.values
    }

    /// The bytes that it needs: a multiple of [`ALIGNED`].
    pub(super) fn byte_len(about: &Nvfp4Description) -> Result<usize> {
        let bytes =
            area(about.rows, about.cols)?.checked_mul(2).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNED));
        let too_large = nvfp4_spec::Error::TooLarge { rows: about.rows, cols: about.cols };
        Ok(bytes.ok_or(too_large)? + ALIGNED)
    }

    /// Over that many bytes.
    pub(super) fn over(about: Nvfp4Description, memory: Memory) -> Self {
        let (values, stored) = (2 * about.rows * about.cols, memory.len() - ALIGNED);
        let [values, stored] = memory.parts([0..values, stored..stored + 4]);
        DirectionValues { about, values: values.into(), stored: stored.into() }
    }

    fn operand(&self) -> Result<Operand<'_>> {
        let values = Input::new(Values::Bf16(self.values.slice()), self.about.rows, self.about.cols)?;
        Ok(NvfpValues { values, stored: self.stored.slice(), unit: self.about.unit }.into())
    }
}

/// A direction as kernels take it.
pub(super) fn operand(direction: &Direction) -> Operand<'_> {
    match direction {
        Direction::Nvfp4(d) => d.view().into(),
        Direction::Fp8(d) => d.view().into(),
        Direction::Plain(nothing) => match *nothing {},
    }
}

/// Where the groups of a direction lie.
pub(super) fn along(side: Side) -> Along {
    match side {
        Side::Row => Along::Rows,
        Side::Column => Along::K,
    }
}

/// A side of a product.
#[derive(Clone, Copy, Debug)]
pub enum Factor<'a> {
    /// A direction.
    Direction(&'a Direction),
    /// One that was written as values.
    Values(&'a DirectionValues),
}

impl<'a> From<&'a Direction> for Factor<'a> {
    fn from(direction: &'a Direction) -> Self {
        Factor::Direction(direction)
    }
}

impl<'a> From<&'a DirectionValues> for Factor<'a> {
    fn from(values: &'a DirectionValues) -> Self {
        Factor::Values(values)
    }
}

impl<'a> Factor<'a> {
    pub(super) fn operand(self) -> Result<Operand<'a>> {
        match self {
            Factor::Direction(direction) => Ok(operand(direction)),
            Factor::Values(values) => values.operand(),
        }
    }

    pub(super) fn format(self) -> (Family, Option<Signs>) {
        match self {
            Factor::Direction(direction) => (direction.family(), direction.rotation()),
            Factor::Values(values) => (Family::Nvfp4, values.about.rotation),
        }
    }
}

impl Gpu {
    /// Whether an operand that is quantized for one product alone, M × K, should be written as [values](super::Options::values). The other
    /// operand is N × K. Formats, sizes and the costs of the GPU decide.
    pub fn prefers_values(&self, (a, b): (&crate::Direction, &crate::Direction), sizes: (usize, usize, usize)) -> bool {
        let fits = |direction: &crate::Direction| match direction {
            crate::Direction::Nvfp4(d) => {
                let Nvfp4Description { global, layout, .. } = *d.description();
                (global, layout) == (GlobalScale::PerTensor, Layout::Linear)
            }
            crate::Direction::Fp8(_) | crate::Direction::Plain(_) => false,
        };
        fits(a) && fits(b) && gemm::prefers_values(self.stream.device(), sizes)
    }
}
