//! The search of scales by a floating-point filter. Twin of [`nvfp4_spec::mse`].
//!
//! As with 4over6, only the choice must equal the rule's. The errors of all candidates are computed
//! in vectors, with a bound on how far they are from the rule's own ([`super::squares`]). Where the
//! bound does not separate the best candidate from the others, as in a tie, the rule decides.

use super::four_over_six::{Choices, Tiles};
use super::squares::{Candidates, Factors};
use crate::vector::*;
use nvfp4_spec::profile::Factor;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{Element, e4m3, mse};

/// The factors of the scale bytes of a row.
pub(super) struct Searched {
    /// The amax that they are for.
    amax: Option<u32>,
    factors: Factors,
}

impl Searched {
    pub fn new() -> Self {
        Searched { amax: None, factors: Factors::NONE }
    }

    /// Switches to another row of the same mode and type.
    pub fn set(&mut self, scaling: &Scaling) {
        let amax = Some(scaling.global.amax.to_bits());
        if self.amax != amax {
            self.amax = amax;
            self.factors = Factors::new(|byte| {
                let encode = match scaling.factor(byte) {
                    Factor::Multiply(factor) => factor,
                    Factor::Divide(divisor) => 1.0 / divisor,
                };
                (mse::decode_factor(byte, scaling), encode)
            });
        }
    }
}

/// Searches the scales of eight tiles of one row, whose largest magnitudes are `amax` and whose
/// scale bytes by the rule "six" are `centres`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn choose<T: Element>(
    searched: &Searched,
    centres: &[u8; 8],
    amax: __m256,
    tiles: &Tiles<'_, T>,
) -> Choices {
    // SAFETY: the source is an array of 8 bytes.
    let centre = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(centres.as_ptr().cast()) });
    let mut tried = Candidates::new(&searched.factors, amax, tiles);
    // The order does not matter: ties are undecided. Those below come last, from the nearest on.
    const { assert!(mse::OFFSETS.len() == 11) };
    for above in 0..=6 {
        tried.try_bytes::<false>(_mm256_add_epi32(centre, _mm256_set1_epi32(above)));
    }
    // A tile of zeros ties, and keeps its byte.
    let zeros = _mm256_cmp_ps::<_CMP_EQ_OQ>(amax, _mm256_setzero_ps());
    for below in 1..=4 {
        let byte = _mm256_sub_epi32(centre, _mm256_set1_epi32(below));
        if _mm256_movemask_ps(_mm256_or_ps(tried.clipped_too_much(byte), zeros)) == 0xFF {
            break;
        }
        tried.try_bytes::<true>(byte);
    }
    // The rule tries the byte of "six" also where it is no number that is searched.
    let number = _mm256_and_si256(
        _mm256_cmpgt_epi32(centre, _mm256_setzero_si256()),
        _mm256_cmpgt_epi32(_mm256_set1_epi32(i32::from(e4m3::NAN_BYTE)), centre),
    );
    let separated = _mm256_cmp_ps::<_CMP_LT_OQ>(tried.upper, tried.others);
    let decided = _mm256_and_ps(_mm256_and_ps(tried.regular, separated), _mm256_castsi256_ps(number));
    Choices {
        scales: _mm256_blendv_epi8(tried.best, centre, _mm256_castps_si256(zeros)),
        undecided: !_mm256_movemask_ps(_mm256_or_ps(decided, zeros)) & ((1 << tiles.count) - 1),
    }
}
