//! E4M3 ("fn" flavour): eight bits, `s eeee mmm`, bias 7, no infinity, NaN at 0x7F and 0xFF. Block
//! scales are E4M3 bytes with the sign bit clear; FP8 tensors use both signs. Source: numerics
//! §1.2.

use crate::small_float::{self, SmallFloat};

/// The largest finite value, byte 0x7E.
pub const MAX: f32 = 448.0;

/// The byte of the largest finite value.
pub const MAX_BYTE: u8 = 0x7E;

/// The NaN that encoders write.
pub const NAN_BYTE: u8 = small_float::NAN_BYTE;

/// Bits of the mantissa.
pub const MANTISSA: i32 = 3;

/// The smallest normal value, 2⁻⁶.
pub const MIN_NORMAL: f32 = 1.0 / 64.0;

/// The byte of the smallest normal value.
pub const MIN_NORMAL_BYTE: u8 = 0x08;

/// The smallest positive value, 2⁻⁹: every finite value is a multiple of it.
pub const MIN_POSITIVE: f32 = 1.0 / 512.0;

const FORMAT: SmallFloat = SmallFloat { mantissa: MANTISSA, bias: 7, max: MAX };

/// The byte nearest to `x`; a tie goes to the even mantissa.
///
/// Magnitudes above 448, infinities included, saturate to ±448. Subnormals are produced: 2⁻¹⁰ is a
/// tie between 0 and 2⁻⁹ and gives 0. NaN gives 0x7F whatever its sign; −0 and negative values that
/// round to zero give 0x80.
pub fn encode(x: f32) -> u8 {
    FORMAT.encode(x)
}

/// The value of a byte, exact in binary32.
pub fn decode(byte: u8) -> f32 {
    if byte & 0x7F == NAN_BYTE { f32::NAN } else { FORMAT.decode(byte) }
}

/// The value in units of 2⁻⁹, or `None` for NaN. Exact, and at most 448·512 in magnitude.
pub fn decode_units(byte: u8) -> Option<i64> {
    let value = decode(byte);
    (!value.is_nan()).then_some((value * 512.0) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_byte_survives_the_round_trip() {
        small_float::tests::check_round_trip(encode, decode);
        for byte in (0..=255u8).filter(|byte| byte & 0x7F != NAN_BYTE) {
            assert_eq!(decode_units(byte).unwrap() as f32 / 512.0, decode(byte));
        }
        assert!(decode(0x7F).is_nan() && decode(0xFF).is_nan());
        assert_eq!(decode_units(0xFF), None);
    }

    #[test]
    fn extremes() {
        assert_eq!([encode(448.0), encode(464.0), encode(f32::INFINITY), encode(-1e9)], [0x7E, 0x7E, 0x7E, 0xFE]);
        assert_eq!([encode(f32::NAN), encode(-f32::NAN)], [0x7F, 0x7F]);
        assert_eq!([encode(2f32.powi(-10)), encode(3.0 * 2f32.powi(-10)), encode(2f32.powi(-9))], [0, 2, 1]);
        assert_eq!([encode(0.0), encode(-0.0), encode(1e-40)], [0, 0x80, 0]);
    }

    #[test]
    fn every_16_bit_input_goes_to_the_nearest_byte() {
        small_float::tests::check_nearest(MAX_BYTE, encode, decode);
    }
}
