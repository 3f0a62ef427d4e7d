//! bf16 × NVFP4 where A has few rows and B is prepared: the integers of [`aligned`](crate::gemm::mixed::aligned)
//! with eight rows of B at a time, whose values stay in registers.

use super::exact::{prefetch, tile_scales};
use super::tiles::{Prepared, ROWS, Strip, TILE};
use crate::Input;
use crate::avx2::Avx2;
use crate::gemm::exact::FEW;
use crate::gemm::exact::row::for_few_rows;
use crate::gemm::exact::scales::Range;
use crate::gemm::mixed::aligned::{Row, Small, doubled, first_two, rows_of};
use crate::gemm::pieces::in_pieces;
use crate::gemm::spec;
use crate::gemm::writer::Writer;
use nvfp4_spec::Element;
use nvfp4_spec::gemm::Product;
use rayon::prelude::*;
use std::arch::x86_64::*;

/// The product, unless A is not bf16 or some rows have no integers.
pub(super) fn few_rows<T: Element>(
    token: Avx2,
    x: &Input<'_>,
    b: &Prepared<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> bool {
    let Some(rows) = rows_of(token, x) else { return false };
    if !b.ranges().all(Range::has_integers) {
        return false;
    }
    let matrix = x.to_matrix();
    let writer = Writer::new((spec::Operand::Plain(&matrix), b.view.into()), product, out);
    let columns = b.view.rows;
    in_pieces(b.strips(), ROWS * x.rows() * x.cols()).for_each(|s| {
        let mut sums = [[0.0; ROWS]; FEW];
        for_few_rows!(&rows[..], strip_sums(&b.strip(s), &mut sums));
        let (first, width) = (s * ROWS, ROWS.min(columns - s * ROWS));
        for (i, sums) in sums[..rows.len()].iter().enumerate() {
            // SAFETY: a strip writes the columns of its own rows of B only.
            unsafe { writer.write(i, first, &sums[..width]) };
        }
    });
    true
}

/// The scales of a tile's first blocks and of its second ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scales(tile: &[u8; TILE], units: __m256) -> [__m256; 2] {
    let words = tile_scales(tile);
    let first = _mm256_and_si256(words, _mm256_set1_epi32(0xFFFF));
    let second = _mm256_srli_epi32::<16>(words);
    [_mm256_mul_ps(_mm256_cvtepi32_ps(first), units), _mm256_mul_ps(_mm256_cvtepi32_ps(second), units)]
}

/// The values of the low nibbles of a vector of a tile and of the high ones, doubled.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values(codes: &[u8; 32], table: __m256i) -> [__m256i; 2] {
    // SAFETY: the source is an array of 32 bytes.
    let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    let mask = _mm256_set1_epi8(15);
    let even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
    let odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask));
    [even, odd]
}

/// The pair of [`Step`](crate::gemm::mixed::aligned::Step) that nibbles of a vector of a tile belong to.
const fn pair(vector: usize, odd: usize) -> usize {
    vector / 2 * 4 + odd * 2 + vector % 2
}

/// The sums of rows of A with eight of B.
#[target_feature(enable = "avx2,fma,f16c")]
fn strip_sums<const R: usize>(rows: [&Row; R], strip: &Strip<'_>, out: &mut [[f32; ROWS]; FEW]) {
    // SAFETY: the source is an array of 8 floats.
    let units = unsafe { _mm256_loadu_ps(strip.units.as_ptr()) };
    let (table, two) = (doubled(), first_two());
    let other = _mm256_add_epi8(two, _mm256_set1_epi16(0x0200));
    let mut sums = [_mm256_setzero_ps(); R];
    for (k, tile) in strip.tiles.iter().enumerate() {
        prefetch(tile);
        let mut dots = [[_mm256_setzero_si256(); 2]; R];
        for (q, codes) in tile.as_chunks::<32>().0.iter().enumerate() {
            let both = values(codes, table);
            for (odd, &values) in both.iter().enumerate() {
                let blocks = [_mm256_shuffle_epi8(values, two), _mm256_shuffle_epi8(values, other)];
                for r in 0..R {
                    for h in 0..2 {
                        let a = rows[r].steps[2 * k + h].pairs[pair(q, odd)];
                        dots[r][h] = _mm256_add_epi32(dots[r][h], _mm256_madd_epi16(_mm256_set1_epi32(a), blocks[h]));
                    }
                }
            }
        }
        let scales = scales(tile, units);
        for r in 0..R {
            for h in 0..2 {
                let scale = _mm256_mul_ps(_mm256_set1_ps(rows[r].steps[2 * k + h].unit), scales[h]);
                sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][h]), scale, sums[r]);
            }
        }
    }
    for r in 0..R {
        let sum = add_small(&rows[r].small, strip, units, sums[r]);
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(out[r].as_mut_ptr(), sum) };
    }
}

/// Adds the products of the small elements of a row.
#[target_feature(enable = "avx2,fma,f16c")]
fn add_small(small: &[Small], strip: &Strip<'_>, units: __m256, mut sum: __m256) -> __m256 {
    let (table, two) = (doubled(), first_two());
    for x in small {
        let tile = &strip.tiles[x.block / 2];
        let (vector, odd) = (x.pair / 4 * 2 + x.pair % 2, x.pair % 4 / 2);
        let two = _mm256_add_epi8(two, _mm256_set1_epi16((x.block % 2) as i16 * 0x0200));
        let pairs = _mm256_shuffle_epi8(values(&tile.as_chunks::<32>().0[vector], table)[odd], two);
        let words = _mm256_sll_epi32(pairs, _mm_cvtsi32_si128(x.shift));
        let scaled =
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(words)), scales(tile, units)[x.block % 2]);
        sum = _mm256_fmadd_ps(_mm256_set1_ps(x.value), scaled, sum);
    }
    sum
}
