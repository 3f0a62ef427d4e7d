//! Loads, stores, constants, and lanes that change their places. Constants of shuffles are those
//! that the twins use.

use super::*;
use std::arch::aarch64::*;
use std::arch::asm;

// ---- Memory ----

/// Eight numbers or 32 bytes.
macro_rules! memory {
    ($($load:ident, $store:ident: $pointer:ty, $vector:ident, $half:ty, $lanes:ident;)*) => { $(
        /// # Safety
        ///
        /// The pointer must be valid for reads of 32 bytes.
        #[target_feature(enable = "neon")]
        #[inline]
        pub(crate) unsafe fn $load(p: *const $pointer) -> $vector {
            let p = p.cast::<$half>();
            // SAFETY: the caller's.
            unsafe { $vector(p.read_unaligned(), p.add(1).read_unaligned()) }
        }
        /// # Safety
        ///
        /// The pointer must be valid for writes of 32 bytes.
        #[target_feature(enable = "neon")]
        #[inline]
        pub(crate) unsafe fn $store(p: *mut $pointer, x: $vector) {
            let p = p.cast::<$half>();
            // SAFETY: the caller's.
            unsafe { p.write_unaligned(x.0) };
            // SAFETY: the caller's.
            unsafe { p.add(1).write_unaligned(x.1) };
        }
    )* };
}

memory! {
    _mm256_loadu_si256, _mm256_storeu_si256: __m256i, __m256i, __m128i, u32;
    _mm256_loadu_ps, _mm256_storeu_ps: f32, __m256, __m128, f32;
}

/// # Safety
///
/// The pointer must be valid for reads of 16 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_loadu_si128(p: *const __m128i) -> __m128i {
    // SAFETY: the caller's.
    unsafe { p.read_unaligned() }
}

/// # Safety
///
/// The pointer must be valid for writes of 16 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_storeu_si128(p: *mut __m128i, x: __m128i) {
    // SAFETY: the caller's.
    unsafe { p.write_unaligned(x) };
}

/// # Safety
///
/// The pointer must be valid for reads of 16 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_loadu_ps(p: *const f32) -> __m128 {
    // SAFETY: the caller's.
    unsafe { p.cast::<__m128>().read_unaligned() }
}

/// # Safety
///
/// The pointer must be valid for writes of 16 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_storeu_ps(p: *mut f32, x: __m128) {
    // SAFETY: the caller's.
    unsafe { p.cast::<__m128>().write_unaligned(x) };
}

/// # Safety
///
/// The pointer must be valid for reads of 8 bytes.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_loadl_epi64(p: *const __m128i) -> __m128i {
    // SAFETY: the caller's.
    _mm_cvtsi64_si128(unsafe { p.cast::<i64>().read_unaligned() })
}

/// # Safety
///
/// Every index must lie inside the table.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm256_i32gather_ps<const SCALE: i32>(table: *const f32, index: __m256i) -> __m256 {
    const { assert!(SCALE == 4) };
    let mut out = [0f32; 8];
    for (out, index) in out.iter_mut().zip(lanes_of(index)) {
        // SAFETY: the caller's.
        *out = unsafe { table.add(index as usize).read() };
    }
    // SAFETY: the source is an array of 8 floats.
    unsafe { _mm256_loadu_ps(out.as_ptr()) }
}

#[target_feature(enable = "neon")]
#[inline]
fn lanes_of(x: __m256i) -> [u32; 8] {
    let mut out = [0; 8];
    // SAFETY: the destination is an array of 8 doublewords.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) };
    out
}

pub(crate) const _MM_HINT_T0: i32 = 3;

/// # Safety
///
/// None is needed: a prefetch is harmless wherever it points.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn _mm_prefetch<const HINT: i32>(p: *const i8) {
    // SAFETY: the instruction changes no memory and no register.
    unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) };
}

