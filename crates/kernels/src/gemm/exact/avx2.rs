//! Eight rows of B at a time, with multiplications of bytes that add up in pairs.

use super::{DOUBLED, Form, Kernel, MOST_ROWS, PanelStep, Part, SHIFT, Tile};
use crate::avx2::{Avx2, codes_of, transposed};
use nvfp4_spec::BLOCK;
use nvfp4_spec::matrix::View;
use std::arch::x86_64::*;

/// Calls a function with the number of rows as a constant, one to six.
macro_rules! for_rows {
    ($rows:expr, $call:ident($($argument:expr),*)) => {
        match $rows {
            // SAFETY: a token is only made after detection.
            1 => unsafe { $call::<1>($($argument),*) },
            // SAFETY: as above.
            2 => unsafe { $call::<2>($($argument),*) },
            // SAFETY: as above.
            3 => unsafe { $call::<3>($($argument),*) },
            // SAFETY: as above.
            4 => unsafe { $call::<4>($($argument),*) },
            // SAFETY: as above.
            5 => unsafe { $call::<5>($($argument),*) },
            // SAFETY: as above.
            6 => unsafe { $call::<6>($($argument),*) },
            _ => unreachable!("a tile has one to six rows"),
        }
    };
}
pub(in super::super) use for_rows;

