//! Eight blocks of a row of B at a time.

use super::{Group, LANES, ORDER, Row, for_few_rows};
use crate::avx2::Avx2;
use crate::gemm::exact::scales::{RUN, Range, SCALES};
use crate::gemm::exact::{DOUBLED, FEW, SHIFT};
use crate::gemm::pieces::padded;
use std::arch::x86_64::*;
use std::ops::Range as Blocks;

/// The sums of a row of B with a few rows of A over all blocks, where the scales of both sides have
/// integers that fit.
pub(in super::super) fn integers_of(
    _: Avx2,
    rows: &[Row],
    codes: &[u8],
    scales: &[u8],
    range: Range,
    out: &mut [f64; FEW],
) {
    for_few_rows!(rows, integers(codes, scales, range, out));
}

/// The sums over some blocks, from a multiple of [`LANES`] on, term by term; exact where binary64 is.
pub(in super::super) fn terms_of(
    _: Avx2,
    rows: &[Row],
    codes: &[u8],
    scales: &[u8],
    blocks: Blocks<usize>,
    out: &mut [f64; FEW],
) {
    for (row, out) in rows.iter().zip(out) {
        // SAFETY: an Avx2 token is only made after detection.
        *out = unsafe { terms(row, codes, scales, blocks.clone()) };
    }
}

/// The values of eight blocks: low and high nibbles of their first words, then of their second.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values(codes: &[u8; 64]) -> [__m256i; 4] {
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) });
    // SAFETY: 64 bytes are two vectors; this is the first.
    let first = unsafe { _mm256_loadu_ps(codes.as_ptr().cast()) };
    // SAFETY: as above; this is the second.
    let second = unsafe { _mm256_loadu_ps(codes.as_ptr().cast::<f32>().add(8)) };
    let even = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(first, second));
    let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(first, second));
    let mask = _mm256_set1_epi8(15);
    let low = |words| _mm256_shuffle_epi8(table, _mm256_and_si256(words, mask));
    let high = |words| low(_mm256_srli_epi16::<4>(words));
    [low(even), high(even), low(odd), high(odd)]
}

/// The words of the products of eight blocks; the two of a doubleword add up to a block's sum.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(a: &Group, b: &[__m256i; 4]) -> __m256i {
    let pair = |q: usize| {
        // SAFETY: the source is an array of 32 bytes.
        _mm256_maddubs_epi16(b[q], unsafe { _mm256_load_si256(a.values[q].as_ptr().cast()) })
    };
    let sums = _mm256_add_epi16(_mm256_add_epi16(pair(0), pair(1)), _mm256_add_epi16(pair(2), pair(3)));
    // SAFETY: the source is an array of 8 doublewords.
    _mm256_add_epi16(sums, unsafe { _mm256_load_si256(a.halves.as_ptr().cast()) })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn integers<const R: usize>(rows: [&Row; R], codes: &[u8], scales: &[u8], range: Range, out: &mut [f64; FEW]) {
    let groups = rows[0].groups.len();
    let parts: [&[Group]; R] = rows.map(|row| &row.groups[..groups]);
    // As binary16 numbers scale bytes are 2⁻⁸ of their values.
    let units = _mm256_set1_ps(256.0 / range.unit());
    let both = _mm256_setr_epi8(
        0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13,
    );
    let mut wide = [[_mm256_setzero_pd(); 2]; R];
    let mut first = 0;
    while first < groups {
        let last = groups.min(first + RUN / LANES);
        let mut sums = [_mm256_setzero_si256(); R];
        for g in first..last {
            let values = values(padded(&codes[8 * LANES * g..], &mut [0; 64]));
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*padded(&scales[LANES * g..], &mut [0; LANES])));
            let bytes = _mm_shufflelo_epi16::<0b11_01_10_00>(bytes);
            let halves = _mm_slli_epi16::<7>(_mm_cvtepu8_epi16(bytes));
            let scale = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtph_ps(halves), units));
            let scale = _mm256_shuffle_epi8(scale, both);
            for r in 0..R {
                let a = &parts[r][g];
                // SAFETY: the source is an array of 8 doublewords.
                let integers = unsafe { _mm256_load_si256(a.integers.as_ptr().cast()) };
                let products = _mm256_madd_epi16(words(a, &values), _mm256_mullo_epi16(scale, integers));
                sums[r] = _mm256_add_epi32(sums[r], products);
            }
        }
        for r in 0..R {
            let halves = [_mm256_castsi256_si128(sums[r]), _mm256_extracti128_si256::<1>(sums[r])];
            for (wide, half) in wide[r].iter_mut().zip(halves) {
                *wide = _mm256_add_pd(*wide, _mm256_cvtepi32_pd(half));
            }
        }
        first = last;
    }
    for r in 0..R {
        // Quartered: the values were doubled.
        out[r] = total(wide[r]) * f64::from(rows[r].range.unit()) * f64::from(range.unit()) * 0.25;
    }
}

/// The sum of eight lanes, exact in any order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn total(halves: [__m256d; 2]) -> f64 {
    let mut lanes = [0.0; 4];
    // SAFETY: the destination is an array of 4 doubles.
    unsafe { _mm256_storeu_pd(lanes.as_mut_ptr(), _mm256_add_pd(halves[0], halves[1])) };
    lanes.iter().sum()
}

#[target_feature(enable = "avx2,fma,f16c")]
fn terms(row: &Row, codes: &[u8], scales: &[u8], blocks: Blocks<usize>) -> f64 {
    let mut wide = [_mm256_setzero_pd(); 2];
    for g in blocks.start / LANES..blocks.end.div_ceil(LANES) {
        let a = &row.groups[g];
        let values = values(padded(&codes[8 * LANES * g..], &mut [0; 64]));
        let eight = *padded(&scales[LANES * g..], &mut [0; LANES]);
        let decoded = ORDER.map(|block| SCALES[usize::from(eight[block])]);
        // SAFETY: the source is an array of 8 floats.
        let b_scales = unsafe { _mm256_loadu_ps(decoded.as_ptr()) };
        // SAFETY: as above.
        let a_scales = unsafe { _mm256_loadu_ps(a.scales.as_ptr()) };
        let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(words(a, &values), _mm256_set1_epi16(1)));
        let term = _mm256_mul_ps(_mm256_mul_ps(dot, b_scales), a_scales);
        wide[0] = _mm256_add_pd(wide[0], _mm256_cvtps_pd(_mm256_castps256_ps128(term)));
        wide[1] = _mm256_add_pd(wide[1], _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(term)));
    }
    // Quartered: the values were doubled.
    total(wide) * 0.25
}
