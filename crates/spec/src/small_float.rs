//! What E4M3 and E5M2 have in common: a sign, an exponent and a mantissa in eight bits. Source:
//! numerics §1.2, §14.1.

/// The NaN that encoders write, whatever the sign of theirs.
pub(crate) const NAN_BYTE: u8 = 0x7F;

/// How the seven bits below the sign are divided.
#[derive(Clone, Copy)]
pub(crate) struct SmallFloat {
    /// Bits of the mantissa.
    pub mantissa: i32,
    /// What is added to the exponent of a normal value.
    pub bias: i32,
    /// The largest finite value.
    pub max: f32,
}

impl SmallFloat {
    /// The byte nearest to `x`, ties to the even mantissa; infinities and what lies beyond the
    /// largest value saturate.
    pub fn encode(self, x: f32) -> u8 {
        if x.is_nan() {
            return NAN_BYTE;
        }
        let a = x.abs().min(self.max);
        // Below the smallest normal value the steps of the grid shrink no more.
        let exponent = ((a.to_bits() >> 23) as i32 - 127).max(1 - self.bias);
        // The product is exact. Rounding up to a power of two carries into the exponent, as it
        // must.
        let steps = (a * power_of_two(self.mantissa - exponent)).round_ties_even() as i32;
        let magnitude = (((exponent + self.bias - 1) << self.mantissa) + steps) as u8;
        if x.is_sign_negative() { magnitude | 0x80 } else { magnitude }
    }

    /// The value of a byte as if every one had a finite value, exact in binary32.
    pub fn decode(self, byte: u8) -> f32 {
        let (field, fraction) =
            (i32::from(byte & 0x7F) >> self.mantissa, i32::from(byte & 0x7F) & ((1 << self.mantissa) - 1));
        let steps = if field == 0 { fraction } else { fraction + (1 << self.mantissa) };
        let magnitude = steps as f32 * power_of_two(field.max(1) - self.bias - self.mantissa);
        if byte & 0x80 == 0 { magnitude } else { -magnitude }
    }
}

/// 2ⁿ for −126 ≤ n ≤ 127, from its bits: `powi` may round.
pub(crate) fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use half::{bf16, f16};

    /// An independent statement of "nearest, ties to even, saturating", by distance in f64 over the
    /// finite bytes.
    fn nearest(x: f32, max_byte: u8, decode: fn(u8) -> f32) -> u8 {
        if x.is_nan() {
            return NAN_BYTE;
        }
        let a = f64::from(x).abs().min(f64::from(decode(max_byte)));
        let distance = |byte: u8| (f64::from(decode(byte)) - a).abs();
        let byte =
            (0..=max_byte).min_by(|&p, &q| distance(p).total_cmp(&distance(q)).then((p & 1).cmp(&(q & 1)))).unwrap();
        byte | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    /// Every 16-bit input goes to the nearest byte, and so do the binary32 neighbours of every
    /// boundary.
    pub fn check_nearest(max_byte: u8, encode: fn(f32) -> u8, decode: fn(u8) -> f32) {
        for bits in 0..=u16::MAX {
            for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                assert_eq!(encode(x), nearest(x, max_byte, decode), "{x:e}");
            }
        }
        for byte in 0..max_byte {
            // The sum is exact: two neighbours on the grid.
            let middle = (decode(byte) + decode(byte + 1)) / 2.0;
            for x in [middle.next_down(), middle, middle.next_up()] {
                assert_eq!([encode(x), encode(-x)], [x, -x].map(|x| nearest(x, max_byte, decode)), "{x:e}");
            }
        }
    }

    /// Every finite byte comes back from its value.
    pub fn check_round_trip(encode: fn(f32) -> u8, decode: fn(u8) -> f32) {
        for byte in (0..=255u8).filter(|&byte| decode(byte).is_finite()) {
            assert_eq!(encode(decode(byte)), byte);
        }
    }
}
