//! Arithmetic, comparisons and conversions of binary32.

use super::*;
use std::arch::aarch64::*;

/// Operations half by half.
macro_rules! floats {
    ($($name:ident: $op:expr;)*) => { $(
        #[target_feature(enable = "neon")]
        #[inline]
        pub(crate) fn $name(a: __m256, b: __m256) -> __m256 {
            __m256($op(a.0, b.0), $op(a.1, b.1))
        }
    )* };
}

floats! {
    _mm256_add_ps: vaddq_f32;
    _mm256_sub_ps: vsubq_f32;
    _mm256_mul_ps: vmulq_f32;
    _mm256_div_ps: vdivq_f32;
    // The second operand where either is NaN, or where both are zeros.
    _mm256_min_ps: |a, b| vbslq_f32(vcltq_f32(a, b), a, b);
    _mm256_max_ps: |a, b| vbslq_f32(vcgtq_f32(a, b), a, b);
    _mm256_hadd_ps: vpaddq_f32;
}

/// Operations on bits.
macro_rules! bits {
    ($($name:ident: $op:ident;)*) => { $(
        #[target_feature(enable = "neon")]
        #[inline]
        pub(crate) fn $name(a: __m256, b: __m256) -> __m256 {
            _mm256_castsi256_ps($op(_mm256_castps_si256(a), _mm256_castps_si256(b)))
        }
    )* };
}

bits! {
    _mm256_and_ps: _mm256_and_si256;
    _mm256_andnot_ps: _mm256_andnot_si256;
    _mm256_or_ps: _mm256_or_si256;
    _mm256_xor_ps: _mm256_xor_si256;
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_fmadd_ps(a: __m256, b: __m256, c: __m256) -> __m256 {
    __m256(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_fmsub_ps(a: __m256, b: __m256, c: __m256) -> __m256 {
    __m256(vfmaq_f32(vnegq_f32(c.0), a.0, b.0), vfmaq_f32(vnegq_f32(c.1), a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_fnmadd_ps(a: __m256, b: __m256, c: __m256) -> __m256 {
    __m256(vfmsq_f32(c.0, a.0, b.0), vfmsq_f32(c.1, a.1, b.1))
}

pub(crate) const _CMP_EQ_OQ: i32 = 0x00;
pub(crate) const _CMP_UNORD_Q: i32 = 0x03;
pub(crate) const _CMP_LT_OQ: i32 = 0x11;
pub(crate) const _CMP_LE_OQ: i32 = 0x12;
pub(crate) const _CMP_GE_OQ: i32 = 0x1D;
pub(crate) const _CMP_GT_OQ: i32 = 0x1E;

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cmp_ps<const PREDICATE: i32>(a: __m256, b: __m256) -> __m256 {
    let half = |a, b| {
        vreinterpretq_f32_u32(match PREDICATE {
            _CMP_EQ_OQ => vceqq_f32(a, b),
            _CMP_LT_OQ => vcltq_f32(a, b),
            _CMP_LE_OQ => vcleq_f32(a, b),
            _CMP_GE_OQ => vcgeq_f32(a, b),
            _CMP_GT_OQ => vcgtq_f32(a, b),
            _CMP_UNORD_Q => vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))),
            _ => unreachable!("a predicate that the twins do not use"),
        })
    };
    __m256(half(a.0, b.0), half(a.1, b.1))
}

/// The sign bits of eight numbers.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_movemask_ps(a: __m256) -> i32 {
    let _mm = _mm256_castps_si256(a);
    let signs = |x| vreinterpretq_u32_s32(vshrq_n_s32::<31>(vreinterpretq_s32_u32(x)));
    let low = vandq_u32(signs(_mm.0), _mm_setr_epi32(1, 2, 4, 8));
    let high = vandq_u32(signs(_mm.1), _mm_setr_epi32(16, 32, 64, 128));
    vaddvq_u32(vorrq_u32(low, high)) as i32
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cvtepi32_ps(a: __m256i) -> __m256 {
    __m256(vcvtq_f32_s32(vreinterpretq_s32_u32(a.0)), vcvtq_f32_s32(vreinterpretq_s32_u32(a.1)))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cvtph_ps(a: __m128i) -> __m256 {
    let halves = vreinterpretq_f16_u32(a);
    __m256(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves))
}

pub(crate) const _MM_FROUND_TO_ZERO: i32 = 3;

/// To binary16: to nearest even, or towards zero.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cvtps_ph<const ROUNDING: i32>(a: __m256) -> __m128i {
    let nearest = vreinterpretq_u32_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.0), a.1));
    if ROUNDING != _MM_FROUND_TO_ZERO {
        return nearest;
    }
    // One less where the nearest is beyond the number.
    let back = _mm256_cvtph_ps(nearest);
    let beyond = vmovn_high_u32(vmovn_u32(vcagtq_f32(back.0, a.0)), vcagtq_f32(back.1, a.1));
    _mm_add_epi16(nearest, vreinterpretq_u32_u16(beyond))
}

/// The larger or smaller by the sign of a mask.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_blendv_ps(a: __m256, b: __m256, mask: __m256) -> __m256 {
    let half = |a, b, mask| vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(mask)), b, a);
    __m256(half(a.0, b.0, mask.0), half(a.1, b.1, mask.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_add_ps(a: __m128, b: __m128) -> __m128 {
    vaddq_f32(a, b)
}
