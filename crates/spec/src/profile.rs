//! Whose bytes are written: four producers of NVFP4 agree on the format and differ in the
//! arithmetic of the scales.
//!
//! | | stored 32-bit number `g` | scale byte `S` of a block | elements |
//! |---|---|---|---|
//! | TransformerEngine | `amax` | [`scale`](mod@crate::scale) | `fl(x · inv)` |
//! | ModelOpt 0.47 | `fl(amax/2688)`, a multiplier | `fl(bm / fl(6g))`, 0 → 1, at least 2⁻⁹ | `fl(x / fl(S·g))` |
//! | llm-compressor 0.14 | `2688 · (1/amax)`, both steps in the input's type, a divisor | `fl(g · bm/6)`, `bm/6` in the input's type; byte 0 → 0x20 | `fl(x / fl(S/g))` |
//! | torchao 0.18 | `fl(amax/2688)`, a multiplier | `fl(fl(bm/6) / g)`, at least 2⁻⁶ | `fl(x · fl(fl(1/g)/S))` |
//!
//! All round scale bytes and codes to nearest even and saturate at 448 and 6. In the last three NaN
//! takes over the amax, as in [`Specials::Reference`]; ModelOpt and llm-compressor write code 0 for −0,
//! torchao code 8. An element that is NaN after scaling becomes code 7 in ModelOpt; the other two
//! have no rule for it (their code depends on the NaN's bits and on the vector instructions at
//! hand), and here it becomes 0 for llm-compressor and 7 for torchao.
//!
//! Where a producer writes NaN for a tensor of zeros (ModelOpt, torchao), `g` is 1 here: the scales
//! are finite and the tensor decodes to zeros.

use crate::scale::{self, Global, Unit};
use crate::{Bound, Precision, Profile, Specials, e4m3};

/// The scale byte that llm-compressor writes for a block whose scale rounds to 0: 0.125.
pub const LLM_COMPRESSOR_ZERO: u8 = 0x20;

/// What is done to an element before it is rounded to a code: one binary32 operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Factor {
    /// `fl(x · f)`.
    Multiply(f32),
    /// `fl(x / f)`.
    Divide(f32),
}

impl Factor {
    /// The scaled element.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Factor::Multiply(f) => x * f,
            Factor::Divide(f) => x / f,
        }
    }
}

impl Profile {
    /// What the stored 32-bit number means.
    pub fn unit(self, bound: Bound) -> Unit {
        match self {
            Profile::TransformerEngine => Unit::Amax(bound),
            Profile::ModelOpt | Profile::TorchAo => Unit::Multiplier,
            Profile::LlmCompressor => Unit::Divisor,
        }
    }

    /// The stored 32-bit number of a tensor or row with this amax, whose elements came in this
    /// type. The bound is 448 but for [`ScaleRule::ModelOptFourOverSix`](crate::ScaleRule).
    pub fn stored(self, amax: f32, bound: Bound, precision: Precision) -> f32 {
        match self {
            Profile::TransformerEngine => amax,
            Profile::ModelOpt | Profile::TorchAo => match amax / bound.six_e() {
                0.0 => 1.0,
                g => g,
            },
            Profile::LlmCompressor => {
                // Its source divides a number by a tensor, which torch computes as the tensor's
                // reciprocal times the number.
                let reciprocal = precision.round(1.0 / amax.max(precision.min_normal()));
                match precision.round(reciprocal * bound.six_e()) {
                    g if g.is_finite() => g,
                    _ => 1.0,
                }
            }
        }
    }

    /// The scale byte of a block, where the stored number is `g` and elements came in this type.
    ///
    /// TransformerEngine's is [`scale::block_scale`](crate::scale::block_scale).
    pub(crate) fn block_scale(self, block_amax: f32, global: &Global, precision: Precision, specials: Specials) -> u8 {
        let g = self.stored(global.amax, global.bound, precision);
        match self {
            Profile::TransformerEngine => scale::block_scale(block_amax, global, specials),
            Profile::ModelOpt => match block_amax / (6.0 * g) {
                0.0 => e4m3::encode(1.0),
                s => e4m3::encode(at_least(e4m3::MIN_POSITIVE, s)),
            },
            Profile::LlmCompressor => match e4m3::encode(g * precision.round(block_amax / 6.0)) {
                0 => LLM_COMPRESSOR_ZERO,
                byte => byte,
            },
            Profile::TorchAo => e4m3::encode(at_least(e4m3::MIN_NORMAL, block_amax / 6.0 / g)),
        }
    }

