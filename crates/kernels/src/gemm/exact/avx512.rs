//! Sixteen rows of B at a time, with the dot products of AVX-512 VNNI.

use super::{Accumulate, Kernel, MOST_ROWS, PAIRED, PanelStep, Step, Tile, avx2};
use crate::avx512::Avx512;
use nvfp4_spec::matrix::View;
use std::arch::x86_64::*;

impl Kernel<16> for Avx512 {
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<16>]) {
        // SAFETY: the token holds the one of AVX2, which is only made after detection.
        unsafe { avx2::unpack(b, first, panel) }
    }

    fn tile(self, rows: &[&[Step]], panel: &[PanelStep<16>], accumulate: Accumulate, out: &mut Tile<16>) {
        macro_rules! tile {
            ($($n:literal)*) => {
                match (rows.len(), accumulate) {
                    $(
                        // SAFETY: the token is only made after detection.
                        ($n, Accumulate::Exact) => unsafe { tile::<$n, true>(rows, panel, out) },
                        // SAFETY: as above.
                        ($n, Accumulate::Reference) => unsafe { tile::<$n, false>(rows, panel, out) },
                    )*
                    _ => unreachable!("a tile has one to six rows"),
                }
            };
        }
        tile!(1 2 3 4 5 6);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn tile<const R: usize, const EXACT: bool>(rows: &[&[Step]], panel: &[PanelStep<16>], out: &mut Tile<16>) {
    const { assert!(R <= MOST_ROWS) };
    let rows: [&[Step]; R] = std::array::from_fn(|r| &rows[r][..panel.len()]);
    let mut wide = [[_mm512_setzero_pd(); 2]; R];
    let mut narrow = [_mm512_setzero_ps(); R];
    let (pairs, last) = panel.as_chunks::<2>();
    for (p, [first, second]) in pairs.iter().enumerate() {
        let (b0, b1) = (load(first), load(second));
        for r in 0..R {
            let (a0, a1) = (&rows[r][2 * p], &rows[r][2 * p + 1]);
            let (t0, t1) = (term(a0, &b0), term(a1, &b1));
            if !EXACT {
                narrow[r] = _mm512_add_ps(_mm512_add_ps(narrow[r], t0), t1);
            } else if a0.spread + first.spread <= PAIRED {
                add(&mut wide[r], _mm512_add_ps(t0, t1));
            } else {
                add(&mut wide[r], t0);
                add(&mut wide[r], t1);
            }
        }
    }
    if let [step] = last {
        let b = load(step);
        for r in 0..R {
            let t = term(&rows[r][panel.len() - 1], &b);
            if EXACT {
                add(&mut wide[r], t);
            } else {
                narrow[r] = _mm512_add_ps(narrow[r], t);
            }
        }
    }
    for r in 0..R {
        if EXACT {
            store(wide[r], &mut out[r]);
        } else {
            let mut sums = [_mm512_setzero_pd(); 2];
            add(&mut sums, narrow[r]);
            store(sums, &mut out[r]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn store(sums: [__m512d; 2], out: &mut [f64; 16]) {
    for (half, out) in sums.into_iter().zip(out.as_chunks_mut::<8>().0) {
        // SAFETY: the destination is an array of 8 doubles.
        unsafe { _mm512_storeu_pd(out.as_mut_ptr(), half) };
    }
}

/// A step of a panel in registers: values, and scales, quartered because values are doubled on both
/// sides.
struct Loaded {
    values: [__m512i; 4],
    scales: __m512,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn load(step: &PanelStep<16>) -> Loaded {
    // SAFETY: the source is an array of 64 bytes.
    let value = |q: usize| unsafe { _mm512_loadu_si512(step.values[q].as_ptr().cast()) };
    // SAFETY: the source is an array of 16 floats.
    let scales = unsafe { _mm512_loadu_ps(step.scales.as_ptr()) };
    Loaded { values: [value(0), value(1), value(2), value(3)], scales: _mm512_mul_ps(scales, _mm512_set1_ps(0.25)) }
}

/// The terms of a block of a row of A with 16 rows of B.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn term(a: &Step, b: &Loaded) -> __m512 {
    let mut dot = _mm512_set1_epi32(a.offset);
    for (&four, &a) in b.values.iter().zip(&a.values) {
        dot = _mm512_dpbusd_epi32(dot, four, _mm512_set1_epi32(a));
    }
    _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), b.scales), _mm512_set1_ps(a.scale))
}

/// Adds terms in binary64.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn add(sums: &mut [__m512d; 2], terms: __m512) {
    let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(terms));
    sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(terms)));
    sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm256_castpd_ps(high)));
}
