//! Products of quantized matrices. **Exact** on the CPU.

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::gemm as spec;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{Element, Error};

pub use spec::{Accumulate, Epilogue, Product};

/// `out = α·A·Bᵀ (+ bias) (+ β·C)`; `out` is `a.rows` × `b.rows`, row-major.
pub fn gemm<T: Element>(
    implementation: Implementation,
    a: &View<'_>,
    b: &View<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let outputs = a.rows.checked_mul(b.rows).ok_or(Error::TooLarge { rows: a.rows, cols: b.rows })?;
    check_len("output", outputs, out.len())?;
    match implementation {
        Implementation::Scalar => out.copy_from_slice(&spec::gemm(a, b, product)?),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(_) => out.copy_from_slice(&spec::gemm(a, b, product)?),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(_) => return gemm(Implementation::best(), a, b, product, out),
    }
    Ok(())
}
