//! Any two operands, decoded to binary32.
//!
//! A is decoded once. B is decoded by eight rows and 1024 columns at a time, 32 KiB, which stay in
//! cache while all rows of A pass over them.

use crate::avx2::Avx2;
use crate::avx512::Avx512;
use crate::fp8::dequantize::avx2::decode_tiles;
use crate::gemm::exact::SCALES;
use crate::gemm::pieces::{in_pieces, padded, rows_in_pieces};
use crate::gemm::spec;
use crate::gemm::writer::{Operands, Writer};
use nvfp4_spec::{BLOCK, Element, e2m1, fp8};
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of B that are decoded at a time.
const ROWS: usize = 8;
/// Columns that are: a multiple of every tile.
const COLUMNS: usize = 1024;

/// A kernel: the products of `R` rows with four others. Lengths are equal and multiples of 16.
pub(super) trait Dots<const R: usize>: Copy + Sync {
    fn avx2(self) -> Avx2;
    fn dots(self, a: [&[f32]; R], b: [&[f32]; 4]) -> [[f32; 4]; R];
}

impl Dots<3> for Avx2 {
    fn avx2(self) -> Avx2 {
        self
    }

    fn dots(self, a: [&[f32]; 3], b: [&[f32]; 4]) -> [[f32; 4]; 3] {
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { dots_of_eight(a, b) }
    }
}

impl Dots<4> for Avx512 {
    fn avx2(self) -> Avx2 {
        Avx512::avx2(self)
    }

    fn dots(self, a: [&[f32]; 4], b: [&[f32]; 4]) -> [[f32; 4]; 4] {
        // SAFETY: an Avx512 token is only made after detection.
        unsafe { dots_of_sixteen(a, b) }
    }
}

pub(super) fn run<T: Element, const R: usize>(kernel: impl Dots<R>, (a, b): &Operands<'_>, writer: &Writer<'_, T>) {
    let (cols, columns) = (a.cols().next_multiple_of(BLOCK), b.rows());
    let decoded = |i: usize| {
        let mut row = vec![0.0; cols];
        decode(kernel.avx2(), a, i, 0..a.cols(), &mut row);
        row
    };
    let rows: Vec<Vec<f32>> = rows_in_pieces(a.rows(), a.cols()).map(decoded).collect();
    in_pieces(columns.div_ceil(ROWS), ROWS * a.rows() * a.cols()).for_each_init(
        || (vec![[0f32; COLUMNS]; ROWS], vec![[0f32; ROWS]; rows.len().next_multiple_of(R)]),
        |(panel, sums), p| {
            let first = p * ROWS;
            let width = ROWS.min(columns - first);
            sums.fill([0.0; ROWS]);
            for start in (0..cols).step_by(COLUMNS) {
                let end = cols.min(start + COLUMNS);
                for (j, row) in panel[..width].iter_mut().enumerate() {
                    decode(kernel.avx2(), b, first + j, start..end.min(b.cols()), &mut row[..end - start]);
                }
                for (some, sums) in rows.chunks(R).zip(sums.chunks_exact_mut(R)) {
                    // A short group repeats its last row; those sums are ignored.
                    let some: [&[f32]; R] = std::array::from_fn(|r| &some[r.min(some.len() - 1)][start..end]);
                    for (f, four) in panel[..width].chunks(4).enumerate() {
                        let four = std::array::from_fn(|j| &four[j.min(four.len() - 1)][..end - start]);
                        for (sums, dots) in sums.iter_mut().zip(kernel.dots(some, four)) {
                            sums[4 * f..4 * f + 4].iter_mut().zip(dots).for_each(|(sum, dot)| *sum += dot);
                        }
                    }
                }
            }
            for (i, sums) in sums[..rows.len()].iter().enumerate() {
                // SAFETY: a panel writes the columns of its own rows of B only.
                unsafe { writer.write(i, first, &sums[..width]) };
            }
        },
    );
}

/// Some columns of a row without its global scale, from a multiple of [`COLUMNS`] on, and zeros
/// after them.
fn decode(token: Avx2, operand: &spec::Operand<'_>, i: usize, at: Range<usize>, out: &mut [f32]) {
    out[at.len()..].fill(0.0);
    match operand {
        spec::Operand::Plain(matrix) => out[..at.len()].copy_from_slice(&matrix.row(i)[at]),
        spec::Operand::Nvfp4(view) => {
            let codes = &view.code_row(i)[at.start / 2..];
            let scales = &view.scale_row(i)[at.start / BLOCK..];
            // SAFETY: an Avx2 token is only made after detection.
            unsafe { decode_nvfp4(codes, scales, out) };
            // The format requires codes beyond an odd end to be zero, but a caller's buffer may
            // differ.
            out[at.len()..].fill(0.0);
        }
        spec::Operand::Fp8(view) => decode_fp8(token, view, i, at.clone(), &mut out[..at.len()]),
    }
}

