//! The 4over6 choice by a floating-point filter. Twin of [`nvfp4_spec::four_over_six`].
//!
//! Only the choice must equal the rule's; the errors themselves are stored nowhere. Both errors are
//! computed in vectors, in another order and without the rule's divisions, and compared with a
//! bound on how far they and the rule's own sums can be apart. Where the bound does not separate
//! the candidates the choice is undecided, and the rule makes it.
//!
//! # The bound
//!
//! Let u = 2⁻²⁴, n the number of elements of the tile, and for a candidate with scale value s and
//! codes qᵢ let f = s·A/6E (strict; A is the amax) or f = s/enc (fast). The exact error of an
//! element, in units of the input, is eᵢ = qᵢ·f − xᵢ (magnitudes; code and element have the same
//! sign). The fast rule computes enc times that, which changes no comparison. The codes here are
//! the rule's: the same product `fl(x·inv)`, rounded to nearest even.
//!
//! A tile is filtered only if both scale bytes are normal E4M3 values, 2⁻⁵⁰ ≤ f ≤ 2⁵⁰ and every
//! scaled element is at most 7. Then q ≤ 6; |q − fl(x·inv)| ≤ 1; inv is 1/f up to a few roundings,
//! so |eᵢ| ≤ 1.01·f and xᵢ ≤ 7.01·f. Nothing overflows, and products that are not zero are at least
//! f/2, far from underflow; only the square of a small error may lose up to 2⁻¹⁵⁰, which is at most
//! 2⁻⁵⁰·f² and lost in the slack of the constants. (A normal scale byte that did not saturate
//! leaves scaled elements below 6.4, and saturated candidates are equal; the limit of 7 is a guard
//! for the argument.)
//!
//! *The rule*, strict: `t = fl(fl(q·s·A)/6E)` is q·f within 2.01u·q·f, and `fl(t − x)` adds one
//! rounding, so an element's error is eᵢ within 2.02u·6f + u·|eᵢ|. Fast: `fl(x·enc)` is off by
//! u·7.01f and the difference adds one rounding, which is less. The sum of n = 16 rounds 15 times,
//! with 16 rows in a tree 4 times more.
//!
//! *The filter*: f̂ carries 3 roundings, `fma(q, f̂, −x)` one, so an element's error is eᵢ within
//! 3.02u·6f + u·|eᵢ|. A lane adds at most 32 terms and the lanes add up in 3 more steps: 35
//! roundings.
//!
//! MAE: the two sums differ by at most u·(5.1·6·n·f + (20 + 36 + 2)·Σ|eᵢ|) < u·(32·n·f + 64·Ê), Ê
//! being the filter's sum.
//!
//! MSE: squares differ by at most |Δ|·(2·1.01·f + |Δ|), with |Δ| ≤ (12.2 + 1.1)·u·f for the rule
//! and (18.2 + 1.1)·u·f for the filter: together 66·u·f² per element; the squares' own rounding is
//! one more per term: u·(68·n·f² + 64·Ê).
//!
//! The candidates are separated if their filtered errors differ by more than both bounds together;
//! evaluating that comparison in binary32 costs a few u·Ê, which the 64 leaves room for (58 are
//! used).

use crate::avx2::small_float::{E4m3, codes};
use crate::avx2::{abs, load, widen};
use crate::vector::*;
use nvfp4_spec::scale::Global;
use nvfp4_spec::{BLOCK, Element, ErrorPath, e4m3};

/// Neighbouring tiles of a band: `height` rows, `stride` elements apart, tile `j` at element `16·j`.
/// `count` of them exist.
pub(super) struct Tiles<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
    pub height: usize,
    pub count: usize,
}

/// The choices for eight tiles.
pub(super) struct Choices {
    /// The scale bytes, one per doubleword.
    pub scales: __m256i,
    /// Bit `j` is set if the filter cannot tell for tile `j`.
    pub undecided: i32,
}

