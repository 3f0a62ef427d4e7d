//! From scaled elements to packed codes. Twins of [`nvfp4_spec::e2m1::encode`] and
//! [`nvfp4_spec::stochastic::encode`].

use super::cuts::{Cuts, Table};
use crate::avx2::{Block, abs, code_signs, count_above, load, narrow, widen};
use crate::vector::*;
use nvfp4_spec::{BLOCK, Element};

/// Whether −0 keeps its sign, as a constant.
pub(super) const KEEP: bool = true;

/// The codes of a row of blocks, rounded to nearest, 8 bytes each.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn nearest<T: Element, const KEEP_ZERO_SIGN: bool>(
    row: &[[T; BLOCK]],
    scales: &[u8],
    table: &Table,
    out: &mut [u8],
) {
    for_each_four(row, scales, out, |_, x, scale| code_words::<T, KEEP_ZERO_SIGN>(load(x), table.cuts(scale)));
}

/// The codes of a row of blocks, rounded with 16 random bytes per block.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn stochastic<T: Element, const KEEP_ZERO_SIGN: bool, const DIVIDE: bool>(
    row: &[[T; BLOCK]],
    scales: &[u8],
    random: &[[u8; BLOCK]],
    table: &Table,
    out: &mut [u8],
) {
    for_each_four(row, scales, out, |b, x, scale| {
        stochastic_words::<T, KEEP_ZERO_SIGN, DIVIDE>(load(x), table.factor(scale), &random[b])
    });
}

/// Packs the codes of four blocks at a time; `words` gets a block's index, its elements and its
/// scale byte.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn for_each_four<T>(
    row: &[[T; BLOCK]],
    scales: &[u8],
    out: &mut [u8],
    words: impl Fn(usize, &[T; BLOCK], u8) -> __m256i,
) {
    let (row_fours, row_rest) = row.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<32>();
    let fours = row_fours.iter().zip(scales.as_chunks::<4>().0).zip(out_fours).enumerate();
    for (i, ((x, s), out)) in fours {
        // As a number: as an array the bytes would take the way through a vector register.
        let s = u32::from_le_bytes(*s);
        let w = [
            words(4 * i, &x[0], s as u8),
            words(4 * i + 1, &x[1], (s >> 8) as u8),
            words(4 * i + 2, &x[2], (s >> 16) as u8),
            words(4 * i + 3, &x[3], (s >> 24) as u8),
        ];
        // SAFETY: the destination is an array of 32 bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), pack(w)) };
    }
    if !row_rest.is_empty() {
        let first = row.len() - row_rest.len();
        let mut w = [_mm256_setzero_si256(); 4];
        for (j, x) in row_rest.iter().enumerate() {
            w[j] = words(first + j, x, scales[first + j]);
        }
        let mut bytes = [0u8; 32];
        // SAFETY: the destination is an array of 32 bytes.
        unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), pack(w)) };
        out_rest.copy_from_slice(&bytes[..out_rest.len()]);
    }
}

/// 16 codes as words: the number of cuts below the magnitude, and the sign.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn code_words<T: Element, const KEEP_ZERO_SIGN: bool>(x: Block, cuts: &Cuts) -> __m256i {
    let a = abs::<T>(x);
    let mut signs = code_signs::<T>(x);
    if !KEEP_ZERO_SIGN {
        signs = _mm256_and_si256(signs, count_above::<T>(a, &cuts[7..]));
    }
    _mm256_sub_epi16(signs, count_above::<T>(a, &cuts[..7]))
}

/// 16 codes as words, rounded stochastically.
///
/// With `e` the power of two at or below max(|y|, 1), the grid step at |y| is e/2, so `u·step =
/// r·(e/512)`; beyond 8, where the rule's step stays 2, everything saturates. The grid at `t` is
/// what is left of `t` when all mantissa bits but one are dropped; below 1 the only grid point
/// other than 0 is 0.5.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn stochastic_words<T: Element, const KEEP_ZERO_SIGN: bool, const DIVIDE: bool>(
    x: Block,
    factor: f32,
    random: &[u8; BLOCK],
) -> __m256i {
    // SAFETY: the source is an array of 16 bytes.
    let random = unsafe { _mm_loadu_si128(random.as_ptr().cast()) };
    let r = [_mm256_cvtepu8_epi32(random), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(random))];
    let a = widen::<T>(abs::<T>(x));
    let factor = _mm256_set1_ps(factor);
    let mut codes = [_mm256_setzero_si256(); 2];
    let mut nonzero = [_mm256_setzero_si256(); 2];
    for half in 0..2 {
        let y = if DIVIDE { _mm256_div_ps(a[half], factor) } else { _mm256_mul_ps(a[half], factor) };
        let one = _mm256_set1_epi32(0x3F80_0000);
        let exponent = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7F80_0000));
        let step = _mm256_sub_epi32(_mm256_max_epi32(exponent, one), _mm256_set1_epi32(9 << 23));
        let t = _mm256_fmadd_ps(_mm256_cvtepi32_ps(r[half]), _mm256_castsi256_ps(step), y);
        let from_one = _mm256_sub_epi32(_mm256_srli_epi32::<22>(_mm256_castps_si256(t)), _mm256_set1_epi32(252));
        let from_half = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GE_OQ>(t, _mm256_set1_ps(0.5)));
        let code = _mm256_max_epi32(from_one, _mm256_srli_epi32::<31>(from_half));
        codes[half] = _mm256_min_epi32(code, _mm256_set1_epi32(7));
        nonzero[half] = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(y, _mm256_setzero_ps()));
    }
    let mut signs = code_signs::<T>(x);
    if !KEEP_ZERO_SIGN {
        signs = _mm256_and_si256(signs, narrow(nonzero[0], nonzero[1]));
    }
    _mm256_or_si256(signs, narrow(codes[0], codes[1]))
}

/// The codes of four blocks, 16 words each, as 32 bytes: the even element in the low nibble.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn pack(words: [__m256i; 4]) -> __m256i {
    let weights = _mm256_set1_epi16(0x1001);
    let pair = |a, b| _mm256_maddubs_epi16(_mm256_packus_epi16(a, b), weights);
    let bytes = _mm256_packus_epi16(pair(words[0], words[1]), pair(words[2], words[3]));
    // The packs work on halves of registers, so the halves of the blocks come out interleaved.
    _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}
