//! Products with NEON, on all threads. A row of B is decoded once for a few rows of A.

mod exact;
mod mixed;

use super::{Operand, Product, check, scalar};
use crate::Result;
use crate::vector::Neon;
use nvfp4_spec::Element;

/// Rows of A that one pass over a row of B takes.
const ROWS: usize = 4;

pub(super) fn gemm<T: Element>(
    token: Neon,
    a: Operand<'_>,
    b: Operand<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    check(&a, &b, product)?;
    // The rule covers a product without outputs or with K = 0.
    if out.is_empty() || a.shape().1 == 0 {
        return scalar(a, b, product, out);
    }
    match (&a, &b) {
        (Operand::Nvfp4(a), Operand::Nvfp4(b)) => exact::gemm(token, a, b, product, out),
        (a, b) => mixed::gemm(token, a, b, product, out)?,
    }
    Ok(())
}
