//! Tiles side by side, eight at a time: their largest magnitudes, their scales, their codes.

use super::AHEAD;
use super::encode::{STEP, encode_steps, mend};
use super::scales::EightScales;
use crate::avx2::small_float::SmallFloat;
use crate::avx2::{Block, infinity_bits, largest_of_eight, load, magnitudes, max, prefetch, values_of, zero};
use crate::vector::*;
use nvfp4_spec::{BLOCK, Element, Specials};

/// Rows of up to eight tiles, `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Band<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
    pub height: usize,
    pub width: usize,
}

impl<'a, T> Band<'a, T> {
    fn row(&self, r: usize) -> &'a [T] {
        &self.data[r * self.stride..][..self.width]
    }
}

/// Quantizes a band: each run of `TILE` columns has one scale for all rows. `out` receives the
/// codes in rows, `out_stride` apart. Returns the scales to store; the last tiles may not exist.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn quantize<T: Element, F: SmallFloat, S, const TILE: usize>(
    band: Band<'_, T>,
    scales: impl Fn(__m256) -> EightScales<S>,
    out: &mut [u8],
    out_stride: usize,
) -> [S; 8] {
    let mut maxima = [zero(); 8];
    for r in 0..band.height {
        if r + AHEAD < band.height {
            prefetch(band.row(r + AHEAD));
        }
        join::<T, TILE>(band.row(r), Specials::Reference, &mut maxima);
    }
    let bits = largest_of_eight::<T>(maxima);
    let infinity = _mm256_set1_epi32(infinity_bits(T::PRECISION) as i32);
    let nan = _mm256_movemask_epi8(_mm256_cmpgt_epi32(bits, infinity)) != 0;
    let bits = if nan { without_nan::<T, TILE>(band) } else { bits };
    let EightScales { multipliers, stored } = scales(values_of(bits, T::PRECISION));
    for r in 0..band.height {
        let codes = &mut out[r * out_stride..][..band.width];
        encode_row::<T, F, TILE>(band.row(r), &multipliers, codes);
        if nan {
            mend(band.row(r), codes);
        }
    }
    stored
}

/// The bits of the largest magnitudes where NaN has to be passed over.
#[cold]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn without_nan<T: Element, const TILE: usize>(band: Band<'_, T>) -> __m256i {
    let mut maxima = [zero(); 8];
    for r in 0..band.height {
        join::<T, TILE>(band.row(r), Specials::Kernel, &mut maxima);
    }
    largest_of_eight::<T>(maxima)
}

/// Joins the magnitudes of a row with the maxima of its tiles.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn join<T: Element, const TILE: usize>(row: &[T], specials: Specials, maxima: &mut [Block; 8]) {
    let (tiles, rest) = row.as_chunks::<TILE>();
    if let Some(eight) = tiles.first_chunk::<8>() {
        // All of them, so that the loop unrolls and the maxima stay in registers.
        for i in 0..8 {
            maxima[i] = max::<T>(maxima[i], magnitude(&eight[i], specials));
        }
        return;
    }
    for (m, tile) in maxima.iter_mut().zip(tiles) {
        *m = max::<T>(*m, magnitude(tile, specials));
    }
    if !rest.is_empty() {
        let mut padded = [T::default(); TILE];
        padded[..rest.len()].copy_from_slice(rest);
        maxima[tiles.len()] = max::<T>(maxima[tiles.len()], magnitude(&padded, specials));
    }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn magnitude<T: Element, const TILE: usize>(tile: &[T; TILE], specials: Specials) -> Block {
    let mut m = [zero(); 2];
    for pair in tile.as_chunks::<BLOCK>().0.as_chunks::<2>().0 {
        m[0] = max::<T>(m[0], magnitudes::<T>(load(&pair[0]), specials));
        m[1] = max::<T>(m[1], magnitudes::<T>(load(&pair[1]), specials));
    }
    max::<T>(m[0], m[1])
}

/// Encodes a row of tiles.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn encode_row<T: Element, F: SmallFloat, const TILE: usize>(x: &[T], multipliers: &[f32; 8], out: &mut [u8]) {
    let (tiles, rest) = x.as_chunks::<TILE>();
    let (out_tiles, out_rest) = out.as_chunks_mut::<TILE>();
    if let (Some(x), Some(out)) = (tiles.first_chunk::<8>(), out_tiles.first_chunk_mut::<8>()) {
        for i in 0..8 {
            encode_steps::<T, F>(x[i].as_chunks::<STEP>().0, multipliers[i], out[i].as_chunks_mut::<STEP>().0);
        }
        return;
    }
    for ((x, out), &m) in tiles.iter().zip(out_tiles).zip(multipliers) {
        encode_steps::<T, F>(x.as_chunks::<STEP>().0, m, out.as_chunks_mut::<STEP>().0);
    }
    if !rest.is_empty() {
        let (mut padded, mut codes) = ([T::default(); TILE], [0; TILE]);
        padded[..rest.len()].copy_from_slice(rest);
        let steps = rest.len().div_ceil(STEP);
        let (x, out) = (&padded.as_chunks::<STEP>().0[..steps], codes.as_chunks_mut::<STEP>().0);
        encode_steps::<T, F>(x, multipliers[tiles.len()], out);
        out_rest.copy_from_slice(&codes[..out_rest.len()]);
    }
}
