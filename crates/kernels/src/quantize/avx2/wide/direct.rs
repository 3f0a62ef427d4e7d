//! Codes that are computed, two blocks at a time: no cuts have to be found, so that an amax may
//! serve a single row. Twins of [`nvfp4_spec::e2m1::encode`] and
//! [`nvfp4_spec::stochastic::encode`].
//!
//! An element is scaled by the rule's own multiplication. Its factor is 2⁻³⁵ times the rule's, which
//! changes no rounding: with the encode scale in [`ENCODE`] the factor is a normal number, and a
//! product that is not rounds to code 0 either way. The scaled values 1, 2 and 4 then have the
//! exponents 92 to 94.
//!
//! Added to 2²² times the power of two e at or below max(y, 1), y is rounded to multiples of e/2,
//! which is E2M1. Here 2¹⁰·y is added to 2³²·e, whose exponent is that of e with one more bit: a
//! maximum and one logical operation find it. The sum's low bits count multiples of e/2, its
//! exponent says which e. Two dot products of words join these, of an even and an odd element, to a
//! byte of codes.

use super::largest_of_sixteen;
use crate::avx512::Avx512;
use nvfp4_spec::scale::Global;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Element, Precision, Profile, Specials, e4m3};
use std::arch::x86_64::*;
use std::ops::RangeInclusive;

/// Encode scales for which factors are far from under- and overflow: 2⁻⁶⁰ to 2⁶⁰.
const ENCODE: RangeInclusive<f32> = power(-60)..=power(60);
/// The exponent that 1 has after scaling.
const ONE: i32 = 92;
/// What scaled elements are in units of: 2⁻³⁵.
pub(super) const UNIT: f32 = power(ONE - 127);
/// The exponent of what is added to an element, less that of the element: a bit that exponents
/// from [`ONE`] to `ONE + 2` do not have.
const ADDED: i32 = 32;
/// The sum's last place would be 2⁻²³ of that: what elements are multiplied by for it to be half of
/// their power of two.
pub(super) const RAISED: f32 = power(ADDED - 22);

