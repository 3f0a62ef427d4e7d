//! Eight rows of B at a time, with multiplications of bytes that add up in pairs.

use super::{Accumulate, DOUBLED, Kernel, PanelStep, SCALES, SHIFT, Step, Tile, spread};
use crate::avx2::{Avx2, codes_of, transposed};
use nvfp4_spec::BLOCK;
use nvfp4_spec::matrix::View;
use std::arch::x86_64::*;

impl Kernel<8> for Avx2 {
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<8>]) {
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { unpack(b, first, panel) }
    }

    fn tile(self, rows: &[&[Step]], panel: &[PanelStep<8>], accumulate: Accumulate, out: &mut Tile<8>) {
        // Two rows at a time: more would not fit the registers.
        for (rows, out) in rows.chunks(2).zip(out.chunks_mut(2)) {
            match (rows.len(), accumulate) {
                // SAFETY: an Avx2 token is only made after detection.
                (1, Accumulate::Exact) => unsafe { tile::<1, true>(rows, panel, out) },
                // SAFETY: as above.
                (1, Accumulate::Reference) => unsafe { tile::<1, false>(rows, panel, out) },
                // SAFETY: as above.
                (_, Accumulate::Exact) => unsafe { tile::<2, true>(rows, panel, out) },
                // SAFETY: as above.
                (_, Accumulate::Reference) => unsafe { tile::<2, false>(rows, panel, out) },
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const R: usize, const EXACT: bool>(rows: &[&[Step]], panel: &[PanelStep<8>], out: &mut [[f64; 8]]) {
    let rows: [&[Step]; R] = std::array::from_fn(|r| &rows[r][..panel.len()]);
    let mut wide = [[_mm256_setzero_pd(); 2]; R];
    let mut narrow = [_mm256_setzero_ps(); R];
    for (k, step) in panel.iter().enumerate() {
        let values: [__m256i; 4] = std::array::from_fn(|q| {
            // SAFETY: the source is an array of 32 bytes.
            unsafe { _mm256_loadu_si256(step.values[q].as_ptr().cast()) }
        });
        // SAFETY: the source is an array of 8 floats.
        let scales = unsafe { _mm256_loadu_ps(step.scales.as_ptr()) };
        for r in 0..R {
            let a = &rows[r][k];
            // A sum of eight pairs is at most 8·2·24·12 = 4608: words hold it.
            let pair = |q: usize| _mm256_maddubs_epi16(values[q], _mm256_set1_epi32(a.values[q]));
            let words = _mm256_add_epi16(_mm256_add_epi16(pair(0), pair(1)), _mm256_add_epi16(pair(2), pair(3)));
            let dot = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
            let dot = _mm256_add_epi32(dot, _mm256_set1_epi32(a.offset));
            let term = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), scales), _mm256_set1_ps(a.scale));
            if EXACT {
                wide[r][0] = _mm256_add_pd(wide[r][0], _mm256_cvtps_pd(_mm256_castps256_ps128(term)));
                wide[r][1] = _mm256_add_pd(wide[r][1], _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(term)));
            } else {
                // Quartered: the values were doubled. Exact.
                narrow[r] = _mm256_add_ps(narrow[r], _mm256_mul_ps(term, _mm256_set1_ps(0.25)));
            }
        }
    }
    for r in 0..R {
        let sums = if EXACT {
            wide[r].map(|half| _mm256_mul_pd(half, _mm256_set1_pd(0.25)))
        } else {
            [_mm256_castps256_ps128(narrow[r]), _mm256_extractf128_ps::<1>(narrow[r])].map(|half| _mm256_cvtps_pd(half))
        };
        for (half, out) in sums.into_iter().zip(out[r].as_chunks_mut::<4>().0) {
            // SAFETY: the destination is an array of 4 doubles.
            unsafe { _mm256_storeu_pd(out.as_mut_ptr(), half) };
        }
    }
}

/// Unpacks up to `N` rows of B from row `first` on, side by side.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<const N: usize>(b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
    let scales = &*SCALES;
    let width = N.min(b.rows - first);
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) };
    let whole = b.cols / BLOCK;
    let mut spreads = vec![0; panel.len() / 2];
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
        for i in 0..count {
            let bytes = b.scale_row(first + c + i);
            for (step, &byte) in panel.iter_mut().zip(bytes) {
                step.scales[c + i] = scales[usize::from(byte)];
            }
            for (largest, &[first, second]) in spreads.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *largest = spread(first, second).max(*largest);
            }
        }
        c += 4;
    }
    for (pair, &spread) in panel.as_chunks_mut::<2>().0.iter_mut().zip(&spreads) {
        pair[0].spread = spread;
    }
}
