//! NVFP4 × NVFP4 where A has few rows and B is prepared: eight rows of B at a time.

use super::tiles::{CODES, Prepared, ROWS, Strip, TILE};
use crate::avx2::Avx2;
use crate::gemm::exact::row::for_few_rows;
use crate::gemm::exact::scales::{RUN, Range};
use crate::gemm::exact::{DOUBLED, FEW, SHIFT, Step, steps};
use crate::gemm::pieces::in_pieces;
use crate::gemm::writer::Writer;
use nvfp4_spec::Element;
use nvfp4_spec::gemm::Product;
use nvfp4_spec::matrix::View;
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Two blocks of a row of A: what the doublewords of a tile are multiplied by.
#[derive(Clone, Copy)]
struct Pair {
    /// Elements 0 and 2 of both blocks, 1 and 3, 4 and 6 ….
    values: [i32; 8],
    /// What undoes the shift of B's values.
    offset: i32,
    /// Their scales as integers of the row.
    scales: i32,
}

/// A row of A.
struct Row {
    pairs: Vec<Pair>,
    range: Range,
}

impl Row {
    fn new(a: &View<'_>, i: usize) -> Self {
        let range = Range::of(a.scale_row(i));
        let ranges = vec![range; a.scale_row(i).len().div_ceil(RUN)];
        let steps: Vec<Step> = steps(a, i, &ranges).collect();
        let pair = |both: &[Step]| {
            let mut pair = Pair { values: [0; 8], offset: 0, scales: 0 };
            for (k, step) in both.iter().enumerate() {
                let word = |low: u32, high: u32| ((low & 0xFF | (high & 0xFF) << 8) << (16 * k)) as i32;
                for (four, values) in step.values.iter().zip(pair.values.as_chunks_mut::<2>().0) {
                    let four = *four as u32;
                    values[0] |= word(four, four >> 16);
                    values[1] |= word(four >> 8, four >> 24);
                }
                pair.offset |= i32::from(step.offset as i16 as u16) << (16 * k);
                pair.scales |= ((step.integer & 0xFFFF) << (16 * k)) as i32;
            }
            pair
        };
        Row { pairs: steps.chunks(2).map(pair).collect(), range }
    }
}

/// The product, unless some rows have no integers that fit.
pub(super) fn few_rows<T: Element>(
    _token: Avx2,
    a: &View<'_>,
    b: &Prepared<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> bool {
    let rows: Vec<Row> = (0..a.rows).map(|i| Row::new(a, i)).collect();
    if !b.ranges().all(|range| rows.iter().all(|row| row.range.fits_integers(range))) {
        return false;
    }
    let columns = b.view.rows;
    let writer = Writer::new((a.into(), b.view.into()), product, out);
    in_pieces(b.strips(), ROWS * a.rows * a.cols).for_each(|s| {
        let mut sums = [[0.0; ROWS]; FEW];
        for_few_rows!(&rows[..], strip_sums(&b.strip(s), &mut sums));
        let (first, width) = (s * ROWS, ROWS.min(columns - s * ROWS));
        for (i, sums) in sums[..a.rows].iter().enumerate() {
            // SAFETY: a strip writes the columns of its own rows of B only.
            unsafe { writer.write(i, first, &sums[..width]) };
        }
    });
    true
}

/// The integers of a tile's scales, in words.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn tile_scales(tile: &[u8; TILE]) -> __m256i {
    let bytes: &[u8; 2 * ROWS] = tile[CODES..].first_chunk().expect("a tile ends in its scales");
    // SAFETY: the source is an array of 16 bytes.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let mask = _mm_set1_epi8(15);
    let powers = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    let powers = _mm_shuffle_epi8(powers, _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask));
    _mm256_mullo_epi16(_mm256_cvtepu8_epi16(powers), _mm256_cvtepu8_epi16(_mm_and_si128(bytes, mask)))
}

/// Asks for the tile that is needed in a while: 32 tiles ahead were better than 8 or none.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn prefetch(tile: &[u8; TILE]) {
    let ahead = tile.as_ptr().wrapping_add(32 * TILE).cast::<i8>();
    _mm_prefetch::<_MM_HINT_T0>(ahead);
    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
}

/// The sums of rows of A with eight of B.
#[target_feature(enable = "avx2,fma,f16c")]
fn strip_sums<const R: usize>(rows: [&Row; R], strip: &Strip<'_>, out: &mut [[f32; ROWS]; FEW]) {
    let shifted: [u8; 16] = DOUBLED.map(|v| (i32::from(v) + SHIFT) as u8);
    // SAFETY: the source is an array of 16 bytes.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(shifted.as_ptr().cast()) });
    let mask = _mm256_set1_epi8(15);
    let pairs: [&[Pair]; R] = rows.map(|row| &row.pairs[..strip.tiles.len()]);
    let mut wide = [[_mm256_setzero_pd(); 2]; R];
    for (run, tiles) in strip.tiles.chunks(RUN / 2).enumerate() {
        let mut sums = [_mm256_setzero_si256(); R];
        for (at, tile) in tiles.iter().enumerate() {
            let k = run * (RUN / 2) + at;
            prefetch(tile);
            let mut words = [_mm256_setzero_si256(); R];
            for r in 0..R {
                words[r] = _mm256_set1_epi32(pairs[r][k].offset);
            }
            for (q, codes) in tile.as_chunks::<32>().0.iter().enumerate() {
                // SAFETY: the source is an array of 32 bytes.
                let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
                let even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
                let odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask));
                for r in 0..R {
                    let a = &pairs[r][k].values;
                    let even = _mm256_maddubs_epi16(even, _mm256_set1_epi32(a[2 * q]));
                    let odd = _mm256_maddubs_epi16(odd, _mm256_set1_epi32(a[2 * q + 1]));
                    words[r] = _mm256_add_epi16(words[r], _mm256_add_epi16(even, odd));
                }
            }
            let scales = tile_scales(tile);
            for r in 0..R {
                let scale = _mm256_mullo_epi16(scales, _mm256_set1_epi32(pairs[r][k].scales));
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(words[r], scale));
            }
        }
        for r in 0..R {
            let halves = [_mm256_castsi256_si128(sums[r]), _mm256_extracti128_si256::<1>(sums[r])];
            for (wide, half) in wide[r].iter_mut().zip(halves) {
                *wide = _mm256_add_pd(*wide, _mm256_cvtepi32_pd(half));
            }
        }
    }
    for r in 0..R {
        let mut sums = [0.0; ROWS];
        for (half, sums) in wide[r].iter().zip(sums.as_chunks_mut::<4>().0) {
            // SAFETY: the destination is an array of 4 doubles.
            unsafe { _mm256_storeu_pd(sums.as_mut_ptr(), *half) };
        }
        // Quartered: the values were doubled.
        let unit = f64::from(rows[r].range.unit()) * 0.25;
        for ((out, sum), other) in out[r].iter_mut().zip(sums).zip(strip.units) {
            *out = (sum * unit * f64::from(other)) as f32;
        }
    }
}
