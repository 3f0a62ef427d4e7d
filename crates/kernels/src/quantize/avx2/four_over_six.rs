//! The 4over6 choice by a floating-point filter. Twin of [`nvfp4_spec::four_over_six`].
//!
//! Only the choice must equal the rule's; the errors themselves are stored nowhere. Both errors are computed in vectors, in
//! another order and without the rule's divisions, and compared with a bound on how far they and the rule's own sums can be
//! apart. Where the bound does not separate the candidates, the rule decides ([`Candidates::choose`] returns `None`).
//!
//! # The bound
//!
//! Let u = 2⁻²⁴, n the number of elements of the tile, and for a candidate with scale value s and codes qᵢ let f = s·A/6E
//! (strict: A is the amax and xᵢ the element) or f = s (fast: xᵢ stands for `fl(x·enc)`, the rule's own product). The exact
//! error of an element is eᵢ = qᵢ·f − xᵢ (magnitudes; code and element have the same sign). The codes here are the rule's:
//! the same product `fl(x·inv)`, rounded to nearest even.
//!
//! A tile is filtered only if both scale bytes are normal E4M3 values, 2⁻⁵⁰ ≤ f ≤ 2⁵⁰ and every scaled element is at most 7.
//! Then q ≤ 6; |q − fl(x·inv)| ≤ 1; inv is 1/f up to a few roundings, so |eᵢ| ≤ 1.01·f; and no operation overflows or
//! loses more to underflow than 2⁻¹⁴⁰·f per element, which the slack in the constants covers.
//!
//! *The rule*, strict: `t = fl(fl(q·s·A)/6E)` is q·f within 2.01u·q·f, and `fl(t − x)` adds one rounding, so an element's
//! error is eᵢ within 2.02u·6f + u·|eᵢ|. Its sum of n = 16 rounds 15 times, with 16 rows in a tree 4 times more.
//! *The filter*: f̂ carries 3 roundings, `fma(q, f̂, −x)` one, so an element's error is eᵢ within 3.02u·6f + u·|eᵢ|. A lane adds
//! at most 32 terms and the lanes add up in 3 more steps: 35 roundings.
//! For the fast path the elements' errors are the same on both sides, and the same bounds hold.
//!
//! MAE: the two sums differ by at most u·(5.1·6·n·f + (20 + 36 + 2)·Σ|eᵢ|) < u·(32·n·f + 64·Ê), Ê being the filter's sum.
//! MSE: squares differ by at most |Δ|·(2·1.01·f + |Δ|), with |Δ| ≤ (12.2 + 1.1)·u·f for the rule and (18.2 + 1.1)·u·f for the
//! filter: together 66·u·f² each; the squares' own rounding is one more per term: u·(68·n·f² + 64·Ê).
//!
//! The candidates are separated if their filtered errors differ by more than both bounds together; evaluating that
//! comparison in binary32 costs a few u·Ê, which the 64 leaves room for (58 are used).

use super::cuts::Table;
use super::encode::{e4m3_bytes, store_bytes};
use crate::avx2::{abs, load, widen};
use nvfp4_spec::{BLOCK, Element, ErrorPath, Metric, e4m3};
use std::arch::x86_64::*;

/// The scale bytes of eight blocks. Twin of `four_over_six::candidate_scales`: a true division by 6 first.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn candidates(amax: __m256, encode: f32, six: &mut [u8; 8], four: &mut [u8; 8]) {
    let base = _mm256_mul_ps(_mm256_div_ps(amax, _mm256_set1_ps(6.0)), _mm256_set1_ps(encode));
    store_bytes(e4m3_bytes(base), six);
    store_bytes(e4m3_bytes(_mm256_mul_ps(base, _mm256_set1_ps(1.5))), four);
}

/// A tile's two scale bytes, six then four, with what the elements are multiplied by and what codes decode with.
pub(super) struct Candidates {
    scales: [u8; 2],
    inverse: [f32; 2],
    decode: [f32; 2],
    /// What elements are multiplied by before they are compared with decoded codes.
    multiplier: f32,
}

