//! From an amax to a scale. Source: numerics §14.2, §14.5.

use super::Format;
use crate::{Precision, e8m0};

/// Elements that share an MXFP8 scale.
pub const MX_BLOCK: usize = 32;

/// Rows, columns or both of a block with a 32-bit scale.
pub const BLOCK: usize = 128;

/// Which numbers may be scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScaleValues {
    /// Any number.
    #[default]
    Any,
    /// Powers of two; others are rounded down to one, so that nothing saturates.
    PowersOfTwo,
}

/// How the 32-bit scale of a tensor or of a block follows from its amax.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct AmaxRule {
    /// Which numbers may be scales.
    pub values: ScaleValues,
    /// A smaller amax counts as this one.
    pub epsilon: f32,
}

impl AmaxRule {
    /// What current scaling uses unless told otherwise.
    pub const CURRENT: AmaxRule = AmaxRule { values: ScaleValues::Any, epsilon: 0.0 };

    /// What block scaling uses unless told otherwise.
    pub const BLOCK: AmaxRule = AmaxRule { values: ScaleValues::PowersOfTwo, epsilon: 0.0 };

    /// The scale of a tensor.
    pub fn tensor_scale(&self, amax: f32, format: Format) -> f32 {
        self.scale(amax, format, f32::MAX)
    }

    /// The scale of a block. A quotient that overflows becomes the largest value of the type that
    /// elements came in.
    pub fn block_scale(&self, amax: f32, format: Format, precision: Precision) -> f32 {
        self.scale(amax, format, precision.max())
    }

    /// `fl(MAX / amax)`, or `overflow` where that is infinite, then rounded down to a power of two
    /// if asked; 1 where the amax is 0, infinite or NaN.
    fn scale(&self, amax: f32, format: Format, overflow: f32) -> f32 {
        let amax = if amax < self.epsilon { self.epsilon } else { amax };
        if amax == 0.0 || !amax.is_finite() {
            return 1.0;
        }
        let quotient = format.max() / amax;
        let scale = if quotient.is_infinite() { overflow } else { quotient };
        match self.values {
            ScaleValues::Any => scale,
            // Never subnormal: the smallest quotient is about 1.3·10⁻³⁶.
            ScaleValues::PowersOfTwo => f32::from_bits(scale.to_bits() & 0xFF80_0000),
        }
    }
}

/// The E8M0 byte of an MXFP8 block: `fl(amax · fl(1/MAX))`, rounded up to a power of two.
///
/// So no finite value saturates, and all of them round to zero beside an infinite one.
pub fn mx_byte(amax: f32, format: Format) -> u8 {
    e8m0::encode_up(amax * (1.0 / format.max()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reciprocals_have_the_published_bits() {
        assert_eq!(Format::ALL.map(|f| (1.0 / f.max()).to_bits()), [0x3B12_4925, 0x3792_4925]);
    }

    #[test]
    fn extreme_amaxes() {
        let powers = AmaxRule { values: ScaleValues::PowersOfTwo, epsilon: 0.0 };
        for rule in [AmaxRule::CURRENT, powers] {
            for amax in [0.0, f32::INFINITY, f32::NAN] {
                assert_eq!(rule.tensor_scale(amax, Format::E4m3), 1.0);
            }
        }
        assert_eq!(AmaxRule::CURRENT.tensor_scale(1e-40, Format::E5m2), f32::MAX);
        assert_eq!(powers.tensor_scale(1e-40, Format::E5m2), 2f32.powi(127));
        let overflow = |rule: AmaxRule, p| rule.block_scale(1e-40, Format::E4m3, p);
        assert_eq!(overflow(AmaxRule::CURRENT, Precision::Bf16).to_bits(), 0x7F7F_0000);
        assert_eq!(overflow(AmaxRule::CURRENT, Precision::F16), 65504.0);
        assert_eq!(overflow(powers, Precision::F16), 32768.0);
    }

    #[test]
    fn epsilon_is_a_floor_for_zero_too() {
        let rule = AmaxRule { epsilon: 7.0, ..AmaxRule::CURRENT };
        assert_eq!([0.0, 3.0, 7.0, 14.0].map(|a| rule.tensor_scale(a, Format::E4m3)), [64.0, 64.0, 64.0, 32.0]);
        assert_eq!(rule.tensor_scale(f32::NAN, Format::E4m3), 1.0);
    }

    #[test]
    fn powers_of_two_are_rounded_down() {
        let scale = |amax| AmaxRule::BLOCK.tensor_scale(amax, Format::E4m3);
        assert_eq!([448.0, 448.0f32.next_up(), 300.0, 224.0].map(scale), [1.0, 0.5, 1.0, 2.0]);
    }

    #[test]
    fn the_byte_of_a_block_steps_just_above_the_largest_value() {
        for format in Format::ALL {
            for k in -100..100 {
                let amax = format.max() * 2f32.powi(k);
                assert_eq!(i32::from(mx_byte(amax, format)), k + 127);
                assert_eq!(i32::from(mx_byte(amax.next_up(), format)), k + 128);
            }
            assert_eq!([0.0, 1e-40, f32::INFINITY, f32::NAN].map(|a| mx_byte(a, format)), [0, 0, 254, 255]);
        }
    }
}
