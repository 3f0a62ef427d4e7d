//! Products with an operand that is FP8 or plain, in vectors. **Bounded**: sums in binary32, see
//! [`nvfp4_spec::gemm::bound`].
//!
//! There are two methods. bf16 × NVFP4, the product of a layer with quantized weights only, has its
//! own with AVX-512: E2M1 values are exact in bf16, so pairs of them are multiplied directly, and a
//! block's sum is multiplied by its scale once. (The instruction takes subnormal numbers, below
//! 2⁻¹²⁶, as zero, and gives zero for them.) Every other pair is decoded to binary32, a few rows at
//! a time, and multiplied by one dot product.

use super::exact::row::avx512::{LANES, block_words, decoded as decoded_scales};
use super::exact::{CHUNK, FEW, SCALES, Vectors};
use super::pieces::{in_pieces, rows_in_pieces};
use super::writer::{Operands, Writer};
use super::{Operand, spec};
use crate::avx2::{Avx2, codes_of, transposed};
use crate::avx512::Avx512;
use crate::{Input, Values};
use half::bf16;
use nvfp4_spec::gemm::Product;
use nvfp4_spec::matrix::{Matrix, View};
use nvfp4_spec::{BLOCK, Element, e2m1, fp8};
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::sync::LazyLock;

/// The product of operands whose shapes were checked and which have elements; `matrices` are the
/// plain ones, gathered.
pub(super) fn gemm<T: Element>(
    vectors: Vectors,
    (a, b): (&Operand<'_>, &Operand<'_>),
    matrices: [Option<&Matrix>; 2],
    product: &Product<'_, T>,
    out: &mut [T],
) {
    let operands = (a.to_spec(matrices[0]), b.to_spec(matrices[1]));
    let writer = &Writer::new(operands, product, out);
    match (vectors, a, b) {
        (Vectors::Avx512(token), Operand::Plain(x), Operand::Nvfp4(weights))
            if matches!(x.values(), Values::Bf16(_)) =>
        {
            if x.rows() <= FEW {
                few_rows(token, x, weights, writer);
            } else if token.has_bf16() {
                panels(token, x, weights, writer);
            } else {
                decoded(token.avx2(), &operands, writer);
            }
        }
        (Vectors::Avx512(token), ..) => decoded(token.avx2(), &operands, writer),
        (Vectors::Avx2(token), ..) => decoded(token, &operands, writer),
    }
}

// ---- bf16 × NVFP4 ----

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

