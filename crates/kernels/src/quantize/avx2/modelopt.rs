//! ModelOpt's searches of scales. Twin of [`nvfp4_spec::modelopt`].
//!
//! Errors are computed by the rule's own operations (a division also by way of the reciprocal, see
//! [`super::search`]), so they have its bits. Four-over-six needs no more than that. The sweep computes
//! those of at most 17 candidates and shows that no other one wins.
//!
//! # The sweep
//!
//! Let c be the byte of the rule "six", normal, m the tile's largest magnitude, s(b) the scale of a
//! byte and E(b) its error. Scales are within 2^±50, so s(b + 8) = 2·s(b) exactly, and m < 6.5·s(c).
//! E is computed for the bytes from c to c + 7, and from c − 1 down to c − 8 as far as needed; E* is
//! the least of them.
//!
//! *Below.* Whatever the code of m, the error of a byte is at least the square of m − fl(6s), as
//! rounded, where that is positive: rounding is monotone, and so are sums of what is not negative. It
//! grows as s falls. If it is more than E* for one byte, it is for all below.
//!
//! *Above.* Every byte over c + 7 has a scale that is a power of two times one from c to c + 7. Of
//! the multiples of 2s(b) that a code can be, those up to 6s(b) are multiples of s(b) too, and m is
//! nearer to 6s(b) than to 8s(b). So no element is nearer to a code of the former than to one of the
//! latter: E(b + 8) ≥ E(b), but for what rounding does. A quotient that rounds to a half way point,
//! or a product that is rounded, moves a half way point by less than 4u of it (u = 2⁻²⁴), and one
//! lies at most 7 times as far from 0 as from its neighbours: squares change by less than 60u of
//! themselves, and the rest rounds less than 10 times. So E(b + 8) ≥ (1 − 128u)·E(b). The bytes over
//! b cannot win if (1 − 128u)·E(b) ≥ E*. For the winner itself, or the byte 8 above a winner under c,
//! which often ties with it, that is asked of E(b + 8), computed.
//!
//! A tile for which one of these cannot be shown is left to the rule.

use super::four_over_six::{Choices, RANGE, Tiles};
use super::search::{DIVISION, RECIPROCAL, errors, magnitudes};
use crate::avx2::small_float::{E4m3, codes};
use crate::vector::*;
use nvfp4_spec::scale::Global;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{Element, e4m3, modelopt};

/// The scale that the sweep tries for each scale byte; NaN for bytes that it does not try.
pub(super) struct Swept {
    /// The amax that they are for.
    amax: Option<u32>,
    scales: [f32; 128],
    reciprocals: [f32; 128],
    /// Whether they are within the range that is proved.
    regular: bool,
}

impl Swept {
    pub fn new() -> Self {
        Swept { amax: None, scales: [f32::NAN; 128], reciprocals: [f32::NAN; 128], regular: false }
    }

    /// Switches to another row of the same mode and type.
    pub fn set(&mut self, scaling: &Scaling) {
        let global = scaling.global.amax;
        if self.amax != Some(global.to_bits()) {
            self.amax = Some(global.to_bits());
            for byte in 1..=e4m3::MAX_BYTE {
                let scale = modelopt::swept_scale(byte, global);
                (self.scales[usize::from(byte)], self.reciprocals[usize::from(byte)]) = (scale, 1.0 / scale);
            }
            let within = |byte: u8| (RANGE[0]..=RANGE[1]).contains(&self.scales[usize::from(byte)]);
            // A tensor of zeros has the scale 1 for every byte.
            self.regular = global > 0.0 && within(1) && within(e4m3::MAX_BYTE);
            // A quotient by way of a reciprocal may be off where all bits of the divisor are ones.
            let ones = |scale: &f32| scale.to_bits() & 0x7F_FFFF == 0x7F_FFFF;
            self.regular &= !self.scales[1..127].iter().any(ones);
        }
    }

