//! Plain × NVFP4 with AVX2 where A has few rows: B's rows are read once, and nothing is unpacked to
//! memory.
//!
//! Four blocks of a row of B are a vector of bytes. Two look-ups give the bytes of their values in
//! bf16, which are joined to words: the even words of a vector become binary32 by a shift, the odd
//! ones by a mask. A is put into the same order beforehand.

use super::{BYTES, plain_row};
use crate::Input;
use crate::avx2::Avx2;
use crate::gemm::exact::row::for_few_rows;
use crate::gemm::exact::{CHUNK, FEW, SCALES};
use crate::gemm::pieces::{in_pieces, padded};
use crate::gemm::writer::Writer;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element, e4m3};
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Eight blocks of a row of A: for blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7, the elements of each
/// from 0, 2, 1 and 3 on, in steps of four.
type Group = [[[f32; 8]; 4]; 4];
/// Blocks of a group.
const BLOCKS: usize = 8;

fn groups(x: &Input<'_>, i: usize) -> Vec<Group> {
    let row = plain_row(x, i);
    let element = |at: usize| row.get(at).copied().unwrap_or(0.0);
    let group = |g: usize| -> Group {
        std::array::from_fn(|pair| {
            std::array::from_fn(|q| {
                std::array::from_fn(|lane| {
                    let block = g * BLOCKS + pair / 2 * 4 + pair % 2 + lane / 4 * 2;
                    element(block * BLOCK + [0, 2, 1, 3][q] + lane % 4 * 4)
                })
            })
        })
    };
    (0..x.cols().div_ceil(BLOCK * BLOCKS)).map(group).collect()
}

pub(super) fn few_rows<T: Element>(_: Avx2, x: &Input<'_>, weights: &View<'_>, writer: &Writer<'_, T>) {
    let rows: Vec<Vec<Group>> = (0..x.rows()).map(|i| groups(x, i)).collect();
    let columns = weights.rows;
    in_pieces(columns.div_ceil(CHUNK), CHUNK * x.rows() * x.cols()).for_each(|chunk| {
        let first = chunk * CHUNK;
        let width = CHUNK.min(columns - first);
        let mut sums = [[0f32; CHUNK]; FEW];
        for c in 0..width {
            let (codes, scales) = (weights.code_row(first + c), weights.scale_row(first + c));
            let mut column = [0.0; FEW];
            for_few_rows!(&rows[..], row_sums(codes, scales, &mut column));
            sums.iter_mut().zip(column).for_each(|(row, sum)| row[c] = sum);
        }
        for (i, sums) in sums[..rows.len()].iter().enumerate() {
            // SAFETY: a chunk writes the columns of its own rows of B only.
            unsafe { writer.write(i, first, &sums[..width]) };
        }
    });
}

/// The sums of rows of A with one of B.
#[target_feature(enable = "avx2,fma,f16c")]
fn row_sums<const R: usize>(rows: [&[Group]; R], codes: &[u8], scales: &[u8], out: &mut [f32; FEW]) {
    let ordinary = scales.iter().copied().max() <= Some(e4m3::MAX_BYTE);
    let rows = rows.map(|row| &row[..rows[0].len()]);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for g in 0..rows[0].len() {
        let mut room = [0; 64];
        let codes = padded(&codes[64 * g..], &mut room);
        let scales = *padded(&scales[BLOCKS * g..], &mut [0; BLOCKS]);
        let scales = if ordinary { positive(scales) } else { any(scales) };
        for half in 0..2 {
            let words = words(codes[32 * half..].first_chunk().expect("two halves"));
            for side in 0..2 {
                let pair = 2 * half + side;
                let from = (4 * half + side) as i32;
                let scale = _mm256_permutevar8x32_ps(
                    scales,
                    _mm256_setr_epi32(from, from, from, from, from + 2, from + 2, from + 2, from + 2),
                );
                let values =
                    [shifted(words[side]), masked(words[side]), shifted(words[side + 2]), masked(words[side + 2])];
                for r in 0..R {
                    let x = |q: usize| {
                        // SAFETY: the source is an array of 8 floats.
                        unsafe { _mm256_loadu_ps(rows[r][g][pair][q].as_ptr()) }
                    };
                    let mut dot = _mm256_mul_ps(values[0], x(0));
                    for (q, &value) in values.iter().enumerate().skip(1) {
                        dot = _mm256_fmadd_ps(value, x(q), dot);
                    }
                    sums[r][side] = _mm256_fmadd_ps(dot, scale, sums[r][side]);
                }
            }
        }
    }
    for r in 0..R {
        let mut lanes = [0f32; 8];
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(sums[r][0], sums[r][1])) };
        out[r] = lanes.iter().sum();
    }
}

/// The values of four blocks as bf16: even elements of blocks 0 and 2, of 1 and 3, then odd ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(codes: &[u8; 32]) -> [__m256i; 4] {
    // SAFETY: the sources are arrays of 16 bytes.
    let tables = BYTES.map(|bytes| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }));
    // SAFETY: the source is an array of 32 bytes.
    let bytes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    let mask = _mm256_set1_epi8(15);
    let both = |nibbles| tables.map(|table| _mm256_shuffle_epi8(table, nibbles));
    let [low_even, high_even] = both(_mm256_and_si256(bytes, mask));
    let [low_odd, high_odd] = both(_mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask));
    [
        _mm256_unpacklo_epi8(low_even, high_even),
        _mm256_unpackhi_epi8(low_even, high_even),
        _mm256_unpacklo_epi8(low_odd, high_odd),
        _mm256_unpackhi_epi8(low_odd, high_odd),
    ]
}

/// The even words in binary32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shifted(words: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
}

/// The odd words in binary32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn masked(words: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xFFFF_0000_u32 as i32)))
}

/// The values of positive scales: as binary16 numbers they are 2⁻⁸ of them.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn positive(scales: [u8; BLOCKS]) -> __m256 {
    let words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(scales)));
    _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16::<7>(words)), _mm256_set1_ps(256.0))
}

/// The values of scales, of which few are not positive.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn scale_values(scales: [u8; BLOCKS]) -> __m256 {
    // A positive one is at most the largest; NaN and negative ones have a byte above it.
    let above = _mm_subs_epu8(_mm_cvtsi64_si128(i64::from_le_bytes(scales)), _mm_set1_epi8(e4m3::MAX_BYTE as i8));
    if _mm_cvtsi128_si64(above) == 0 { positive(scales) } else { any(scales) }
}

/// The values of any scales.
#[target_feature(enable = "avx2,fma,f16c")]
#[cold]
fn any(scales: [u8; BLOCKS]) -> __m256 {
    let values = scales.map(|byte| SCALES[usize::from(byte)]);
    // SAFETY: the source is an array of 8 floats.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}
