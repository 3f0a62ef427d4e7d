//! Rows of elements to codes. Twin of the loop in [`nvfp4_spec::fp8::quantize`].
//!
//! Multipliers are positive numbers, so that a product has the sign of its element and is NaN only
//! where the element is. A row with NaN is encoded like any other, and corrected afterwards.

use crate::avx2::small_float::{SmallFloat, code_words};
use crate::avx2::{Block, abs, infinity_bits, largest, load, max, widen, zero};
use crate::vector::*;
use nvfp4_spec::{BLOCK, Element, Precision, e4m3};

/// Elements that are encoded at a time: as many as a vector has bytes.
pub(super) const STEP: usize = 32;

/// Whether a largest magnitude is that of a NaN.
pub(super) fn is_nan<T: Element>(bits: u32) -> bool {
    bits > infinity_bits(T::PRECISION)
}

/// Encodes a row with one multiplier; the bits of its largest magnitude, NaN above all.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn encode<T: Element, F: SmallFloat>(x: &[T], multiplier: f32, out: &mut [u8]) -> u32 {
    let m = _mm256_set1_ps(multiplier);
    for_each_step::<T, F>(x, out, |_| [[m; 2]; 2])
}

/// Encodes a row with a multiplier per column. Their number is that of the elements, rounded up to
/// [`STEP`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn encode_columns<T: Element, F: SmallFloat>(x: &[T], multipliers: &[f32], out: &mut [u8]) -> u32 {
    let blocks = multipliers.as_chunks::<BLOCK>().0;
    for_each_step::<T, F>(x, out, |i| {
        [ordered::<T>(widen::<f32>(load(&blocks[2 * i]))), ordered::<T>(widen::<f32>(load(&blocks[2 * i + 1])))]
    })
}

/// Encodes the elements of a row, [`STEP`] at a time, with the multipliers of each step; the bits
/// of the largest magnitude.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn for_each_step<T: Element, F: SmallFloat>(
    x: &[T],
    out: &mut [u8],
    multipliers: impl Fn(usize) -> [[__m256; 2]; 2],
) -> u32 {
    let (steps, tail) = x.as_chunks::<STEP>();
    let (out_steps, out_tail) = out.as_chunks_mut::<STEP>();
    let mut seen = zero();
    for (i, (x, out)) in steps.iter().zip(out_steps).enumerate() {
        let x = pair(x);
        seen = max::<T>(seen, max::<T>(abs::<T>(x[0]), abs::<T>(x[1])));
        store_codes(codes::<T, F>(x, multipliers(i)), out);
    }
    if !tail.is_empty() {
        let (mut padded, mut codes_of_all) = ([T::default(); STEP], [0; STEP]);
        padded[..tail.len()].copy_from_slice(tail);
        let x = pair(&padded);
        seen = max::<T>(seen, max::<T>(abs::<T>(x[0]), abs::<T>(x[1])));
        store_codes(codes::<T, F>(x, multipliers(steps.len())), &mut codes_of_all);
        out_tail.copy_from_slice(&codes_of_all[..out_tail.len()]);
    }
    let bits = largest::<T>(seen);
    if is_nan::<T>(bits) {
        mend(x, out);
    }
    bits
}

/// Encodes whole steps with one multiplier.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn encode_steps<T: Element, F: SmallFloat>(x: &[[T; STEP]], multiplier: f32, out: &mut [[u8; STEP]]) {
    let m = _mm256_set1_ps(multiplier);
    for (x, out) in x.iter().zip(out) {
        store_codes(codes::<T, F>(pair(x), [[m; 2]; 2]), out);
    }
}

/// Gives NaN its code.
#[cold]
pub(super) fn mend<T: Element>(x: &[T], out: &mut [u8]) {
    for (code, _) in out.iter_mut().zip(x).filter(|(_, x)| x.to_f32().is_nan()) {
        *code = e4m3::NAN_BYTE; // in E5M2 too
    }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn pair<T: Element>(x: &[T; STEP]) -> [Block; 2] {
    let halves = x.as_chunks::<BLOCK>().0;
    [load(&halves[0]), load(&halves[1])]
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn store_codes(codes: __m256i, out: &mut [u8; STEP]) {
    // SAFETY: the destination is an array of 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), codes) };
}

/// The elements of a block in binary32, in the order that is cheapest: 0–3, 8–11 and 4–7, 12–15 for
/// bf16, whose bits are only moved, and 0–7, 8–15 for others.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn spread<T: Element>(b: Block) -> [__m256; 2] {
    match T::PRECISION {
        Precision::Bf16 => {
            let zero = _mm256_setzero_si256();
            let (low, high) = (_mm256_unpacklo_epi16(zero, b.words()), _mm256_unpackhi_epi16(zero, b.words()));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        }
        Precision::F32 | Precision::F16 => widen::<T>(b),
    }
}

/// 0–7, 8–15 in the order of [`spread`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn ordered<T: Element>([low, high]: [__m256; 2]) -> [__m256; 2] {
    match T::PRECISION {
        Precision::Bf16 => [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)],
        Precision::F32 | Precision::F16 => [low, high],
    }
}

/// The codes of two blocks, in order; not of NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn codes<T: Element, F: SmallFloat>(x: [Block; 2], multipliers: [[__m256; 2]; 2]) -> __m256i {
    let (mut magnitudes, mut signs) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
    let sign = _mm256_set1_ps(-0.0);
    for i in 0..2 {
        let [low, high] = spread::<T>(x[i]);
        let (low, high) = (_mm256_mul_ps(low, multipliers[i][0]), _mm256_mul_ps(high, multipliers[i][1]));
        magnitudes[i] = code_words::<F>([_mm256_andnot_ps(sign, low), _mm256_andnot_ps(sign, high)]);
        // Saturation keeps the signs.
        signs[i] = _mm256_packs_epi32(_mm256_castps_si256(low), _mm256_castps_si256(high));
    }
    let magnitudes = _mm256_packus_epi16(magnitudes[0], magnitudes[1]);
    let signs = _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(i8::MIN));
    let codes = _mm256_or_si256(magnitudes, signs);
    // The packs work on halves of registers.
    match T::PRECISION {
        Precision::Bf16 => _mm256_permute4x64_epi64::<0b11_01_10_00>(codes),
        Precision::F32 | Precision::F16 => {
            _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        }
    }
}
