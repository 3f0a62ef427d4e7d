//! The search of scales by a floating-point filter. Twin of [`nvfp4_spec::mse`].
//!
//! As with 4over6, only the choice must equal the rule's. The errors of all candidates are computed
//! in vectors, with a bound on how far they are from the rule's own. Where the bound does not
//! separate the best candidate from the others, as in a tie, the rule decides.
//!
//! # The bound
//!
//! Let u = 2⁻²⁴, and for a candidate let f be what its codes are multiplied by to decode them. A tile
//! is filtered only if f is within 2^±50 and no scaled element is more than 2¹².
//!
//! Codes are the rule's: elements are multiplied by the rule's own factor, or divided by f. The
//! division is a product with r = fl(1/f), corrected by its remainder, which rounds as a division
//! does (Markstein); where the remainder underflows, the code is 0 either way. So p = fl(q·f), what
//! a code decodes to, is the rule's too.
//!
//! The rule adds up (x − p)² in binary64, where its own roundings do not count. Here fl(p − x) is off
//! by at most u times itself, and a sum of 16 squares rounds 5 times: Ê is within 7.1u·Ê of the
//! rule's. Squares that underflow lose less than 2⁻¹⁴⁵ together, which is less than 2⁻⁴⁴·f². Used
//! are 16u·Ê and 2⁻⁴⁰·f².

use super::four_over_six::{Choices, RANGE, Tiles, round_to_grid};
use crate::avx2::{abs, load, widen};
use crate::vector::*;
use nvfp4_spec::profile::Factor;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Element, e4m3, mse};

/// What the codes of each scale byte are multiplied by to decode them, and what elements are
/// multiplied by before they are rounded to codes: the rule's factor, or the reciprocal of its
/// divisor.
pub(super) struct Factors {
    /// The amax that they are for.
    amax: Option<u32>,
    decode: [f32; 128],
    encode: [f32; 128],
}

impl Factors {
    pub fn new() -> Self {
        Factors { amax: None, decode: [0.0; 128], encode: [0.0; 128] }
    }

    /// Switches to another row of the same mode and type.
    pub fn set(&mut self, scaling: &Scaling) {
        let amax = Some(scaling.global.amax.to_bits());
        if self.amax != amax {
            self.amax = amax;
            self.decode = std::array::from_fn(|byte| mse::decode_factor(byte as u8, scaling));
            self.encode = std::array::from_fn(|byte| match scaling.factor(byte as u8) {
                Factor::Multiply(factor) => factor,
                Factor::Divide(divisor) => 1.0 / divisor,
            });
        }
    }
}

/// Searches the scales of eight tiles of one row, whose largest magnitudes are `amax` and whose
/// scale bytes by the rule "six" are `centres`. `DIVIDE` says that the rule divides.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn choose<T: Element, const DIVIDE: bool>(
    factors: &Factors,
    centres: &[u8; 8],
    amax: __m256,
    tiles: &Tiles<'_, T>,
) -> Choices {
    let x = magnitudes(tiles);
    // SAFETY: the source is an array of 8 bytes.
    let centre = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(centres.as_ptr().cast()) });
    let infinity = _mm256_set1_ps(f32::INFINITY);
    let (mut least, mut lower, mut upper) = (infinity, infinity, infinity);
    let (mut others, mut best) = (infinity, centre);
    let mut regular = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    // A tile of zeros ties, and keeps its byte.
    let zeros = _mm256_cmp_ps::<_CMP_EQ_OQ>(amax, _mm256_setzero_ps());
    // The order does not matter: ties are undecided. Those below come last, from the nearest on.
    let order = [0, 1, 2, 3, 4, 5, 6, -1, -2, -3, -4];
    const { assert!(mse::OFFSETS.len() == 11) };
    for offset in order {
        let byte = _mm256_add_epi32(centre, _mm256_set1_epi32(offset));
        let inside = _mm256_and_si256(
            _mm256_cmpgt_epi32(byte, _mm256_setzero_si256()),
            _mm256_cmpgt_epi32(_mm256_set1_epi32(i32::from(e4m3::NAN_BYTE)), byte),
        );
        let exists = _mm256_castsi256_ps(if offset == 0 { _mm256_set1_epi32(-1) } else { inside });
        let index = _mm256_and_si256(byte, _mm256_set1_epi32(127));
        // SAFETY: the indices are less than the 128 elements of the table.
        let f = unsafe { _mm256_i32gather_ps::<4>(factors.decode.as_ptr(), index) };
        // SAFETY: as above.
        let by = unsafe { _mm256_i32gather_ps::<4>(factors.encode.as_ptr(), index) };
        // Below, clipping alone may be worse than the best so far, and then it is for all that follow:
        // no code decodes to more than 6f, rounded. The margins cover the roundings.
        if offset < 0 {
            let clipped = _mm256_fnmadd_ps(f, _mm256_set1_ps(6.0 * (1.0 + 4.0 * f32::EPSILON)), amax);
            let square = _mm256_mul_ps(_mm256_mul_ps(clipped, clipped), _mm256_set1_ps(1.0 - 8.0 * f32::EPSILON));
            let worse = _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_GT_OQ>(clipped, _mm256_setzero_ps()),
                _mm256_cmp_ps::<_CMP_GT_OQ>(square, upper),
            );
            if _mm256_movemask_ps(_mm256_or_ps(worse, zeros)) == 0xFF {
                break;
            }
        }

        let sum = match DIVIDE {
            true => errors::<RECIPROCAL>(&x, f, by),
            false => errors::<MULTIPLY>(&x, f, by),
        };
        let bound = _mm256_mul_ps(_mm256_mul_ps(f, f), _mm256_set1_ps(f32::EPSILON / 131072.0));
        let bound = _mm256_fmadd_ps(sum, _mm256_set1_ps(8.0 * f32::EPSILON), bound);
        let covered = _mm256_and_ps(
            _mm256_and_ps(
                _mm256_cmp_ps::<_CMP_GE_OQ>(f, _mm256_set1_ps(RANGE[0])),
                _mm256_cmp_ps::<_CMP_LE_OQ>(f, _mm256_set1_ps(RANGE[1])),
            ),
            _mm256_cmp_ps::<_CMP_LE_OQ>(_mm256_mul_ps(amax, by), _mm256_set1_ps(4096.0)),
        );
        // A candidate that exists and is not covered leaves the tile undecided.
        regular = _mm256_andnot_ps(_mm256_andnot_ps(covered, exists), regular);

        // What does not exist is worse than everything else, whatever was computed for it.
        let high = _mm256_add_ps(sum, bound);
        let low = _mm256_blendv_ps(infinity, _mm256_sub_ps(sum, bound), exists);
        let sum = _mm256_blendv_ps(infinity, sum, exists);
        let better = _mm256_cmp_ps::<_CMP_LT_OQ>(sum, least);
        others = _mm256_min_ps(others, _mm256_blendv_ps(low, lower, better));
        least = _mm256_blendv_ps(least, sum, better);
        lower = _mm256_blendv_ps(lower, low, better);
        upper = _mm256_blendv_ps(upper, high, better);
        best = _mm256_blendv_epi8(best, byte, _mm256_castps_si256(better));
    }
    let decided = _mm256_and_ps(regular, _mm256_cmp_ps::<_CMP_LT_OQ>(upper, others));
    Choices {
        scales: _mm256_blendv_epi8(best, centre, _mm256_castps_si256(zeros)),
        undecided: !_mm256_movemask_ps(_mm256_or_ps(decided, zeros)) & ((1 << tiles.count) - 1),
    }
}

