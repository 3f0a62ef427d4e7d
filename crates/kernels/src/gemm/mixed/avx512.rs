//! bf16 × NVFP4 with AVX-512: panels of bf16.
//!
//! E2M1 values are exact in bf16, so pairs of them are multiplied directly, and a block's sum is
//! multiplied by its scale once. (The instruction takes subnormal numbers, below 2⁻¹²⁶, as zero, and
//! gives zero for them.)

use super::BYTES;
use super::panel::{PanelStep, Tiles, run_panels};
use crate::avx2::{Avx2, codes_of, transposed};
use crate::avx512::Avx512;
use crate::gemm::exact::SCALES;
use crate::gemm::writer::Writer;
use crate::{Input, Values};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element};
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of B in a panel.
const N: usize = 16;
/// Rows of A that a tile has.
const R: usize = 8;

/// Row `i` of A, two elements to a word; beyond the end there are zeros.
fn pairs(x: &Input<'_>, i: usize, blocks: usize) -> Vec<u32> {
    let Values::Bf16(values) = x.values() else { unreachable!("A is bf16") };
    let row = &values[i * x.stride()..][..x.cols()];
    let mut words = vec![0; blocks * BLOCK / 2];
    for (word, pair) in words.iter_mut().zip(row.chunks(2)) {
        let high = pair.get(1).map_or(0, |x| x.to_bits());
        *word = u32::from(pair[0].to_bits()) | u32::from(high) << 16;
    }
    words
}

pub(super) fn panels<T: Element>(token: Avx512, x: &Input<'_>, weights: &View<'_>, writer: &Writer<'_, T>) {
    let blocks = weights.cols.div_ceil(BLOCK);
    let rows: Vec<Vec<u32>> = (0..x.rows()).into_par_iter().map(|i| pairs(x, i, blocks)).collect();
    run_panels(&Rows { token, rows }, weights, writer);
}

/// The rows of A, in pairs.
struct Rows {
    token: Avx512,
    rows: Vec<Vec<u32>>,
}

impl Tiles<N, R> for Rows {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn unpack(&self, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
        // SAFETY: an Avx512 token is only made after detection, and holds the one of AVX2.
        unsafe { unpack(self.token.avx2(), b, first, panel) };
    }

    fn tile(&self, group: Range<usize>, panel: &[PanelStep<N>], out: &mut [[f32; N]; R]) {
        // A short group repeats its last row; those sums are ignored.
        let some: [&[u32]; R] = std::array::from_fn(|r| &self.rows[group.start + r.min(group.len() - 1)][..]);
        // SAFETY: an Avx512 token is only made after detection.
        unsafe { tile_of(some, panel, out) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn tile_of(rows: [&[u32]; R], panel: &[PanelStep<N>], out: &mut [[f32; N]; R]) {
    let rows: [&[[u32; BLOCK / 2]]; R] = rows.map(|row| &row.as_chunks().0[..panel.len()]);
    let mut sums = [_mm512_setzero_ps(); R];
    for (k, step) in panel.iter().enumerate() {
        let mut dots = [_mm512_setzero_ps(); R];
        for (q, pairs) in step.pairs.iter().enumerate() {
            // SAFETY: the source is an array of 16 doublewords.
            let pairs = unsafe { _mm512_loadu_si512(pairs.as_ptr().cast()) };
            for r in 0..R {
                let a = _mm512_set1_epi32(rows[r][k][q] as i32);
                // SAFETY: a vector is plain bits, whatever its lanes are called.
                let (a, b) = unsafe {
                    (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(pairs))
                };
                dots[r] = _mm512_dpbf16_ps(dots[r], a, b);
            }
        }
        // SAFETY: the source is an array of 16 floats.
        let scales = unsafe { _mm512_loadu_ps(step.scales.as_ptr()) };
        for r in 0..R {
            sums[r] = _mm512_fmadd_ps(dots[r], scales, sums[r]);
        }
    }
    for r in 0..R {
        // SAFETY: the destination is an array of 16 floats.
        unsafe { _mm512_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
    }
}

/// Unpacks up to 16 rows of B from row `first` on.
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(_token: Avx2, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]) {
    let width = N.min(b.rows - first);
    // SAFETY: the sources are arrays of 16 bytes.
    let tables = BYTES.map(|bytes| unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
    let whole = b.cols / BLOCK;
    for c in (0..width).step_by(4) {
        let count = 4.min(width - c);
        let rows: [&[u8]; 4] = std::array::from_fn(|i| b.code_row(first + c + i.min(count - 1)));
        for (k, step) in panel.iter_mut().enumerate() {
            let mut words = [[_mm_setzero_si128(); 4]; 2];
            for i in 0..4 {
                let mut eight = [0u8; 8];
                if k < whole {
                    eight.copy_from_slice(&rows[i][8 * k..][..8]);
                } else {
                    let rest = &rows[i][8 * k..];
                    eight[..rest.len()].copy_from_slice(rest);
                    if b.cols % 2 == 1 {
                        eight[rest.len() - 1] &= 15;
                    }
                }
                let codes = codes_of(eight);
                let bytes = tables.map(|table| _mm_shuffle_epi8(table, codes));
                words[0][i] = _mm_unpacklo_epi8(bytes[0], bytes[1]);
                words[1][i] = _mm_unpackhi_epi8(bytes[0], bytes[1]);
            }
            for (h, w) in words.into_iter().enumerate() {
                for (q, transposed) in transposed(w).into_iter().enumerate() {
                    let to: &mut [u32; 4] =
                        step.pairs[4 * h + q][c..].first_chunk_mut().expect("16 is a multiple of 4");
                    // SAFETY: the destination is an array of 16 bytes.
                    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), transposed) };
                }
            }
        }
        for i in 0..count {
            for (step, &byte) in panel.iter_mut().zip(b.scale_row(first + c + i)) {
                step.scales[c + i] = SCALES[usize::from(byte)];
            }
        }
    }
}
