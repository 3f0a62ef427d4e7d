//! From eight largest magnitudes to eight scales. Twins of [`nvfp4_spec::fp8::Mode::tile_scale`];
//! not for NaN.

use crate::avx2::small_float::{SmallFloat, e8m0_reciprocals, e8m0_up, store_bytes};
use crate::vector::*;
use nvfp4_spec::Precision;
use nvfp4_spec::fp8::{AmaxRule, ScaleValues};

/// What the elements of eight tiles are multiplied by, and what is stored for them.
#[derive(Clone, Copy)]
pub(super) struct EightScales<S> {
    pub multipliers: [f32; 8],
    pub stored: [S; 8],
}

/// Blocks with 32-bit scales, of elements of a type.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn of_blocks<F: SmallFloat>(rule: AmaxRule, precision: Precision, amaxes: __m256) -> EightScales<f32> {
    let (epsilon, infinity) = (_mm256_set1_ps(rule.epsilon), _mm256_set1_ps(f32::INFINITY));
    let amaxes = _mm256_blendv_ps(amaxes, epsilon, _mm256_cmp_ps::<_CMP_LT_OQ>(amaxes, epsilon));
    let quotients = _mm256_div_ps(_mm256_set1_ps(F::MAX), amaxes);
    let overflow = _mm256_cmp_ps::<_CMP_EQ_OQ>(quotients, infinity);
    let mut scales = _mm256_blendv_ps(quotients, _mm256_set1_ps(precision.max()), overflow);
    if rule.values == ScaleValues::PowersOfTwo {
        scales = _mm256_and_ps(scales, infinity); // the bits of the exponent
    }
    let zero = _mm256_cmp_ps::<_CMP_EQ_OQ>(amaxes, _mm256_setzero_ps());
    let infinite = _mm256_cmp_ps::<_CMP_EQ_OQ>(amaxes, infinity);
    let scales = _mm256_blendv_ps(scales, _mm256_set1_ps(1.0), _mm256_or_ps(zero, infinite));
    EightScales { multipliers: numbers(scales), stored: numbers(_mm256_div_ps(_mm256_set1_ps(1.0), scales)) }
}

/// Blocks of MXFP8.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn of_mx<F: SmallFloat>(amaxes: __m256) -> EightScales<u8> {
    let bytes = e8m0_up(_mm256_mul_ps(amaxes, _mm256_set1_ps(1.0 / F::MAX)));
    let mut stored = [0; 8];
    store_bytes(bytes, &mut stored);
    EightScales { multipliers: numbers(e8m0_reciprocals(bytes)), stored }
}

/// Eight numbers out of a vector.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn numbers(x: __m256) -> [f32; 8] {
    let mut out = [0.0; 8];
    // SAFETY: the destination is an array of 8 numbers.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
    out
}

/// Eight numbers as a vector.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn vector(x: &[f32; 8]) -> __m256 {
    // SAFETY: the source is an array of 8 numbers.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}
