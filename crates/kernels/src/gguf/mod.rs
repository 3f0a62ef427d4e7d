//! Codes and scales to GGUF's 36-byte blocks and back. **Exact.**

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::gguf as spec;

/// Packs linear codes and scales of a `rows` × `cols` matrix; `cols` must be a multiple of 64.
pub fn pack(
    implementation: Implementation,
    codes: &[u8],
    scales: &[u8],
    rows: usize,
    cols: usize,
    packed: &mut [u8],
) -> Result<()> {
    check_len("GGUF data", spec::packed_len(rows, cols)?, packed.len())?;
    spec::check(codes, scales, rows, cols)?;
    match implementation {
        Implementation::Scalar => packed.copy_from_slice(&spec::pack(codes, scales, rows, cols)?),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::pack(token, codes, scales, packed),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::pack(token, codes, scales, packed),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::pack(token.avx2(), codes, scales, packed),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(_) => return pack(Implementation::best(), codes, scales, rows, cols, packed),
    }
    Ok(())
}

/// Unpacks GGUF blocks into linear codes and scales.
pub fn unpack(
    implementation: Implementation,
    packed: &[u8],
    rows: usize,
    cols: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    check_len("GGUF data", spec::packed_len(rows, cols)?, packed.len())?;
    check_len("codes", rows * cols / 2, codes.len())?;
    check_len("scales", rows * cols / nvfp4_spec::BLOCK, scales.len())?;
    match implementation {
        Implementation::Scalar => {
            let (unpacked_codes, unpacked_scales) = spec::unpack(packed, rows, cols)?;
            codes.copy_from_slice(&unpacked_codes);
            scales.copy_from_slice(&unpacked_scales);
        }
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::unpack(token, packed, codes, scales),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::unpack(token, packed, codes, scales),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::unpack(token.avx2(), packed, codes, scales),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(_) => return unpack(Implementation::best(), packed, rows, cols, codes, scales),
    }
    Ok(())
}
