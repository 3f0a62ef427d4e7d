//! Any two operands, decoded to binary32.
//!
//! A is decoded once. B is decoded by a few rows and 256 columns at a time, and transposed into a
//! panel, which stays in cache while all rows of A pass over it: an element of A is multiplied with
//! a column of the panel, so that no sum is spread over lanes.

use crate::avx2::Avx2;
use crate::avx512::Avx512;
use crate::fp8::dequantize::avx2::{LANES, decode_side_by_side, dequantize_row};
use crate::gemm::exact::{SCALES, for_rows};
use crate::gemm::pieces::{in_pieces, padded, rows_in_pieces};
use crate::gemm::spec;
use crate::gemm::writer::{Operands, Writer};
use nvfp4_spec::{BLOCK, Element, e2m1, fp8};
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::ops::Range;

/// The most rows of A that are multiplied with a panel at a time.
const MOST_ROWS: usize = 6;
/// Columns of B that are decoded at a time: a multiple of every tile.
const COLUMNS: usize = 256;
/// The smallest tile of FP8.
const SMALLEST: usize = 32;
/// What rows of A are apart beyond their length, so that those of one tile do not share sets of the
/// cache.
const APART: usize = 4 * BLOCK;

/// `N` rows of B side by side, column by column.
#[repr(align(64))]
struct Panel<const N: usize>([[f32; N]; COLUMNS]);

/// A kernel: the products of some rows of A with the `N` rows of a panel.
pub(super) trait Tiles<const N: usize>: Copy + Sync {
    fn avx2(self) -> Avx2;
    /// Adds them to sums. Rows are `stride` apart, and as long as the panel.
    fn add(self, rows: &[f32], stride: usize, panel: &[[f32; N]], sums: &mut [[f32; N]]);
}

impl Tiles<16> for Avx2 {
    fn avx2(self) -> Avx2 {
        self
    }

    fn add(self, rows: &[f32], stride: usize, panel: &[[f32; 16]], sums: &mut [[f32; 16]]) {
        for_rows!(sums.len(), add_in_eights(rows, stride, panel, sums));
    }
}

impl Tiles<32> for Avx512 {
    fn avx2(self) -> Avx2 {
        Avx512::avx2(self)
    }

    fn add(self, rows: &[f32], stride: usize, panel: &[[f32; 32]], sums: &mut [[f32; 32]]) {
        for_rows!(sums.len(), add_in_sixteens(rows, stride, panel, sums));
    }
}

