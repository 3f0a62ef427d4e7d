//! Cuts: codes without arithmetic.
//!
//! Scaling an element is one rounded multiplication or division by a positive factor that depends on the block's scale byte
//! alone, and so is monotone in the element's magnitude; rounding to E2M1 is monotone too. Hence for every scale byte there
//! are seven magnitudes of the input type at which the code grows by one, and a code is the number of cuts that the
//! element's magnitude, compared as an integer, lies above. Cuts are found with the rule's own operations and kept per scale
//! byte; a tensor or a row uses a few dozen of the 127.

use crate::avx2::{infinity_bits, splat, value_of};
use nvfp4_spec::block::Scaling;
use nvfp4_spec::profile::Factor;
use nvfp4_spec::{Precision, e2m1, e4m3};
use std::arch::x86_64::*;

/// What is known of a scale byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    Ready,
    /// The factor is not a positive finite number: no cuts exist, and the rules decide.
    Irregular,
}

/// What the elements of a block with a given scale byte need.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// The multiplier or divisor.
    pub factor: f32,
    /// Seven cuts for the codes; the eighth is the largest magnitude that scales to zero. A magnitude above a cut is beyond
    /// it.
    pub cuts: [__m256i; 8],
}

/// The entries of one tensor or row, made when first asked for.
pub(super) struct Table {
    scaling: Scaling,
    states: [State; 128],
    entries: Vec<Entry>,
}

impl Table {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn new(scaling: &Scaling) -> Self {
        let empty = Entry { factor: 0.0, cuts: [_mm256_setzero_si256(); 8] };
        Table { scaling: *scaling, states: [State::Empty; 128], entries: vec![empty; 128] }
    }

    pub fn scaling(&self) -> &Scaling {
        &self.scaling
    }

    /// Turns to another row. The entries of the same scaling are kept.
    pub fn set(&mut self, scaling: &Scaling) {
        if self.scaling.global.amax.to_bits() != scaling.global.amax.to_bits() {
            self.scaling = *scaling;
            self.states = [State::Empty; 128];
        }
    }

    /// The entry of a scale byte that [`Table::prepare`] called regular.
    #[inline]
    pub fn entry(&self, scale: u8) -> &Entry {
        &self.entries[usize::from(scale & 127)]
    }

    /// Makes the entry of a scale byte; `false` if there is none, because the factor is 0, infinite or NaN.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub fn prepare(&mut self, scale: u8) -> bool {
        let index = usize::from(scale & 127);
        if self.states[index] == State::Empty {
            self.states[index] = match self.scaling.factor(scale) {
                Factor::Multiply(f) | Factor::Divide(f) if !(f > 0.0 && f.is_finite()) => State::Irregular,
                factor => {
                    self.entries[index] = make(factor, self.scaling.precision);
                    State::Ready
                }
            };
        }
        self.states[index] == State::Ready && scale <= e4m3::MAX_BYTE
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn make(factor: Factor, precision: Precision) -> Entry {
    let cut = |first: f32| splat(last_below(first, factor, precision), precision);
    let mut cuts = [_mm256_setzero_si256(); 8];
    for (cut_at, first) in cuts.iter_mut().zip(e2m1::FIRSTS) {
        *cut_at = cut(first);
    }
    cuts[7] = cut(f32::from_bits(1));
    let (Factor::Multiply(factor) | Factor::Divide(factor)) = factor;
    Entry { factor, cuts }
}

/// The bits of the largest magnitude that scales to less than `first`, at most those of +∞. The guess is a step or two off;
/// where it is further off (the factor or the magnitude is subnormal), bisection takes over.
fn last_below(first: f32, factor: Factor, precision: Precision) -> u32 {
    let below = |bits: u32| factor.apply(value_of(bits, precision)) < first;
    let infinity = infinity_bits(precision);
    let guess = match factor {
        Factor::Multiply(f) => first / f,
        Factor::Divide(f) => first * f,
    };
    let mut bits = match precision {
        Precision::F32 => guess.to_bits(),
        Precision::Bf16 => guess.to_bits() >> 16,
        Precision::F16 => u32::from(half::f16::from_f32(guess).to_bits()),
    }
    .min(infinity - 1);
    for _ in 0..4 {
        match (below(bits), bits < infinity && below(bits + 1)) {
            (true, false) => return bits,
            (true, true) => bits += 1,
            // Zero scales to zero, which is below everything.
            (false, _) => bits -= 1,
        }
    }
    let (mut low, mut high) = (0, infinity); // `low` scales to below `first`; +∞ scales to +∞, which does not
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

    /// Cuts of every scale byte at amaxes over the whole range, against the rules on both sides of each cut.
    #[test]
    fn codes_change_exactly_at_the_cuts() {
        let amaxes =
            [1e-45, 1e-40, 1e-38, 7.9e-36, 1e-20, 0.37, 1.0, 448.0, 2688.0, 1e20, 3e38, f32::MAX, f32::INFINITY];
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            for profile in [Profile::TransformerEngine, Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo] {
                for amax in amaxes {
                    let scaling = Scaling::new(amax, &Mode { profile, ..Mode::default() }, precision);
                    for scale in 0..=e4m3::MAX_BYTE {
                        check(scaling.factor(scale), &scaling);
                    }
                }
            }
        }
    }

    fn check(factor: Factor, scaling: &Scaling) {
        let (Factor::Multiply(f) | Factor::Divide(f)) = factor;
        if !(f > 0.0 && f.is_finite()) {
            return;
        }
        let code = |bits| scaling.code(factor.apply(value_of(bits, scaling.precision)), None) & 7;
        for (below, first) in (0..).zip(e2m1::FIRSTS) {
            let cut = last_below(first, factor, scaling.precision);
            assert!(code(cut) <= below, "{factor:?} {cut:#x}");
            if cut < infinity_bits(scaling.precision) {
                assert!(code(cut + 1) > below, "{factor:?} {cut:#x}");
            }
        }
    }
}
