//! Cuts: codes without arithmetic.
//!
//! Scaling an element is one rounded multiplication or division by a positive factor that depends
//! on the block's scale byte alone, and so is monotone in the element's magnitude; rounding to E2M1
//! is monotone too. Hence for every scale byte there are seven magnitudes of the input type at
//! which the code grows by one, and a code is the number of cuts that the element's magnitude,
//! compared as an integer, lies above. Cuts are found with the rule's own operations and kept per
//! scale byte; a tensor or a row uses a few dozen of the 127.

use crate::avx2::{infinity_bits, narrow, value_of};
use crate::vector::*;
use nvfp4_spec::profile::Factor;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{Element, GlobalScale, Precision, e2m1, e4m3};

/// The state of a scale byte's entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    Ready,
    /// The factor is not a positive finite number: no cuts exist, and the rules decide.
    Irregular,
}

/// Seven cuts for the codes; the eighth is the largest magnitude that scales to zero. Each fills a
/// vector.
pub(super) type Cuts = [__m256i; 8];

/// The entries of one tensor or row, made when first asked for.
pub(super) struct Table {
    scaling: Scaling,
    states: [State; 128],
    complete: bool,
    /// The multipliers or divisors.
    factors: [f32; 128],
    cuts: Box<[Cuts; 128]>,
}

impl Table {
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub fn new(scaling: &Scaling) -> Self {
        let cuts = Box::new([[_mm256_setzero_si256(); 8]; 128]);
        Table { scaling: *scaling, states: [State::Empty; 128], complete: false, factors: [0.0; 128], cuts }
    }

    pub fn scaling(&self) -> &Scaling {
        &self.scaling
    }

    /// Whether elements are divided by their factor.
    pub fn divides(&self) -> bool {
        matches!(self.scaling.factor(e4m3::MAX_BYTE), Factor::Divide(_))
    }

    /// Switches to another row of the same mode and type. The entries of the same amax are kept.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn set<T: Element>(&mut self, scaling: &Scaling) {
        if self.scaling.global.amax.to_bits() != scaling.global.amax.to_bits() {
            self.scaling = *scaling;
            self.states = [State::Empty; 128];
            self.complete = false;
        }
        // One amax serves a whole tensor, so it pays to fill all entries: no block has to check
        // then.
        if self.states[0] == State::Empty && scaling.mode.global == GlobalScale::PerTensor {
            self.complete = true;
            for scale in 0..=e4m3::MAX_BYTE {
                self.complete &= self.fill::<T>(scale);
            }
        }
    }

    /// Whether every finite scale byte has an entry.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The cuts of a scale byte that [`Table::prepare`] has answered `true` for.
    #[inline]
    pub fn cuts(&self, scale: u8) -> &Cuts {
        &self.cuts[usize::from(scale & 127)]
    }

    /// The same cuts of a 16-bit type, one word each.
    #[cfg(target_arch = "x86_64")]
    pub fn words(&self, scale: u8) -> [u16; 8] {
        self.cuts(scale).map(|cut| {
            // SAFETY: a vector is 16 words of plain bits.
            let words: [u16; 16] = unsafe { std::mem::transmute(cut) };
            words[0]
        })
    }

    /// Its multiplier or divisor.
    #[inline]
    pub fn factor(&self, scale: u8) -> f32 {
        self.factors[usize::from(scale & 127)]
    }

    /// Fills the entry of a scale byte if needed; `false` if there is none, because the factor is
    /// 0, infinite or NaN.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn prepare<T: Element>(&mut self, scale: u8) -> bool {
        self.states[usize::from(scale & 127)] == State::Ready || self.fill::<T>(scale & 127)
    }

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline(never)]
    fn fill<T: Element>(&mut self, scale: u8) -> bool {
        let index = usize::from(scale);
        if self.states[index] == State::Empty {
            self.states[index] = match self.scaling.factor(scale) {
                // NaN's byte has a NaN factor, so it is irregular too.
                Factor::Multiply(f) | Factor::Divide(f) if !(f > 0.0 && f.is_finite()) => State::Irregular,
                Factor::Multiply(f) => {
                    self.factors[index] = f;
                    make::<T, true>(f, &mut self.cuts[index]);
                    State::Ready
                }
                Factor::Divide(f) => {
                    self.factors[index] = f;
                    make::<T, false>(f, &mut self.cuts[index]);
                    State::Ready
                }
            };
        }
        self.states[index] == State::Ready
    }
}

