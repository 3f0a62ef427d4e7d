//! The Hadamard transform along rows with AVX2, on all threads. Twin of
//! [`nvfp4_spec::hadamard::transform`]: the same additions in the same order, a group in two
//! vectors.

use crate::avx2::{Avx2, Block, high_halves, load, round_or_nan, store, widen};
use crate::vector::*;
use crate::{Input, Values};
use half::bf16;
use nvfp4_spec::hadamard::{FACTOR, Signs};
use nvfp4_spec::{BLOCK, Element};
use rayon::prelude::*;

pub(super) fn hadamard(token: Avx2, x: &Input<'_>, signs: Signs, out: &mut [bf16]) {
    match x.values() {
        Values::F32(values) => rows(token, values, x, signs, out),
        Values::Bf16(values) => rows(token, values, x, signs, out),
        Values::F16(values) => rows(token, values, x, signs, out),
    }
}

fn rows<T: Element>(_: Avx2, values: &[T], x: &Input<'_>, signs: Signs, out: &mut [bf16]) {
    out.par_chunks_exact_mut(x.cols()).enumerate().for_each(|(r, out)| {
        let row = &values[r * x.stride()..][..x.cols()];
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { groups(row, signs, out) };
    });
}

/// Transforms the groups of a row. A stage gathers the first elements of its butterflies in one
/// vector and the second ones in another, which changes their order. Comments say which bit of an
/// element's number is that of its vector, its half, its pair and its place in the pair.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn groups<T: Element>(row: &[T], signs: Signs, out: &mut [bf16]) {
    let flips: [f32; BLOCK] = std::array::from_fn(|i| if signs.negates(i) { -0.0 } else { 0.0 });
    let flips = widen::<f32>(load(&flips));
    let factor = _mm256_set1_ps(FACTOR);
    for (group, out) in row.as_chunks::<BLOCK>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        let [a, b] = widen::<T>(load(group));
        let [a, b] = [_mm256_xor_ps(a, flips[0]), _mm256_xor_ps(b, flips[1])];
        let [a, b] = neighbours(a, b); // 3 2 1 0 → 0 2 3 1
        let [a, b] = neighbours(a, b); // → 1 2 0 3
        let [a, b] = butterflies(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)); // → 2 1 0 3
        let [a, b] = neighbours(a, b); // → 3 1 2 0
        let [low, high] = [in_order(a), in_order(b)];
        let [low, high] = [round_or_nan(_mm256_mul_ps(low, factor)), round_or_nan(_mm256_mul_ps(high, factor))];
        store(Block::of_words(high_halves(low, high)), out);
    }
}

/// Eight butterflies.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn butterflies(a: __m256, b: __m256) -> [__m256; 2] {
    [_mm256_add_ps(a, b), _mm256_sub_ps(a, b)]
}

/// The same of neighbours in two vectors: those of the second follow those of the first in each half.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn neighbours(x: __m256, y: __m256) -> [__m256; 2] {
    butterflies(_mm256_shuffle_ps::<0b10_00_10_00>(x, y), _mm256_shuffle_ps::<0b11_01_11_01>(x, y))
}

/// Exchanges the bits of halves and pairs.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn in_order(x: __m256) -> __m256 {
    _mm256_castsi256_ps(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_castps_si256(x)))
}
