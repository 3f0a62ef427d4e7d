//! Which units of a GPU compute which products. This module answers without a GPU; `cuda::describe`
//! answers for given operands, and tests on a GPU compare the two.

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
    /// Multiply-adds in binary32, without tensor cores: an order of magnitude slower.
    MultiplyAdds,
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Units::Bf16TensorCores => "on bf16 tensor cores",
            Units::MultiplyAdds => "by multiply-adds without tensor cores",
        })
    }
}

/// The units that multiply two operands of this format on a GPU of this compute capability; `None`
/// if there are no kernels for it.
///
/// No kernel here uses the instructions for FP4 and FP8 that newer chips have, so Blackwell runs
/// what Ampere runs.
///
/// ```
/// use nvfp4_kernels::gemm::{Stored, Units, units};
///
/// assert_eq!(units(Stored::Nvfp4, (10, 0)), Some(Units::Bf16TensorCores));
/// assert_eq!(units(Stored::Mxfp8, (10, 0)), Some(Units::MultiplyAdds));
/// assert_eq!(units(Stored::Nvfp4, (7, 5)), None);
/// ```
pub fn units(stored: Stored, capability: (u32, u32)) -> Option<Units> {
    (capability >= (8, 0)).then_some(match stored {
        Stored::Nvfp4 => Units::Bf16TensorCores,
        Stored::Fp8 | Stored::Fp8Block | Stored::Mxfp8 => Units::MultiplyAdds,
    })
}