impl Kernel<8> for Avx2 {
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<8>]) {
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { unpack(b, first, panel) }
    }

    fn add_integers(self, rows: &[Part<'_>], panel: &[PanelStep<8>], units: &[f32; 8], out: &mut Tile<8>) {
        for_rows!(rows.len(), add_integers(rows, panel, units, out));
    }

    fn add_terms(self, rows: &[Part<'_>], panel: &[PanelStep<8>], form: &Form<8>, out: &mut Tile<8>) {
        // Two rows at a time: more would not fit the registers.
        for (rows, out) in rows.chunks(2).zip(out.chunks_mut(2)) {
            for_rows!(rows.len(), add_terms(rows, panel, form, out));
        }
    }

    fn add_in_order(self, rows: &[Part<'_>], panel: &[PanelStep<8>], out: &mut Tile<8>) {
        for_rows!(rows.len(), add_in_order(rows, panel, out));
    }
}

/// The words of a block's products with eight rows of B; the two of a doubleword add up to its sum.
/// A sum of eight pairs and half an offset are at most 8·24·12 + 1152 = 3456.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(a: &super::Step, b: &[__m256i; 4]) -> __m256i {
    let pair = |q: usize| _mm256_maddubs_epi16(b[q], _mm256_set1_epi32(a.values[q]));
    let sums = _mm256_add_epi16(_mm256_add_epi16(pair(0), pair(1)), _mm256_add_epi16(pair(2), pair(3)));
    _mm256_add_epi16(sums, _mm256_set1_epi32(a.halves))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values(step: &PanelStep<8>) -> [__m256i; 4] {
    std::array::from_fn(|q| {
        // SAFETY: the source is an array of 32 bytes.
        unsafe { _mm256_loadu_si256(step.values[q].as_ptr().cast()) }
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scales(step: &PanelStep<8>) -> __m256i {
    // SAFETY: the source is an array of 8 doublewords.
    unsafe { _mm256_loadu_si256(step.scales.as_ptr().cast()) }
}

/// Adds to eight doubles, half by half.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add(halves: [__m256d; 2], out: &mut [f64; 8]) {
    for (half, out) in halves.into_iter().zip(out.as_chunks_mut::<4>().0) {
        // SAFETY: the source is an array of 4 doubles.
        let sum = unsafe { _mm256_add_pd(_mm256_loadu_pd(out.as_ptr()), half) };
        // SAFETY: the destination is an array of 4 doubles.
        unsafe { _mm256_storeu_pd(out.as_mut_ptr(), sum) };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_integers<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<8>], units: &[f32; 8], out: &mut [[f64; 8]]) {
    const { assert!(R <= MOST_ROWS) };
    let parts: [&[super::Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [_mm256_setzero_si256(); R];
    for (k, step) in panel.iter().enumerate() {
        let (values, scales) = (values(step), scales(step));
        for r in 0..R {
            let a = &parts[r][k];
            let scale = _mm256_mullo_epi16(scales, _mm256_set1_epi32(a.integer as i32));
            sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(words(a, &values), scale));
        }
    }
    // SAFETY: the source is an array of 8 floats.
    let units = unsafe { _mm256_loadu_ps(units.as_ptr()) };
    let units = [_mm256_castps256_ps128(units), _mm256_extractf128_ps::<1>(units)].map(|half| _mm256_cvtps_pd(half));
    for r in 0..R {
        // Quartered: the values were doubled.
        let unit = _mm256_set1_pd(f64::from(rows[r].unit) * 0.25);
        let halves = [_mm256_castsi256_si128(sums[r]), _mm256_extracti128_si256::<1>(sums[r])];
        let scaled = |h: usize| _mm256_mul_pd(_mm256_cvtepi32_pd(halves[h]), _mm256_mul_pd(units[h], unit));
        add([scaled(0), scaled(1)], &mut out[r]);
    }
}

/// The scales of a step in binary32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn floats(step: &PanelStep<8>, form: &Form<8>) -> __m256 {
    match form {
        Form::Floats => _mm256_castsi256_ps(scales(step)),
        Form::Integers(units) => {
            // SAFETY: the source is an array of 8 floats.
            let units = unsafe { _mm256_loadu_ps(units.as_ptr()) };
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32::<16>(scales(step))), units)
        }
    }
}

/// The terms of a block with eight rows of B, quartered, because the values were doubled.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn term(a: &super::Step, values: &[__m256i; 4], scales: __m256) -> __m256 {
    let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(words(a, values), _mm256_set1_epi16(1)));
    _mm256_mul_ps(_mm256_mul_ps(dot, scales), _mm256_set1_ps(a.scale * 0.25))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_terms<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<8>], form: &Form<8>, out: &mut [[f64; 8]]) {
    let parts: [&[super::Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [[_mm256_setzero_pd(); 2]; R];
    for (k, step) in panel.iter().enumerate() {
        let (values, scales) = (values(step), floats(step, form));
        for r in 0..R {
            let term = term(&parts[r][k], &values, scales);
            sums[r][0] = _mm256_add_pd(sums[r][0], _mm256_cvtps_pd(_mm256_castps256_ps128(term)));
            sums[r][1] = _mm256_add_pd(sums[r][1], _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(term)));
        }
    }
    for r in 0..R {
        add(sums[r], &mut out[r]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_in_order<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<8>], out: &mut [[f64; 8]]) {
    let parts: [&[super::Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [_mm256_setzero_ps(); R];
    for (k, step) in panel.iter().enumerate() {
        let (values, scales) = (values(step), floats(step, &Form::Floats));
        for r in 0..R {
            sums[r] = _mm256_add_ps(sums[r], term(&parts[r][k], &values, scales));
        }
    }
    for r in 0..R {
        let halves = [_mm256_castps256_ps128(sums[r]), _mm256_extractf128_ps::<1>(sums[r])];
        add(halves.map(|half| _mm256_cvtps_pd(half)), &mut out[r]);
    }
}

/// Unpacks the values of up to `N` rows of B from row `first` on, side by side.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<const N: usize>(b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
    let width = N.min(b.rows - first);
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) };
    let whole = b.cols / BLOCK;
    let mut c = 0;
    while c < width {
        let count = 4.min(width - c);
        let rows: [&[u8]; 4] = std::array::from_fn(|i| b.code_row(first + c + i.min(count - 1)));
        for (k, step) in panel.iter_mut().enumerate().take(whole) {
            let fours: [__m128i; 4] = std::array::from_fn(|i| {
                let bytes = rows[i][8 * k..].first_chunk().expect("a whole block has 8 bytes");
                _mm_shuffle_epi8(table, codes_of(*bytes))
            });
            for (values, transposed) in step.values.iter_mut().zip(transposed(fours)) {
                let to: &mut [[u8; 4]; 4] = values[c..].first_chunk_mut().expect("N is a multiple of 4");
                // SAFETY: the destination is an array of 16 bytes.
                unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), transposed) };
            }
        }
        // A partial block is unpacked one value at a time.
        if whole < panel.len() {
            for (i, row) in rows.iter().enumerate() {
                for e in 0..BLOCK {
                    let at = whole * BLOCK + e;
                    let inside = at < b.cols;
                    let value =
                        if inside { shifted[usize::from(row[at / 2] >> (4 * (at % 2)) & 15)] } else { SHIFT as u8 };
                    panel[whole].values[e / 4][c + i][e % 4] = value;
                }
            }
        }
        c += 4;
    }
}