    /// The scales of eight bytes, and their reciprocals.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    fn of(&self, bytes: __m256i) -> [__m256; 2] {
        let index = _mm256_and_si256(bytes, _mm256_set1_epi32(127));
        // SAFETY: the indices are less than the 128 elements of the tables.
        [&self.scales, &self.reciprocals].map(|table| unsafe { _mm256_i32gather_ps::<4>(table.as_ptr(), index) })
    }
}

/// Bytes of the window that lie below the one of "six".
const BELOW: i32 = 8;
/// Bytes of the window from that one on: an octave.
const OCTAVE: i32 = 8;

/// Searches the scales of eight tiles of one row, whose largest magnitudes are `amax` and whose
/// scale bytes by the rule "six" are `centres`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn sweep<T: Element>(swept: &Swept, centres: &[u8; 8], amax: __m256, tiles: &Tiles<'_, T>) -> Choices {
    let all = (1 << tiles.count) - 1;
    // SAFETY: the source is an array of 8 bytes.
    let centre = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(centres.as_ptr().cast()) });
    if !swept.regular {
        return Choices { scales: centre, undecided: all };
    }
    let x = magnitudes(tiles);
    let infinity = _mm256_set1_ps(f32::INFINITY);
    let (mut least, mut best) = (infinity, centre);
    let mut octave = [infinity; OCTAVE as usize];
    for (offset, kept) in octave.iter_mut().enumerate() {
        let byte = _mm256_add_epi32(centre, _mm256_set1_epi32(offset as i32));
        let sum = error(swept, &x, byte);
        let better = _mm256_cmp_ps::<_CMP_LT_OQ>(sum, least);
        least = _mm256_blendv_ps(least, sum, better);
        best = _mm256_blendv_epi8(best, byte, _mm256_castps_si256(better));
        *kept = sum;
    }
    let zeros = _mm256_cmp_ps::<_CMP_EQ_OQ>(amax, _mm256_setzero_ps());
    // Downwards, until clipping alone is worse in every tile; the smaller byte wins ties.
    let mut none_below = zeros;
    for below in 1..=BELOW + 1 {
        let byte = _mm256_sub_epi32(centre, _mm256_set1_epi32(below));
        let clipped = _mm256_sub_ps(amax, _mm256_mul_ps(swept.of(byte)[0], _mm256_set1_ps(6.0)));
        let worse = _mm256_and_ps(
            _mm256_cmp_ps::<_CMP_GT_OQ>(clipped, _mm256_setzero_ps()),
            _mm256_cmp_ps::<_CMP_GT_OQ>(_mm256_mul_ps(clipped, clipped), least),
        );
        none_below = _mm256_or_ps(worse, zeros);
        if below > BELOW || _mm256_movemask_ps(none_below) == 0xFF {
            break;
        }
        let sum = error(swept, &x, byte);
        let better = _mm256_cmp_ps::<_CMP_LE_OQ>(sum, least);
        least = _mm256_blendv_ps(least, sum, better);
        best = _mm256_blendv_epi8(best, byte, _mm256_castps_si256(better));
    }
    // What each of the octave leaves to the bytes above it.
    let lower = _mm256_and_si256(_mm256_cmpgt_epi32(centre, best), _mm256_set1_epi32(OCTAVE));
    let nearest = _mm256_add_epi32(best, lower);
    let above = error(swept, &x, _mm256_add_epi32(nearest, _mm256_set1_epi32(OCTAVE)));
    let mut others = infinity;
    for (k, sum) in octave.into_iter().enumerate() {
        let byte = _mm256_add_epi32(centre, _mm256_set1_epi32(k as i32));
        let wins = _mm256_castsi256_ps(_mm256_cmpeq_epi32(byte, nearest));
        others = _mm256_min_ps(others, _mm256_blendv_ps(sum, above, wins));
    }
    const SLACK: f32 = 1.0 - 64.0 * f32::EPSILON;
    let none_above = _mm256_cmp_ps::<_CMP_GE_OQ>(_mm256_mul_ps(others, _mm256_set1_ps(SLACK)), least);
    let normal = _mm256_cmpgt_epi32(centre, _mm256_set1_epi32(i32::from(e4m3::MIN_NORMAL_BYTE) - 1));
    let decided = _mm256_and_ps(_mm256_and_ps(none_above, none_below), _mm256_castsi256_ps(normal));
    // A tile of zeros has no error with any byte, so it has the first one.
    let best = _mm256_blendv_epi8(best, _mm256_set1_epi32(1), _mm256_castps_si256(zeros));
    Choices { scales: best, undecided: !_mm256_movemask_ps(_mm256_or_ps(decided, zeros)) & all }
}

