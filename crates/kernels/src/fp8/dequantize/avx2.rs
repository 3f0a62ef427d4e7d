//! Decoding FP8 with AVX2, on all threads. Twin of [`nvfp4_spec::fp8::dequantize`].
//!
//! A code becomes a binary16 number by moving its bits, and that becomes binary32 in hardware. E5M2
//! is the high byte of one. E4M3 has another bias, so the number is 2⁻⁸ of the value, and the
//! factor takes up the rest: a power of two that moves from one factor of a product to the other
//! changes no rounding, as long as neither overflows.

use crate::avx2::small_float::{E4m3, E5m2, SmallFloat};
use crate::avx2::{Avx2, Block, high_halves, load, round_bits, store, widen};
use crate::vector::*;
use nvfp4_spec::fp8::{Format, View};
use nvfp4_spec::{BLOCK, Element, Precision, e4m3};
use rayon::prelude::*;

/// Elements that one task decodes.
const TASK: usize = 1 << 17;

pub(super) fn dequantize<T: Element>(token: Avx2, q: &View<'_>, out: &mut [T]) {
    match q.format {
        Format::E4m3 => decode::<T, E4m3>(token, q, out),
        Format::E5m2 => decode::<T, E5m2>(token, q, out),
    }
}

fn decode<T: Element, F: SmallFloat>(_: Avx2, q: &View<'_>, out: &mut [T]) {
    if q.rows == 0 || q.cols == 0 {
        return;
    }
    let ((tile_height, tile_width), (_, across)) = (q.tile.size(q.rows, q.cols), q.tile.grid(q.rows, q.cols));
    let height = TASK.div_ceil(q.cols);
    out.par_chunks_mut(height * q.cols).enumerate().for_each_init(Factors::default, |factors, (task, out)| {
        for (i, out) in out.chunks_exact_mut(q.cols).enumerate() {
            let r = task * height + i;
            factors.set::<F>(q, r / tile_height, across);
            if !factors.exact {
                by_the_rules(q, r, out);
            } else if tile_width == 1 {
                // SAFETY: an Avx2 token is only made after detection.
                unsafe { columns::<T, F>(q.code_row(r), &factors.values, out) };
            } else {
                // SAFETY: an Avx2 token is only made after detection.
                unsafe { tiles::<T, F>(q.code_row(r), tile_width, factors.values.iter().copied(), out) };
            }
        }
    });
}

/// The factors of the binary16 numbers of a row of tiles, padded with zeros to a whole block.
#[derive(Default)]
struct Factors {
    values: Vec<f32>,
    /// Whether all factors are [exact](is_exact).
    exact: bool,
    row: Option<usize>,
}

impl Factors {
    fn set<F: SmallFloat>(&mut self, q: &View<'_>, row: usize, across: usize) {
        if self.row == Some(row) {
            return;
        }
        let factors = || (row * across..(row + 1) * across).map(|i| q.scales.factor(i));
        self.row = Some(row);
        self.exact = factors().all(is_exact::<F>);
        self.values.clear();
        // One NaN for all: rounding to bf16 must not carry into its sign.
        self.values.extend(factors().map(|f| if f.is_nan() { f32::NAN } else { f * F::OF_HALF }));
        self.values.resize(across.next_multiple_of(BLOCK), 0.0);
    }
}

/// Decodes a row by the rules.
#[cold]
fn by_the_rules<T: Element>(q: &View<'_>, r: usize, out: &mut [T]) {
    let ((tile_height, tile_width), (_, across)) = (q.tile.size(q.rows, q.cols), q.tile.grid(q.rows, q.cols));
    for (c, (out, &code)) in out.iter_mut().zip(q.code_row(r)).enumerate() {
        let factor = q.scales.factor(r / tile_height * across + c / tile_width);
        *out = T::from_f32(q.format.decode(code) * factor);
    }
}

/// Twin of [`super::row`].
pub(crate) fn dequantize_row(token: Avx2, format: Format, codes: &[u8], width: usize, scales: &[f32], out: &mut [f32]) {
    match format {
        Format::E4m3 => row::<E4m3>(token, codes, width, scales, out),
        Format::E5m2 => row::<E5m2>(token, codes, width, scales, out),
    }
}

fn row<F: SmallFloat>(_: Avx2, codes: &[u8], width: usize, scales: &[f32], out: &mut [f32]) {
    if !scales.iter().all(|&scale| is_exact::<F>(scale)) {
        return super::row(F::FORMAT, codes, width, scales, out);
    }
    // SAFETY: an Avx2 token is only made after detection.
    unsafe { tiles::<f32, F>(codes, width, scales.iter().map(|scale| scale * F::OF_HALF), out) };
}

/// Whether a factor can take up the power of two: a finite one may overflow.
fn is_exact<F: SmallFloat>(factor: f32) -> bool {
    (factor * F::OF_HALF).is_finite() || !factor.is_finite()
}

/// Rows that are decoded side by side.
#[cfg(target_arch = "x86_64")]
pub(crate) const LANES: usize = 16;

