//! Plain × NVFP4 with AVX-512: panels of bf16, and few rows of any type.
//!
//! E2M1 values are exact in bf16, so pairs of them are multiplied directly, and a block's sum is
//! multiplied by its scale once. (The instruction takes subnormal numbers, below 2⁻¹²⁶, as zero, and
//! gives zero for them.)

use super::{BYTES, plain_row};
use crate::avx2::{Avx2, codes_of, transposed};
use crate::avx512::Avx512;
use crate::gemm::exact::row::avx512::{LANES, block_words, decoded};
use crate::gemm::exact::{CHUNK, SCALES};
use crate::gemm::pieces::in_pieces;
use crate::gemm::writer::Writer;
use crate::{Input, Values};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element, e2m1};
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Rows of B in a panel.
const N: usize = 16;
/// Rows of A that a tile has.
const R: usize = 8;

/// A block of 16 rows of B side by side: pairs of unscaled values as bf16, and scales.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelStep {
    pairs: [[u32; N]; BLOCK / 2],
    scales: [f32; N],
}

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
    let columns = weights.rows;
    let empty = PanelStep { pairs: [[0; N]; BLOCK / 2], scales: [0.0; N] };
    (0..columns.div_ceil(N)).into_par_iter().for_each_init(
        || vec![empty; blocks],
        |panel, p| {
            let first = p * N;
            let width = N.min(columns - first);
            if width < N {
                panel.fill(empty);
            }
            // SAFETY: an Avx512 token is only made after detection, and holds the one of AVX2.
            unsafe { unpack(token.avx2(), weights, first, panel) };
            let mut tile = [[0f32; N]; R];
            for group in (0..rows.len()).step_by(R) {
                let height = R.min(rows.len() - group);
                // A short group repeats its last row; those sums are ignored.
                let some: [&[u32]; R] = std::array::from_fn(|r| &rows[group + r.min(height - 1)][..]);
                // SAFETY: an Avx512 token is only made after detection.
                unsafe { tile_of(some, panel, &mut tile) };
                for (r, sums) in tile[..height].iter().enumerate() {
                    // SAFETY: a panel writes the columns of its own rows of B only.
                    unsafe { writer.write(group + r, first, &sums[..width]) };
                }
            }
        },
    );
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn tile_of(rows: [&[u32]; R], panel: &[PanelStep], out: &mut [[f32; N]; R]) {
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
fn unpack(_token: Avx2, b: &View<'_>, first: usize, panel: &mut [PanelStep]) {
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

/// The product for few rows of A: B's rows are read without unpacking, for each row of A while they
/// are in cache.
pub(super) fn few_rows<T: Element>(_token: Avx512, x: &Input<'_>, weights: &View<'_>, writer: &Writer<'_, T>) {
    let blocks = weights.cols.div_ceil(BLOCK);
    // Element e of sixteen blocks side by side: a lane of a vector has a block.
    let row = |i: usize| -> Vec<[[f32; LANES]; BLOCK]> {
        let row = plain_row(x, i);
        let element = |at: usize| row.get(at).copied().unwrap_or(0.0);
        let group = |g: usize| -> [[f32; LANES]; BLOCK] {
            std::array::from_fn(|e| std::array::from_fn(|lane| element((g * LANES + lane) * BLOCK + e)))
        };
        (0..blocks.div_ceil(LANES)).map(group).collect()
    };
    let rows: Vec<Vec<[[f32; LANES]; BLOCK]>> = (0..x.rows()).map(row).collect();
    let columns = weights.rows;
    in_pieces(columns.div_ceil(CHUNK), CHUNK * x.rows() * x.cols()).for_each(|chunk| {
        let first = chunk * CHUNK;
        let width = CHUNK.min(columns - first);
        for (i, row) in rows.iter().enumerate() {
            let mut sums = [0f32; CHUNK];
            for (c, sum) in sums[..width].iter_mut().enumerate() {
                // SAFETY: an Avx512 token is only made after detection.
                *sum = unsafe { row_sum(row, weights.code_row(first + c), weights.scale_row(first + c)) };
            }
            // SAFETY: a chunk writes the columns of its own rows of B only.
            unsafe { writer.write(i, first, &sums[..width]) };
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_sum(row: &[[[f32; LANES]; BLOCK]], codes: &[u8], scales: &[u8]) -> f32 {
    let values: [f32; 16] = std::array::from_fn(|code| e2m1::decode(code as u8));
    // SAFETY: the source is an array of 16 floats.
    let table = unsafe { _mm512_loadu_ps(values.as_ptr()) };
    let mut sum = _mm512_setzero_ps();
    for (g, elements) in row.iter().enumerate() {
        let words = block_words(&codes[8 * LANES * g..]);
        let mut dots = [_mm512_setzero_ps(); 4];
        // A look-up takes the low four bits of each lane. Written out, so that shifts are constants
        // and sums stay in registers.
        macro_rules! elements {
            ($($e:literal: $word:literal >> $shift:literal),*) => { $(
                let value = _mm512_permutexvar_ps(_mm512_srli_epi32::<$shift>(words[$word]), table);
                // SAFETY: the source is an array of 16 floats.
                let x = unsafe { _mm512_loadu_ps(elements[$e].as_ptr()) };
                dots[$e % 4] = _mm512_fmadd_ps(value, x, dots[$e % 4]);
            )* };
        }
        elements!(0: 0 >> 0, 1: 0 >> 4, 2: 0 >> 8, 3: 0 >> 12, 4: 0 >> 16, 5: 0 >> 20, 6: 0 >> 24, 7: 0 >> 28);
        elements!(8: 1 >> 0, 9: 1 >> 4, 10: 1 >> 8, 11: 1 >> 12, 12: 1 >> 16, 13: 1 >> 20, 14: 1 >> 24, 15: 1 >> 28);
        let dot = _mm512_add_ps(_mm512_add_ps(dots[0], dots[1]), _mm512_add_ps(dots[2], dots[3]));
        sum = _mm512_fmadd_ps(dot, decoded(&scales[LANES * g..]), sum);
    }
    _mm512_reduce_add_ps(sum)
}
