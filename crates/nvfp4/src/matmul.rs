//! Products of quantized tensors. What they compute is written in [`nvfp4_spec::gemm`].

use crate::{Direction, Element, Error, QuantTensor, Result, Side, TensorRef};
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

/// `α·X·Wᵀ (+ bias) (+ β·C)` of a plain tensor [M, K] and a quantized one [N, K]: the product of a layer whose weights alone are
/// quantized. Sums are in binary32, within [`nvfp4_spec::gemm::bound`] of the exact ones.
///
/// A weight that is Hadamard-transformed is refused: `x` is not.
pub fn matmul_plain<T: Element>(x: &TensorRef<'_>, w: &Direction, product: &Product<'_, T>) -> Result<Vec<T>> {
    if w.rotation.is_some() {
        return Err(Error::Rotation { left: None, right: w.rotation });
    }
    let scales = w.linear_scales()?;
    let mut out = zeros(area(x.rows(), w.rows)?, x.rows(), w.rows)?;
    x.with_input(|x| Ok(gemm::gemm(Implementation::best(), x, &w.view(&scales), product, &mut out)?))?;
    Ok(out)
}

/// Products that belong together, as those of the experts of a layer: a list of pairs of any sizes, and a result for each. The same
/// `product` goes for all, so a bias asks for equal N, and a C for equal sizes; [`gemm::grouped`] takes one each.
pub fn matmul_grouped<T: Element>(pairs: &[(&Direction, &Direction)], product: &Product<'_, T>) -> Result<Vec<Vec<T>>> {
    let mut scales = Vec::with_capacity(pairs.len());
    let mut outs = Vec::with_capacity(pairs.len());
    for (a, b) in pairs {
        if a.rotation != b.rotation {
            return Err(Error::Rotation { left: a.rotation, right: b.rotation });
        }
        scales.push((a.linear_scales()?, b.linear_scales()?));
        outs.push(zeros(area(a.rows, b.rows)?, a.rows, b.rows)?);
    }
    let mut members: Vec<gemm::Member<'_, T>> = pairs
        .iter()
        .zip(&scales)
        .zip(&mut outs)
        .map(|(((a, b), scales), out)| gemm::Member {
            a: (&a.view(&scales.0)).into(),
            b: (&b.view(&scales.1)).into(),
            product: *product,
            out,
        })
        .collect();
    gemm::grouped(Implementation::best(), &mut members)?;
    Ok(outs)
}

impl QuantTensor {
    /// The product of this tensor's row direction and the other's, transposed: `self · otherᵀ`, [M, N].
    pub fn matmul<T: Element>(&self, other: &QuantTensor) -> Result<Vec<T>> {
        matmul(self.direction(Side::Row)?, other.direction(Side::Row)?, &Product::default())
    }
}
