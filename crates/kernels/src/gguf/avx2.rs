//! GGUF blocks with AVX2: nibbles are spread to bytes, paired anew, and packed. Twin of
//! [`nvfp4_spec::gguf`].

use crate::avx2::Avx2;
use crate::vector::*;
use nvfp4_spec::gguf::{BLOCK_BYTES, BLOCK_ELEMENTS};
use rayon::prelude::*;

/// GGUF blocks that one task packs.
const TASK: usize = 1 << 12;

const CODE_BYTES: usize = BLOCK_ELEMENTS / 2;
const SCALE_BYTES: usize = BLOCK_BYTES - CODE_BYTES;

pub(super) fn pack(token: Avx2, codes: &[u8], scales: &[u8], packed: &mut [u8]) {
    let tasks = packed.par_chunks_mut(TASK * BLOCK_BYTES);
    tasks.zip(codes.par_chunks(TASK * CODE_BYTES).zip(scales.par_chunks(TASK * SCALE_BYTES))).for_each(
        |(packed, (codes, scales))| {
            let from = codes.as_chunks().0.iter().zip(scales.as_chunks::<SCALE_BYTES>().0);
            for (block, (codes, scales)) in packed.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(from) {
                block[..SCALE_BYTES].copy_from_slice(scales);
                // SAFETY: an Avx2 token is only made after detection.
                block[SCALE_BYTES..].copy_from_slice(&unsafe { far_pairs(token, codes) });
            }
        },
    );
}

pub(super) fn unpack(token: Avx2, packed: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let tasks = codes.par_chunks_mut(TASK * CODE_BYTES).zip(scales.par_chunks_mut(TASK * SCALE_BYTES));
    tasks.zip(packed.par_chunks(TASK * BLOCK_BYTES)).for_each(|((codes, scales), packed)| {
        let to = codes.as_chunks_mut::<CODE_BYTES>().0.iter_mut().zip(scales.as_chunks_mut::<SCALE_BYTES>().0);
        for ((codes, scales), block) in to.zip(packed.as_chunks::<BLOCK_BYTES>().0) {
            scales.copy_from_slice(&block[..SCALE_BYTES]);
            let nibbles = block[SCALE_BYTES..].try_into().expect("a block has 32 bytes of codes");
            // SAFETY: an Avx2 token is only made after detection.
            *codes = unsafe { near_pairs(token, nibbles) };
        }
    });
}

/// The low and the high nibbles of 32 bytes, as bytes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn nibbles(bytes: &[u8; CODE_BYTES]) -> [__m256i; 2] {
    // SAFETY: the source is an array of 32 bytes.
    let x = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask)]
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn bytes_of(x: __m256i) -> [u8; CODE_BYTES] {
    let mut bytes = [0; CODE_BYTES];
    // SAFETY: the destination is an array of 32 bytes.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), x) };
    bytes
}

/// Nibbles that pair elements (0,1), (2,3), … to nibbles that pair (0,8), (1,9), … in every 16.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn far_pairs(_: Avx2, bytes: &[u8; CODE_BYTES]) -> [u8; CODE_BYTES] {
    let [even, odd] = nibbles(bytes);
    // Each 128-bit half of a and b holds the 16 elements of a sub-block in order: 0 and 2 in a, 1
    // and 3 in b.
    let (a, b) = (_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd));
    let (first, last) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    bytes_of(_mm256_or_si256(first, _mm256_slli_epi16::<4>(last)))
}

/// The way back.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn near_pairs(_: Avx2, bytes: &[u8; CODE_BYTES]) -> [u8; CODE_BYTES] {
    let [first, last] = nibbles(bytes);
    let (a, b) = (_mm256_unpacklo_epi64(first, last), _mm256_unpackhi_epi64(first, last));
    // Words of two neighbouring elements become bytes.
    let weights = _mm256_set1_epi16(0x1001);
    bytes_of(_mm256_packus_epi16(_mm256_maddubs_epi16(a, weights), _mm256_maddubs_epi16(b, weights)))
}
