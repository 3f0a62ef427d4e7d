//! Decoding with AVX2, on all threads.
//!
//! A block has at most sixteen different values, which depend only on its scale byte and the global
//! scale. They are computed once per scale byte, by the rule, and looked up by code: 16-bit values
//! as two byte shuffles, binary32 as a permutation of eight magnitudes and the sign.

use crate::avx2::Avx2;
use crate::vector::*;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element, Precision, e2m1};
use rayon::prelude::*;

/// Elements that one task decodes.
const TASK: usize = 1 << 17;

pub(super) fn dequantize<T: Element>(token: Avx2, q: &View<'_>, out: &mut [T]) {
    if q.rows == 0 || q.cols == 0 {
        return;
    }
    let height = TASK.div_ceil(q.cols);
    out.par_chunks_mut(height * q.cols).enumerate().for_each(|(task, out)| {
        let mut table = Table::new();
        for (i, out) in out.chunks_exact_mut(q.cols).enumerate() {
            let r = task * height + i;
            table.set(q.row_stored(r));
            // SAFETY: an Avx2 token is only made after detection.
            unsafe { row(token, q, r, &mut table, out) };
        }
    });
}

/// The values of the sixteen codes, per scale byte, for one global scale.
struct Table {
    stored: f32,
    ready: [bool; 256],
    entries: Vec<Entry>,
}

/// 16-bit values: their low bytes, then their high bytes. binary32: the eight magnitudes.
#[derive(Clone, Copy)]
struct Entry([u8; 32]);

impl Table {
    fn new() -> Self {
        Table { stored: 0.0, ready: [false; 256], entries: vec![Entry([0; 32]); 256] }
    }

    fn set(&mut self, stored: f32) {
        if self.stored.to_bits() != stored.to_bits() {
            self.stored = stored;
            self.ready = [false; 256];
        }
    }

    #[inline]
    fn entry<T: Element>(&mut self, q: &View<'_>, scale: u8) -> &Entry {
        let index = usize::from(scale);
        if !self.ready[index] {
            self.entries[index] = make::<T>(q.unit.decode_factor(scale, self.stored));
            self.ready[index] = true;
        }
        &self.entries[index]
    }
}

#[inline(never)]
fn make<T: Element>(factor: f32) -> Entry {
    let mut bytes = [0; 32];
    match T::PRECISION {
        Precision::F32 => {
            for (bytes, magnitude) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(e2m1::MAGNITUDES) {
                *bytes = (magnitude * factor).to_le_bytes();
            }
        }
        Precision::Bf16 | Precision::F16 => {
            for code in 0..16 {
                let value = e2m1::decode(code as u8) * factor;
                let bits = match T::PRECISION {
                    Precision::Bf16 => half::bf16::from_f32(value).to_bits(),
                    _ => half::f16::from_f32(value).to_bits(),
                };
                [bytes[code], bytes[16 + code]] = bits.to_le_bytes();
            }
        }
    }
    Entry(bytes)
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn row<T: Element>(_: Avx2, q: &View<'_>, r: usize, table: &mut Table, out: &mut [T]) {
    let (codes, scales) = (q.code_row(r), q.scale_row(r));
    let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
    for ((codes, &scale), out) in codes.as_chunks::<8>().0.iter().zip(scales).zip(&mut *blocks) {
        block(codes, table.entry::<T>(q, scale), out);
    }
    if !tail.is_empty() {
        let (mut padded, mut whole) = ([0; 8], [T::default(); BLOCK]);
        let rest = &codes[blocks.len() * 8..];
        padded[..rest.len()].copy_from_slice(rest);
        block(&padded, table.entry::<T>(q, scales[scales.len() - 1]), &mut whole);
        tail.copy_from_slice(&whole[..tail.len()]);
    }
}

/// Decodes 16 codes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn block<T: Element>(codes: &[u8; 8], entry: &Entry, out: &mut [T; BLOCK]) {
    let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*codes));
    let nibble = _mm_set1_epi8(15);
    let (even, odd) = (_mm_and_si128(bytes, nibble), _mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble));
    let codes = _mm_unpacklo_epi8(even, odd);
    match T::PRECISION {
        Precision::F32 => {
            // SAFETY: the source is an array of 32 bytes.
            let magnitudes = unsafe { _mm256_loadu_ps(entry.0.as_ptr().cast()) };
            let values = |codes: __m128i| {
                let codes = _mm256_cvtepu8_epi32(codes);
                let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(codes, _mm256_set1_epi32(8)));
                // The permutation looks at three bits of an index.
                _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign))
            };
            // SAFETY: 16 elements of 4 bytes are two vectors; this is the first.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast(), values(codes)) };
            // SAFETY: as above; this is the second.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast::<f32>().add(8), values(_mm_srli_si128::<8>(codes))) };
        }
        Precision::Bf16 | Precision::F16 => {
            // SAFETY: the source is an array of 32 bytes; these are the first 16.
            let low = unsafe { _mm_loadu_si128(entry.0.as_ptr().cast()) };
            // SAFETY: as above; these are the last 16.
            let high = unsafe { _mm_loadu_si128(entry.0.as_ptr().add(16).cast()) };
            let (low, high) = (_mm_shuffle_epi8(low, codes), _mm_shuffle_epi8(high, codes));
            let p = out.as_mut_ptr().cast::<__m128i>();
            // SAFETY: 16 elements of 2 bytes are two half vectors; this is the first.
            unsafe { _mm_storeu_si128(p, _mm_unpacklo_epi8(low, high)) };
            // SAFETY: as above; this is the second.
            unsafe { _mm_storeu_si128(p.add(1), _mm_unpackhi_epi8(low, high)) };
        }
    }
}
