//! ModelOpt's searches of scales. Twin of [`nvfp4_spec::modelopt`].
//!
//! Four-over-six computes its two errors by the rule's own operations, so they have its bits. The sweep
//! has a filter: it computes the errors of at most 17 candidates nearly ([`super::squares`]) and shows
//! that no other one wins. The tiles for which that cannot be shown, as in a tie, have the errors of
//! all candidates computed by the rule's own operations.
//!
//! # The sweep
//!
//! Let c be the byte of the rule "six", normal, m the tile's largest magnitude, s(b) the scale of a
//! byte and E(b) its error. Scales are within 2^±50, so s(b + 8) = 2·s(b) exactly, and m < 6.9·s(c).
//! E is bounded for the bytes from c to c + 7, and from c − 1 down to c − 8 as far as needed; E* is
//! the upper bound of the least of them. A byte loses if its lower bound is more.
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
//! b cannot win if (1 − 128u)·E(b) > E*. For the winner itself, or the byte 8 above a winner under c,
//! that is asked of E(b + 8).

use super::four_over_six::{Choices, RANGE, Tiles, round_to_grid};
use super::squares::{Candidates, Factors, magnitudes, sum_of_each};
use crate::avx2::small_float::{E4m3, codes};
use crate::vector::*;
use nvfp4_spec::scale::Global;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{Element, e4m3, modelopt};

/// The scale that the sweep tries for each scale byte, and its reciprocal.
pub(super) struct Swept {
    /// The amax that they are for.
    amax: Option<u32>,
    factors: Factors,
    /// Whether errors by way of the reciprocals have the rule's bits.
    exact: bool,
}

impl Swept {
    pub fn new() -> Self {
        Swept { amax: None, factors: Factors::NONE, exact: false }
    }

    /// Switches to another row of the same mode and type.
    pub fn set(&mut self, scaling: &Scaling) {
        let global = scaling.global.amax;
        if self.amax != Some(global.to_bits()) {
            self.amax = Some(global.to_bits());
            self.factors = Factors::new(|byte| match byte {
                // Where its amax is too small for the byte, as in a tensor of zeros, the scale is 1.
                1.. if modelopt::swept_amax(byte, global) / 6.0 > 0.0 => {
                    let scale = modelopt::swept_scale(byte, global);
                    (scale, 1.0 / scale)
                }
                _ => (f32::NAN, f32::NAN),
            });
            // A quotient by way of a reciprocal may be off where all bits of the divisor are ones.
            let good = |scale: &f32| !scale.is_nan() && scale.to_bits() & 0x7F_FFFF != 0x7F_FFFF;
            self.exact = self.factors.decode[1..=usize::from(e4m3::MAX_BYTE)].iter().all(good);
        }
    }
}

/// Bytes that are tried below the one of "six".
const BELOW: i32 = 8;
/// Bytes that are tried from that one on: an octave.
const OCTAVE: i32 = 8;

/// Searches the scales of eight tiles of one row, whose largest magnitudes are `amax` and whose
/// scale bytes by the rule "six" are `centres`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn sweep<T: Element>(swept: &Swept, centres: &[u8; 8], amax: __m256, tiles: &Tiles<'_, T>) -> Choices {
    // SAFETY: the source is an array of 8 bytes.
    let centre = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(centres.as_ptr().cast()) });
    let mut tried = Candidates::new(&swept.factors, amax, tiles);
    let mut octave = [_mm256_setzero_ps(); OCTAVE as usize];
    for (offset, lower) in octave.iter_mut().enumerate() {
        *lower = tried.try_bytes::<false>(_mm256_add_epi32(centre, _mm256_set1_epi32(offset as i32)));
    }
    let zeros = _mm256_cmp_ps::<_CMP_EQ_OQ>(amax, _mm256_setzero_ps());
    let mut none_below = zeros;
    for below in 1..=BELOW + 1 {
        let byte = _mm256_sub_epi32(centre, _mm256_set1_epi32(below));
        none_below = _mm256_or_ps(tried.clipped_too_much(byte), zeros);
        if below > BELOW || _mm256_movemask_ps(none_below) == 0xFF {
            break;
        }
        tried.try_bytes::<true>(byte);
    }
    // What each of the octave leaves to the bytes above it.
    let lower = _mm256_and_si256(_mm256_cmpgt_epi32(centre, tried.best), _mm256_set1_epi32(OCTAVE));
    let nearest = _mm256_add_epi32(tried.best, lower);
    let mut above = tried.try_bytes::<false>(_mm256_add_epi32(nearest, _mm256_set1_epi32(OCTAVE)));
    for (k, lower) in octave.into_iter().enumerate() {
        let byte = _mm256_add_epi32(centre, _mm256_set1_epi32(k as i32));
        let nearest = _mm256_castsi256_ps(_mm256_cmpeq_epi32(byte, nearest));
        above = _mm256_min_ps(above, _mm256_blendv_ps(lower, above, nearest));
    }
    const SLACK: f32 = 1.0 - 64.0 * f32::EPSILON;
    let none_above = _mm256_cmp_ps::<_CMP_GT_OQ>(_mm256_mul_ps(above, _mm256_set1_ps(SLACK)), tried.upper);
    let separated = _mm256_cmp_ps::<_CMP_LT_OQ>(tried.upper, tried.others);
    let normal = _mm256_cmpgt_epi32(centre, _mm256_set1_epi32(i32::from(e4m3::MIN_NORMAL_BYTE) - 1));
    let decided = _mm256_and_ps(
        _mm256_and_ps(none_above, none_below),
        _mm256_and_ps(_mm256_and_ps(separated, tried.regular), _mm256_castsi256_ps(normal)),
    );
    // A tile of zeros has no error with any byte, so it has the first one.
    let best = _mm256_blendv_epi8(tried.best, _mm256_set1_epi32(1), _mm256_castps_si256(zeros));
    let all = (1 << tiles.count) - 1;
    // The scale of zeros is left to the rule where the tensor has no scales.
    let zeros = if swept.exact { zeros } else { _mm256_setzero_ps() };
    let undecided = !_mm256_movemask_ps(_mm256_or_ps(decided, zeros)) & all;
    match swept.exact && undecided != 0 {
        true => sweep_all(swept, tried.magnitudes(), amax, Choices { scales: best, undecided }),
        false => Choices { scales: best, undecided },
    }
}