impl Candidates {
    /// `None` if a candidate is outside the range in which the bound holds.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub fn new(table: &mut Table, scales: [u8; 2], error: ErrorPath) -> Option<Self> {
        let global = table.scaling().global;
        let normal = e4m3::encode(e4m3::MIN_NORMAL)..=e4m3::MAX_BYTE;
        if !scales.iter().all(|&s| normal.contains(&s) && table.prepare(s)) {
            return None;
        }
        let (unit, multiplier) = match error {
            ErrorPath::Strict => (global.amax * (1.0 / global.bound.six_e()), 1.0),
            ErrorPath::Fast => (1.0, global.encode),
        };
        let decode = scales.map(|s| e4m3_value(s) * unit);
        let in_range = |f: &f32| (2f32.powi(-50)..=2f32.powi(50)).contains(f);
        let inverse = scales.map(|s| table.entry(s).factor);
        decode.iter().all(in_range).then_some(Candidates { scales, inverse, decode, multiplier })
    }

    /// The scale byte that the rule chooses, or `None` if the filter cannot tell.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub fn choose<'a, T: Element>(
        &self,
        amax: f32,
        rows: impl Iterator<Item = &'a [T; BLOCK]>,
        metric: Metric,
        error: ErrorPath,
    ) -> Option<u8> {
        // Written so that NaN is refused too.
        if !self.inverse.iter().all(|inverse| amax * inverse <= 7.0) {
            return None;
        }
        let (errors, count) = match (metric, error) {
            (Metric::Mae, ErrorPath::Strict) => self.errors::<T, true, false>(rows),
            (Metric::Mae, ErrorPath::Fast) => self.errors::<T, true, true>(rows),
            (Metric::Mse, ErrorPath::Strict) => self.errors::<T, false, false>(rows),
            (Metric::Mse, ErrorPath::Fast) => self.errors::<T, false, true>(rows),
        };
        let unit = f32::EPSILON / 2.0;
        let bound = |c: usize| {
            let f = self.decode[c];
            let elements = match metric {
                Metric::Mae => 32.0 * f,
                Metric::Mse => 68.0 * f * f,
            };
            unit * (elements * (count * BLOCK) as f32 + 64.0 * errors[c])
        };
        let bound = bound(0) + bound(1);
        let difference = errors[1] - errors[0];
        if difference < -bound {
            Some(self.scales[1])
        } else if difference > bound {
            Some(self.scales[0])
        } else {
            None
        }
    }

    /// The filtered errors of both candidates, and the number of rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn errors<'a, T: Element, const MAE: bool, const SCALED: bool>(
        &self,
        rows: impl Iterator<Item = &'a [T; BLOCK]>,
    ) -> ([f32; 2], usize) {
        let inverse = self.inverse.map(|x| _mm256_set1_ps(x));
        let decode = self.decode.map(|x| _mm256_set1_ps(x));
        let multiplier = _mm256_set1_ps(self.multiplier);
        let mut sums = [_mm256_setzero_ps(); 2];
        let mut count = 0;
        for row in rows {
            count += 1;
            for x in widen::<T>(abs::<T>(load(row))) {
                let compared = if SCALED { _mm256_mul_ps(x, multiplier) } else { x };
                for c in 0..2 {
                    let q = round_to_grid(_mm256_mul_ps(x, inverse[c]));
                    let e = _mm256_fmsub_ps(q, decode[c], compared);
                    sums[c] = if MAE {
                        _mm256_add_ps(sums[c], _mm256_andnot_ps(_mm256_set1_ps(-0.0), e))
                    } else {
                        _mm256_fmadd_ps(e, e, sums[c])
                    };
                }
            }
        }
        let s = _mm256_hadd_ps(sums[0], sums[1]);
        let s = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s));
        let s = _mm_hadd_ps(s, s);
        let both = _mm_cvtsi128_si64(_mm_castps_si128(s)) as u64;
        ([f32::from_bits(both as u32), f32::from_bits((both >> 32) as u32)], count)
    }
}

/// The E2M1 magnitude nearest to `y`, 0 ≤ y ≤ 7. Adding a power of two that leaves one mantissa bit (below 1: units of 0.5)
/// makes the addition round to nearest even.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn round_to_grid(y: __m256) -> __m256 {
    let y = _mm256_min_ps(y, _mm256_set1_ps(6.0));
    let exponent = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7F80_0000));
    let exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(0x3F80_0000));
    let magic = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(22 << 23)));
    _mm256_sub_ps(_mm256_add_ps(y, magic), magic)
}

/// The value of a normal, positive E4M3 byte: its bits, shifted into place and with the exponent's bias exchanged.
fn e4m3_value(byte: u8) -> f32 {
    f32::from_bits((u32::from(byte) << 20) + (120 << 23))
}
