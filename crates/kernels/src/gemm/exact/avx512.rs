//! Sixteen rows of B at a time, with the dot products of AVX-512 VNNI.

use super::{Accumulate, Kernel, MOST_ROWS, PanelStep, Step, Tile, avx2};
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
    for (k, step) in panel.iter().enumerate() {
        let values: [__m512i; 4] = std::array::from_fn(|q| {
            // SAFETY: the source is an array of 64 bytes.
            unsafe { _mm512_loadu_si512(step.values[q].as_ptr().cast()) }
        });
        // SAFETY: the source is an array of 16 floats.
        let scales = unsafe { _mm512_loadu_ps(step.scales.as_ptr()) };
        for r in 0..R {
            let a = &rows[r][k];
            let mut dot = _mm512_set1_epi32(a.offset);
            for (&four, &a) in values.iter().zip(&a.values) {
                dot = _mm512_dpbusd_epi32(dot, four, _mm512_set1_epi32(a));
            }
            let term = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), scales), _mm512_set1_ps(a.scale));
            if EXACT {
                let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(term));
                wide[r][0] = _mm512_add_pd(wide[r][0], _mm512_cvtps_pd(_mm512_castps512_ps256(term)));
                wide[r][1] = _mm512_add_pd(wide[r][1], _mm512_cvtps_pd(_mm256_castpd_ps(high)));
            } else {
                // Quartered: the values were doubled. Exact.
                narrow[r] = _mm512_add_ps(narrow[r], _mm512_mul_ps(term, _mm512_set1_ps(0.25)));
            }
        }
    }
    for r in 0..R {
        if EXACT {
            for (h, &half) in wide[r].iter().enumerate() {
                let quarter = _mm512_mul_pd(half, _mm512_set1_pd(0.25));
                // SAFETY: the destination is half of an array of 16 floats.
                unsafe { _mm256_storeu_ps(out[r].as_mut_ptr().add(8 * h), _mm512_cvtpd_ps(quarter)) };
            }
        } else {
            // SAFETY: the destination is an array of 16 floats.
            unsafe { _mm512_storeu_ps(out[r].as_mut_ptr(), narrow[r]) };
        }
    }
}
