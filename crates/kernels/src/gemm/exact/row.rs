//! The product for few rows of A: B's rows are read once, and nothing is unpacked to memory.
//!
//! Sixteen blocks of a row of B are 128 bytes. Each lane of a vector takes a block: one vector the
//! first four bytes of each, one the other four. Their low nibbles are even elements, their high
//! nibbles odd ones; A's are put into the same order beforehand, and four dot products add up to a
//! block's sum in its lane.

use super::{BLOCK, DOUBLED, SHIFT};
use crate::avx512::Avx512;
use nvfp4_spec::matrix::View;
use std::arch::x86_64::*;
use std::ops::Range;

/// Blocks that are worked on at a time.
pub(in super::super) const LANES: usize = 16;

/// Sixteen blocks of a row of A in the order of B's nibbles.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group {
    values: [[[i8; 4]; LANES]; 4],
    /// What undoes the shift of B's values.
    offsets: [i32; LANES],
    scales: [f32; LANES],
}

/// A row of A; what is missing of the last sixteen blocks is zero.
pub(super) fn groups(a: &View<'_>, i: usize) -> Vec<Group> {
    let steps: Vec<super::Step> = super::steps(a, i).collect();
    let group = |sixteen: &[super::Step]| {
        let mut group = Group { values: [[[0; 4]; LANES]; 4], offsets: [0; LANES], scales: [0.0; LANES] };
        for (b, step) in sixteen.iter().enumerate() {
            for e in 0..BLOCK {
                // Elements 0, 2, 4, 6; 1, 3, 5, 7; 8, 10, …; 9, 11, …
                group.values[e / 8 * 2 + e % 2][b][e % 8 / 2] = step.values[e / 4].to_le_bytes()[e % 4] as i8;
            }
            (group.offsets[b], group.scales[b]) = (step.offset, step.scale);
        }
        group
    };
    steps.chunks(LANES).map(group).collect()
}

/// The sums of row `j` of B with rows of A over some blocks, from a multiple of [`LANES`] on; exact
/// where binary64 is.
pub(super) fn sums(_token: Avx512, rows: &[Vec<Group>], b: &View<'_>, j: usize, blocks: Range<usize>, out: &mut [f64]) {
    let groups = blocks.start / LANES..blocks.end.div_ceil(LANES);
    match rows {
        // SAFETY: an Avx512 token is only made after detection.
        [one] => unsafe { row_sums([one], b, j, groups, out) },
        // SAFETY: as above.
        [one, two] => unsafe { row_sums([one, two], b, j, groups, out) },
        // SAFETY: as above.
        [one, two, three] => unsafe { row_sums([one, two, three], b, j, groups, out) },
        // SAFETY: as above.
        [one, two, three, four] => unsafe { row_sums([one, two, three, four], b, j, groups, out) },
        _ => unreachable!("one to four rows"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_sums<const R: usize>(rows: [&Vec<Group>; R], b: &View<'_>, j: usize, groups: Range<usize>, out: &mut [f64]) {
    let (codes, scales) = (b.code_row(j), b.scale_row(j));
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) });
    let mut wide = [[_mm512_setzero_pd(); 2]; R];
    let rows: [&[Group]; R] = rows.map(|r| &r[..groups.end]);
    for g in groups {
        let nibbles = nibbles(&codes[8 * LANES * g..]);
        let values = nibbles.map(|n| _mm512_shuffle_epi8(table, n));
        let scale = decoded(&scales[LANES * g..]);
        for r in 0..R {
            let a = &rows[r][g];
            // SAFETY: the source is an array of 16 doublewords.
            let mut dot = unsafe { _mm512_loadu_si512(a.offsets.as_ptr().cast()) };
            for (&four, a) in values.iter().zip(&a.values) {
                // SAFETY: the source is an array of 64 bytes.
                dot = _mm512_dpbusd_epi32(dot, four, unsafe { _mm512_loadu_si512(a.as_ptr().cast()) });
            }
            // SAFETY: the source is an array of 16 floats.
            let a_scale = unsafe { _mm512_loadu_ps(a.scales.as_ptr()) };
            let term = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale), a_scale);
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(term));
            wide[r][0] = _mm512_add_pd(wide[r][0], _mm512_cvtps_pd(_mm512_castps512_ps256(term)));
            wide[r][1] = _mm512_add_pd(wide[r][1], _mm512_cvtps_pd(_mm256_castpd_ps(high)));
        }
    }
    for r in 0..R {
        // Exact in any order; quartered, because the values were doubled.
        out[r] = _mm512_reduce_add_pd(_mm512_add_pd(wide[r][0], wide[r][1])) * 0.25;
    }
}

/// The two words of each of 16 blocks of codes; beyond the end there are zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
pub(in super::super) fn block_words(codes: &[u8]) -> [__m512i; 2] {
    let mask = |left: usize| if left >= 64 { u64::MAX } else { (1 << left) - 1 };
    // SAFETY: bytes beyond the slice are masked, and masked bytes are not read.
    let first = unsafe { _mm512_maskz_loadu_epi8(mask(codes.len()), codes.as_ptr().cast()) };
    let rest = &codes[codes.len().min(64)..];
    // SAFETY: as above.
    let second = unsafe { _mm512_maskz_loadu_epi8(mask(rest.len()), rest.as_ptr().cast()) };
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    [_mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second)]
}

/// The codes of 16 blocks, one per byte: low and high nibbles of the first words, then of the
/// second.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn nibbles(codes: &[u8]) -> [__m512i; 4] {
    let [first, second] = block_words(codes);
    let mask = _mm512_set1_epi8(15);
    [
        _mm512_and_si512(first, mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(first), mask),
        _mm512_and_si512(second, mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(second), mask),
    ]
}

/// The values of 16 scale bytes, or of what is left of them and zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
pub(in super::super) fn decoded(scales: &[u8]) -> __m512 {
    let mask = if scales.len() >= 16 { u16::MAX } else { (1 << scales.len()) - 1 };
    // SAFETY: bytes beyond the slice are masked, and masked bytes are not read.
    let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_maskz_loadu_epi8(mask, scales.as_ptr().cast()) });
    let magnitude = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7F));
    let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(bytes, _mm512_set1_epi32(0x80)));
    // Shifted into place the exponent is 120 too small; the product is exact and normalises
    // subnormals.
    let bits = _mm512_or_si512(_mm512_slli_epi32::<20>(magnitude), sign);
    let value = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(f32::from_bits((127 + 120) << 23)));
    let nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F));
    _mm512_mask_blend_ps(nan, value, _mm512_set1_ps(f32::NAN))
}