/// Decodes 32 columns of 16 rows from column `from` on, each row with a factor, and puts element `r`
/// of column `from + c` at `out[c][at + r]`. Nothing is done, and false returned, where a factor does not take up the power
/// of two.
#[cfg(target_arch = "x86_64")]
pub(crate) fn decode_side_by_side<const N: usize, const COLUMNS: usize>(
    _: Avx2,
    format: Format,
    codes: &[[u8; COLUMNS]; LANES],
    from: usize,
    factors: &[f32; LANES],
    out: &mut [[f32; N]],
    at: usize,
) -> bool {
    match format {
        // SAFETY: an Avx2 token is only made after detection.
        Format::E4m3 => unsafe { side_by_side::<E4m3, N, COLUMNS>(codes, from, factors, out, at) },
        // SAFETY: as above.
        Format::E5m2 => unsafe { side_by_side::<E5m2, N, COLUMNS>(codes, from, factors, out, at) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn side_by_side<F: SmallFloat, const N: usize, const COLUMNS: usize>(
    codes: &[[u8; COLUMNS]; LANES],
    from: usize,
    factors: &[f32; LANES],
    out: &mut [[f32; N]],
    at: usize,
) -> bool {
    if !factors.iter().all(|&f| is_exact::<F>(f)) {
        return false;
    }
    let whole = widen::<f32>(load(&factors.map(|f| f * F::OF_HALF)));
    let mut rows = [_mm256_setzero_si256(); LANES];
    for (row, codes) in rows.iter_mut().zip(codes) {
        let codes: &[u8; 32] = codes[from..].first_chunk().expect("32 columns");
        // SAFETY: the source is an array of 32 bytes.
        *row = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    }
    // Rows r and r + 8 become one, four times: bytes of a column then lie in one lane.
    for _ in 0..4 {
        let mut mixed = [_mm256_setzero_si256(); LANES];
        for r in 0..8 {
            mixed[2 * r] = _mm256_unpacklo_epi8(rows[r], rows[r + 8]);
            mixed[2 * r + 1] = _mm256_unpackhi_epi8(rows[r], rows[r + 8]);
        }
        rows = mixed;
    }
    for (c, column) in rows.iter().enumerate() {
        for (lane, bytes) in
            [_mm256_castsi256_si128(*column), _mm256_extracti128_si256::<1>(*column)].into_iter().enumerate()
        {
            let Some(out) = out.get_mut(16 * lane + c) else { continue };
            let zero = _mm_setzero_si128();
            let halves = [_mm_unpacklo_epi8(zero, bytes), _mm_unpackhi_epi8(zero, bytes)];
            for (h, out) in out[at..][..LANES].as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let values = _mm256_mul_ps(_mm256_cvtph_ps(half::<F>(halves[h])), whole[h]);
                // SAFETY: the destination is an array of 8 floats.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
            }
        }
    }
    true
}

/// Decodes a row of tiles, each with a factor.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn tiles<T: Element, F: SmallFloat>(codes: &[u8], width: usize, factors: impl Iterator<Item = f32>, out: &mut [T]) {
    for ((codes, out), factor) in codes.chunks(width).zip(out.chunks_mut(width)).zip(factors) {
        let factor = _mm256_set1_ps(factor);
        for_each_block::<T, F>(codes, out, |_| [factor; 2]);
    }
}

/// Decodes codes with a factor each; factors are rounded up to whole blocks.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn columns<T: Element, F: SmallFloat>(codes: &[u8], factors: &[f32], out: &mut [T]) {
    let factors = factors.as_chunks::<BLOCK>().0;
    for_each_block::<T, F>(codes, out, |i| widen::<f32>(load(&factors[i])));
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn for_each_block<T: Element, F: SmallFloat>(codes: &[u8], out: &mut [T], factors: impl Fn(usize) -> [__m256; 2]) {
    let (blocks, tail) = codes.as_chunks::<BLOCK>();
    let (out_blocks, out_tail) = out.as_chunks_mut::<BLOCK>();
    for (i, (codes, out)) in blocks.iter().zip(out_blocks).enumerate() {
        block::<T, F>(codes, factors(i), out);
    }
    if !tail.is_empty() {
        let (mut padded, mut whole) = ([0; BLOCK], [T::default(); BLOCK]);
        padded[..tail.len()].copy_from_slice(tail);
        block::<T, F>(&padded, factors(blocks.len()), &mut whole);
        out_tail.copy_from_slice(&whole[..out_tail.len()]);
    }
}

/// Decodes 16 codes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn block<T: Element, F: SmallFloat>(codes: &[u8; BLOCK], factors: [__m256; 2], out: &mut [T; BLOCK]) {
    // SAFETY: the source is an array of 16 bytes.
    let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
    let zero = _mm_setzero_si128();
    let halves = [_mm_unpacklo_epi8(zero, codes), _mm_unpackhi_epi8(zero, codes)];
    let mut values = [_mm256_setzero_ps(); 2];
    for i in 0..2 {
        values[i] = _mm256_mul_ps(_mm256_cvtph_ps(half::<F>(halves[i])), factors[i]);
    }
    match T::PRECISION {
        Precision::F32 => {
            // SAFETY: 16 elements of 4 bytes are two vectors; this is the first.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast(), values[0]) };
            // SAFETY: as above; this is the second.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast::<f32>().add(8), values[1]) };
        }
        Precision::Bf16 => {
            store(Block::of_words(high_halves(round_bits(values[0]), round_bits(values[1]))), out);
        }
        Precision::F16 => {
            let [low, high] = [_mm256_cvtps_ph::<0>(values[0]), _mm256_cvtps_ph::<0>(values[1])];
            store(Block::of_words(_mm256_set_m128i(high, low)), out);
        }
    }
}

/// Codes in the high bytes of eight words as binary16 numbers.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn half<F: SmallFloat>(words: __m128i) -> __m128i {
    match F::FORMAT {
        Format::E5m2 => words,
        Format::E4m3 => {
            // The sign stays, the rest moves down by one bit, and a copy of the sign is cleared.
            let moved = _mm_and_si128(_mm_srai_epi16::<1>(words), _mm_set1_epi16(0xBFFF_u16 as i16));
            let magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7FFF));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(i16::from(e4m3::NAN_BYTE) << 8));
            _mm_or_si128(moved, _mm_and_si128(nan, _mm_set1_epi16(0x7E00)))
        }
    }
}
