//! Rows of elements to codes. Twin of the loop in [`nvfp4_spec::fp8::quantize`].
//!
//! Multipliers are positive numbers, so that a product has the sign of its element and is NaN only where the element is.
//! A row with NaN in it is encoded like any other, and then mended.

use crate::avx2::small_float::{SmallFloat, code_words, e8m0_reciprocals, e8m0_up, store_bytes};
use crate::avx2::{Block, abs, infinity_bits, largest, largest_of_eight, load, max, values_of, widen, zero};
use nvfp4_spec::fp8::scale::MX_BLOCK;
use nvfp4_spec::{BLOCK, Edge, Element, Precision, e4m3, scale};
use std::arch::x86_64::*;

/// Elements that are encoded at a time: as many as a vector has bytes.
const STEP: usize = 32;

/// Whether a largest magnitude is that of a NaN.
pub(super) fn is_nan<T: Element>(bits: u32) -> bool {
    bits > infinity_bits(T::PRECISION)
}

/// Encodes a row with one multiplier; the bits of its largest magnitude, NaN above all.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn encode<T: Element, F: SmallFloat>(x: &[T], multiplier: f32, out: &mut [u8]) -> u32 {
    let m = _mm256_set1_ps(multiplier);
    for_each_step::<T, F>(x, out, |_| [[m; 2]; 2])
}

/// Encodes a row with a multiplier per column. Their number is that of the elements, rounded up to [`STEP`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn encode_columns<T: Element, F: SmallFloat>(x: &[T], multipliers: &[f32], out: &mut [u8]) -> u32 {
    let blocks = multipliers.as_chunks::<BLOCK>().0;
    for_each_step::<T, F>(x, out, |i| {
        [ordered::<T>(widen::<f32>(load(&blocks[2 * i]))), ordered::<T>(widen::<f32>(load(&blocks[2 * i + 1])))]
    })
}

/// Encodes the elements of a row, [`STEP`] at a time, with the multipliers of each step; the bits of the largest magnitude.
#[target_feature(enable = "avx2,fma,f16c")]
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

/// Gives NaN its code.
#[cold]
fn mend<T: Element>(x: &[T], out: &mut [u8]) {
    for (code, _) in out.iter_mut().zip(x).filter(|(_, x)| x.to_f32().is_nan()) {
        *code = e4m3::NAN_BYTE; // in E5M2 too
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pair<T: Element>(x: &[T; STEP]) -> [Block; 2] {
    let halves = x.as_chunks::<BLOCK>().0;
    [load(&halves[0]), load(&halves[1])]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_codes(codes: __m256i, out: &mut [u8; STEP]) {
    // SAFETY: the destination is an array of 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), codes) };
}

/// The elements of a block in binary32, in the order that is cheapest: 0–3, 8–11 and 4–7, 12–15 for bf16, whose bits are
/// only moved, and 0–7, 8–15 for others.
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn ordered<T: Element>([low, high]: [__m256; 2]) -> [__m256; 2] {
    match T::PRECISION {
        Precision::Bf16 => [_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high)],
        Precision::F32 | Precision::F16 => [low, high],
    }
}

/// The codes of two blocks, in order; not of NaN.
#[target_feature(enable = "avx2,fma,f16c")]
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

/// Blocks of MXFP8 whose scales are found at a time.
const EIGHT: usize = 8 * MX_BLOCK;

/// Quantizes a row to MXFP8.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mx_row<T: Element, F: SmallFloat>(x: &[T], out: &mut [u8], scales: &mut [u8]) {
    let (eights, tail) = x.as_chunks::<EIGHT>();
    let (out_eights, out_tail) = out.as_chunks_mut::<EIGHT>();
    let (scale_eights, scale_tail) = scales.as_chunks_mut::<8>();
    for ((x, out), scales) in eights.iter().zip(out_eights).zip(&mut *scale_eights) {
        mx_eight::<T, F>(x, out, scales);
    }
    if !tail.is_empty() {
        let (mut padded, mut codes, mut scales) = ([T::default(); EIGHT], [0; EIGHT], [0; 8]);
        padded[..tail.len()].copy_from_slice(tail);
        mx_eight::<T, F>(&padded, &mut codes, &mut scales);
        out_tail.copy_from_slice(&codes[..out_tail.len()]);
        // A row that is a multiple of 8 blocks but for a few elements has its last scale in a whole chunk.
        let last = tail.len().div_ceil(MX_BLOCK);
        match scale_tail.len() {
            0 => scale_eights[eights.len()].copy_from_slice(&scales),
            _ => scale_tail.copy_from_slice(&scales[..last]),
        }
    }
}

/// Quantizes eight blocks.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn mx_eight<T: Element, F: SmallFloat>(x: &[T; EIGHT], out: &mut [u8; EIGHT], scales: &mut [u8; 8]) {
    let blocks = x.as_chunks::<STEP>().0;
    let mut maxima = [zero(); 8];
    for (m, x) in maxima.iter_mut().zip(blocks) {
        let [a, b] = pair(x);
        *m = max::<T>(abs::<T>(a), abs::<T>(b));
    }
    let bits = largest_of_eight::<T>(maxima);
    let infinity = _mm256_set1_epi32(infinity_bits(T::PRECISION) as i32);
    let nan = _mm256_movemask_epi8(_mm256_cmpgt_epi32(bits, infinity)) != 0;
    let amaxes = if nan { amaxes_without_nan(blocks) } else { values_of(bits, T::PRECISION) };
    let multipliers = mx_scales::<F>(amaxes, scales);
    let steps = blocks.iter().zip(out.as_chunks_mut::<STEP>().0);
    for ((x, out), m) in steps.zip(multipliers) {
        store_codes(codes::<T, F>(pair(x), [[_mm256_set1_ps(m); 2]; 2]), out);
    }
    if nan {
        mend(x, out);
    }
}

/// Writes the scales of eight blocks; what their elements are multiplied by. Twin of [`scale::mx_byte`](nvfp4_spec::fp8::scale::mx_byte).
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn mx_scales<F: SmallFloat>(amaxes: __m256, scales: &mut [u8; 8]) -> [f32; 8] {
    let bytes = e8m0_up(_mm256_mul_ps(amaxes, _mm256_set1_ps(1.0 / F::MAX)));
    store_bytes(bytes, scales);
    let mut multipliers = [0.0; 8];
    // SAFETY: the destination is an array of 8 numbers.
    unsafe { _mm256_storeu_ps(multipliers.as_mut_ptr(), e8m0_reciprocals(bytes)) };
    multipliers
}

#[cold]
#[target_feature(enable = "avx2,fma,f16c")]
fn amaxes_without_nan<T: Element>(blocks: &[[T; STEP]]) -> __m256 {
    let mut amaxes = [0.0; 8];
    for (amax, block) in amaxes.iter_mut().zip(blocks) {
        *amax = scale::amax(&block.map(|x| x.to_f32()), Edge::Kernel);
    }
    eight(&amaxes)
}

/// Eight numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn eight(x: &[f32; 8]) -> __m256 {
    // SAFETY: the source is an array of 8 numbers.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}