/// A power of two.
pub(super) const fn power(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Whether the codes of these settings are computed here.
pub(in crate::quantize::avx2) fn computes(_: Avx512, scaling: &Scaling) -> bool {
    let mode = &scaling.mode;
    mode.profile == Profile::TransformerEngine
        && mode.profile.code_specials(mode.specials) == Specials::Kernel
        && ENCODE.contains(&scaling.global.encode)
}

/// The codes of a row of blocks, rounded to nearest. Not for NaN.
pub(in crate::quantize::avx2) fn nearest<T: Element>(
    _: Avx512,
    row: &[[T; BLOCK]],
    scales: &[u8],
    global: &Global,
    out: &mut [u8],
) {
    // SAFETY: an Avx512 token is only made after detection.
    unsafe { each_sixteen::<T, false>(row, scales, &[], global, out) }
}

/// The codes of a row of blocks, rounded with 16 random bytes per block. Not for NaN.
pub(in crate::quantize::avx2) fn stochastic<T: Element>(
    _: Avx512,
    row: &[[T; BLOCK]],
    scales: &[u8],
    random: &[[u8; BLOCK]],
    global: &Global,
    out: &mut [u8],
) {
    // SAFETY: an Avx512 token is only made after detection.
    unsafe { each_sixteen::<T, true>(row, scales, random, global, out) }
}

/// The bits of the largest magnitude of each of a row of tiles of a 16-bit type. Says whether one is
/// NaN.
pub(in crate::quantize::avx2) fn magnitudes<T: Element>(
    _: Avx512,
    data: &[T],
    (stride, height): (usize, usize),
    out: &mut [u32],
    limit: u32,
) -> bool {
    // SAFETY: an Avx512 token is only made after detection.
    unsafe { find_magnitudes(data, (stride, height), out, limit) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn find_magnitudes<T: Element>(data: &[T], (stride, height): (usize, usize), out: &mut [u32], limit: u32) -> bool {
    assert!(size_of::<T>() == 2);
    let mut all = _mm512_setzero_si512();
    for (i, out) in out.chunks_mut(16).enumerate() {
        let mut pairs = [_mm512_setzero_si512(); 8];
        for r in 0..height {
            let row = data[r * stride + i * 16 * BLOCK..].as_chunks::<BLOCK>().0;
            let row = &row[..row.len().min(out.len())];
            for (pair, x) in pairs.iter_mut().zip(row.chunks(2)) {
                *pair = _mm512_max_epu16(*pair, _mm512_and_si512(words(x), _mm512_set1_epi16(0x7FFF)));
            }
        }
        let largest = _mm512_cvtepu16_epi32(largest_of_sixteen(pairs));
        all = _mm512_max_epu32(all, largest);
        // SAFETY: the mask has as many bits as there are doublewords.
        unsafe { _mm512_mask_storeu_epi32(out.as_mut_ptr().cast(), first(out.len()), largest) };
    }
    _mm512_cmpgt_epu32_mask(all, _mm512_set1_epi32(limit as i32)) != 0
}

/// A mask of the first `count` of 16.
pub(super) fn first(count: usize) -> u16 {
    u16::MAX >> (16 - count)
}

/// The words of one or two blocks of a 16-bit type.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn words<T: Element>(x: &[[T; BLOCK]]) -> __m512i {
    assert!(size_of::<T>() == 2 && !x.is_empty());
    // SAFETY: the mask has 16 bits for each block, 32 at the most.
    unsafe { _mm512_maskz_loadu_epi16(if x.len() < 2 { 0xFFFF } else { u32::MAX }, x.as_ptr().cast()) }
}

/// Two blocks, or one and zeros.
pub(super) struct Pair {
    /// The magnitudes of elements 0, 2, … and of 1, 3, ….
    pub values: [__m512; 2],
    /// A word for every element, with its sign.
    signs: __m512i,
}

impl Pair {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    #[inline]
    pub fn load<T: Element>(x: &[[T; BLOCK]]) -> Self {
        if T::PRECISION == Precision::F32 {
            let block = |i: usize| match x.get(i) {
                // SAFETY: 16 elements of 4 bytes are one vector.
                Some(x) => unsafe { _mm512_loadu_ps(x.as_ptr().cast()) },
                None => _mm512_setzero_ps(),
            };
            let (a, b) = (block(0), block(1));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            let (even, odd) = (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
            let signs = _mm512_mask_blend_epi16(
                0xAAAA_AAAA,
                _mm512_srli_epi32::<16>(_mm512_castps_si512(even)),
                _mm512_castps_si512(odd),
            );
            return Pair { values: [_mm512_abs_ps(even), _mm512_abs_ps(odd)], signs };
        }
        let signs = words(x);
        let a = _mm512_and_si512(signs, _mm512_set1_epi16(0x7FFF));
        let values = match T::PRECISION {
            Precision::F16 => [
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)),
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(a))),
            ],
            Precision::Bf16 | Precision::F32 => {
                let odd = _mm512_and_si512(signs, _mm512_set1_epi32(0x7FFF_0000));
                [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(a)), _mm512_castsi512_ps(odd)]
            }
        };
        Pair { values, signs }
    }
}

/// Of 16 lanes those of pair `k`: lane 2k eight times, lane 2k + 1 eight times.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn of_pair(lanes: __m512, k: usize) -> __m512 {
    let order = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(2 * k as i32)), lanes)
}

/// What the elements of 16 blocks with these scale bytes are multiplied by, in units of [`UNIT`]. Twin
/// of [`nvfp4_spec::scale::inverse_scale`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn factors(scales: &[u8], global: &Global) -> __m512 {
    // SAFETY: the mask has as many bits as there are bytes.
    let bytes = unsafe { _mm_maskz_loadu_epi8(first(scales.len()), scales.as_ptr().cast()) };
    _mm512_mul_ps(inverse(values_of_bytes(_mm512_cvtepu8_epi32(bytes)), global), _mm512_set1_ps(UNIT))
}

/// The values of E4M3 bytes other than NaN: their bits, shifted into place, and the difference of the
/// biases.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn values_of_bytes(bytes: __m512i) -> __m512 {
    const BIASES: f32 = e4m3::MIN_NORMAL / f32::MIN_POSITIVE;
    _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(bytes)), _mm512_set1_ps(BIASES))
}

/// `min(fl(1/fl(value · dec)), f32::MAX)`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn inverse(values: __m512, global: &Global) -> __m512 {
    let quotient = _mm512_div_ps(_mm512_set1_ps(1.0), _mm512_mul_ps(values, _mm512_set1_ps(global.decode)));
    _mm512_min_ps(quotient, _mm512_set1_ps(f32::MAX))
}

