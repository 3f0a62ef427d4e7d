//! From FP8 codes and scales back to values. **Exact**, but for the sign of a NaN.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::fp8::{self, View};
use nvfp4_spec::{Element, area};

/// Decodes a quantized matrix into a contiguous row-major one.
pub fn dequantize<T: Element>(implementation: Implementation, q: &View<'_>, out: &mut [T]) -> Result<()> {
    q.check()?;
    check_len("output", area(q.rows, q.cols)?, out.len())?;
    match implementation {
        Implementation::Scalar => out.copy_from_slice(&fp8::dequantize(q)?),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::dequantize(token, q, out),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::dequantize(token, q, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::dequantize(token.avx2(), q, out),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, q, out)?,
    }
    Ok(())
}