/// Some columns of row `i` of an FP8 operand, without a scale of the whole matrix.
fn decode_fp8(token: Avx2, view: &fp8::View<'_>, i: usize, at: Range<usize>, out: &mut [f32]) {
    let shape = (view.rows, view.cols);
    let factor = |r: usize, c: usize| view.scales.factor(view.tile.index(shape, (r, c)));
    let (height, width) = view.tile.size(view.rows, view.cols);
    match view.tile {
        fp8::Tile::Tensor => decode_tiles(token, view.format, &view.code_row(i)[at], usize::MAX, &[1.0], out),
        fp8::Tile::Row128 | fp8::Tile::Square128 | fp8::Tile::Row32 => {
            let factors: Vec<f32> = at.clone().step_by(width).map(|c| factor(i, c)).collect();
            decode_tiles(token, view.format, &view.code_row(i)[at], width, &factors, out);
        }
        // Tiles of 32 in a column: the operand is taken transposed.
        fp8::Tile::Column32 => {
            let factors: Vec<f32> = at.clone().step_by(height).map(|r| factor(r, i)).collect();
            let codes: Vec<u8> = at.map(|r| view.codes[r * view.cols + i]).collect();
            decode_tiles(token, view.format, &codes, height, &factors, out);
        }
    }
}

/// Whole blocks of codes times their scales; codes beyond the end are zero.
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_nvfp4(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let scales_of = &*SCALES;
    // SAFETY: the source is an array of 8 floats.
    let table = unsafe { _mm256_loadu_ps(e2m1::MAGNITUDES.as_ptr()) };
    let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (k, (values, &scale)) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(scales).enumerate() {
        let eight = *padded(&codes[8 * k..], &mut [0; 8]);
        let scale = _mm256_set1_ps(scales_of[usize::from(scale)]);
        for (half, out) in eight.as_chunks::<4>().0.iter().zip(values.as_chunks_mut::<8>().0) {
            let code = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(*half)), shifts);
            // A look-up takes the low three bits of each lane; the fourth is the sign.
            let magnitude = _mm256_permutevar8x32_ps(table, code);
            let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(code), _mm256_set1_epi32(i32::MIN));
            let value = _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
            // SAFETY: the destination is an array of 8 floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(value, scale)) };
        }
    }
}

/// The products of three rows with four others, added up in eight lanes: twelve sums, three
/// elements of A and one of B fill the registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn dots_of_eight(a: [&[f32]; 3], b: [&[f32]; 4]) -> [[f32; 4]; 3] {
    let eights = a[0].len() / 8;
    let (a, b) = (a.map(|row| &row.as_chunks::<8>().0[..eights]), b.map(|row| &row.as_chunks::<8>().0[..eights]));
    let mut sums = [[_mm256_setzero_ps(); 4]; 3];
    for k in 0..eights {
        // SAFETY: the sources are arrays of 8 floats.
        let x = a.map(|row| unsafe { _mm256_loadu_ps(row[k].as_ptr()) });
        for j in 0..4 {
            // SAFETY: as above.
            let y = unsafe { _mm256_loadu_ps(b[j][k].as_ptr()) };
            for r in 0..3 {
                sums[r][j] = _mm256_fmadd_ps(x[r], y, sums[r][j]);
            }
        }
    }
    let mut out = [[0.0; 4]; 3];
    for (out, [s0, s1, s2, s3]) in out.iter_mut().zip(sums) {
        let pairs = _mm256_hadd_ps(_mm256_hadd_ps(s0, s1), _mm256_hadd_ps(s2, s3));
        let four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
        // SAFETY: the destination is an array of 4 floats.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), four) };
    }
    out
}

/// The products of four rows with four others, added up in sixteen lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots_of_sixteen(a: [&[f32]; 4], b: [&[f32]; 4]) -> [[f32; 4]; 4] {
    let sixteens = a[0].len() / 16;
    let (a, b) = (a.map(|row| &row.as_chunks::<16>().0[..sixteens]), b.map(|row| &row.as_chunks::<16>().0[..sixteens]));
    let mut sums = [[_mm512_setzero_ps(); 4]; 4];
    for k in 0..sixteens {
        // SAFETY: the sources are arrays of 16 floats.
        let x = a.map(|row| unsafe { _mm512_loadu_ps(row[k].as_ptr()) });
        for j in 0..4 {
            // SAFETY: as above.
            let y = unsafe { _mm512_loadu_ps(b[j][k].as_ptr()) };
            for r in 0..4 {
                sums[r][j] = _mm512_fmadd_ps(x[r], y, sums[r][j]);
            }
        }
    }
    let mut out = [[0.0; 4]; 4];
    for (out, four) in out.iter_mut().zip(sums) {
        for (out, sum) in out.iter_mut().zip(four) {
            *out = _mm512_reduce_add_ps(sum);
        }
    }
    out
}
