//! The errors of candidates for a tile's scale, nearly: what the searches of [`super::search`] and
//! [`super::modelopt`] filter with. At most eight vector operations for eight elements, where the
//! rules' own take thirteen.
//!
//! An element x is compared in units of f, what codes are multiplied by to decode them: its error
//! is that of y = x/f, rounded to a code q. The error of the tile is f² times the sum S of the
//! squares (y − q)².
//!
//! # The bound
//!
//! Let u = 2⁻²⁴. [`Candidates`] are filtered only if f is within 2^±50, the factor `by` to encode is
//! 1/f within δu for a δ of at most 8, and y is at most 14, or at most 6.9 where codes are not
//! clipped.
//!
//! *Here* ŷ = fl(x·by) is y within (δ + 1.1)u·y. *The rules* have fl(x·by) too, or a true quotient by
//! a number whose reciprocal, rounded, is `by`: y within (δ + 2.2)u·y. Both are rounded to the nearest
//! code, ties to even, so that their codes differ only for a y so near to a half way point. No such
//! point lies above 5, thus the distances of y from the two codes are within 10·(δ + 2.2)u of each
//! other, and ŷ adds 5·(δ + 1.1)u. For larger y, which have the code 6 in both, ŷ adds 14·(δ + 1.1)u.
//! The rules decode a code to fl(q·f), within 6u·f, and may round the difference, by 8u·f, as it is
//! rounded here. Together an element's error, in units of f, differs by less than D = (15δ + 50)u.
//!
//! The sums of squares then differ by at most 2D·Σ|y − q| + 16D², where Σ|y − q| ≤ 4·√S ≤ 2 + 2S.
//! Squares, sums and the product with f² round less than 16 times in each. So the error here, Ê, and
//! the rule's differ by less than 4D·(f² + Ê) + 32u·Ê + 16D²·f², less than (60δ + 240)u·(f² + Ê).

use super::four_over_six::{RANGE, Tiles};
use crate::avx2::{abs, load, widen};
use crate::vector::*;
use nvfp4_spec::{BLOCK, Element, e4m3};

/// What the codes of each scale byte are multiplied by to decode them, and what elements are
/// multiplied by before they are rounded to codes.
pub(super) struct Factors {
    pub decode: [f32; 128],
    encode: [f32; 128],
    /// What errors are bounded by, in units of f² + Ê.
    bound: f32,
}

impl Factors {
    /// Factors that are not filtered.
    pub const NONE: Factors = Factors { decode: [f32::NAN; 128], encode: [f32::NAN; 128], bound: f32::NAN };

    /// The factors to decode and encode of each scale byte. Where the bound does not cover them, they
    /// are NaN.
    pub fn new(of: impl Fn(u8) -> (f32, f32)) -> Self {
        const U: f64 = f32::EPSILON as f64 / 2.0;
        let (mut factors, mut largest) = (Self::NONE, 0f64);
        for byte in 0..e4m3::NAN_BYTE {
            let (f, by) = of(byte);
            let delta = (f64::from(f) * f64::from(by) - 1.0).abs() / U;
            if delta <= 8.0 && (RANGE[0]..=RANGE[1]).contains(&f) {
                (factors.decode[usize::from(byte)], factors.encode[usize::from(byte)]) = (f, by);
                largest = largest.max(delta);
            }
        }
        factors.bound = ((60.0 * largest.ceil() + 240.0) * U) as f32;
        factors
    }

    /// The factors of eight scale bytes: to decode, to encode.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn of(&self, bytes: __m256i) -> [__m256; 2] {
        let index = _mm256_and_si256(bytes, _mm256_set1_epi32(127));
        // SAFETY: the indices are less than the 128 elements of the tables.
        [&self.decode, &self.encode].map(|table| unsafe { _mm256_i32gather_ps::<4>(table.as_ptr(), index) })
    }
}

/// Eight tiles of one row, and the candidates for their scales that were tried.
pub(super) struct Candidates<'a> {
    factors: &'a Factors,
    x: [[__m256; 2]; 8],
    amax: __m256,
    /// The scale byte with the least error so far.
    pub best: __m256i,
    /// The least error, nearly, and the bounds of the rule's own.
    least: __m256,
    lower: __m256,
    pub upper: __m256,
    /// No candidate but the best has an error below this.
    pub others: __m256,
    /// The tiles whose candidates are all covered by the bound.
    pub regular: __m256,
}

impl<'a> Candidates<'a> {
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn new<T: Element>(factors: &'a Factors, amax: __m256, tiles: &Tiles<'_, T>) -> Self {
        let infinity = _mm256_set1_ps(f32::INFINITY);
        Candidates {
            factors,
            x: magnitudes(tiles),
            amax,
            best: _mm256_setzero_si256(),
            least: infinity,
            lower: infinity,
            upper: infinity,
            others: infinity,
            regular: _mm256_castsi256_ps(_mm256_set1_epi32(-1)),
        }
    }

