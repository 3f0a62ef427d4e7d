//! bf16 × NVFP4 with AVX2 where A has more than a few rows: products of 16-bit integers, twice as
//! many an instruction as of binary32.
//!
//! The elements of a block of A become integers: the largest gets 15 bits. A bf16 number has 8, so
//! those down to 2⁻⁷ of the largest are exact. The others, about one in 150 of normal data, are
//! *small*: they are zero among the integers, and multiplied in binary32 on their own, as are
//! numbers that are not finite.
//!
//! # Why it is within the bound
//!
//! Doubled E2M1 values are integers of at most 12, so a block's sum is below 16·12·2¹⁵ < 2²³. B's
//! values are the high bytes of words, 256 times as large: the sum is below 2³¹, and as a multiple
//! of 256 still exact in binary32. It is multiplied by a power of two and a scale of four
//! significant bits, and added with one rounding. So is a small element times a value times its
//! scale, which has 8 significant bits. That is at most as many roundings as a chain of K fused
//! multiply-adds has.

use super::panel::{PanelStep, Tiles, run_panels};
use super::streamed::scale_values;
use crate::avx2::Avx2;
use crate::gemm::exact::{DOUBLED, for_rows};
use crate::gemm::pieces::{padded, rows_in_pieces};
use crate::gemm::writer::Writer;
use crate::{Input, Values};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element};
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of B in a panel.
const N: usize = 8;
/// The most rows of A that a tile has.
const R: usize = 6;

/// The pairs of eight elements: those of the low nibbles of four bytes, then of their high ones.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The exponent field from which on a block has a unit of its own: below, units times scales could
/// be subnormal, so that elements are small instead.
const LEAST: i32 = 40;

/// A block of a row of A.
#[derive(Clone, Copy)]
pub(in super::super) struct Step {
    /// Its integers in pairs, as [`ORDER`] says.
    pub pairs: [i32; BLOCK / 2],
    /// Their unit, less what B's values are larger by.
    pub unit: f32,
}

/// A row of A: an even number of blocks.
pub(in super::super) struct Row {
    pub steps: Vec<Step>,
    pub small: Vec<Small>,
}

/// An element that is no integer of its block.
pub(in super::super) struct Small {
    pub block: usize,
    pub pair: usize,
    /// How far to the left its word has to be shifted in the pair.
    pub shift: i32,
    /// The value, less what B's values are larger by.
    pub value: f32,
}

/// B's values are doubled and the high bytes of words.
const LARGER: f32 = 512.0;

/// The rows of A as integers; `None` where they are not bf16, or so many elements are small that
/// binary32 is faster.
pub(in super::super) fn rows_of(_: Avx2, x: &Input<'_>) -> Option<Vec<Row>> {
    let Values::Bf16(values) = x.values() else { return None };
    let row = |i: usize| -> Option<Row> {
        let elements = &values[i * x.stride()..][..x.cols()];
        // SAFETY: an Avx2 token is only made after detection.
        let row = unsafe { aligned(elements) };
        (row.small.len() <= row.steps.len()).then_some(row)
    };
    rows_in_pieces(x.rows(), x.cols()).map(row).collect()
}

/// The product, panel by panel.
pub(super) fn panels<T: Element>(token: Avx2, rows: Vec<Row>, weights: &View<'_>, writer: &Writer<'_, T>) {
    run_panels(&Rows { token, rows }, weights, writer);
}

/// The rows of A.
struct Rows {
    token: Avx2,
    rows: Vec<Row>,
}