    /// How the elements of a block with this scale byte are scaled.
    pub(crate) fn factor(self, byte: u8, global: &Global, precision: Precision, specials: Specials) -> Factor {
        let (g, scale) = (self.stored(global.amax, global.bound, precision), e4m3::decode(byte));
        match self {
            Profile::TransformerEngine => Factor::Multiply(scale::inverse_scale(byte, global, specials)),
            Profile::ModelOpt => Factor::Divide(scale * g),
            Profile::LlmCompressor => Factor::Divide(scale / g),
            Profile::TorchAo => Factor::Multiply(1.0 / g / scale),
        }
    }
}

/// `max(x, least)`; NaN stays NaN, as in torch's `clamp`.
pub(crate) fn at_least(least: f32, x: f32) -> f32 {
    if x < least { least } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block;
    use crate::scaling::Scaling;
    use crate::tile::Quantized;
    use crate::{Mode, Rounding};

    const GRID: [f32; 16] =
        [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0];
    const CODES: [u8; 16] = [7, 6, 6, 4, 4, 2, 2, 0, 8, 10, 10, 12, 12, 14, 14, 15];

    fn quantize(profile: Profile, row: [f32; 16], amax: f32, precision: Precision) -> Quantized<1> {
        let scaling = Scaling::new(amax, &Mode { profile, ..Mode::default() }, precision);
        block::quantize(&[row], &scaling, Rounding::NearestEven)
    }

    const OTHERS: [Profile; 3] = [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo];

    #[test]
    fn a_block_on_the_grid_has_the_codes_of_the_worked_example() {
        for profile in OTHERS {
            for precision in [Precision::F32, Precision::Bf16] {
                let q = quantize(profile, GRID, 2688.0, precision);
                assert_eq!((q.scale, q.codes[0]), (0x38, CODES), "{profile:?}");
            }
        }
    }

    #[test]
    fn zero_blocks_get_the_producers_scale_byte() {
        let byte = |profile| quantize(profile, [0.0; 16], 1.0, Precision::F32);
        assert_eq!(OTHERS.map(|p| byte(p).scale), [0x38, 0x20, 0x08]);
        assert!(OTHERS.iter().all(|&p| byte(p).codes[0] == [0; 16]));
    }

    #[test]
    fn underflowing_blocks_get_the_producers_smallest_scale() {
        let byte = |profile| quantize(profile, [1e-6; 16], 1.0, Precision::F32).scale;
        assert_eq!(OTHERS.map(byte), [0x01, 0x20, 0x08]);
    }

    #[test]
    fn a_tensor_of_zeros_stores_finite_scales_and_decodes_to_zeros() {
        for profile in OTHERS {
            for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
                assert_eq!(profile.stored(0.0, Bound::E448, precision), 1.0);
                let q = quantize(profile, [0.0; 16], 0.0, precision);
                assert!(q.codes[0] == [0; 16] && q.scale < e4m3::NAN_BYTE, "{profile:?}");
            }
        }
    }

    #[test]
    fn llm_compressor_rounds_its_scales_to_the_inputs_type() {
        // 2688/0.0903 is 29756.9; the producer's file holds 29696, the nearest bf16.
        let amax = 0.09033203;
        assert_eq!(Profile::LlmCompressor.stored(amax, Bound::E448, Precision::Bf16), 29696.0);
        assert_eq!(Profile::LlmCompressor.stored(amax, Bound::E448, Precision::F32), 1.0 / amax * 2688.0);
        // A case where a division would give 1696.
        assert_eq!(Profile::LlmCompressor.stored(1.5859375, Bound::E448, Precision::Bf16), 1688.0);
        assert_eq!(Profile::LlmCompressor.stored(0.03, Bound::E448, Precision::F16), 1.0, "the quotient overflows f16");
    }

    #[test]
    fn negative_zero_and_nan() {
        let mut row = [1.0; 16];
        (row[1], row[2]) = (-0.0, -1e-30);
        let codes = |profile| quantize(profile, row, 1.0, Precision::F32).codes[0];
        assert_eq!(OTHERS.map(|p| codes(p)[1]), [0, 0, 8], "-0");
        assert_eq!(OTHERS.map(|p| codes(p)[2]), [8, 8, 8], "a small negative value");
        row[3] = f32::NAN;
        let q = OTHERS.map(|p| quantize(p, row, 1.0, Precision::F32));
        assert_eq!(q.map(|q| (q.scale, q.codes[0][0])), [(0x7F, 7), (0x7F, 0), (0x7F, 7)]);
    }
}
