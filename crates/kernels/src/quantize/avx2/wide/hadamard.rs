//! The Hadamard transform of a piece of bf16 elements, along its columns. Twin of
//! [`nvfp4_spec::hadamard::transform`]; see [`super::super::column`], which has it for AVX2.

use super::{PIECE, Rows, load};
use crate::avx512::Avx512;
use crate::quantize::avx2::column::Submatrix;
use nvfp4_spec::hadamard::{FACTOR, Signs};
use nvfp4_spec::{BLOCK, Element};
use std::arch::x86_64::*;

/// The sign bit for the rows that change sign, nothing for the others.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) fn flips(signs: Signs) -> Rows {
    let mut flips = [_mm512_setzero_si512(); BLOCK];
    for (i, flip) in flips.iter_mut().enumerate() {
        if signs.negates(i) {
            *flip = _mm512_set1_epi16(i16::MIN);
        }
    }
    flips
}

/// The transformed columns, rounded to bf16. NaN of bf16 has no low bits, so that rounding leaves
/// it alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
pub(super) fn transform(rows: &Rows, flips: &Rows) -> Rows {
    let mut even = half::<false>(rows, flips);
    stage::<8>(&mut even);
    let mut out = *rows;
    for (out, &x) in out.iter_mut().zip(&even) {
        *out = _mm512_srli_epi32::<16>(round_bits(x));
    }
    let mut odd = half::<true>(rows, flips);
    stage::<8>(&mut odd);
    for (out, &x) in out.iter_mut().zip(&odd) {
        *out = _mm512_mask_blend_epi16(0xAAAA_AAAA, *out, round_bits(x));
    }
    out
}

/// The bits of the largest magnitude of the transformed columns, before the factor 1/4 and the
/// rounding to bf16. `None` where there is an infinity or NaN.
pub(crate) fn largest<T: Element>(_: Avx512, x: &Submatrix<'_, T>, signs: Signs) -> Option<f32> {
    // SAFETY: an Avx512 token is only made after detection.
    let largest = f32::from_bits(unsafe { largest_bits(x, signs) });
    largest.is_finite().then_some(largest)
}

/// The last butterflies are `a + b` and `a − b`, of which the larger magnitude is `|a| + |b|`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn largest_bits<T: Element>(x: &Submatrix<'_, T>, signs: Signs) -> u32 {
    let flips = flips(signs);
    let mut largest = _mm512_setzero_si512();
    x.for_each_piece::<PIECE>(|_, _, piece, stride| {
        let rows = load(piece, stride);
        for v in [half::<false>(&rows, &flips), half::<true>(&rows, &flips)] {
            for i in 0..8 {
                let sum = _mm512_add_ps(_mm512_abs_ps(v[i]), _mm512_abs_ps(v[i + 8]));
                // As integers, so that NaN is the largest of all.
                largest = _mm512_max_epi32(largest, _mm512_castps_si512(sum));
            }
        }
    });
    _mm512_reduce_max_epi32(largest) as u32
}

/// The even or the odd columns in binary32 after all butterflies but the last.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn half<const ODD: bool>(rows: &Rows, flips: &Rows) -> [__m512; BLOCK] {
    let mut v = [_mm512_setzero_ps(); BLOCK];
    for i in 0..BLOCK {
        let x = _mm512_xor_si512(rows[i], flips[i]);
        v[i] = _mm512_castsi512_ps(match ODD {
            false => _mm512_slli_epi32::<16>(x),
            true => _mm512_and_si512(x, _mm512_set1_epi32(0xFFFF_0000u32 as i32)),
        });
    }
    stage::<1>(&mut v);
    stage::<2>(&mut v);
    stage::<4>(&mut v);
    v
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn stage<const DISTANCE: usize>(v: &mut [__m512; BLOCK]) {
    for i in 0..BLOCK {
        if i & DISTANCE == 0 {
            let (a, b) = (v[i], v[i + DISTANCE]);
            v[i] = _mm512_add_ps(a, b);
            v[i + DISTANCE] = _mm512_sub_ps(a, b);
        }
    }
}

/// A quarter of the values, rounded to bf16 in the high half. Twin of [`crate::avx2::round_bits`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn round_bits(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(_mm512_mul_ps(x, _mm512_set1_ps(FACTOR)));
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)))
}