    /// Tries a scale byte for each tile, where it is within 1…0x7E. Returns a lower bound of its
    /// error, infinite for a byte that is not tried. With `CLIP` elements may be beyond 6 times the
    /// scale.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn try_bytes<const CLIP: bool>(&mut self, bytes: __m256i) -> __m256 {
        let tried = _mm256_castsi256_ps(_mm256_and_si256(
            _mm256_cmpgt_epi32(bytes, _mm256_setzero_si256()),
            _mm256_cmpgt_epi32(_mm256_set1_epi32(i32::from(e4m3::NAN_BYTE)), bytes),
        ));
        let [f, by] = self.factors.of(bytes);
        let sum = squares::<CLIP>(&self.x, by);
        // Not true of NaN, so a byte that has no factors is not covered.
        let limit = if CLIP { 14.0 } else { 6.9 };
        let covered = _mm256_cmp_ps::<_CMP_LE_OQ>(_mm256_mul_ps(self.amax, by), _mm256_set1_ps(limit));
        self.regular = _mm256_andnot_ps(_mm256_andnot_ps(covered, tried), self.regular);

        let (unit, bound) = (_mm256_mul_ps(f, f), _mm256_set1_ps(self.factors.bound));
        let bound = _mm256_mul_ps(unit, _mm256_fmadd_ps(sum, bound, bound));
        let infinity = _mm256_set1_ps(f32::INFINITY);
        let sum = _mm256_mul_ps(unit, sum);
        let (low, high) = (_mm256_sub_ps(sum, bound), _mm256_add_ps(sum, bound));
        let sum = _mm256_blendv_ps(infinity, sum, tried);
        let low = _mm256_blendv_ps(infinity, low, tried);
        let better = _mm256_cmp_ps::<_CMP_LT_OQ>(sum, self.least);
        self.others = _mm256_min_ps(self.others, _mm256_blendv_ps(low, self.lower, better));
        self.least = _mm256_blendv_ps(self.least, sum, better);
        self.lower = _mm256_blendv_ps(self.lower, low, better);
        self.upper = _mm256_blendv_ps(self.upper, high, better);
        self.best = _mm256_blendv_epi8(self.best, bytes, _mm256_castps_si256(better));
        low
    }

    /// The tiles for which clipping the largest element alone is worse than the best byte, with this
    /// byte and so with every one below it: no code decodes to more than 6f, rounded. The margins
    /// cover the roundings here and in the rules.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn clipped_too_much(&self, bytes: __m256i) -> __m256 {
        let [f, _] = self.factors.of(bytes);
        let clipped = _mm256_fnmadd_ps(f, _mm256_set1_ps(6.0 * (1.0 + 4.0 * f32::EPSILON)), self.amax);
        let square = _mm256_mul_ps(_mm256_mul_ps(clipped, clipped), _mm256_set1_ps(1.0 - 8.0 * f32::EPSILON));
        _mm256_and_ps(
            _mm256_cmp_ps::<_CMP_GT_OQ>(clipped, _mm256_setzero_ps()),
            _mm256_cmp_ps::<_CMP_GT_OQ>(square, self.upper),
        )
    }

    /// The magnitudes of the elements.
    pub fn magnitudes(&self) -> &[[__m256; 2]; 8] {
        &self.x
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

/// The sums of (y − q)² of eight tiles, each multiplied by a factor of its own. The rounding is that
/// of [`super::four_over_six::round_to_grid`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn squares<const CLIP: bool>(x: &[[__m256; 2]; 8], by: __m256) -> __m256 {
    /// Its bits are those of the exponent.
    const EXPONENT: f32 = f32::INFINITY;
    /// Added to a power of two times this, a number is rounded to half that power of two.
    const MAGIC: f32 = (1 << 22) as f32;
    let mut factors = [0f32; 8];
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(factors.as_mut_ptr(), by) };
    let mut sums = [_mm256_setzero_ps(); 8];
    for j in 0..8 {
        let by = _mm256_set1_ps(factors[j]);
        let mut errors = [_mm256_setzero_ps(); 2];
        for (error, &x) in errors.iter_mut().zip(&x[j]) {
            let y = _mm256_mul_ps(x, by);
            let clipped = if CLIP { _mm256_min_ps(y, _mm256_set1_ps(6.0)) } else { y };
            let power = _mm256_max_ps(_mm256_and_ps(clipped, _mm256_set1_ps(EXPONENT)), _mm256_set1_ps(1.0));
            let rounded = _mm256_fmadd_ps(power, _mm256_set1_ps(MAGIC), clipped);
            *error = _mm256_sub_ps(_mm256_fnmadd_ps(power, _mm256_set1_ps(MAGIC), rounded), y);
        }
        sums[j] = _mm256_fmadd_ps(errors[0], errors[0], _mm256_mul_ps(errors[1], errors[1]));
    }
    sum_of_each(&sums)
}

/// The sums of eight vectors: those of neighbours first, pairwise.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(super) fn sum_of_each(sums: &[__m256; 8]) -> __m256 {
    let pairs: [__m256; 4] = std::array::from_fn(|i| _mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]));
    // Low and high halves of each sum of four.
    let (a, b) = (_mm256_hadd_ps(pairs[0], pairs[1]), _mm256_hadd_ps(pairs[2], pairs[3]));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}