fn panels<T: Element>(token: Avx512, x: &Input<'_>, weights: &View<'_>, writer: &Writer<'_, T>) {
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

/// The bf16 bits of E2M1 values, by code: low bytes, high bytes.
const BYTES: [[u8; 16]; 2] = {
    let (mut low, mut high) = ([0; 16], [0; 16]);
    let mut code = 0;
    while code < 16 {
        let magnitude = e2m1::MAGNITUDES[code % 8].to_bits() >> 16;
        low[code] = magnitude as u8;
        high[code] = (magnitude >> 8) as u8 | if code < 8 { 0 } else { 0x80 };
        code += 1;
    }
    [low, high]
};

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
fn few_rows<T: Element>(_token: Avx512, x: &Input<'_>, weights: &View<'_>, writer: &Writer<'_, T>) {
    let Values::Bf16(values) = x.values() else { unreachable!("A is bf16") };
    let blocks = weights.cols.div_ceil(BLOCK);
    // Element e of sixteen blocks side by side: a lane of a vector has a block.
    let row = |i: usize| -> Vec<[[f32; LANES]; BLOCK]> {
        let row = &values[i * x.stride()..][..x.cols()];
        let element = |at: usize| row.get(at).map_or(0.0, |x: &bf16| x.to_f32());
        let group = |g: usize| -> [[f32; LANES]; BLOCK] {
            std::array::from_fn(|e| std::array::from_fn(|lane| element((g * LANES + lane) * BLOCK + e)))
        };
        (0..blocks.div_ceil(LANES)).map(group).collect()
    };
    let rows: Vec<Vec<[[f32; LANES]; BLOCK]>> = (0..x.rows()).map(row).collect();
    let columns = weights.rows;
    (0..columns.div_ceil(CHUNK)).into_par_iter().for_each(|chunk| {
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
        sum = _mm512_fmadd_ps(dot, decoded_scales(&scales[LANES * g..]), sum);
    }
    _mm512_reduce_add_ps(sum)
}

// ---- Everything else ----

/// Rows of B that are decoded at a time.
const ROWS: usize = 8;

fn decoded<T: Element>(token: Avx2, operands: &Operands<'_>, writer: &Writer<'_, T>) {
    let (a, b) = operands;
    let columns = b.rows();
    let rows: Vec<Vec<f32>> = rows_in_pieces(a.rows(), a.cols()).map(|i| row_of(token, a, i)).collect();
    in_pieces(columns.div_ceil(ROWS), ROWS * a.rows() * a.cols()).for_each(|p| {
        let first = p * ROWS;
        let width = ROWS.min(columns - first);
        let few: Vec<Vec<f32>> = (0..width).map(|j| row_of(token, b, first + j)).collect();
        for (pair, two) in rows.chunks(2).enumerate() {
            let mut sums = [[0f32; ROWS]; 2];
            for (f, four) in few.chunks(4).enumerate() {
                let four: [&[f32]; 4] = std::array::from_fn(|j| &four[j.min(four.len() - 1)][..]);
                // SAFETY: an Avx2 token is only made after detection.
                let dots = unsafe { dots(token, [&two[0], &two[two.len() - 1]], four) };
                sums.iter_mut().zip(dots).for_each(|(sums, dots)| sums[4 * f..4 * f + 4].copy_from_slice(&dots));
            }
            for (r, sums) in sums[..two.len()].iter().enumerate() {
                let i = 2 * pair + r;
                // SAFETY: a group writes the columns of its own rows of B only.
                unsafe { writer.write(i, first, &sums[..width]) };
            }
        }
    });
}

/// A row without its global scale, and zeros up to a whole block.
fn row_of(token: Avx2, operand: &spec::Operand<'_>, i: usize) -> Vec<f32> {
    let mut row = vec![0.0; operand.cols().next_multiple_of(BLOCK)];
    match operand {
        spec::Operand::Plain(matrix) => row[..matrix.cols()].copy_from_slice(matrix.row(i)),
        spec::Operand::Nvfp4(view) => {
            let (codes, scales) = (view.code_row(i), view.scale_row(i));
            for (k, (values, &scale)) in row.as_chunks_mut::<BLOCK>().0.iter_mut().zip(scales).enumerate() {
                let mut eight = [0; 8];
                let rest = &codes[8 * k..];
                eight[..rest.len().min(8)].copy_from_slice(&rest[..rest.len().min(8)]);
                // SAFETY: an Avx2 token is only made after detection.
                unsafe { decode(token, eight, SCALES[usize::from(scale)], values) };
            }
            // The format requires codes beyond an odd end to be zero, but a caller's buffer may
            // differ.
            row[view.cols..].fill(0.0);
        }
        spec::Operand::Fp8(view) => decode_fp8(view, i, &mut row),
    }
    row
}

/// The values of all codes, E4M3's and E5M2's.
static FP8_VALUES: LazyLock<[[f32; 256]; 2]> =
    LazyLock::new(|| fp8::Format::ALL.map(|format| std::array::from_fn(|code| format.decode(code as u8))));

/// Row `i` of an FP8 operand, without a scale of the whole matrix.
fn decode_fp8(view: &fp8::View<'_>, i: usize, row: &mut [f32]) {
    let values = match view.format {
        fp8::Format::E4m3 => &FP8_VALUES[0],
        fp8::Format::E5m2 => &FP8_VALUES[1],
    };
    let value = |code: u8| values[usize::from(code)];
    let shape = (view.rows, view.cols);
    let factor = |r: usize, c: usize| match view.tensor_scale() {
        Some(_) => 1.0,
        None => view.scales.factor(view.tile.index(shape, (r, c))),
    };
    let (height, width) = view.tile.size(view.rows, view.cols);
    match view.tile {
        fp8::Tile::Column32 => {
            let column = view.codes.iter().skip(i).step_by(view.cols);
            for (t, tile) in row[..view.rows].chunks_mut(height).enumerate() {
                let factor = factor(t * height, i);
                tile.iter_mut().zip(column.clone().skip(t * height)).for_each(|(x, &code)| *x = value(code) * factor);
            }
        }
        fp8::Tile::Tensor | fp8::Tile::Row128 | fp8::Tile::Square128 | fp8::Tile::Row32 => {
            let tiles = row[..view.cols].chunks_mut(width).zip(view.code_row(i).chunks(width));
            for (t, (tile, codes)) in tiles.enumerate() {
                let factor = factor(i, t * width);
                tile.iter_mut().zip(codes).for_each(|(x, &code)| *x = value(code) * factor);
            }
        }
    }
}

/// The values of a block of codes times its scale.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn decode(_token: Avx2, codes: [u8; 8], scale: f32, out: &mut [f32; BLOCK]) {
    // SAFETY: the source is an array of 8 floats.
    let table = unsafe { _mm256_loadu_ps(e2m1::MAGNITUDES.as_ptr()) };
    let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (half, out) in codes.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        let code = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(*half)), shifts);
        // A look-up takes the low three bits of each lane; the fourth is the sign.
        let magnitude = _mm256_permutevar8x32_ps(table, code);
        let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(code), _mm256_set1_epi32(i32::MIN));
        let value = _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(value, _mm256_set1_ps(scale))) };
    }
}

/// The products of two rows with four others, added up in eight lanes. Lengths are equal and
/// multiples of 8.
#[target_feature(enable = "avx2,fma,f16c")]
fn dots(_token: Avx2, a: [&[f32]; 2], b: [&[f32]; 4]) -> [[f32; 4]; 2] {
    let mut sums = [[_mm256_setzero_ps(); 4]; 2];
    let eights = a[0].len() / 8;
    let (a, b) = (a.map(|row| &row.as_chunks::<8>().0[..eights]), b.map(|row| &row.as_chunks::<8>().0[..eights]));
    for k in 0..eights {
        // SAFETY: the sources are arrays of 8 floats.
        let x = a.map(|row| unsafe { _mm256_loadu_ps(row[k].as_ptr()) });
        for j in 0..4 {
            // SAFETY: as above.
            let y = unsafe { _mm256_loadu_ps(b[j][k].as_ptr()) };
            sums[0][j] = _mm256_fmadd_ps(x[0], y, sums[0][j]);
            sums[1][j] = _mm256_fmadd_ps(x[1], y, sums[1][j]);
        }
    }
    sums.map(|four| {
        four.map(|sum| {
            let mut lanes = [0f32; 8];
            // SAFETY: the destination is an array of 8 floats.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
            lanes.iter().sum()
        })
    })
}
