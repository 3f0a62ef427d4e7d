//! Eight-bit floats in vectors. Twins of [`nvfp4_spec::e4m3`], [`nvfp4_spec::e5m2`] and
//! [`nvfp4_spec::e8m0`].

use crate::vector::*;
use nvfp4_spec::fp8::Format;
use nvfp4_spec::{e4m3, e5m2};

/// A format of codes, as constants.
pub(crate) trait SmallFloat: Send + Sync {
    /// The format.
    const FORMAT: Format;
    /// Bits of the mantissa.
    const MANTISSA: i32;
    /// The largest finite value.
    const MAX: f32;
    /// The smallest normal value.
    const MIN_NORMAL: f32;
    /// A value over that of the binary16 number with the same exponent field.
    const OF_HALF: f32;
}

/// E4M3 as a type.
pub(crate) enum E4m3 {}

/// E5M2 as a type.
pub(crate) enum E5m2 {}

impl SmallFloat for E4m3 {
    const FORMAT: Format = Format::E4m3;
    const MANTISSA: i32 = e4m3::MANTISSA;
    const MAX: f32 = e4m3::MAX;
    const MIN_NORMAL: f32 = e4m3::MIN_NORMAL;
    const OF_HALF: f32 = 256.0;
}

impl SmallFloat for E5m2 {
    const FORMAT: Format = Format::E5m2;
    const MANTISSA: i32 = e5m2::MANTISSA;
    const MAX: f32 = e5m2::MAX;
    const MIN_NORMAL: f32 = e5m2::MIN_NORMAL;
    const OF_HALF: f32 = 1.0;
}

/// The codes of eight magnitudes, as doublewords. Not for NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn codes<F: SmallFloat>(a: __m256) -> __m256i {
    let codes = _mm256_sub_epi32(shifted::<F>(a), _mm256_set1_epi32(offset::<F>()));
    _mm256_srl_epi32(codes, _mm_cvtsi32_si128(7 - F::MANTISSA))
}

/// The codes of 16 magnitudes, 0–7 and 8–15, as words in the order of `packs`: 0–3, 8–11, 4–7,
/// 12–15.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn code_words<F: SmallFloat>(a: [__m256; 2]) -> __m256i {
    let words = _mm256_packs_epi32(shifted::<F>(a[0]), shifted::<F>(a[1]));
    let codes = _mm256_sub_epi16(words, _mm256_set1_epi16(offset::<F>() as i16));
    _mm256_srl_epi16(codes, _mm_cvtsi32_si128(7 - F::MANTISSA))
}

/// What [`shifted`] gives for code 0: the exponent of the number that it adds to the smallest
/// magnitudes.
const fn offset<F: SmallFloat>() -> i32 {
    (F::MIN_NORMAL.to_bits() >> 16) as i32 + ((23 - F::MANTISSA) << 7)
}

/// The codes of eight magnitudes, times 2^(7 − mantissa), plus [`offset`]: positive 16-bit numbers
/// in doublewords.
///
/// Adding a power of two that leaves the format's mantissa bits (below the smallest normal value,
/// its smallest step) makes the addition round to nearest even. The sum then has the exponent in
/// its high half, the steps in its low half, and one multiplication of 16-bit halves joins them to
/// the code.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn shifted<F: SmallFloat>(a: __m256) -> __m256i {
    let a = _mm256_min_ps(a, _mm256_set1_ps(F::MAX));
    let exponent = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7F80_0000));
    let exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(F::MIN_NORMAL.to_bits() as i32));
    let power = _mm256_add_epi32(exponent, _mm256_set1_epi32((23 - F::MANTISSA) << 23));
    let sum = _mm256_add_ps(a, _mm256_castsi256_ps(power));
    _mm256_madd_epi16(_mm256_castps_si256(sum), _mm256_set1_epi32(1 << 16 | 1 << (7 - F::MANTISSA)))
}

/// The E8M0 bytes of the smallest powers of two that are not below eight magnitudes, as
/// doublewords. Not for NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn e8m0_up(a: __m256) -> __m256i {
    let bits = _mm256_castps_si256(a);
    let up = _mm256_srli_epi32::<23>(_mm256_add_epi32(bits, _mm256_set1_epi32(0x007F_FFFF)));
    let bytes = _mm256_min_epi32(up, _mm256_set1_epi32(i32::from(nvfp4_spec::e8m0::MAX_BYTE)));
    // Up to 2⁻¹²⁷, the value of byte 0, nothing is rounded up.
    _mm256_and_si256(bytes, _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x0040_0000)))
}

/// One over the values of eight E8M0 bytes in doublewords. Not for NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn e8m0_reciprocals(bytes: __m256i) -> __m256 {
    let exponent = _mm256_sub_epi32(_mm256_set1_epi32(i32::from(nvfp4_spec::e8m0::MAX_BYTE)), bytes);
    // The reciprocal of byte 254 is the only subnormal one.
    let bits = _mm256_max_epi32(_mm256_slli_epi32::<23>(exponent), _mm256_set1_epi32(0x0040_0000));
    _mm256_castsi256_ps(bits)
}

/// Writes the low bytes of eight doublewords.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn store_bytes(x: __m256i, out: &mut [u8; 8]) {
    let words = super::narrow(x, x);
    let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_castsi256_si128(words));
    *out = _mm_cvtsi128_si64(bytes).to_le_bytes();
}