/// Chooses between six and four for eight tiles whose largest magnitudes are `amax`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn choose<T: Element, const MAE: bool>(
    global: &Global,
    error: ErrorPath,
    amax: __m256,
    tiles: &Tiles<'_, T>,
) -> Choices {
    // Twin of `four_over_six::candidate_scales`: a true division by 6 first.
    let base = _mm256_mul_ps(_mm256_div_ps(amax, _mm256_set1_ps(6.0)), _mm256_set1_ps(global.encode));
    let scales = [codes::<E4m3>(base), codes::<E4m3>(_mm256_mul_ps(base, _mm256_set1_ps(1.5)))];
    let unit = unit(global, error);

    let mut filtered = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    let (mut inverse, mut decode) = ([[0f32; 8]; 2], [[0f32; 8]; 2]);
    let mut factors = [_mm256_setzero_ps(); 2];
    for c in 0..2 {
        // The value of a normal E4M3 byte: its bits, shifted into place and with the exponent's
        // bias exchanged.
        let bits = _mm256_add_epi32(_mm256_slli_epi32::<20>(scales[c]), _mm256_set1_epi32(120 << 23));
        let value = _mm256_castsi256_ps(bits);
        // Twin of `scale::inverse_scale`; what it guards against is outside the range that is
        // filtered.
        let inv = _mm256_div_ps(_mm256_set1_ps(1.0), _mm256_mul_ps(value, _mm256_set1_ps(global.decode)));
        let f = _mm256_mul_ps(value, _mm256_set1_ps(unit));
        let normal = _mm256_cmpgt_epi32(scales[c], _mm256_set1_epi32(i32::from(e4m3::MIN_NORMAL_BYTE) - 1));
        let within = _mm256_and_ps(
            _mm256_cmp_ps::<_CMP_GE_OQ>(f, _mm256_set1_ps(RANGE[0])),
            _mm256_cmp_ps::<_CMP_LE_OQ>(f, _mm256_set1_ps(RANGE[1])),
        );
        let small = _mm256_cmp_ps::<_CMP_LE_OQ>(_mm256_mul_ps(amax, inv), _mm256_set1_ps(LARGEST));
        let holds = _mm256_and_ps(_mm256_and_ps(within, small), _mm256_castsi256_ps(normal));
        filtered = _mm256_and_ps(filtered, holds);
        factors[c] = f;
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(inverse[c].as_mut_ptr(), inv) };
        // SAFETY: the destination is an array of 8 floats.
        unsafe { _mm256_storeu_ps(decode[c].as_mut_ptr(), f) };
    }

    let mut sums = [[0f32; 4]; 8];
    for j in 0..tiles.count {
        let (inverse, decode) = ([inverse[0][j], inverse[1][j]], [decode[0][j], decode[1][j]]);
        let sum = errors::<T, MAE>(tiles, j, inverse, decode);
        // SAFETY: the destination is an array of 4 floats.
        unsafe { _mm_storeu_ps(sums[j].as_mut_ptr(), sum) };
    }
    let [six, four] = add_up(&sums);

    let mut bound = _mm256_mul_ps(_mm256_set1_ps(OF_ERRORS), _mm256_add_ps(six, four));
    let weight = of_factors(MAE, tiles.height);
    for f in factors {
        let f = if MAE { f } else { _mm256_mul_ps(f, f) };
        bound = _mm256_fmadd_ps(f, _mm256_set1_ps(weight), bound);
    }
    let bound = _mm256_mul_ps(bound, _mm256_set1_ps(f32::EPSILON / 2.0));
    let difference = _mm256_sub_ps(four, six);
    let four_wins = _mm256_cmp_ps::<_CMP_LT_OQ>(difference, _mm256_sub_ps(_mm256_setzero_ps(), bound));
    let six_wins = _mm256_cmp_ps::<_CMP_GT_OQ>(difference, bound);
    let decided = _mm256_and_ps(filtered, _mm256_or_ps(four_wins, six_wins));
    // Equal scale bytes tie, and a tie is six.
    let equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(scales[0], scales[1]));
    Choices {
        scales: _mm256_blendv_epi8(scales[0], scales[1], _mm256_castps_si256(four_wins)),
        undecided: !_mm256_movemask_ps(_mm256_or_ps(decided, equal)) & ((1 << tiles.count) - 1),
    }
}