pub(super) fn run<T: Element, const N: usize>(kernel: impl Tiles<N>, (a, b): &Operands<'_>, writer: &Writer<'_, T>) {
    let (cols, columns, token) = (a.cols().next_multiple_of(BLOCK), b.rows(), kernel.avx2());
    let stride = cols + APART;
    let mut rows = vec![0.0; a.rows() * stride];
    let places: Vec<&mut [f32]> = rows.chunks_mut(stride).map(|row| &mut row[..cols]).collect();
    rows_in_pieces(a.rows(), a.cols()).zip(places).for_each(|(i, row)| {
        for (k, piece) in row.chunks_mut(COLUMNS).enumerate() {
            let start = k * COLUMNS;
            decode(token, a, i, start..a.cols().min(start + piece.len()), piece);
        }
    });
    in_pieces(columns.div_ceil(N), N * a.rows() * a.cols()).for_each_init(
        || (vec![[0f32; COLUMNS]; N], Box::new(Panel([[0f32; N]; COLUMNS])), vec![[0f32; N]; a.rows()]),
        |(decoded, panel, sums), p| {
            let first = p * N;
            let width = N.min(columns - first);
            sums.fill([0.0; N]);
            for start in (0..cols).step_by(COLUMNS) {
                let end = cols.min(start + COLUMNS);
                let panel = &mut panel.0[..end - start];
                if !fp8_panel(token, b, first, start..end.min(b.cols()), panel) {
                    for (j, row) in decoded[..width].iter_mut().enumerate() {
                        decode(token, b, first + j, start..end.min(b.cols()), &mut row[..end - start]);
                    }
                    // SAFETY: an Avx2 token is only made after detection.
                    unsafe { transpose(decoded, panel) };
                }
                for (some, sums) in rows.chunks(MOST_ROWS * stride).zip(sums.chunks_mut(MOST_ROWS)) {
                    kernel.add(&some[start..], stride, panel, sums);
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                // SAFETY: a panel writes the columns of its own rows of B only.
                unsafe { writer.write(i, first, &sums[..width]) };
            }
        },
    );
}

/// [`decode`] and [`transpose`] at once, for FP8 with tiles along K: bytes are transposed. Whether it
/// was done: some factors need the rules.
fn fp8_panel<const N: usize>(
    token: Avx2,
    operand: &spec::Operand<'_>,
    first: usize,
    at: Range<usize>,
    panel: &mut [[f32; N]],
) -> bool {
    let spec::Operand::Fp8(view) = operand else { return false };
    if view.tile == fp8::Tile::Column32 {
        return false;
    }
    let (shape, (_, width)) = ((view.rows, view.cols), view.tile.size(view.rows, view.cols));
    for (e, start) in (first..view.rows.min(first + N)).step_by(LANES).enumerate() {
        let mut codes = [[0; COLUMNS]; LANES];
        let mut factors = [[1.0; LANES]; COLUMNS / SMALLEST];
        for (r, i) in (start..view.rows.min(start + LANES)).enumerate() {
            codes[r][..at.len()].copy_from_slice(&view.code_row(i)[at.clone()]);
            if view.tile != fp8::Tile::Tensor {
                let tile = view.tile.index(shape, (i, at.start));
                for (k, factors) in factors[..at.len().div_ceil(SMALLEST)].iter_mut().enumerate() {
                    factors[r] = view.scales.factor(tile + k * SMALLEST / width);
                }
            }
        }
        for (c, (columns, factors)) in panel.chunks_mut(SMALLEST).zip(&factors).enumerate() {
            if !decode_side_by_side(token, view.format, &codes, SMALLEST * c, factors, columns, LANES * e) {
                return false;
            }
        }
    }
    panel[at.len()..].fill([0.0; N]);
    true
}

/// Rows side by side: eight of them and eight columns at a time.
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose<const N: usize>(rows: &[[f32; COLUMNS]], panel: &mut [[f32; N]]) {
    for (e, eight) in rows.as_chunks::<8>().0.iter().enumerate() {
        for (c, columns) in panel.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut fours = [_mm256_setzero_ps(); 8];
            for r in 0..4 {
                for half in 0..2 {
                    let at = 8 * c + 4 * half;
                    let (low, high): (&[f32; 4], &[f32; 4]) = (
                        eight[r][at..].first_chunk().expect("in a row"),
                        eight[r + 4][at..].first_chunk().expect("in a row"),
                    );
                    // SAFETY: the sources are arrays of 4 floats.
                    fours[4 * half + r] = unsafe { _mm256_loadu2_m128(high.as_ptr(), low.as_ptr()) };
                }
            }
            for half in 0..2 {
                let [a, b, c, d] = [0, 1, 2, 3].map(|r| fours[4 * half + r]);
                let (t0, t1) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (t2, t3) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let four = [
                    _mm256_shuffle_ps::<0b01_00_01_00>(t0, t2),
                    _mm256_shuffle_ps::<0b11_10_11_10>(t0, t2),
                    _mm256_shuffle_ps::<0b01_00_01_00>(t1, t3),
                    _mm256_shuffle_ps::<0b11_10_11_10>(t1, t3),
                ];
                for (q, column) in four.into_iter().enumerate() {
                    let to: &mut [f32; 8] = columns[4 * half + q][8 * e..].first_chunk_mut().expect("in a column");
                    // SAFETY: the destination is an array of 8 floats.
                    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), column) };
                }
            }
        }
    }
}

