//! Which units of a GPU compute which products. This module answers without a GPU; `cuda::describe`
//! answers for given operands, and tests on a GPU compare the two.

use nvfp4_spec::gemm::Accumulator;
use std::fmt;

/// The format of both operands of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// NVFP4.
    Nvfp4,
    /// FP8 with a scale per tensor.
    Fp8,
    /// FP8 with a scale per 128 values.
    Fp8Block,
    /// MXFP8.
    Mxfp8,
}

/// What multiplies on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Units {
    /// Tensor cores that multiply bf16, which holds every decoded value exactly.
    Bf16TensorCores,
    /// Tensor cores that multiply FP8 codes, through cuBLASLt: twice as fast, with sums of fewer
    /// bits.
    Fp8TensorCores,
    /// Tensor cores that multiply codes by the scales of their blocks, through cuBLASLt.
    BlockScaledTensorCores,
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Units::Bf16TensorCores => "on bf16 tensor cores",
            Units::Fp8TensorCores => "on FP8 tensor cores",
            Units::BlockScaledTensorCores => "on block-scaled tensor cores",
        })
    }
}

/// The units that multiply two operands of this format on a GPU of this compute capability; `None`
/// if there are no kernels for it. Where cuBLASLt is missing or refuses a shape, and on every chip
/// but Hopper where its first products are not right, all formats go to bf16 tensor cores; on Hopper
/// most FP8 stays on FP8 tensor cores, by a kernel of this crate.
///
/// ```
/// use nvfp4_kernels::gemm::{Accumulator, Stored, Units, units};
///
/// assert_eq!(units(Stored::Nvfp4, Accumulator::Precise, (9, 0)), Some(Units::Bf16TensorCores));
/// assert_eq!(units(Stored::Nvfp4, Accumulator::Precise, (10, 0)), Some(Units::BlockScaledTensorCores));
/// assert_eq!(units(Stored::Fp8, Accumulator::Fast, (9, 0)), Some(Units::Fp8TensorCores));
/// assert_eq!(units(Stored::Fp8, Accumulator::Precise, (9, 0)), Some(Units::Bf16TensorCores));
/// assert_eq!(units(Stored::Nvfp4, Accumulator::Precise, (7, 5)), None);
/// ```
pub fn units(stored: Stored, accumulator: Accumulator, capability: (u32, u32)) -> Option<Units> {
    let reduced = accumulator != Accumulator::Precise && capability >= LEAST_FP8;
    (capability >= (8, 0)).then_some(match stored {
        Stored::Fp8 if reduced => Units::Fp8TensorCores,
        Stored::Fp8Block if reduced && capability.0 == BLOCKS_OF_128 => Units::Fp8TensorCores,
        Stored::Nvfp4 | Stored::Mxfp8 if capability >= LEAST_BLOCK_SCALED => Units::BlockScaledTensorCores,
        Stored::Nvfp4 | Stored::Fp8 | Stored::Fp8Block | Stored::Mxfp8 => Units::Bf16TensorCores,
    })
}

/// FP8 tensor cores came with this compute capability.
pub(crate) const LEAST_FP8: (u32, u32) = (8, 9);

/// cuBLASLt has FP8 in blocks of 128 with this compute capability alone, Hopper's.
pub(crate) const BLOCKS_OF_128: u32 = 9;

/// Block-scaled tensor cores came with this compute capability.
pub(crate) const LEAST_BLOCK_SCALED: (u32, u32) = (10, 0);