/// The smallest and the largest decode factor for which the bound holds: 2⁻⁵⁰ and 2⁵⁰.
pub(super) const RANGE: [f32; 2] = [f32::from_bits((127 - 50) << 23), f32::from_bits((127 + 50) << 23)];

/// The largest scaled element for which it holds.
pub(super) const LARGEST: f32 = 7.0;

/// The part of both filtered errors in the bound, in units of 2⁻²⁴.
pub(super) const OF_ERRORS: f32 = 64.0;

/// The part of f (MAE) or f² (MSE) of each candidate in the bound, in units of 2⁻²⁴.
pub(super) fn of_factors(mae: bool, height: usize) -> f32 {
    (if mae { 32.0 } else { 68.0 }) * (height * BLOCK) as f32
}

/// f of a candidate over its scale value.
pub(super) fn unit(global: &Global, error: ErrorPath) -> f32 {
    match error {
        ErrorPath::Strict => global.amax * (1.0 / global.bound.six_e()),
        ErrorPath::Fast => global.decode,
    }
}

/// The filtered errors of tile `j` in four parts: six, six, four, four.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn errors<T: Element, const MAE: bool>(tiles: &Tiles<'_, T>, j: usize, inverse: [f32; 2], decode: [f32; 2]) -> __m128 {
    let inverse = [_mm256_set1_ps(inverse[0]), _mm256_set1_ps(inverse[1])];
    let decode = [_mm256_set1_ps(decode[0]), _mm256_set1_ps(decode[1])];
    let mut sums = [_mm256_setzero_ps(); 2];
    for r in 0..tiles.height {
        let row = tiles.data[r * tiles.stride + j * BLOCK..].first_chunk().expect("a tile's rows have 16 elements");
        let x = widen::<T>(abs::<T>(load(row)));
        for x in x {
            for c in 0..2 {
                let q = round_to_grid(_mm256_mul_ps(x, inverse[c]));
                let e = _mm256_fmsub_ps(q, decode[c], x);
                sums[c] = if MAE {
                    _mm256_add_ps(sums[c], _mm256_andnot_ps(_mm256_set1_ps(-0.0), e))
                } else {
                    _mm256_fmadd_ps(e, e, sums[c])
                };
            }
        }
    }
    let s = _mm256_hadd_ps(sums[0], sums[1]);
    _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps::<1>(s))
}

/// The errors of eight tiles: all of six, all of four.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn add_up(sums: &[[f32; 4]; 8]) -> [__m256; 2] {
    // SAFETY: the source is an array of 4 floats.
    let part = |j: usize| unsafe { _mm_loadu_ps(sums[j].as_ptr()) };
    let pair = |j: usize| _mm256_set_m128(part(j + 4), part(j));
    // Tile by tile: six, four, six, four; low halves tiles 0–3, high halves 4–7.
    let (a, b) = (_mm256_hadd_ps(pair(0), pair(1)), _mm256_hadd_ps(pair(2), pair(3)));
    [_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b)]
}

/// The E2M1 magnitude nearest to `y`, which is not negative. Adding a power of two that leaves one mantissa bit
/// (below 1: units of 0.5) makes the addition round to nearest even.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn round_to_grid(y: __m256) -> __m256 {
    let y = _mm256_min_ps(y, _mm256_set1_ps(6.0));
    let exponent = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7F80_0000));
    let exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(0x3F80_0000));
    let magic = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(22 << 23)));
    _mm256_sub_ps(_mm256_add_ps(y, magic), magic)
}