/// Up to [`COLUMNS`] columns of a row without its global scale, from a multiple of that on, and zeros
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
    let (height, width) = view.tile.size(view.rows, view.cols);
    // The factors of the tiles from the start on, `step` apart along K. Their places are evenly apart.
    let factors = |step: usize, place: &dyn Fn(usize) -> (usize, usize)| {
        let index = |k: usize| view.tile.index(shape, place(k));
        let first = index(at.start);
        let apart = if at.len() > step { index(at.start + step) - first } else { 0 };
        let mut factors = [0.0; COLUMNS / SMALLEST];
        for (k, factor) in factors[..at.len().div_ceil(step)].iter_mut().enumerate() {
            *factor = view.scales.factor(first + k * apart);
        }
        factors
    };
    match view.tile {
        fp8::Tile::Tensor => dequantize_row(token, view.format, &view.code_row(i)[at], usize::MAX, &[1.0], out),
        fp8::Tile::Row128 | fp8::Tile::Square128 | fp8::Tile::Row32 => {
            let factors = factors(width, &|c| (i, c));
            dequantize_row(token, view.format, &view.code_row(i)[at], width, &factors, out);
        }
        // Tiles of 32 in a column: the operand is taken transposed.
        fp8::Tile::Column32 => {
            let factors = factors(height, &|r| (r, i));
            let mut codes = [0; COLUMNS];
            codes.iter_mut().zip(at.clone()).for_each(|(code, r)| *code = view.codes[r * view.cols + i]);
            dequantize_row(token, view.format, &codes[..at.len()], height, &factors, out);
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

/// Adds the products of `R` rows with the rows of a panel: twelve sums, two vectors of B and an
/// element of A fill the registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn add_in_eights<const R: usize>(rows: &[f32], stride: usize, panel: &[[f32; 16]], out: &mut [[f32; 16]]) {
    let rows: [&[f32]; R] = std::array::from_fn(|r| &rows[r * stride..][..panel.len()]);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for (k, column) in panel.iter().enumerate() {
        let halves = column.as_chunks::<8>().0;
        // SAFETY: the sources are arrays of 8 floats.
        let b = [0, 1].map(|h| unsafe { _mm256_loadu_ps(halves[h].as_ptr()) });
        for r in 0..R {
            let a = _mm256_set1_ps(rows[r][k]);
            for h in 0..2 {
                sums[r][h] = _mm256_fmadd_ps(a, b[h], sums[r][h]);
            }
        }
    }
    for r in 0..R {
        for (h, out) in out[r].as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: source and destination are an array of 8 floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_add_ps(_mm256_loadu_ps(out.as_ptr()), sums[r][h])) };
        }
    }
}

/// [`add_in_eights`] with vectors of sixteen.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_in_sixteens<const R: usize>(rows: &[f32], stride: usize, panel: &[[f32; 32]], out: &mut [[f32; 32]]) {
    let rows: [&[f32]; R] = std::array::from_fn(|r| &rows[r * stride..][..panel.len()]);
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (k, column) in panel.iter().enumerate() {
        let halves = column.as_chunks::<16>().0;
        // SAFETY: the sources are arrays of 16 floats.
        let b = [0, 1].map(|h| unsafe { _mm512_loadu_ps(halves[h].as_ptr()) });
        for r in 0..R {
            let a = _mm512_set1_ps(rows[r][k]);
            for h in 0..2 {
                sums[r][h] = _mm512_fmadd_ps(a, b[h], sums[r][h]);
            }
        }
    }
    for r in 0..R {
        for (h, out) in out[r].as_chunks_mut::<16>().0.iter_mut().enumerate() {
            // SAFETY: source and destination are an array of 16 floats.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(out.as_ptr()), sums[r][h])) };
        }
    }
}