#[target_feature(enable = "avx2,fma,f16c")]
fn aligned(elements: &[bf16]) -> Row {
    let order: [i8; 16] = std::array::from_fn(|byte| (2 * ORDER[byte / 2] + byte % 2) as i8);
    // SAFETY: the source is an array of 16 bytes.
    let order = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(order.as_ptr().cast()) });
    let mut row = Row { steps: Vec::with_capacity(elements.len().div_ceil(BLOCK)), small: Vec::new() };
    for (k, block) in elements.reinterpret_cast().chunks(BLOCK).enumerate() {
        let mut room = [0u16; BLOCK];
        let block: &[u16; BLOCK] = match block.try_into() {
            Ok(whole) => whole,
            Err(_) => {
                room[..block.len()].copy_from_slice(block);
                &room
            }
        };
        // SAFETY: the source is an array of 16 words.
        let bits = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        let exponents = _mm256_and_si256(bits, _mm256_set1_epi16(0x7F80));
        let finite = _mm256_andnot_si256(_mm256_cmpeq_epi16(exponents, _mm256_set1_epi16(0x7F80)), exponents);
        // The largest of 16, as the smallest of their complements.
        let eight = _mm_max_epi16(_mm256_castsi256_si128(finite), _mm256_extracti128_si256::<1>(finite));
        let least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
        let exponent = ((!_mm_cvtsi128_si32(least) & 0x7F80) >> 7).max(LEAST);
        // 2^(exponent − 127) is 2¹⁴ units.
        let units = _mm256_set1_ps(f32::from_bits(((127 + 14 + 127 - exponent) as u32) << 23));
        let halves = [_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits)];
        let mut inexact = 0;
        let integers = [0, 1].map(|h| {
            let value = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves[h])));
            let scaled = _mm256_mul_ps(value, units);
            let integer = _mm256_cvtps_epi32(scaled);
            // What is not finite is not equal either.
            let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_cvtepi32_ps(integer), scaled);
            inexact |= (!_mm256_movemask_ps(equal) as u32 & 0xFF) << (8 * h);
            _mm256_and_si256(integer, _mm256_castps_si256(equal))
        });
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(integers[0], integers[1]));
        let words = _mm256_shuffle_epi8(words, order);
        let mut pairs = [0; BLOCK / 2];
        // SAFETY: the destination is an array of 8 doublewords.
        unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), words) };
        row.steps.push(Step { pairs, unit: f32::from_bits(((exponent - 14) as u32) << 23) / LARGER });
        while inexact != 0 {
            let at = inexact.trailing_zeros() as usize;
            let word = at / 8 * 8 + at % 2 * 4 + at % 8 / 2;
            let value = bf16::from_bits(block[at]).to_f32() / LARGER;
            row.small.push(Small { block: k, pair: word / 2, shift: 16 - (word % 2 * 16) as i32, value });
            inexact &= inexact - 1;
        }
    }
    if row.steps.len() % 2 == 1 {
        row.steps.push(Step { pairs: [0; BLOCK / 2], unit: 0.0 });
    }
    row
}

impl Tiles<N, R> for Rows {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn unpack(&self, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { unpack(self.token, b, first, panel) };
    }

    fn tile(&self, group: Range<usize>, panel: &[PanelStep<N>], out: &mut [[f32; N]; R]) {
        let rows = &self.rows[group];
        for_rows!(rows.len(), tile_of(rows, panel, out));
        for (row, out) in rows.iter().zip(out) {
            // SAFETY: an Avx2 token is only made after detection.
            unsafe { add_small(&row.small, panel, out) };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile_of<const H: usize>(rows: &[Row], panel: &[PanelStep<N>], out: &mut [[f32; N]; R]) {
    let steps: [&[Step]; H] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [_mm256_setzero_ps(); H];
    for (k, step) in panel.iter().enumerate() {
        let mut dots = [_mm256_setzero_si256(); H];
        for (q, pairs) in step.pairs.iter().enumerate() {
            // SAFETY: the source is an array of 8 doublewords.
            let pairs = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) };
            for r in 0..H {
                let products = _mm256_madd_epi16(_mm256_set1_epi32(steps[r][k].pairs[q]), pairs);
                dots[r] = if q == 0 { products } else { _mm256_add_epi32(dots[r], products) };
            }
        }
        // SAFETY: the source is an array of 8 floats.
        let scales = unsafe { _mm256_loadu_ps(step.scales.as_ptr()) };
        for r in 0..H {
            let scale = _mm256_mul_ps(_mm256_set1_ps(steps[r][k].unit), scales);
            sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, sums[r]);
        }
    }
    for r in 0..H {
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
    }
}

