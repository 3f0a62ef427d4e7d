//! From codes and scales back to values. **Exact**, but for the sign of a NaN.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::matrix::{self, View};
use nvfp4_spec::{Element, Error};

/// Decodes a quantized matrix with linear scales into a contiguous row-major one.
///
/// ```
/// use nvfp4_kernels::{Implementation, dequantize::dequantize};
/// use nvfp4_spec::matrix::{self, Matrix};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let x = Matrix::new(1, 4, &[6.0f32, 3.0, 0.4, -1.0])?;
/// let q = matrix::quantize(&x, &[6.0], &Mode::default(), Rounding::NearestEven)?;
/// let mut values = [0.0f32; 4];
/// dequantize(Implementation::best(), &q.view(), &mut values)?;
/// assert_eq!(values, [6.0, 3.0, 0.5, -1.0]);
/// # Ok::<(), nvfp4_kernels::Error>(())
/// ```
pub fn dequantize<T: Element>(implementation: Implementation, q: &View<'_>, out: &mut [T]) -> Result<()> {
    q.check()?;
    let (rows, cols) = (q.rows, q.cols);
    check_len("output", rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })?, out.len())?;
    match implementation {
        Implementation::Scalar => out.copy_from_slice(&matrix::dequantize(q)?),
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
