//! Arithmetic and comparisons of integers.

use super::*;
use std::arch::aarch64::*;

lanes! {
    _mm256_and_si256, _mm_and_si128: same, vandq_u32, same;
    _mm256_or_si256, _mm_or_si128: same, vorrq_u32, same;
    _mm256_xor_si256, _mm_xor_si128: same, veorq_u32, same;
    _mm256_add_epi32, _mm_add_epi32: same, vaddq_u32, same;
    _mm256_sub_epi32, _mm_sub_epi32: same, vsubq_u32, same;
    _mm256_add_epi16, _mm_add_epi16: vreinterpretq_u16_u32, vaddq_u16, vreinterpretq_u32_u16;
    _mm256_sub_epi16, _mm_sub_epi16: vreinterpretq_u16_u32, vsubq_u16, vreinterpretq_u32_u16;
    _mm256_max_epu32, _mm_max_epu32: same, vmaxq_u32, same;
    _mm256_max_epi32, _mm_max_epi32: vreinterpretq_s32_u32, vmaxq_s32, vreinterpretq_u32_s32;
    _mm256_min_epi32, _mm_min_epi32: vreinterpretq_s32_u32, vminq_s32, vreinterpretq_u32_s32;
    _mm256_max_epu16, _mm_max_epu16: vreinterpretq_u16_u32, vmaxq_u16, vreinterpretq_u32_u16;
    _mm256_cmpgt_epi32, _mm_cmpgt_epi32: vreinterpretq_s32_u32, vcgtq_s32, same;
    _mm256_cmpgt_epi16, _mm_cmpgt_epi16: vreinterpretq_s16_u32, vcgtq_s16, vreinterpretq_u32_u16;
    _mm256_cmpeq_epi32, _mm_cmpeq_epi32: same, vceqq_u32, same;
    _mm256_cmpeq_epi16, _mm_cmpeq_epi16: vreinterpretq_u16_u32, vceqq_u16, vreinterpretq_u32_u16;
}

/// Shifts by a constant.
macro_rules! shifts {
    ($($name:ident, $narrow:ident: $to:ident, $op:ident, $from:ident;)*) => { $(
        #[target_feature(enable = "neon")]
        #[inline]
        #[allow(dead_code)] // not every operation is used in both widths
        pub(crate) fn $narrow<const N: i32>(a: __m128i) -> __m128i {
            $from($op::<N>($to(a)))
        }
        #[target_feature(enable = "neon")]
        #[inline]
        #[allow(dead_code)]
        pub(crate) fn $name<const N: i32>(a: __m256i) -> __m256i {
            __m256i($narrow::<N>(a.0), $narrow::<N>(a.1))
        }
    )* };
}

shifts! {
    _mm256_srli_epi16, _mm_srli_epi16: vreinterpretq_u16_u32, vshrq_n_u16, vreinterpretq_u32_u16;
    _mm256_srai_epi16, _mm_srai_epi16: vreinterpretq_s16_u32, vshrq_n_s16, vreinterpretq_u32_s16;
    _mm256_slli_epi16, _mm_slli_epi16: vreinterpretq_u16_u32, vshlq_n_u16, vreinterpretq_u32_u16;
    _mm256_srli_epi32, _mm_srli_epi32: same, vshrq_n_u32, same;
    _mm256_slli_epi32, _mm_slli_epi32: same, vshlq_n_u32, same;
    _mm256_srli_epi64, _mm_srli_epi64: vreinterpretq_u64_u32, vshrq_n_u64, vreinterpretq_u32_u64;
    _mm256_slli_epi64, _mm_slli_epi64: vreinterpretq_u64_u32, vshlq_n_u64, vreinterpretq_u32_u64;
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_andnot_si256(a: __m256i, b: __m256i) -> __m256i {
    __m256i(vbicq_u32(b.0, a.0), vbicq_u32(b.1, a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_srl_epi32(a: __m256i, count: __m128i) -> __m256i {
    let by = vdupq_n_s32(-(_mm_cvtsi128_si32(count)));
    __m256i(vshlq_u32(a.0, by), vshlq_u32(a.1, by))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_srl_epi16(a: __m256i, count: __m128i) -> __m256i {
    let by = vdupq_n_s16(-(_mm_cvtsi128_si32(count) as i16));
    let half = |x| vreinterpretq_u32_u16(vshlq_u16(vreinterpretq_u16_u32(x), by));
    __m256i(half(a.0), half(a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_mul_epu32(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let (a, b) = (vmovn_u64(vreinterpretq_u64_u32(a)), vmovn_u64(vreinterpretq_u64_u32(b)));
        vreinterpretq_u32_u64(vmull_u32(a, b))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_madd_epi16(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let (a, b) = (vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b));
        vreinterpretq_u32_s32(vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_maddubs_epi16(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let (a, b) = (vreinterpretq_u8_u32(a), vreinterpretq_s8_u32(b));
        // A product of a byte without and one with a sign fits a word; a sum of two saturates.
        let low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), vmovl_s8(vget_low_s8(b)));
        let high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(a)), vmovl_high_s8(b));
        vreinterpretq_u32_s16(vqaddq_s16(vuzp1q_s16(low, high), vuzp2q_s16(low, high)))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_packs_epi32(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let low = vqmovn_s32(vreinterpretq_s32_u32(a));
        vreinterpretq_u32_s16(vqmovn_high_s32(low, vreinterpretq_s32_u32(b)))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_packus_epi32(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let low = vqmovun_s32(vreinterpretq_s32_u32(a));
        vreinterpretq_u32_u16(vqmovun_high_s32(low, vreinterpretq_s32_u32(b)))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_packs_epi16(a: __m256i, b: __m256i) -> __m256i {
    let half = |a, b| {
        let low = vqmovn_s16(vreinterpretq_s16_u32(a));
        vreinterpretq_u32_s8(vqmovn_high_s16(low, vreinterpretq_s16_u32(b)))
    };
    __m256i(half(a.0, b.0), half(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_packus_epi16(a: __m128i, b: __m128i) -> __m128i {
    let low = vqmovun_s16(vreinterpretq_s16_u32(a));
    vreinterpretq_u32_u8(vqmovun_high_s16(low, vreinterpretq_s16_u32(b)))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_packus_epi16(a: __m256i, b: __m256i) -> __m256i {
    __m256i(_mm_packus_epi16(a.0, b.0), _mm_packus_epi16(a.1, b.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cvtepu8_epi32(a: __m128i) -> __m256i {
    let words = vmovl_u8(vget_low_u8(vreinterpretq_u8_u32(a)));
    __m256i(vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_cvtepu16_epi32(a: __m128i) -> __m256i {
    let words = vreinterpretq_u16_u32(a);
    __m256i(vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words))
}

/// The largest of eight words.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn largest_word(words: __m128i) -> u32 {
    u32::from(vmaxvq_u16(vreinterpretq_u16_u32(words)))
}

/// The sign bits of 32 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_movemask_epi8(a: __m256i) -> i32 {
    let weights = vcombine_u8(vcreate_u8(0x8040_2010_0804_0201), vcreate_u8(0x8040_2010_0804_0201));
    let half = |x| {
        let bits = vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8::<7>(vreinterpretq_s8_u32(x))), weights);
        u32::from(vaddv_u8(vget_low_u8(bits))) | u32::from(vaddv_u8(vget_high_u8(bits))) << 8
    };
    (half(a.0) | half(a.1) << 16) as i32
}
