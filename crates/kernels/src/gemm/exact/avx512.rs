//! Sixteen rows of B at a time, with the dot products of AVX-512 VNNI.

use super::avx2::for_rows;
use super::{Form, Kernel, MOST_ROWS, PanelStep, Part, Step, Tile, avx2};
use crate::avx512::Avx512;
use nvfp4_spec::matrix::View;
use std::arch::x86_64::*;

impl Kernel<16> for Avx512 {
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<16>]) {
        // SAFETY: the token holds the one of AVX2, which is only made after detection.
        unsafe { avx2::unpack(b, first, panel) }
    }

    fn add_integers(self, rows: &[Part<'_>], panel: &[PanelStep<16>], units: &[f32; 16], out: &mut Tile<16>) {
        for_rows!(rows.len(), add_integers(rows, panel, units, out));
    }

    fn add_terms(self, rows: &[Part<'_>], panel: &[PanelStep<16>], form: &Form<16>, out: &mut Tile<16>) {
        for_rows!(rows.len(), add_terms(rows, panel, form, out));
    }

    fn add_in_order(self, rows: &[Part<'_>], panel: &[PanelStep<16>], out: &mut Tile<16>) {
        for_rows!(rows.len(), add_in_order(rows, panel, out));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn values(step: &PanelStep<16>) -> [__m512i; 4] {
    // SAFETY: the source is an array of 64 bytes.
    let value = |q: usize| unsafe { _mm512_loadu_si512(step.values[q].as_ptr().cast()) };
    [value(0), value(1), value(2), value(3)]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn scales(step: &PanelStep<16>) -> __m512i {
    // SAFETY: the source is an array of 16 doublewords.
    unsafe { _mm512_loadu_si512(step.scales.as_ptr().cast()) }
}

/// A block's sums with 16 rows of B.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dot(a: &Step, values: &[__m512i; 4]) -> __m512i {
    let mut dot = _mm512_set1_epi32(a.offset);
    for (&four, &a) in values.iter().zip(&a.values) {
        dot = _mm512_dpbusd_epi32(dot, four, _mm512_set1_epi32(a));
    }
    dot
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_integers<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<16>], units: &[f32; 16], out: &mut Tile<16>) {
    const { assert!(R <= MOST_ROWS) };
    let parts: [&[Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [_mm512_setzero_si512(); R];
    for (k, step) in panel.iter().enumerate() {
        // A block's sum fits the low half of its doubleword, so the high halves of scales are zero.
        let (values, scales) = (values(step), _mm512_srli_epi32::<16>(scales(step)));
        for r in 0..R {
            let a = &parts[r][k];
            let scale = _mm512_mullo_epi16(scales, _mm512_set1_epi32(a.integer as i32));
            sums[r] = _mm512_dpwssd_epi32(sums[r], dot(a, &values), scale);
        }
    }
    // SAFETY: the source is an array of 16 floats.
    let units = unsafe { _mm512_loadu_ps(units.as_ptr()) };
    let high = |x: __m512i| _mm512_extracti64x4_epi64::<1>(x);
    let units = [
        _mm512_cvtps_pd(_mm512_castps512_ps256(units)),
        _mm512_cvtps_pd(_mm256_castsi256_ps(high(_mm512_castps_si512(units)))),
    ];
    for r in 0..R {
        // Quartered: the values were doubled.
        let unit = _mm512_set1_pd(f64::from(rows[r].unit) * 0.25);
        let halves = [_mm512_castsi512_si256(sums[r]), high(sums[r])];
        let scaled = |h: usize| _mm512_mul_pd(_mm512_cvtepi32_pd(halves[h]), _mm512_mul_pd(units[h], unit));
        add_to([scaled(0), scaled(1)], &mut out[r]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_terms<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<16>], form: &Form<16>, out: &mut Tile<16>) {
    let parts: [&[Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut sums = [[_mm512_setzero_pd(); 2]; R];
    for (k, step) in panel.iter().enumerate() {
        let (values, scales) = (values(step), floats(step, form));
        for r in 0..R {
            add(&mut sums[r], term(&parts[r][k], &values, scales));
        }
    }
    for r in 0..R {
        add_to(sums[r], &mut out[r]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_in_order<const R: usize>(rows: &[Part<'_>], panel: &[PanelStep<16>], out: &mut Tile<16>) {
    let parts: [&[Step]; R] = std::array::from_fn(|r| &rows[r].steps[..panel.len()]);
    let mut narrow = [_mm512_setzero_ps(); R];
    for (k, step) in panel.iter().enumerate() {
        let (values, scales) = (values(step), floats(step, &Form::Floats));
        for r in 0..R {
            narrow[r] = _mm512_add_ps(narrow[r], term(&parts[r][k], &values, scales));
        }
    }
    for r in 0..R {
        let mut sums = [_mm512_setzero_pd(); 2];
        add(&mut sums, narrow[r]);
        add_to(sums, &mut out[r]);
    }
}

/// Adds to 16 doubles, half by half.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn add_to(sums: [__m512d; 2], out: &mut [f64; 16]) {
    for (half, out) in sums.into_iter().zip(out.as_chunks_mut::<8>().0) {
        // SAFETY: the source is an array of 8 doubles.
        let sum = unsafe { _mm512_add_pd(_mm512_loadu_pd(out.as_ptr()), half) };
        // SAFETY: the destination is an array of 8 doubles.
        unsafe { _mm512_storeu_pd(out.as_mut_ptr(), sum) };
    }
}

/// The scales of a step in binary32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn floats(step: &PanelStep<16>, form: &Form<16>) -> __m512 {
    match form {
        Form::Floats => _mm512_castsi512_ps(scales(step)),
        Form::Integers(units) => {
            // SAFETY: the source is an array of 16 floats.
            let units = unsafe { _mm512_loadu_ps(units.as_ptr()) };
            _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32::<16>(scales(step))), units)
        }
    }
}

/// The terms of a block of a row of A with 16 rows of B, quartered, because the values were
/// doubled.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn term(a: &Step, values: &[__m512i; 4], scales: __m512) -> __m512 {
    let dot = _mm512_cvtepi32_ps(dot(a, values));
    _mm512_mul_ps(_mm512_mul_ps(dot, scales), _mm512_set1_ps(a.scale * 0.25))
}

/// Adds terms in binary64.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
pub(super) fn add(sums: &mut [__m512d; 2], terms: __m512) {
    let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(terms));
    sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(terms)));
    sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm256_castpd_ps(high)));
}
