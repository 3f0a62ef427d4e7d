//! A quantized block under another tensor scale, for weights that are joined into one matrix and
//! must share one.
//!
//! This is our own rule. The codes stay as they are where the scale byte can take up the whole
//! change; elsewhere the block is quantized again from what it decodes to.

use crate::scale::Unit;
use crate::tile::Quantized;
use crate::{BLOCK, Specials, e2m1, e4m3, mse};

/// The sign bit of a scale byte, which no producer sets and every reader obeys.
pub const SIGN: u8 = 0x80;

/// The block of 16 codes with the scale byte `scale` and the stored number `from`, with the stored
/// number `to`.
///
/// A block that decodes to zeros or NaN stays as it is. With `c` the byte nearest to the scale
/// times the ratio of the tensor scales: if `c` has exactly that value, the codes stay, and every
/// element decodes to the same bits. Otherwise the elements, as they decode before, are quantized
/// with each scale byte from 4 below to 6 above `c`, as in [`mse`], and the smallest sum of squared
/// errors wins.
pub fn block(codes: &[u8; BLOCK], scale: u8, from: f32, to: f32, unit: Unit) -> Quantized<1> {
    let (sign, magnitude) = (scale & SIGN, scale & !SIGN);
    if codes.iter().all(|c| c & 7 == 0) {
        return Quantized { scale, codes: [*codes] };
    }
    match change(magnitude, from, to, unit) {
        Change::Scale(byte) => Quantized { scale: sign | byte, codes: [*codes] },
        Change::Search(nearest) => {
            let factor = unit.decode_factor(magnitude, from);
            let row = codes.map(|c| e2m1::decode(c) * factor);
            let quantize = |scale: u8| {
                let factor = unit.decode_factor(scale, to);
                Quantized { scale, codes: [row.map(|x| code(x, factor))] }
            };
            let best = mse::search(nearest, quantize, |q| mse::error(&[row], q, unit.decode_factor(q.scale, to)));
            Quantized { scale: sign | best.scale, ..best }
        }
    }
}

/// What becomes of the blocks with a scale byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// They get this scale byte and keep their codes.
    Scale(u8),
    /// They are quantized again, with a scale byte around this one.
    Search(u8),
}

/// What becomes of blocks with the scale byte `magnitude`, which has no sign, unless all of their
/// elements are zeros.
pub fn change(magnitude: u8, from: f32, to: f32, unit: Unit) -> Change {
    if magnitude == 0 || magnitude == e4m3::NAN_BYTE {
        return Change::Scale(magnitude);
    }
    // A stored number that divides has the ratio the other way around. Products of 4 and 24 bits
    // are exact in binary64.
    let (before, after) = if unit == Unit::Divisor { (to, from) } else { (from, to) };
    let wanted = f64::from(e4m3::decode(magnitude)) * f64::from(before);
    let nearest = e4m3::encode((wanted / f64::from(after)) as f32);
    match f64::from(e4m3::decode(nearest)) * f64::from(after) == wanted {
        true => Change::Scale(nearest),
        false => Change::Search(nearest),
    }
}

/// The code of an element that is quantized again; `factor` is what decodes it.
pub fn code(x: f32, factor: f32) -> u8 {
    e2m1::encode(x / factor, Specials::Kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: [u8; 16] = [7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10, 11, 12, 13, 14, 15];

    fn decoded(q: &Quantized<1>, stored: f32, unit: Unit) -> [f32; 16] {
        q.codes[0].map(|c| e2m1::decode(c) * unit.decode_factor(q.scale, stored))
    }

    fn before(scale: u8, stored: f32, unit: Unit) -> [f32; 16] {
        decoded(&Quantized { scale, codes: [CODES] }, stored, unit)
    }

    #[test]
    fn a_power_of_two_moves_into_every_scale_byte_that_has_room_for_it() {
        for (unit, from, to) in [(Unit::Multiplier, 0.3f32, 1.2f32), (Unit::Divisor, 1.2, 0.3)] {
            let mut exact = 0;
            for scale in 1..=e4m3::MAX_BYTE {
                let q = block(&CODES, scale, from, to, unit);
                // Room: a quarter is a multiple of the smallest number.
                if e4m3::decode_units(scale).unwrap() % 4 == 0 {
                    assert_eq!((e4m3::decode(q.scale), q.codes[0]), (e4m3::decode(scale) / 4.0, CODES), "{scale:#x}");
                    assert_eq!(decoded(&q, to, unit), before(scale, from, unit));
                    exact += 1;
                }
            }
            assert_eq!(exact, 126 - 6 - 6 - 4, "of 7 subnormals one, of the next two octaves two and four");
        }
    }

    #[test]
    fn another_ratio_is_exact_where_the_product_has_four_bits() {
        // Three quarters of 1 and of 1.5 times powers of two.
        let byte = |x: f32| e4m3::encode(x);
        let q = block(&CODES, byte(2.0), 0.75, 1.0, Unit::Multiplier);
        assert_eq!((q.scale, q.codes[0]), (byte(1.5), CODES));
        let q = block(&CODES, byte(3.0), 0.75, 1.0, Unit::Multiplier);
        assert_eq!((q.scale, q.codes[0]), (byte(2.25), CODES));
        // 2.25 · 0.75 = 1.6875 has five.
        let q = block(&CODES, byte(2.25), 0.75, 1.0, Unit::Multiplier);
        assert_ne!(decoded(&q, 1.0, Unit::Multiplier), before(byte(2.25), 0.75, Unit::Multiplier));
    }

    #[test]
    fn what_is_not_exact_is_at_least_as_near_as_the_same_codes_with_the_nearest_byte() {
        let error = |a: &[f32; 16], b: &[f32; 16]| -> f64 {
            a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum()
        };
        for (unit, from, to) in [(Unit::Multiplier, 0.91f32, 1.0f32), (Unit::Divisor, 36864.0, 33536.0)] {
            let ratio = if unit == Unit::Divisor { to / from } else { from / to };
            for scale in 2..=e4m3::MAX_BYTE {
                let (q, row) = (block(&CODES, scale, from, to, unit), before(scale, from, unit));
                let nearest = Quantized { scale: e4m3::encode(e4m3::decode(scale) * ratio), codes: [CODES] };
                assert!(error(&decoded(&q, to, unit), &row) <= error(&decoded(&nearest, to, unit), &row), "{scale:#x}");
            }
        }
    }

    #[test]
    fn zeros_nan_and_signs_stay() {
        let same = |codes: [u8; 16], scale: u8| block(&codes, scale, 0.3, 1.0, Unit::Multiplier);
        assert_eq!(same([8; 16], 0x38), Quantized { scale: 0x38, codes: [[8; 16]] });
        assert_eq!(same(CODES, 0x00), Quantized { scale: 0x00, codes: [CODES] });
        assert_eq!(same(CODES, 0x7F), Quantized { scale: 0x7F, codes: [CODES] });
        let (positive, negative) = (same(CODES, 0x38), same(CODES, 0xB8));
        assert_eq!((positive.scale | SIGN, positive.codes), (negative.scale, negative.codes));
    }
}