/// Scaled magnitudes, at most 6.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn scaled(x: __m512, factor: __m512) -> __m512 {
    _mm512_min_ps(_mm512_mul_ps(x, factor), _mm512_set1_ps(6.0 * UNIT))
}

/// What to add to [`RAISED`] times a scaled magnitude below 8 for the addition to round to E2M1.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn rounder(y: __m512) -> __m512 {
    let from_one = _mm512_castps_si512(_mm512_max_ps(y, _mm512_set1_ps(UNIT)));
    let (exponent, bit) = (_mm512_set1_epi32(0x7F80_0000), _mm512_set1_epi32(ADDED << 23));
    // (from_one & exponent) | bit
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xEA>(from_one, exponent, bit))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn each_sixteen<T: Element, const STOCHASTIC: bool>(
    row: &[[T; BLOCK]],
    scales: &[u8],
    random: &[[u8; BLOCK]],
    global: &Global,
    out: &mut [u8],
) {
    let (sixteens, rest) = row.as_chunks::<16>();
    let done = 16 * sixteens.len();
    for (i, x) in sixteens.iter().enumerate() {
        let out: &mut [u8; 128] = (&mut out[128 * i..][..128]).try_into().expect("16 blocks");
        let random = if STOCHASTIC { &random[16 * i..][..16] } else { &[] };
        sixteen::<T, STOCHASTIC>(x, factors(&scales[16 * i..][..16], global), random, out);
    }
    if !rest.is_empty() {
        let (mut x, mut bytes, mut codes) = ([[T::default(); BLOCK]; 16], [[0; BLOCK]; 16], [0; 128]);
        x[..rest.len()].copy_from_slice(rest);
        if STOCHASTIC {
            bytes[..rest.len()].copy_from_slice(&random[done..][..rest.len()]);
        }
        let factors = factors(&scales[done..][..rest.len()], global);
        sixteen::<T, STOCHASTIC>(&x, factors, &bytes, &mut codes);
        let out = &mut out[128 * sixteens.len()..];
        out.copy_from_slice(&codes[..out.len()]);
    }
}

/// The codes of 16 blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn sixteen<T: Element, const STOCHASTIC: bool>(
    x: &[[T; BLOCK]; 16],
    factors: __m512,
    random: &[[u8; BLOCK]],
    out: &mut [u8; 128],
) {
    for (half, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let (mut bytes, mut signs) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for j in 0..4 {
            let k = 4 * half + j;
            let pair = Pair::load(&x[2 * k..][..2]);
            let factor = of_pair(factors, k);
            let [even, odd] = pair.values.map(|x| scaled(x, factor));
            bytes[j] = match STOCHASTIC {
                false => join(to_nearest(even), to_nearest(odd)),
                true => {
                    let random: &[[u8; BLOCK]; 2] = random[2 * k..][..2].try_into().expect("two blocks");
                    // SAFETY: the source is two arrays of 16 bytes.
                    let r = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(random.as_ptr().cast()) });
                    let byte = _mm512_set1_epi32(0xFF << 7);
                    let r_even = _mm512_and_si512(_mm512_slli_epi32::<7>(r), byte);
                    let r_odd = _mm512_and_si512(_mm512_srli_epi32::<1>(r), byte);
                    join(at_random(even, r_even), at_random(odd, r_odd))
                }
            };
            signs[j] = pair.signs;
        }
        // SAFETY: the destination is an array of 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), packed(bytes, signs)) };
    }
}

/// Sums whose bits are those of the rounded magnitudes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn to_nearest(y: __m512) -> __m512i {
    _mm512_castps_si512(_mm512_fmadd_ps(y, _mm512_set1_ps(RAISED), rounder(y)))
}

/// The same, rounded by a random byte, which is here 2⁷ times that.
///
/// With `e` the power of two at or below max(y, 1) the grid step at y is e/2, so `u·step` is
/// 2⁷r · 2⁻¹⁶e. Elements are at most 6, so that the sum is less than 8.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn at_random(y: __m512, r: __m512i) -> __m512i {
    // The exponents from `ONE` to `ONE + 2` have the bit 16.
    const { assert!(ONE & 16 != 0 && ONE & 3 == 0 && ONE & ADDED == 0) };
    let from_one = _mm512_castps_si512(_mm512_max_ps(y, _mm512_set1_ps(UNIT)));
    let step = _mm512_castsi512_ps(_mm512_and_si512(from_one, _mm512_set1_epi32((0xFF & !16) << 23)));
    let t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(r), step, y);
    const DOWN: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    _mm512_castps_si512(_mm512_fmadd_round_ps::<DOWN>(t, _mm512_set1_ps(RAISED), rounder(t)))
}

