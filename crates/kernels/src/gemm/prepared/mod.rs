//! Products with NVFP4 weights that were brought into an order of their own, once.

#[cfg(target_arch = "x86_64")]
mod exact;
#[cfg(target_arch = "x86_64")]
mod mixed;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::{Operand, Product, gemm};
use crate::{Implementation, Result};
use nvfp4_spec::Element;
use nvfp4_spec::matrix::View;

/// A matrix in the order in which products with few rows read it fastest, 4.5 bits per element; `None`
/// where the implementation reads it as it is. The order is private: it may change with a version.
pub fn prepare(implementation: Implementation, b: &View<'_>) -> Result<Option<Vec<u8>>> {
    b.check()?;
    match implementation {
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(_) | Implementation::Avx512(_) if b.cols > 0 => tiles::prepare(b).map(Some),
        _ => Ok(None),
    }
}

/// [`gemm`](super::gemm) with a matrix that was prepared too: the same outputs where both operands
/// are NVFP4, and elsewhere within the same bound.
///
/// ```
/// use nvfp4_kernels::gemm::{Product, gemm_prepared, prepare};
/// use nvfp4_kernels::{Implementation, Input};
/// use nvfp4_spec::matrix::{self, Matrix};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let w = Matrix::new(1, 16, &[6.0f32; 16])?;
/// let w = matrix::quantize(&w, &[2688.0], &Mode::default(), Rounding::NearestEven)?;
/// let x = Input::new((&[2.0f32; 16][..]).into(), 1, 16)?;
/// let mut y = [0.0f32];
/// let prepared = prepare(Implementation::best(), &w.view())?;
/// gemm_prepared(Implementation::best(), &x, &w.view(), prepared.as_deref(), &Product::default(), &mut y)?;
/// assert_eq!(y, [16.0 * 12.0]);
/// # Ok::<(), nvfp4_kernels::Error>(())
/// ```
pub fn gemm_prepared<'a, T: Element>(
    implementation: Implementation,
    a: impl Into<Operand<'a>>,
    b: &'a View<'a>,
    prepared: Option<&'a [u8]>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let a = a.into();
    #[cfg(target_arch = "x86_64")]
    if few_rows(implementation, &a, b, prepared, product, out)? {
        return Ok(());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = prepared;
    gemm(implementation, a, b, product, out)
}

/// The product, if there is a kernel for it.
#[cfg(target_arch = "x86_64")]
fn few_rows<T: Element>(
    implementation: Implementation,
    a: &Operand<'_>,
    b: &View<'_>,
    prepared: Option<&[u8]>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<bool> {
    use super::Accumulate;
    use super::exact::FEW;
    let Some(bytes) = prepared else { return Ok(false) };
    let outputs = super::check(a, &b.into(), product)?;
    crate::input::check_len("output", outputs, out.len())?;
    if outputs == 0 || b.cols == 0 {
        return Ok(false);
    }
    let prepared = tiles::Prepared::new(b, bytes)?;
    if a.rows() > FEW || product.accumulate != Accumulate::Exact {
        return Ok(false);
    }
    // Few rows are bound by memory: they need no wider vectors.
    let token = match implementation {
        Implementation::Avx2(token) => token,
        Implementation::Avx512(token) => token.avx2(),
        _ => return Ok(false),
    };
    Ok(match a {
        Operand::Nvfp4(a) => exact::few_rows(token, a, &prepared, product, out),
        Operand::Plain(x) => mixed::few_rows(token, x, &prepared, product, out),
        Operand::Fp8(_) => false,
    })
}
