//! From FP8 codes and scales back to values. **Exact**, but for the sign of a NaN.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::fp8::{self, Format, View};
use nvfp4_spec::{Element, area};
use std::num::NonZeroUsize;

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

/// Decodes codes that lie side by side, of which each `width` have a scale: `code · scale`, rounded
/// once.
pub fn dequantize_row(
    implementation: Implementation,
    format: Format,
    codes: &[u8],
    width: NonZeroUsize,
    scales: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let width = width.get();
    check_len("scales", codes.len().div_ceil(width), scales.len())?;
    check_len("output", codes.len(), out.len())?;
    match implementation {
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::dequantize_row(token, format, codes, width, scales, out),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::dequantize_row(token, format, codes, width, scales, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::dequantize_row(token.avx2(), format, codes, width, scales, out),
        // One row is nothing for a GPU.
        _ => row(format, codes, width, scales, out),
    }
    Ok(())
}

/// The rule.
fn row(format: Format, codes: &[u8], width: usize, scales: &[f32], out: &mut [f32]) {
    let values: [f32; 256] = std::array::from_fn(|code| format.decode(code as u8));
    for ((codes, out), scale) in codes.chunks(width).zip(out.chunks_mut(width)).zip(scales) {
        codes.iter().zip(out).for_each(|(&code, out)| *out = values[usize::from(code)] * scale);
    }
}
