//! The 16-point randomized Hadamard transform along the rows of a matrix. **Exact.**
//! [Quantization](crate::quantize) has it built in; this is for callers that need the transformed
//! values.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Input, Result};
use half::bf16;
use nvfp4_spec::hadamard::{Signs, transform};
use nvfp4_spec::{BLOCK, Error, area};
use rayon::prelude::*;

/// Transforms every group of 16 along the rows of `x`, whose number of columns must be a multiple
/// of 16, into a contiguous matrix of bf16. Twin of [`nvfp4_spec::matrix::transform`].
pub fn hadamard(implementation: Implementation, x: &Input<'_>, signs: Signs, out: &mut [bf16]) -> Result<()> {
    check(x.rows(), x.cols(), out.len())?;
    if out.is_empty() {
        return Ok(());
    }
    match implementation {
        Implementation::Scalar => groups(x, signs, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::hadamard(token, x, signs, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::hadamard(token.avx2(), x, signs, out),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::hadamard(token, x, signs, out),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, x, signs, out)?,
    }
    Ok(())
}

fn check(rows: usize, cols: usize, out: usize) -> Result<()> {
    if !cols.is_multiple_of(BLOCK) {
        let what = "the dimension that the Hadamard transform runs along";
        return Err(Error::Multiple { what, of: BLOCK, got: cols }.into());
    }
    Ok(check_len("output", area(rows, cols)?, out)?)
}

/// The rule on all threads.
fn groups(x: &Input<'_>, signs: Signs, out: &mut [bf16]) {
    let values = x.values();
    out.par_chunks_exact_mut(x.cols()).enumerate().for_each(|(r, row)| {
        for (g, group) in row.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let at = r * x.stride() + g * BLOCK;
            let transformed = transform(std::array::from_fn(|i| values.get(at + i)), signs);
            *group = transformed.map(bf16::from_f32);
        }
    });
}