/// The errors of eight tiles with these scale bytes; infinite for those that are not tried.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn error(swept: &Swept, x: &[[__m256; 2]; 8], bytes: __m256i) -> __m256 {
    let inside = _mm256_and_si256(
        _mm256_cmpgt_epi32(bytes, _mm256_setzero_si256()),
        _mm256_cmpgt_epi32(_mm256_set1_epi32(i32::from(e4m3::NAN_BYTE)), bytes),
    );
    let [scale, reciprocal] = swept.of(bytes);
    let sum = errors::<RECIPROCAL>(x, scale, reciprocal);
    _mm256_blendv_ps(_mm256_set1_ps(f32::INFINITY), sum, _mm256_castsi256_ps(inside))
}

/// Chooses between the amaxes of eight tiles and 1.5 times those.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn four_over_six<T: Element>(global: &Global, amax: __m256, tiles: &Tiles<'_, T>) -> Choices {
    let x = magnitudes(tiles);
    let six = _mm256_set1_ps(6.0);
    let unit = modelopt::unit(global.amax);
    let mut regular = _mm256_cmp_ps::<_CMP_LE_OQ>(amax, _mm256_set1_ps(f32::MAX));
    if !(global.amax > 0.0 && global.amax.is_finite()) {
        regular = _mm256_setzero_ps();
    }
    let mut tried = [(_mm256_setzero_ps(), _mm256_setzero_si256()); 2];
    for (tried, multiplier) in tried.iter_mut().zip(modelopt::MULTIPLIERS) {
        let amax = _mm256_mul_ps(amax, _mm256_set1_ps(multiplier));
        let sixth = _mm256_div_ps(amax, six);
        // Twin of `tried_scale`. The value of a normal byte: its bits, with another bias.
        let byte = codes::<E4m3>(_mm256_mul_ps(sixth, _mm256_set1_ps(unit)));
        let bits = _mm256_add_epi32(_mm256_slli_epi32::<20>(byte), _mm256_set1_epi32(120 << 23));
        let scale = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(1.0 / unit));
        let normal = _mm256_cmpgt_epi32(byte, _mm256_set1_epi32(i32::from(e4m3::MIN_NORMAL_BYTE) - 1));
        let within = _mm256_and_ps(
            _mm256_cmp_ps::<_CMP_GE_OQ>(scale, _mm256_set1_ps(RANGE[0])),
            _mm256_cmp_ps::<_CMP_LE_OQ>(scale, _mm256_set1_ps(RANGE[1])),
        );
        regular = _mm256_and_ps(regular, _mm256_and_ps(within, _mm256_castsi256_ps(normal)));
        // Twin of `exported`; what it guards against is outside of the range.
        let scaled = _mm256_mul_ps(sixth, _mm256_set1_ps(global.bound.value()));
        let written = codes::<E4m3>(_mm256_div_ps(scaled, _mm256_set1_ps(global.amax / 6.0)));
        *tried = (errors::<DIVISION>(&x, scale, scale), written);
    }
    let [(six, own), (four, larger)] = tried;
    let four_wins = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(four, six));
    Choices {
        scales: _mm256_blendv_epi8(own, larger, four_wins),
        undecided: !_mm256_movemask_ps(regular) & ((1 << tiles.count) - 1),
    }
}
