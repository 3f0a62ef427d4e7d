//! Sixteen blocks of a row of B at a time, with the dot products of AVX-512 VNNI.

use super::{Group, Kernel, Row, for_few_rows};
use crate::avx512::Avx512;
use crate::gemm::exact::avx512::add;
use crate::gemm::exact::scales::{RUN, Range};
use crate::gemm::exact::{DOUBLED, FEW, SHIFT};
use std::arch::x86_64::*;
use std::ops::Range as Blocks;

/// Blocks that are worked on at a time.
pub(in super::super::super) const LANES: usize = 16;

impl Kernel<LANES> for Avx512 {
    const ORDER: [usize; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    fn integers(self, rows: &[Row<LANES>], codes: &[u8], scales: &[u8], range: Range, out: &mut [f64; FEW]) {
        for_few_rows!(rows, integers(codes, scales, range, out));
    }

    fn terms(self, rows: &[Row<LANES>], codes: &[u8], scales: &[u8], blocks: Blocks<usize>, out: &mut [f64; FEW]) {
        for (row, out) in rows.iter().zip(out) {
            // SAFETY: an Avx512 token is only made after detection.
            *out = unsafe { terms(row, codes, scales, blocks.clone()) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn values(codes: &[u8]) -> [__m512i; 4] {
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) });
    nibbles(codes).map(|n| _mm512_shuffle_epi8(table, n))
}

/// The sums of 16 blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dots(a: &Group<LANES>, values: &[__m512i; 4]) -> __m512i {
    // SAFETY: the source is an array of 16 doublewords.
    let mut dot = unsafe { _mm512_loadu_si512(a.offsets.as_ptr().cast()) };
    for (&four, a) in values.iter().zip(&a.values) {
        // SAFETY: the source is an array of 64 bytes.
        dot = _mm512_dpbusd_epi32(dot, four, unsafe { _mm512_loadu_si512(a.as_ptr().cast()) });
    }
    dot
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn integers<const R: usize>(rows: [&Row<LANES>; R], codes: &[u8], scales: &[u8], range: Range, out: &mut [f64; FEW]) {
    let groups = rows[0].groups.len();
    let parts: [&[Group<LANES>]; R] = rows.map(|row| &row.groups[..groups]);
    // As binary16 numbers scale bytes are 2⁻⁸ of their values.
    let units = _mm512_set1_ps(256.0 / range.unit());
    let mut wide = [[_mm512_setzero_pd(); 2]; R];
    let mut first = 0;
    while first < groups {
        let last = groups.min(first + RUN / LANES);
        let mut sums = [_mm512_setzero_si512(); R];
        for g in first..last {
            let values = values(&codes[8 * LANES * g..]);
            let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(scale_bytes(&scales[LANES * g..])));
            // A block's sum fits the low half of its doubleword, and the high halves of scales are
            // zero.
            let scale = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtph_ps(halves), units));
            for r in 0..R {
                let a = &parts[r][g];
                // SAFETY: the source is an array of 16 doublewords.
                let integers = unsafe { _mm512_loadu_si512(a.integers.as_ptr().cast()) };
                sums[r] = _mm512_dpwssd_epi32(sums[r], dots(a, &values), _mm512_mullo_epi16(scale, integers));
            }
        }
        for r in 0..R {
            let halves = [_mm512_castsi512_si256(sums[r]), _mm512_extracti64x4_epi64::<1>(sums[r])];
            for (wide, half) in wide[r].iter_mut().zip(halves) {
                *wide = _mm512_add_pd(*wide, _mm512_cvtepi32_pd(half));
            }
        }
        first = last;
    }
    for r in 0..R {
        // Exact in any order; quartered, because the values were doubled.
        let sum = _mm512_reduce_add_pd(_mm512_add_pd(wide[r][0], wide[r][1]));
        out[r] = sum * f64::from(rows[r].range.unit()) * f64::from(range.unit()) * 0.25;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn terms(row: &Row<LANES>, codes: &[u8], scales: &[u8], blocks: Blocks<usize>) -> f64 {
    let mut wide = [_mm512_setzero_pd(); 2];
    for g in blocks.start / LANES..blocks.end.div_ceil(LANES) {
        let a = &row.groups[g];
        // SAFETY: the source is an array of 16 floats.
        let a_scale = unsafe { _mm512_loadu_ps(a.scales.as_ptr()) };
        let dot = _mm512_cvtepi32_ps(dots(a, &values(&codes[8 * LANES * g..])));
        add(&mut wide, _mm512_mul_ps(_mm512_mul_ps(dot, decoded(&scales[LANES * g..])), a_scale));
    }
    // Exact in any order; quartered, because the values were doubled.
    _mm512_reduce_add_pd(_mm512_add_pd(wide[0], wide[1])) * 0.25
}

/// The two words of each of 16 blocks of codes; beyond the end there are zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
pub(in super::super::super) fn block_words(codes: &[u8]) -> [__m512i; 2] {
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

/// Sixteen scale bytes, or what is left of them and zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn scale_bytes(scales: &[u8]) -> __m128i {
    let mask = if scales.len() >= 16 { u16::MAX } else { (1 << scales.len()) - 1 };
    // SAFETY: bytes beyond the slice are masked, and masked bytes are not read.
    unsafe { _mm_maskz_loadu_epi8(mask, scales.as_ptr().cast()) }
}

/// The values of 16 scale bytes, or of what is left of them and zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
pub(in super::super::super) fn decoded(scales: &[u8]) -> __m512 {
    let bytes = _mm512_cvtepu8_epi32(scale_bytes(scales));
    let magnitude = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7F));
    let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(bytes, _mm512_set1_epi32(0x80)));
    // Shifted into place the exponent is 120 too small; the product is exact and normalises
    // subnormals.
    let bits = _mm512_or_si512(_mm512_slli_epi32::<20>(magnitude), sign);
    let value = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(f32::from_bits((127 + 120) << 23)));
    let nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F));
    _mm512_mask_blend_ps(nan, value, _mm512_set1_ps(f32::NAN))
}