// ---- Constants and casts ----

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_setzero_si256() -> __m256i {
    _mm256_set1_epi32(0)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_setzero_si128() -> __m128i {
    vdupq_n_u32(0)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_setzero_ps() -> __m256 {
    _mm256_set1_ps(0.0)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set1_ps(x: f32) -> __m256 {
    __m256(vdupq_n_f32(x), vdupq_n_f32(x))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set1_epi32(x: i32) -> __m256i {
    __m256i(vdupq_n_u32(x as u32), vdupq_n_u32(x as u32))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_set1_epi16(x: i16) -> __m128i {
    vreinterpretq_u32_s16(vdupq_n_s16(x))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set1_epi16(x: i16) -> __m256i {
    __m256i(_mm_set1_epi16(x), _mm_set1_epi16(x))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_set1_epi8(x: i8) -> __m128i {
    vreinterpretq_u32_s8(vdupq_n_s8(x))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set1_epi8(x: i8) -> __m256i {
    __m256i(_mm_set1_epi8(x), _mm_set1_epi8(x))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_setr_epi32(a: u32, b: u32, c: u32, d: u32) -> __m128i {
    let pair = |a: u32, b: u32| vcreate_u32(u64::from(a) | u64::from(b) << 32);
    vcombine_u32(pair(a, b), pair(c, d))
}

#[target_feature(enable = "neon")]
#[inline]
#[allow(clippy::too_many_arguments)]
pub(crate) fn _mm256_setr_epi32(a: i32, b: i32, c: i32, d: i32, e: i32, f: i32, g: i32, h: i32) -> __m256i {
    let four = |a: i32, b: i32, c: i32, d: i32| _mm_setr_epi32(a as u32, b as u32, c as u32, d as u32);
    __m256i(four(a, b, c, d), four(e, f, g, h))
}

#[target_feature(enable = "neon")]
#[inline]
#[allow(clippy::too_many_arguments)]
pub(crate) fn _mm256_setr_ps(a: f32, b: f32, c: f32, d: f32, e: f32, f: f32, g: f32, h: f32) -> __m256 {
    let four = |a: f32, b: f32, c: f32, d: f32| _mm_setr_epi32(a.to_bits(), b.to_bits(), c.to_bits(), d.to_bits());
    _mm256_castsi256_ps(__m256i(four(a, b, c, d), four(e, f, g, h)))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set_m128i(high: __m128i, low: __m128i) -> __m256i {
    __m256i(low, high)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_set_m128(high: __m128, low: __m128) -> __m256 {
    __m256(low, high)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_castps_si256(a: __m256) -> __m256i {
    __m256i(vreinterpretq_u32_f32(a.0), vreinterpretq_u32_f32(a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_castsi256_ps(a: __m256i) -> __m256 {
    __m256(vreinterpretq_f32_u32(a.0), vreinterpretq_f32_u32(a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_castsi256_si128(a: __m256i) -> __m128i {
    a.0
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_castps256_ps128(a: __m256) -> __m128 {
    a.0
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_extracti128_si256<const HALF: i32>(a: __m256i) -> __m128i {
    if HALF == 0 { a.0 } else { a.1 }
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_extractf128_ps<const HALF: i32>(a: __m256) -> __m128 {
    if HALF == 0 { a.0 } else { a.1 }
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_cvtsi32_si128(x: i32) -> __m128i {
    _mm_setr_epi32(x as u32, 0, 0, 0)
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_cvtsi64_si128(x: i64) -> __m128i {
    vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(x as u64), vcreate_u64(0)))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_cvtsi128_si32(x: __m128i) -> i32 {
    vgetq_lane_u32::<0>(x) as i32
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_cvtsi128_si64(x: __m128i) -> i64 {
    vgetq_lane_u64::<0>(vreinterpretq_u64_u32(x)) as i64
}

// ---- Places ----

lanes! {
    _mm256_unpacklo_epi8, _mm_unpacklo_epi8: vreinterpretq_u8_u32, vzip1q_u8, vreinterpretq_u32_u8;
    _mm256_unpackhi_epi8, _mm_unpackhi_epi8: vreinterpretq_u8_u32, vzip2q_u8, vreinterpretq_u32_u8;
    _mm256_unpacklo_epi16, _mm_unpacklo_epi16: vreinterpretq_u16_u32, vzip1q_u16, vreinterpretq_u32_u16;
    _mm256_unpackhi_epi16, _mm_unpackhi_epi16: vreinterpretq_u16_u32, vzip2q_u16, vreinterpretq_u32_u16;
    _mm256_unpacklo_epi32, _mm_unpacklo_epi32: same, vzip1q_u32, same;
    _mm256_unpackhi_epi32, _mm_unpackhi_epi32: same, vzip2q_u32, same;
    _mm256_unpacklo_epi64, _mm_unpacklo_epi64: vreinterpretq_u64_u32, vzip1q_u64, vreinterpretq_u32_u64;
    _mm256_unpackhi_epi64, _mm_unpackhi_epi64: vreinterpretq_u64_u32, vzip2q_u64, vreinterpretq_u32_u64;
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_permute4x64_epi64<const ORDER: i32>(a: __m256i) -> __m256i {
    const { assert!(ORDER == 0b11_01_10_00) };
    __m256i(_mm_unpacklo_epi64(a.0, a.1), _mm_unpackhi_epi64(a.0, a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_permute2x128_si256<const HALVES: i32>(a: __m256i, b: __m256i) -> __m256i {
    const { assert!(HALVES == 0x20 || HALVES == 0x31) };
    if HALVES == 0x20 { __m256i(a.0, b.0) } else { __m256i(a.1, b.1) }
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_permute2f128_ps<const HALVES: i32>(a: __m256, b: __m256) -> __m256 {
    const { assert!(HALVES == 0x20 || HALVES == 0x31) };
    if HALVES == 0x20 { __m256(a.0, b.0) } else { __m256(a.1, b.1) }
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_shuffle_epi32<const ORDER: i32>(a: __m128i) -> __m128i {
    const { assert!(ORDER == 0b01_00_11_10 || ORDER == 0b10_11_00_01) };
    if ORDER == 0b01_00_11_10 { vextq_u32::<2>(a, a) } else { vrev64q_u32(a) }
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_shuffle_epi32<const ORDER: i32>(a: __m256i) -> __m256i {
    __m256i(_mm_shuffle_epi32::<ORDER>(a.0), _mm_shuffle_epi32::<ORDER>(a.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_shuffle_ps<const ORDER: i32>(a: __m256, b: __m256) -> __m256 {
    const { assert!(ORDER == 0b10_00_10_00 || ORDER == 0b11_01_11_01) };
    match ORDER {
        0b10_00_10_00 => __m256(vuzp1q_f32(a.0, b.0), vuzp1q_f32(a.1, b.1)),
        _ => __m256(vuzp2q_f32(a.0, b.0), vuzp2q_f32(a.1, b.1)),
    }
}

/// The bytes of `table` that the low four bits say, zero where the highest is set.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_shuffle_epi8(table: __m128i, index: __m128i) -> __m128i {
    let index = vandq_u8(vreinterpretq_u8_u32(index), vdupq_n_u8(0x8F));
    vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), index))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_permutevar8x32_epi32(a: __m256i, index: __m256i) -> __m256i {
    let table = uint8x16x2_t(vreinterpretq_u8_u32(a.0), vreinterpretq_u8_u32(a.1));
    let half = |index| {
        // The four bytes of each doubleword.
        let first = vmulq_u32(vandq_u32(index, vdupq_n_u32(7)), vdupq_n_u32(0x0404_0404));
        let bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x0302_0100)));
        vreinterpretq_u32_u8(vqtbl2q_u8(table, bytes))
    };
    __m256i(half(index.0), half(index.1))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_permutevar8x32_ps(a: __m256, index: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(_mm256_castps_si256(a), index))
}

#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm_srli_si128<const BYTES: i32>(a: __m128i) -> __m128i {
    vreinterpretq_u32_u8(vextq_u8::<BYTES>(vreinterpretq_u8_u32(a), vdupq_n_u8(0)))
}

/// Where bytes of the mask have their highest bit set, those of `b`.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_blendv_epi8(a: __m256i, b: __m256i, mask: __m256i) -> __m256i {
    let half = |a, b, mask| {
        let from_b = vcltzq_s8(vreinterpretq_s8_u32(mask));
        vreinterpretq_u32_u8(vbslq_u8(from_b, vreinterpretq_u8_u32(b), vreinterpretq_u8_u32(a)))
    };
    __m256i(half(a.0, b.0, mask.0), half(a.1, b.1, mask.1))
}

/// Every second doubleword from `b`.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_blend_epi32<const LANES: i32>(a: __m256i, b: __m256i) -> __m256i {
    const { assert!(LANES == 0b1010_1010) };
    let odd = vreinterpretq_u32_u64(vdupq_n_u64(0xFFFF_FFFF_0000_0000));
    __m256i(vbslq_u32(odd, b.0, a.0), vbslq_u32(odd, b.1, a.1))
}

/// Every second word from `b`.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn _mm256_blend_epi16<const LANES: i32>(a: __m256i, b: __m256i) -> __m256i {
    const { assert!(LANES == 0b1010_1010) };
    let odd = vdupq_n_u32(0xFFFF_0000);
    __m256i(vbslq_u32(odd, b.0, a.0), vbslq_u32(odd, b.1, a.1))
}
