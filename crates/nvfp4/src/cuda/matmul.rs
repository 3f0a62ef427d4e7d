//! Products of tensors in the memory of a GPU.

use super::values::operand;
use super::{Direction, Factor, Gpu, Input, Plain, PreparedWeight, Product, SliceMut};
use crate::format::Family;
use crate::{Element, Error, Result};
use nvfp4_kernels::gemm::cuda::{Member, gemm, grouped};
use nvfp4_spec::hadamard::Signs;

impl Gpu {
    /// `α·A·Bᵀ (+ bias) (+ β·C)`: `a` is [M, K], `b` is [N, K], the result [M, N], row-major. Twin of [`crate::matmul`], with sums in
    /// binary32, within [`nvfp4_spec::gemm::bound`] of the exact ones.
    pub fn matmul<'a, T: Element + Plain>(
        &self,
        a: impl Into<Factor<'a>>,
        b: impl Into<Factor<'a>>,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        let (a, b) = (a.into(), b.into());
        crate::matmul::check_pair(a.format(), b.format())?;
        Ok(gemm(&self.stream, a.operand()?, b.operand()?, product, out, &*self.memory)?)
    }

    /// [`Gpu::matmul`] with plain elements on the left. A weight that is Hadamard-transformed is refused: `x` is not.
    pub fn matmul_plain<'a, T: Element + Plain>(
        &self,
        x: &Input<'_>,
        w: impl Into<Factor<'a>>,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        let w = w.into();
        check_plain(None, w.format().1)?;
        Ok(gemm(&self.stream, *x, w.operand()?, product, out, &*self.memory)?)
    }

    /// [`Gpu::matmul`] with plain elements on the right.
    pub fn matmul_by_plain<T: Element + Plain>(
        &self,
        a: &Direction,
        x: &Input<'_>,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        check_plain(a.rotation(), None)?;
        Ok(gemm(&self.stream, operand(a), *x, product, out, &*self.memory)?)
    }

    /// [`Gpu::matmul`] with plain elements on both sides, which may be of two types: **Bounded**, as all products on a GPU.
    pub fn matmul_plain_by_plain<T: Element + Plain>(
        &self,
        x: &Input<'_>,
        w: &Input<'_>,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        Ok(gemm(&self.stream, *x, *w, product, out, &*self.memory)?)
    }

    /// A weight in the order in which tensor cores read it, for many products with [`Gpu::matmul_prepared`]. NVFP4 alone has one, and a weight
    /// that is Hadamard-transformed is refused, as in [`Gpu::matmul_plain`].
    pub fn prepare(&self, weight: &Direction) -> Result<PreparedWeight> {
        check_plain(None, weight.rotation())?;
        match weight {
            Direction::Nvfp4(d) => Ok(PreparedWeight::new(&self.stream, &d.view(), &*self.memory)?),
            Direction::Fp8(_) | Direction::Plain(_) => Err(Error::NotNvfp4 { got: weight.family() }),
        }
    }

    /// [`Gpu::matmul_plain`] with a weight that was prepared.
    pub fn matmul_prepared<T: Element + Plain>(
        &self,
        x: &Input<'_>,
        w: &PreparedWeight,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        Ok(gemm(&self.stream, *x, w, product, out, &*self.memory)?)
    }

    /// [`Gpu::matmul`] with a weight that was prepared.
    pub fn matmul_on_prepared<T: Element + Plain>(
        &self,
        a: &Direction,
        w: &PreparedWeight,
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        // Those that are transformed cannot be prepared.
        crate::matmul::check_pair((a.family(), a.rotation()), (Family::Nvfp4, None))?;
        Ok(gemm(&self.stream, operand(a), w, product, out, &*self.memory)?)
    }

    /// Products that belong together, each with operands of its own and a place for its result; empty ones touch nothing. All are checked
    /// before any begins.
    pub fn matmul_grouped<'a, T: Element + Plain>(
        &self,
        members: impl IntoIterator<Item = (&'a Direction, &'a Direction, Product<'a, T>, SliceMut<'a, T>)>,
    ) -> Result<()> {
        let members = members.into_iter().map(|(a, b, product, out)| {
            check(a, b)?;
            Ok(Member { a: operand(a), b: operand(b).into(), product, out })
        });
        let mut members: Vec<Member<'a, T>> = members.collect::<Result<_>>()?;
        Ok(grouped(&self.stream, &mut members, &*self.memory)?)
    }
}

pub(super) fn check(a: &Direction, b: &Direction) -> Result<()> {
    crate::matmul::check_pair((a.family(), a.rotation()), (b.family(), b.rotation()))
}

/// Beside plain elements, which are not transformed, nothing is.
fn check_plain(left: Option<Signs>, right: Option<Signs>) -> Result<()> {
    if left == right { Ok(()) } else { Err(Error::Rotation { left, right }) }
}
