//! Products of quantized tensors. What they compute is written in [`nvfp4_spec::gemm`].

use crate::{Direction, Element, Error, QuantTensor, Result, Side};
use nvfp4_kernels::{Implementation, gemm};
use nvfp4_spec::{area, zeros};

pub use nvfp4_kernels::gemm::{Accumulate, Epilogue, Product};

/// `α·A·Bᵀ (+ bias) (+ β·C)`: `a` is [M, K], `b` is [N, K], the result [M, N], row-major.
///
/// The three products of a linear layer are `x.row · w.row`, `dy.row · w.col` and `dy.col · x.col`. Operands whose Hadamard
/// transforms differ are refused: only equal rotations cancel.
pub fn matmul<T: Element>(a: &Direction, b: &Direction, product: &Product<'_, T>) -> Result<Vec<T>> {
    matmul_with(Implementation::best(), a, b, product)
}

/// [`matmul`] by the implementation asked for. All give the same bits.
pub fn matmul_with<T: Element>(
    implementation: Implementation,
    a: &Direction,
    b: &Direction,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    if a.rotation != b.rotation {
        return Err(Error::Rotation { left: a.rotation, right: b.rotation });
    }
    let (a_scales, b_scales) = (a.linear_scales()?, b.linear_scales()?);
    let mut out = zeros(area(a.rows, b.rows)?, a.rows, b.rows)?;
    gemm::gemm(implementation, &a.view(&a_scales), &b.view(&b_scales), product, &mut out)?;
    Ok(out)
}

impl QuantTensor {
    /// The product of this tensor's row direction and the other's, transposed: `self · otherᵀ`, [M, N].
    pub fn matmul<T: Element>(&self, other: &QuantTensor) -> Result<Vec<T>> {
        matmul(self.direction(Side::Row)?, other.direction(Side::Row)?, &Product::default())
    }
}
