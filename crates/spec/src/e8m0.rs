//! E8M0: eight bits of exponent and nothing else. Byte `b` is 2^(b−127), 255 is NaN: the block
//! scales of MXFP8. Source: numerics §14.5.

/// The byte of NaN.
pub const NAN_BYTE: u8 = 255;

/// The largest scale, 2¹²⁷.
pub const MAX_BYTE: u8 = 254;

/// 2⁻¹²⁷: the value of byte 0, the only one below the smallest normal binary32 number.
const SMALLEST: f32 = f32::from_bits(0x0040_0000);

/// The value of a byte, exact in binary32.
pub fn decode(byte: u8) -> f32 {
    match byte {
        0 => SMALLEST,
        NAN_BYTE => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// One over the value of a byte, exact in binary32: what elements are multiplied by when they are
/// quantized.
pub fn reciprocal(byte: u8) -> f32 {
    if byte == NAN_BYTE { f32::NAN } else { decode(MAX_BYTE - byte) }
}

/// The byte of the smallest power of two that is not below `x`, for `x ≥ 0`.
///
/// Values up to 2⁻¹²⁷, including zero, give byte 0. Values above 2¹²⁷, including infinity, give
/// byte 254. NaN gives 255.
pub fn encode_up(x: f32) -> u8 {
    let (exponent, mantissa) = ((x.to_bits() >> 23 & 0xFF) as u8, x.to_bits() & 0x007F_FFFF);
    match (exponent, mantissa) {
        _ if x.is_nan() => NAN_BYTE,
        (MAX_BYTE.., _) => MAX_BYTE,
        // A subnormal number in units of 2⁻¹⁴⁹: 2⁻¹²⁷ is 2²² of them.
        (0, ..=0x0040_0000) => 0,
        (_, 0) => exponent,
        _ => exponent + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_powers_of_two_and_reciprocals_exact() {
        for byte in 0..=MAX_BYTE {
            assert_eq!(f64::from(decode(byte)), 2f64.powi(i32::from(byte) - 127));
            assert_eq!(f64::from(decode(byte)) * f64::from(reciprocal(byte)), 1.0);
            assert_eq!(encode_up(decode(byte)), byte);
        }
        assert!(decode(NAN_BYTE).is_nan() && reciprocal(NAN_BYTE).is_nan());
    }

    #[test]
    fn rounding_is_up_and_stays_inside() {
        for byte in 1..=MAX_BYTE {
            assert_eq!(encode_up(decode(byte).next_down()), byte, "just below byte {byte}");
            assert_eq!(encode_up(decode(byte - 1).next_up()), byte, "just above byte {}", byte - 1);
        }
        assert_eq!([0.0, 1e-45, f32::MAX, f32::INFINITY, f32::NAN].map(encode_up), [0, 0, 254, 254, 255]);
    }

    #[test]
    fn every_16_bit_magnitude_is_at_most_its_scale() {
        for bits in 0..=0x7F80u16 {
            let x = half::bf16::from_bits(bits).to_f32();
            let byte = encode_up(x);
            assert!(x <= decode(byte) || byte == MAX_BYTE, "{x:e}");
            assert!(byte == 0 || x > decode(byte - 1), "{x:e}");
        }
    }
}
