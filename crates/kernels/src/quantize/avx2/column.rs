//! Columns of a panel as rows: the transposed input, Hadamard-transformed if asked. Twin of [`nvfp4_spec::matrix::columns`].

use crate::avx2::{Block, load, round_to_bf16, store, widen};
use half::bf16;
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{BLOCK, Element, Precision};
use std::arch::x86_64::*;

/// Writes `cols` columns of `rows` rows as rows of `pitch` elements, zeros behind the last. `x` starts at the first element and
/// has rows `stride` apart.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn transpose<T: Element>(x: &[T], stride: usize, rows: usize, cols: usize, pitch: usize, out: &mut [T]) {
    for r in (0..rows).step_by(8) {
        for c in (0..cols).step_by(8) {
            if r + 8 <= rows && c + 8 <= cols {
                let from =
                    std::array::from_fn(|i| x[(r + i) * stride + c..].first_chunk().expect("8 columns are left"));
                let to = transpose_8x8::<T>(from);
                for (i, row) in to.iter().enumerate() {
                    out[(c + i) * pitch + r..][..8].copy_from_slice(row);
                }
            } else {
                for (i, j) in (r..rows.min(r + 8)).flat_map(|i| (c..cols.min(c + 8)).map(move |j| (i, j))) {
                    out[j * pitch + i] = x[i * stride + j];
                }
            }
        }
    }
    for row in out.chunks_exact_mut(pitch).take(cols) {
        row[rows..].fill(T::default());
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose_8x8<T: Element>(rows: [&[T; 8]; 8]) -> [[T; 8]; 8] {
    let mut out = [[T::default(); 8]; 8];
    match T::PRECISION {
        Precision::F32 => {
            // SAFETY: eight elements of 4 bytes are one vector.
            let r = rows.map(|row| unsafe { _mm256_loadu_ps(row.as_ptr().cast()) });
            let pair = |i: usize| [_mm256_unpacklo_ps(r[i], r[i + 1]), _mm256_unpackhi_ps(r[i], r[i + 1])];
            let (p0, p2, p4, p6) = (pair(0), pair(2), pair(4), pair(6));
            let quad = |a: [__m256; 2], b: [__m256; 2]| {
                [
                    _mm256_shuffle_ps::<0b01_00_01_00>(a[0], b[0]),
                    _mm256_shuffle_ps::<0b11_10_11_10>(a[0], b[0]),
                    _mm256_shuffle_ps::<0b01_00_01_00>(a[1], b[1]),
                    _mm256_shuffle_ps::<0b11_10_11_10>(a[1], b[1]),
                ]
            };
            let (top, bottom) = (quad(p0, p2), quad(p4, p6));
            for i in 0..4 {
                let (low, high) = (
                    _mm256_permute2f128_ps::<0x20>(top[i], bottom[i]),
                    _mm256_permute2f128_ps::<0x31>(top[i], bottom[i]),
                );
                // SAFETY: eight elements of 4 bytes are one vector.
                unsafe { _mm256_storeu_ps(out[i].as_mut_ptr().cast(), low) };
                // SAFETY: eight elements of 4 bytes are one vector.
                unsafe { _mm256_storeu_ps(out[i + 4].as_mut_ptr().cast(), high) };
            }
        }
        Precision::Bf16 | Precision::F16 => {
            // SAFETY: eight elements of 2 bytes are half a vector.
            let r = rows.map(|row| unsafe { _mm_loadu_si128(row.as_ptr().cast()) });
            let pair = |i: usize| [_mm_unpacklo_epi16(r[i], r[i + 1]), _mm_unpackhi_epi16(r[i], r[i + 1])];
            let (p0, p2, p4, p6) = (pair(0), pair(2), pair(4), pair(6));
            for half in 0..2 {
                let top = [_mm_unpacklo_epi32(p0[half], p2[half]), _mm_unpackhi_epi32(p0[half], p2[half])];
                let bottom = [_mm_unpacklo_epi32(p4[half], p6[half]), _mm_unpackhi_epi32(p4[half], p6[half])];
                for i in 0..2 {
                    let (even, odd) = (_mm_unpacklo_epi64(top[i], bottom[i]), _mm_unpackhi_epi64(top[i], bottom[i]));
                    // SAFETY: eight elements of 2 bytes are half a vector.
                    unsafe { _mm_storeu_si128(out[4 * half + 2 * i].as_mut_ptr().cast(), even) };
                    // SAFETY: eight elements of 2 bytes are half a vector.
                    unsafe { _mm_storeu_si128(out[4 * half + 2 * i + 1].as_mut_ptr().cast(), odd) };
                }
            }
        }
    }
    out
}

/// Transforms groups of 16. Twin of [`nvfp4_spec::hadamard::transform`]: the same additions, eight lanes at a time.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn hadamard<T: Element>(groups: &[[T; BLOCK]], signs: Signs, out: &mut [[bf16; BLOCK]]) {
    let flips: [__m256; 2] = std::array::from_fn(|half| {
        let f: [f32; 8] = std::array::from_fn(|i| if signs.negates(8 * half + i) { -0.0 } else { 0.0 });
        // SAFETY: the source is an array of 8 floats.
        unsafe { _mm256_loadu_ps(f.as_ptr()) }
    });
    for (group, out) in groups.iter().zip(out) {
        store(transform::<T>(load(group), flips), out);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transform<T: Element>(group: Block, flips: [__m256; 2]) -> Block {
    let x = widen::<T>(group);
    // In a lane whose index has the stage's bit set the result is (other − own), elsewhere (own + other).
    let stage = |v: __m256, other: __m256, negate: __m256| _mm256_add_ps(other, _mm256_xor_ps(v, negate));
    let by_one = _mm256_setr_ps(0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0);
    let by_two = _mm256_setr_ps(0.0, 0.0, -0.0, -0.0, 0.0, 0.0, -0.0, -0.0);
    let by_four = _mm256_setr_ps(0.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, -0.0);
    let half = |v: __m256, flips: __m256| {
        let v = _mm256_xor_ps(v, flips);
        let v = stage(v, _mm256_permute_ps::<0b10_11_00_01>(v), by_one);
        let v = stage(v, _mm256_permute_ps::<0b01_00_11_10>(v), by_two);
        stage(v, _mm256_permute2f128_ps::<0x01>(v, v), by_four)
    };
    let (a, b) = (half(x[0], flips[0]), half(x[1], flips[1]));
    let quarter = _mm256_set1_ps(0.25);
    round_to_bf16([_mm256_mul_ps(_mm256_add_ps(a, b), quarter), _mm256_mul_ps(_mm256_sub_ps(a, b), quarter)])
}
