//! E5M2: eight bits, `s eeeee mm`, bias 15; infinity at 0x7C and 0xFC, NaN above it. A value is the
//! binary16 number whose high byte it is. Source: numerics §14.1.

use crate::small_float::{self, SmallFloat};

/// The largest finite value, byte 0x7B.
pub const MAX: f32 = 57344.0;

/// The byte of the largest finite value.
pub const MAX_BYTE: u8 = 0x7B;

/// The byte of +∞, which is decoded and never written.
pub const INFINITY_BYTE: u8 = 0x7C;

/// The NaN that encoders write.
pub const NAN_BYTE: u8 = small_float::NAN_BYTE;

/// Bits of the mantissa.
pub const MANTISSA: i32 = 2;

/// The smallest normal value, 2⁻¹⁴.
pub const MIN_NORMAL: f32 = 1.0 / 16384.0;

const FORMAT: SmallFloat = SmallFloat { mantissa: MANTISSA, bias: 15, max: MAX };

/// The byte nearest to `x`; a tie goes to the even mantissa.
///
/// Magnitudes above 57344, infinities included, saturate to ±57344. Subnormals are produced: 2⁻¹⁷
/// is a tie between 0 and 2⁻¹⁶ and gives 0. NaN gives 0x7F whatever its sign; −0 and negative
/// values that round to zero give 0x80.
pub fn encode(x: f32) -> u8 {
    FORMAT.encode(x)
}

/// The value of a byte, exact in binary32.
pub fn decode(byte: u8) -> f32 {
    match byte & 0x7F {
        INFINITY_BYTE if byte & 0x80 == 0 => f32::INFINITY,
        INFINITY_BYTE => f32::NEG_INFINITY,
        0..INFINITY_BYTE => FORMAT.decode(byte),
        _ => f32::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn a_byte_is_the_high_byte_of_a_binary16_number() {
        for byte in 0..=255u8 {
            let half = f16::from_bits(u16::from(byte) << 8).to_f32();
            let value = decode(byte);
            assert!(value.to_bits() == half.to_bits() || value.is_nan() && half.is_nan(), "{byte:#04x}");
        }
        small_float::tests::check_round_trip(encode, decode);
    }

    #[test]
    fn extremes() {
        let largest = [57344.0, 61440.0, f32::INFINITY, f32::MAX, -1e9].map(encode);
        assert_eq!(largest, [0x7B, 0x7B, 0x7B, 0x7B, 0xFB]);
        assert_eq!([encode(f32::NAN), encode(-f32::NAN)], [0x7F, 0x7F]);
        assert_eq!([encode(2f32.powi(-17)), encode(3.0 * 2f32.powi(-17)), encode(MIN_NORMAL)], [0, 2, 4]);
        assert_eq!([encode(0.0), encode(-0.0), encode(-1e-40)], [0, 0x80, 0x80]);
    }

    #[test]
    fn every_16_bit_input_goes_to_the_nearest_byte() {
        small_float::tests::check_nearest(MAX_BYTE, encode, decode);
    }
}