/// Decides by the errors of all bytes, computed by the rule's own operations; tiles with elements
/// beyond the range of those stay undecided.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cold]
fn sweep_all(swept: &Swept, x: &[[__m256; 2]; 8], amax: __m256, choices: Choices) -> Choices {
    let (mut scales, mut amaxes) = ([0i32; 8], [0f32; 8]);
    // SAFETY: the destination is an array of 8 doublewords.
    unsafe { _mm256_storeu_si256(scales.as_mut_ptr().cast(), choices.scales) };
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(amaxes.as_mut_ptr(), amax) };
    let mut left = 0;
    for j in (0..8).filter(|j| choices.undecided >> j & 1 != 0) {
        if amaxes[j] <= RANGE[1] {
            scales[j] = first_least(swept, &x[j]);
        } else {
            left |= 1 << j;
        }
    }
    // SAFETY: the source is an array of 8 doublewords.
    Choices { scales: unsafe { _mm256_loadu_si256(scales.as_ptr().cast()) }, undecided: left }
}

/// The byte with the smallest error for a tile, the first of those that tie.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn first_least(swept: &Swept, x: &[__m256; 2]) -> i32 {
    let mut bytes = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    let (mut least, mut best) = (_mm256_set1_ps(f32::INFINITY), bytes);
    for _ in 0..e4m3::MAX_BYTE.div_ceil(8) {
        let [scale, reciprocal] = swept.factors.of(bytes);
        // Byte 127 has no scale, so its error is NaN.
        let sum = errors::<RECIPROCAL>(&[*x; 8], scale, reciprocal);
        let better = _mm256_cmp_ps::<_CMP_LT_OQ>(sum, least);
        least = _mm256_blendv_ps(least, sum, better);
        best = _mm256_blendv_epi8(best, bytes, _mm256_castps_si256(better));
        bytes = _mm256_add_epi32(bytes, _mm256_set1_epi32(8));
    }
    let (mut errors, mut first) = ([0f32; 8], [0i32; 8]);
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(errors.as_mut_ptr(), least) };
    // SAFETY: the destination is an array of 8 doublewords.
    unsafe { _mm256_storeu_si256(first.as_mut_ptr().cast(), best) };
    let least = errors.into_iter().fold(f32::INFINITY, f32::min);
    let ties = errors.into_iter().zip(first).filter(|(error, _)| *error == least);
    ties.map(|(_, byte)| byte).min().expect("one of them is the least")
}

/// Elements are divided by the scale by way of its reciprocal: the product is corrected by its
/// remainder, and so rounds as a division does (Markstein). Where the remainder underflows, the code
/// is 0 either way.
const RECIPROCAL: u8 = 1;
/// Elements are divided by the scale.
const DIVISION: u8 = 2;

/// Twin of [`nvfp4_spec::modelopt::error`], for eight tiles.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn errors<const SCALED: u8>(x: &[[__m256; 2]; 8], scale: __m256, reciprocal: __m256) -> __m256 {
    let (mut scales, mut reciprocals) = ([0f32; 8], [0f32; 8]);
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(scales.as_mut_ptr(), scale) };
    // SAFETY: as above.
    unsafe { _mm256_storeu_ps(reciprocals.as_mut_ptr(), reciprocal) };
    let mut sums = [_mm256_setzero_ps(); 8];
    for j in 0..8 {
        let (scale, reciprocal) = (_mm256_set1_ps(scales[j]), _mm256_set1_ps(reciprocals[j]));
        let mut errors = [_mm256_setzero_ps(); 2];
        for (error, &x) in errors.iter_mut().zip(&x[j]) {
            let y = match SCALED {
                DIVISION => _mm256_div_ps(x, scale),
                _ => {
                    let y = _mm256_mul_ps(x, reciprocal);
                    _mm256_fmadd_ps(_mm256_fnmadd_ps(scale, y, x), reciprocal, y)
                }
            };
            *error = _mm256_sub_ps(_mm256_mul_ps(round_to_grid(y), scale), x);
        }
        let [first, second] = errors;
        sums[j] = _mm256_add_ps(_mm256_mul_ps(first, first), _mm256_mul_ps(second, second));
    }
    sum_of_each(&sums)
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
