//! Sums over many terms, taken in binary32 where a tensor's type is smaller. candle adds in the
//! tensor's own type; in bf16 such a sum stops growing once it is 256 times its terms.

use candle_core::shape::Dim;
use candle_core::{DType, Result, Tensor};

/// Sums over a dimension, which stays with size 1, rounded once to the tensor's type.
pub(crate) fn sum(x: &Tensor, over: impl Dim) -> Result<Tensor> {
    wide(x)?.sum_keepdim(over)?.to_dtype(x.dtype())
}

/// A tensor in a type to add in: binary32, or its own where that is larger.
pub(crate) fn wide(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}
