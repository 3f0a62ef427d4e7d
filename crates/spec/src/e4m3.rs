//! E4M3 ("fn" flavour): eight bits, `s eeee mmm`, bias 7, no infinity, NaN at 0x7F and 0xFF. Block scales are E4M3
//! bytes with the sign bit clear. Source: numerics §1.2.

/// The largest finite value, byte 0x7E.
pub const MAX: f32 = 448.0;

/// The byte of the largest finite value.
pub const MAX_BYTE: u8 = 0x7E;

/// The NaN that encoders write.
pub const NAN_BYTE: u8 = 0x7F;

/// The smallest normal value, 2⁻⁶.
pub const MIN_NORMAL: f32 = 1.0 / 64.0;

/// The byte of the smallest normal value.
pub const MIN_NORMAL_BYTE: u8 = 0x08;

/// The smallest positive value, 2⁻⁹: every finite value is a multiple of it.
pub const MIN_POSITIVE: f32 = 1.0 / 512.0;

/// The byte nearest to `x`; a tie goes to the even mantissa.
///
/// Magnitudes above 448, infinities included, saturate to ±448. Subnormals are produced: 2⁻¹⁰ is a tie between 0 and
/// 2⁻⁹ and gives 0. NaN gives 0x7F whatever its sign; −0 and negative values that round to zero give 0x80.
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return NAN_BYTE;
    }
    let a = x.abs();
    let magnitude = if a >= MAX {
        MAX_BYTE
    } else if a < MIN_NORMAL {
        // The product is exact; a result of 8 is the byte of the smallest normal value.
        (a * 512.0).round_ties_even() as u8
    } else {
        let exponent = (a.to_bits() >> 23) as i32 - 127;
        // 8 ≤ a·2^(3−exponent) < 16, exact. Rounding up to 16 carries into the exponent, as it must.
        let mantissa = (a * power_of_two(3 - exponent)).round_ties_even() as i32;
        (((exponent + 7) << 3) + (mantissa - 8)) as u8
    };
    if x.is_sign_negative() { magnitude | 0x80 } else { magnitude }
}

/// The value of a byte, exact in binary32.
pub fn decode(byte: u8) -> f32 {
    let mantissa = f32::from(byte & 7);
    let exponent = i32::from(byte >> 3 & 15);
    let magnitude = match (byte & 0x7F, exponent) {
        (NAN_BYTE, _) => f32::NAN,
        (_, 0) => mantissa * MIN_POSITIVE,
        _ => (8.0 + mantissa) * power_of_two(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// 2ⁿ for −126 ≤ n ≤ 127, from its bits: `powi` may round.
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// The value in units of 2⁻⁹, or `None` for NaN. Exact, and at most 448·512 in magnitude.
pub fn decode_units(byte: u8) -> Option<i64> {
    let value = decode(byte);
    (!value.is_nan()).then_some((value * 512.0) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_finite_byte_survives_the_round_trip() {
        for byte in 0..=255u8 {
            if byte & 0x7F != NAN_BYTE {
                assert_eq!(encode(decode(byte)), byte);
                assert_eq!(decode_units(byte).unwrap() as f32 / 512.0, decode(byte));
            }
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

    /// An independent statement of "nearest, ties to even, saturating", by distance in f64 over the finite bytes.
    fn nearest(x: f32) -> u8 {
        let a = f64::from(x).abs().min(448.0);
        let distance = |byte: u8| (f64::from(decode(byte)) - a).abs();
        let byte =
            (0..=MAX_BYTE).min_by(|&p, &q| distance(p).total_cmp(&distance(q)).then((p & 1).cmp(&(q & 1)))).unwrap();
        byte | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn every_16_bit_input_goes_to_the_nearest_byte() {
        for bits in 0..=u16::MAX {
            for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                let expected = if x.is_nan() { NAN_BYTE } else { nearest(x) };
                assert_eq!(encode(x), expected, "{x:e}");
            }
        }
    }
}
