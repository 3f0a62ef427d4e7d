//! The kinds of products that NVIDIA's library computes from codes.

use crate::gemm::units::{LEAST_BLOCK_SCALED, LEAST_FP8};
use nvfp4_spec::gemm::Accumulator;
use std::fmt;

/// Products that NVIDIA's library computes in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ProductKind {
    /// Two NVFP4 matrices with a global scale each.
    Nvfp4,
    /// Two NVFP4 matrices, one or both with a global scale per row.
    Nvfp4RowScaled,
    /// Two MXFP8 matrices.
    Mxfp8,
    /// Two FP8 matrices with a scale each, [`Accumulator::Split`].
    Fp8Split,
    /// Two FP8 matrices with a scale each, [`Accumulator::Fast`].
    Fp8Fast,
}

impl ProductKind {
    /// Every kind.
    pub const ALL: [ProductKind; 5] = [
        ProductKind::Nvfp4,
        ProductKind::Nvfp4RowScaled,
        ProductKind::Mxfp8,
        ProductKind::Fp8Split,
        ProductKind::Fp8Fast,
    ];

    /// The compute capability that brought its units.
    pub(super) fn least(self) -> (u32, u32) {
        match self {
            ProductKind::Nvfp4 | ProductKind::Nvfp4RowScaled | ProductKind::Mxfp8 => LEAST_BLOCK_SCALED,
            ProductKind::Fp8Split | ProductKind::Fp8Fast => LEAST_FP8,
        }
    }

    /// What it is asked to add in.
    pub(super) fn accumulator(self) -> Accumulator {
        match self {
            ProductKind::Nvfp4 | ProductKind::Nvfp4RowScaled | ProductKind::Mxfp8 => Accumulator::Precise,
            ProductKind::Fp8Split => Accumulator::Split,
            ProductKind::Fp8Fast => Accumulator::Fast,
        }
    }
}

impl fmt::Display for ProductKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProductKind::Nvfp4 => "nvfp4",
            ProductKind::Nvfp4RowScaled => "nvfp4 row-scaled",
            ProductKind::Mxfp8 => "mxfp8",
            ProductKind::Fp8Split => "fp8 split",
            ProductKind::Fp8Fast => "fp8 fast",
        })
    }
}