/// Finds the eight cuts side by side: a guess by division, then steps of one until the rule's own
/// operation says that a magnitude is the last below. Where that takes more than a few steps (the
/// factor or the magnitude is subnormal), bisection does it.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn make<T: Element, const MULTIPLY: bool>(f: f32, cuts: &mut Cuts) {
    let precision = T::PRECISION;
    let [f0, f1, f2, f3, f4, f5, f6] = e2m1::FIRSTS;
    let firsts = _mm256_setr_ps(f0, f1, f2, f3, f4, f5, f6, f32::from_bits(1));
    let by = _mm256_set1_ps(f);
    let below = |bits: __m256i| {
        let value = match precision {
            Precision::F32 => _mm256_castsi256_ps(bits),
            Precision::Bf16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)),
            Precision::F16 => _mm256_cvtph_ps(_mm256_castsi256_si128(narrow(bits, bits))),
        };
        let scaled = if MULTIPLY { _mm256_mul_ps(value, by) } else { _mm256_div_ps(value, by) };
        _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(scaled, firsts))
    };
    let guess = if MULTIPLY { _mm256_div_ps(firsts, by) } else { _mm256_mul_ps(firsts, by) };
    let guess = match precision {
        Precision::F32 => _mm256_castps_si256(guess),
        Precision::Bf16 => _mm256_srli_epi32::<16>(_mm256_castps_si256(guess)),
        Precision::F16 => _mm256_cvtepu16_epi32(_mm256_cvtps_ph::<_MM_FROUND_TO_ZERO>(guess)),
    };
    let one = _mm256_set1_epi32(1);
    let mut bits = _mm256_min_epi32(guess, _mm256_set1_epi32(infinity_bits(precision) as i32 - 1));
    let mut found = false;
    for _ in 0..4 {
        // A mask is −1 where true.
        let (here, next) = (below(bits), below(_mm256_add_epi32(bits, one)));
        found = _mm256_movemask_epi8(_mm256_andnot_si256(next, here)) == -1;
        if found {
            break;
        }
        let up = _mm256_and_si256(here, next);
        bits = _mm256_sub_epi32(_mm256_sub_epi32(bits, up), _mm256_add_epi32(here, one));
    }
    if !found {
        let factor = if MULTIPLY { Factor::Multiply(f) } else { Factor::Divide(f) };
        let mut exact = [0; 8];
        for (bits, first) in exact.iter_mut().zip(e2m1::FIRSTS.into_iter().chain([f32::from_bits(1)])) {
            *bits = last_below(first, factor, precision);
        }
        // SAFETY: the source is an array of 8 doublewords.
        bits = unsafe { _mm256_loadu_si256(exact.as_ptr().cast()) };
    }
    if precision != Precision::F32 {
        bits = _mm256_or_si256(bits, _mm256_slli_epi32::<16>(bits));
    }
    for (k, cut) in cuts.iter_mut().enumerate() {
        *cut = _mm256_permutevar8x32_epi32(bits, _mm256_set1_epi32(k as i32));
    }
}

/// The bits of the largest magnitude that scales to less than `first`, by bisection.
#[cold]
fn last_below(first: f32, factor: Factor, precision: Precision) -> u32 {
    let below = |bits: u32| factor.apply(value_of(bits, precision)) < first;
    // Zero scales to zero, which is below everything; +∞ scales to +∞, which is not.
    let (mut low, mut high) = (0, infinity_bits(precision));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::{Mode, Profile};
    use nvfp4_testing::{Need, missing};

    /// Cuts of every scale byte at amaxes over the whole range, against the rules on both sides of
    /// each cut.
    #[test]
    fn codes_change_exactly_at_the_cuts() {
        if crate::avx2::Avx2::detect().is_none() {
            return missing(Need::Avx2, "the CPU has no AVX2");
        }
        let amaxes =
            [1e-45, 1e-40, 1e-38, 7.9e-36, 1e-20, 0.37, 1.0, 448.0, 2688.0, 1e20, 3e38, f32::MAX, f32::INFINITY];
        for profile in [Profile::TransformerEngine, Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo] {
            for amax in amaxes {
                let mode = Mode { profile, ..Mode::default() };
                check_all::<f32>(amax, &mode);
                check_all::<half::bf16>(amax, &mode);
                check_all::<half::f16>(amax, &mode);
            }
        }
    }

    fn check_all<T: Element>(amax: f32, mode: &Mode) {
        let scaling = Scaling::new(amax, mode, T::PRECISION);
        for scale in 0..=e4m3::MAX_BYTE {
            check::<T>(scaling.factor(scale), &scaling);
        }
    }

    fn check<T: Element>(factor: Factor, scaling: &Scaling) {
        let (Factor::Multiply(f) | Factor::Divide(f)) = factor;
        if !(f > 0.0 && f.is_finite()) {
            return;
        }
        let precision = scaling.precision;
        // SAFETY: a vector may hold any bits.
        let mut vectors: Cuts = unsafe { std::mem::zeroed() };
        match factor {
            // SAFETY: the caller has looked for AVX2.
            Factor::Multiply(f) => unsafe { make::<T, true>(f, &mut vectors) },
            // SAFETY: the caller has looked for AVX2.
            Factor::Divide(f) => unsafe { make::<T, false>(f, &mut vectors) },
        }
        // SAFETY: a vector is eight doublewords of plain bits.
        let lanes: [[u32; 8]; 8] = unsafe { std::mem::transmute(vectors) };
        let cuts = lanes.map(|lane| if precision == Precision::F32 { lane[0] } else { lane[0] & 0xFFFF });
        let scaled = |bits| factor.apply(value_of(bits, precision));
        let code = |bits| scaling.code(scaled(bits), None) & 7;
        for (below, &cut) in (0..7).zip(&cuts) {
            assert!(code(cut) <= below && code(cut + 1) > below, "{factor:?} {precision:?} {cut:#x}");
        }
        assert!(scaled(cuts[7]) == 0.0 && scaled(cuts[7] + 1) > 0.0, "{factor:?} {precision:?}");
    }
}