/// Bytes of two codes, times 2⁶, from sums of even and odd elements. A sum's high word is 2⁷ times
/// its exponent, and a binade has two codes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn join(even: __m512i, odd: __m512i) -> __m512i {
    let none = _mm512_set1_epi32(-17 * ((ONE + ADDED) << 7));
    let joined = _mm512_dpwssd_epi32(none, even, _mm512_set1_epi32(1 << 16 | 1 << 6));
    _mm512_dpwssd_epi32(joined, odd, _mm512_set1_epi32(16 << 16 | 16 << 6))
}

/// The bytes of eight blocks in order, with their signs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn packed(bytes: [__m512i; 4], signs: [__m512i; 4]) -> __m512i {
    let mut halves = [_mm512_setzero_si512(); 2];
    for (i, half) in halves.iter_mut().enumerate() {
        let codes = _mm512_srli_epi16::<6>(_mm512_packus_epi32(bytes[2 * i], bytes[2 * i + 1]));
        // Bits 7 and 15 are signs, which belong to bits 3 and 7.
        let signs = _mm512_packs_epi16(signs[2 * i], signs[2 * i + 1]);
        // codes | (signs & bit)
        let codes = _mm512_ternarylogic_epi32::<0xF8>(codes, _mm512_srli_epi16::<4>(signs), _mm512_set1_epi16(0x08));
        *half = _mm512_ternarylogic_epi32::<0xF8>(codes, _mm512_srli_epi16::<8>(signs), _mm512_set1_epi16(0x80));
    }
    // The packs work on quarters of registers, so the quarters come out interleaved.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, _mm512_packus_epi16(halves[0], halves[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::Mode;
    use nvfp4_testing::{Need, missing};

    /// Every element of the 16-bit types, under scale bytes and amaxes over the whole range, against
    /// the rules.
    #[test]
    fn computed_codes_are_those_of_the_rules() {
        let Some(token) = Avx512::detect() else { return missing(Need::Avx512, "the CPU has no AVX-512") };
        for (amax, step) in [(0.37, 3), (power(71), 29), (power(-48), 29), (1e-3, 31)] {
            check::<half::bf16>(token, amax, step, half::bf16::from_bits);
            check::<half::f16>(token, amax, step, half::f16::from_bits);
            check::<f32>(token, amax, step, |bits| f32::from_bits(u32::from(bits) << 16 | u32::from(bits)));
        }
    }

    fn check<T: Element>(token: Avx512, amax: f32, step: usize, of_bits: fn(u16) -> T) {
        let scaling = Scaling::new(amax, &Mode::default(), T::PRECISION);
        assert!(computes(token, &scaling), "{amax}");
        // An odd number of blocks, and not whole sixteens.
        let elements: Vec<T> = (0..=u16::MAX).map(of_bits).filter(|x| !x.to_f32().is_nan()).collect();
        let blocks = elements.as_chunks::<BLOCK>().0;
        let blocks = &blocks[..blocks.len() - 1];
        let random: Vec<[u8; BLOCK]> =
            (0..blocks.len()).map(|b| std::array::from_fn(|i| (b * 37 + i * 83) as u8)).collect();
        let mut codes = vec![[0u8; BLOCK / 2]; blocks.len()];
        for scale in (0..=e4m3::MAX_BYTE).step_by(step) {
            let scales = vec![scale; blocks.len()];
            let factor = scaling.factor(scale);
            for draws in [false, true] {
                match draws {
                    false => nearest(token, blocks, &scales, &scaling.global, codes.as_flattened_mut()),
                    true => stochastic(token, blocks, &scales, &random, &scaling.global, codes.as_flattened_mut()),
                }
                for (b, block) in blocks.iter().enumerate() {
                    for (i, x) in block.iter().enumerate() {
                        let expected = scaling.code(factor.apply(x.to_f32()), draws.then(|| random[b][i]));
                        let code = codes[b][i / 2] >> (4 * (i % 2)) & 15;
                        assert_eq!(code, expected, "{x:?}, scale {scale:#x}, amax {amax:e}, random: {draws}");
                    }
                }
            }
        }
    }
}