/// The magnitudes of eight tiles of one row; zeros for those that do not exist.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn magnitudes<T: Element>(tiles: &Tiles<'_, T>) -> [[__m256; 2]; 8] {
    let mut x = [[_mm256_setzero_ps(); 2]; 8];
    for (j, x) in x.iter_mut().enumerate().take(tiles.count) {
        let row = tiles.data[j * BLOCK..].first_chunk().expect("a tile's row has 16 elements");
        *x = widen::<T>(abs::<T>(load(row)));
    }
    x
}

/// Elements are multiplied by `by`.
const MULTIPLY: u8 = 0;
/// Elements are divided by `f`, by way of its reciprocal `by`.
pub(super) const RECIPROCAL: u8 = 1;
/// Elements are divided by `f`.
pub(super) const DIVISION: u8 = 2;

/// The errors of eight tiles, each with factors of its own: `f` to decode, `by` to encode. Products
/// are not fused with sums, which are those of [`nvfp4_spec::modelopt::error`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn errors<const SCALED: u8>(x: &[[__m256; 2]; 8], f: __m256, by: __m256) -> __m256 {
    let (mut decode, mut encode) = ([0f32; 8], [0f32; 8]);
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(decode.as_mut_ptr(), f) };
    // SAFETY: as above.
    unsafe { _mm256_storeu_ps(encode.as_mut_ptr(), by) };
    let mut sums = [_mm256_setzero_ps(); 8];
    for j in 0..8 {
        let (f, by) = (_mm256_set1_ps(decode[j]), _mm256_set1_ps(encode[j]));
        let mut errors = [_mm256_setzero_ps(); 2];
        for (error, &x) in errors.iter_mut().zip(&x[j]) {
            let y = match SCALED {
                DIVISION => _mm256_div_ps(x, f),
                MULTIPLY => _mm256_mul_ps(x, by),
                _ => {
                    let y = _mm256_mul_ps(x, by);
                    _mm256_fmadd_ps(_mm256_fnmadd_ps(f, y, x), by, y)
                }
            };
            *error = _mm256_sub_ps(_mm256_mul_ps(round_to_grid(y), f), x);
        }
        let [first, second] = errors;
        sums[j] = _mm256_add_ps(_mm256_mul_ps(first, first), _mm256_mul_ps(second, second));
    }
    let pairs: [__m256; 4] = std::array::from_fn(|i| _mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]));
    // Low and high halves of each sum of four.
    let (a, b) = (_mm256_hadd_ps(pairs[0], pairs[1]), _mm256_hadd_ps(pairs[2], pairs[3]));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}