/// Adds the products of the small elements of a row.
#[target_feature(enable = "avx2,fma,f16c")]
fn add_small(small: &[Small], panel: &[PanelStep<N>], out: &mut [f32; N]) {
    // SAFETY: the source is an array of 8 floats.
    let mut sum = unsafe { _mm256_loadu_ps(out.as_ptr()) };
    for x in small {
        let step = &panel[x.block];
        // SAFETY: the source is an array of 8 doublewords.
        let pairs = unsafe { _mm256_loadu_si256(step.pairs[x.pair].as_ptr().cast()) };
        let words = _mm256_sll_epi32(pairs, _mm_cvtsi32_si128(x.shift));
        // SAFETY: the source is an array of 8 floats.
        let scales = unsafe { _mm256_loadu_ps(step.scales.as_ptr()) };
        let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(words)), scales);
        sum = _mm256_fmadd_ps(_mm256_set1_ps(x.value), scaled, sum);
    }
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
}

/// Doubled values by code.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in super::super) fn doubled() -> __m256i {
    // SAFETY: the source is an array of 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(DOUBLED.as_ptr().cast()) })
}

/// A shuffle: the first two bytes of each doubleword as the high bytes of its words.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in super::super) fn first_two() -> __m256i {
    _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13))
}

/// Unpacks up to eight rows of B from row `first` on. What lies beyond the end of a row is
/// multiplied by zeros.
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(_token: Avx2, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
    let width = N.min(b.rows - first);
    let row = |c: usize| first + c.min(width - 1);
    let rows: [&[u8]; N] = std::array::from_fn(|c| b.code_row(row(c)));
    let mask = _mm256_set1_epi8(15);
    let (doubled, first_two) = (doubled(), first_two());
    let last_two = _mm256_add_epi8(first_two, _mm256_set1_epi16(0x0200));
    for (two, steps) in panel.chunks_mut(2).enumerate() {
        // Rows 0 to 3 in the lower halves, 4 to 7 in the upper ones: doublewords of all rows. Plain
        // loops: a closure that the library calls is not inlined.
        let mut fours = [_mm256_setzero_si256(); 4];
        for (c, four) in fours.iter_mut().enumerate() {
            let (mut room, mut other) = ([0; 16], [0; 16]);
            let lower = padded(&rows[c][16 * two..], &mut room);
            let upper = padded(&rows[c + 4][16 * two..], &mut other);
            // SAFETY: the sources are arrays of 16 bytes.
            *four = unsafe { _mm256_loadu2_m128i(upper.as_ptr().cast(), lower.as_ptr().cast()) };
        }
        let low = [_mm256_unpacklo_epi32(fours[0], fours[1]), _mm256_unpacklo_epi32(fours[2], fours[3])];
        let high = [_mm256_unpackhi_epi32(fours[0], fours[1]), _mm256_unpackhi_epi32(fours[2], fours[3])];
        let words = [
            [_mm256_unpacklo_epi64(low[0], low[1]), _mm256_unpackhi_epi64(low[0], low[1])],
            [_mm256_unpacklo_epi64(high[0], high[1]), _mm256_unpackhi_epi64(high[0], high[1])],
        ];
        for (step, words) in steps.iter_mut().zip(words) {
            for (h, words) in words.into_iter().enumerate() {
                let even = _mm256_shuffle_epi8(doubled, _mm256_and_si256(words, mask));
                let odd = _mm256_shuffle_epi8(doubled, _mm256_and_si256(_mm256_srli_epi16::<4>(words), mask));
                for (q, (values, two)) in
                    [(even, first_two), (even, last_two), (odd, first_two), (odd, last_two)].into_iter().enumerate()
                {
                    let pairs = _mm256_shuffle_epi8(values, two);
                    // SAFETY: the destination is an array of 8 doublewords.
                    unsafe { _mm256_storeu_si256(step.pairs[4 * h + q].as_mut_ptr().cast(), pairs) };
                }
            }
        }
    }
    let scales: [&[u8]; N] = std::array::from_fn(|c| &b.scale_row(row(c))[..panel.len()]);
    for (k, step) in panel.iter_mut().enumerate() {
        let mut bytes = [0; N];
        for (byte, row) in bytes.iter_mut().zip(scales) {
            *byte = row[k];
        }
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(step.scales.as_mut_ptr(), scale_values(bytes)) };
    }
}
