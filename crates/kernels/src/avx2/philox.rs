//! Philox for eight blocks at once. Twin of [`nvfp4_spec::philox`] and
//! [`nvfp4_spec::stochastic::Stream`].

use crate::vector::*;
use nvfp4_spec::BLOCK;
use nvfp4_spec::philox::{KEY_STEPS, MULTIPLIERS, ROUNDS, words};
use nvfp4_spec::stochastic::Stream;

/// The random bytes of consecutive blocks, 16 each: block `first + i` of the stream at `out[i]`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) fn fill(stream: &Stream, first: u64, out: &mut [[u8; BLOCK]]) {
    let (eights, rest) = out.as_chunks_mut::<8>();
    for (i, eight) in eights.iter_mut().enumerate() {
        eight_blocks(stream, first.wrapping_add(8 * i as u64), eight);
    }
    let done = 8 * eights.len() as u64;
    for (i, block) in rest.iter_mut().enumerate() {
        *block = stream.block(first.wrapping_add(done + i as u64));
    }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn eight_blocks(stream: &Stream, first: u64, out: &mut [[u8; BLOCK]; 8]) {
    let start = stream.first_block.wrapping_add(first);
    let mut lanes = [[0u32; 8]; 2];
    let [low, high] = &mut lanes;
    for (i, (low, high)) in low.iter_mut().zip(high).enumerate() {
        [*low, *high] = words(start.wrapping_add(i as u64));
    }
    // SAFETY: the source is an array of 8 doublewords.
    let low = unsafe { _mm256_loadu_si256(lanes[0].as_ptr().cast()) };
    // SAFETY: the source is an array of 8 doublewords.
    let high = unsafe { _mm256_loadu_si256(lanes[1].as_ptr().cast()) };
    let offset = words(stream.offset);
    let mut c = [low, high, _mm256_set1_epi32(offset[0] as i32), _mm256_set1_epi32(offset[1] as i32)];
    let mut key = words(stream.seed);
    for _ in 0..ROUNDS {
        let ([low0, high0], [low1, high1]) = (multiply(c[0], MULTIPLIERS[0]), multiply(c[2], MULTIPLIERS[1]));
        let k = [_mm256_set1_epi32(key[0] as i32), _mm256_set1_epi32(key[1] as i32)];
        c = [
            _mm256_xor_si256(_mm256_xor_si256(high1, c[1]), k[0]),
            low1,
            _mm256_xor_si256(_mm256_xor_si256(high0, c[3]), k[1]),
            low0,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    // Words of eight blocks to blocks of four words.
    let (a, b) = (_mm256_unpacklo_epi32(c[0], c[1]), _mm256_unpackhi_epi32(c[0], c[1]));
    let (d, e) = (_mm256_unpacklo_epi32(c[2], c[3]), _mm256_unpackhi_epi32(c[2], c[3]));
    let pairs = [
        _mm256_unpacklo_epi64(a, d),
        _mm256_unpackhi_epi64(a, d),
        _mm256_unpacklo_epi64(b, e),
        _mm256_unpackhi_epi64(b, e),
    ];
    for (i, pair) in pairs.into_iter().enumerate() {
        let (low, high) = (_mm256_castsi256_si128(pair), _mm256_extracti128_si256::<1>(pair));
        // SAFETY: a block is 16 bytes.
        unsafe { _mm_storeu_si128(out[i].as_mut_ptr().cast(), low) };
        // SAFETY: a block is 16 bytes.
        unsafe { _mm_storeu_si128(out[i + 4].as_mut_ptr().cast(), high) };
    }
}

/// The low and high words of eight 64-bit products.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn multiply(x: __m256i, by: u32) -> [__m256i; 2] {
    let by = _mm256_set1_epi32(by as i32);
    let even = _mm256_mul_epu32(x, by);
    let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(x), by);
    let low = _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd));
    let high = _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd);
    [low, high]
}
