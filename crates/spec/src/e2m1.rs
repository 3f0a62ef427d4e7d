//! E2M1: four bits, `s e e m`. Codes 0…7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; code `8 + c` is the
//! negative of code `c`. There is no infinity and no NaN. Source: numerics §1.1, §1.3, §1.4.

use crate::Specials;

/// The values of codes 0…7.
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The bit that makes a code negative.
pub const SIGN: u8 = 8;

/// The largest value, 6.
pub const MAX: f32 = 6.0;

/// The smallest magnitudes that round to the codes 1…7: the midpoints, or what follows them where a
/// tie goes down.
pub const FIRSTS: [f32; 7] =
    [0.25f32.next_up(), 0.75, 1.25f32.next_up(), 1.75, 2.5f32.next_up(), 3.5, 5.0f32.next_up()];

/// The code nearest to `x`; a tie goes to the even code.
///
/// Anything beyond ±5, infinities included, becomes ±6. A negative value that rounds to zero gives
/// code 8 (−0). The specials say what exactly −0 becomes (kernel: 8, reference: 0) and NaN (kernel: 7,
/// reference: 0).
pub fn encode(x: f32, specials: Specials) -> u8 {
    if x.is_nan() {
        return nan_code(specials);
    }
    let a = x.abs();
    let magnitude = if a <= 0.25 {
        0
    } else if a < 0.75 {
        1
    } else if a <= 1.25 {
        2
    } else if a < 1.75 {
        3
    } else if a <= 2.5 {
        4
    } else if a < 3.5 {
        5
    } else if a <= 5.0 {
        6
    } else {
        7
    };
    magnitude | sign(x, specials)
}

/// What NaN becomes: +6 with kernel specials, 0 with reference specials.
pub fn nan_code(specials: Specials) -> u8 {
    match specials {
        Specials::Kernel => 7,
        Specials::Reference => 0,
    }
}

/// The sign bit of the code for `x`: set for negative values, and for −0 with kernel specials.
pub fn sign(x: f32, specials: Specials) -> u8 {
    let negative = match specials {
        Specials::Kernel => x.is_sign_negative(),
        Specials::Reference => x < 0.0,
    };
    if negative { SIGN } else { 0 }
}

/// The value of a code; only the low four bits are looked at. Code 8 is −0.
pub fn decode(code: u8) -> f32 {
    let magnitude = MAGNITUDES[usize::from(code & 7)];
    if code & SIGN == 0 { magnitude } else { -magnitude }
}

/// Two codes in a byte: the even element in the low nibble.
pub fn pack(even: u8, odd: u8) -> u8 {
    even & 15 | odd << 4
}

/// The two codes of a byte, even element first.
pub fn unpack(byte: u8) -> [u8; 2] {
    [byte & 15, byte >> 4]
}

/// Bytes that a row of `cols` codes takes. With an odd length the last high nibble is 0.
pub const fn packed_len(cols: usize) -> usize {
    cols.div_ceil(2)
}

/// The code of element `i` in a packed row.
pub fn code_at(row: &[u8], i: usize) -> u8 {
    unpack(row[i / 2])[i % 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn ties_go_to_the_even_code() {
        for (x, code) in [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)] {
            assert_eq!(encode(x, Specials::Kernel), code, "{x}");
            assert_eq!(encode(-x, Specials::Reference), code | SIGN, "-{x}");
        }
    }

    #[test]
    fn edges_differ_only_at_negative_zero_and_nan() {
        assert_eq!([encode(-0.0, Specials::Kernel), encode(-0.0, Specials::Reference)], [8, 0]);
        assert_eq!([encode(f32::NAN, Specials::Kernel), encode(-f32::NAN, Specials::Kernel)], [7, 7]);
        assert_eq!([encode(f32::NAN, Specials::Reference), encode(-f32::NAN, Specials::Reference)], [0, 0]);
        assert_eq!([encode(-1e-40, Specials::Kernel), encode(-1e-40, Specials::Reference)], [8, 8]);
        assert_eq!([encode(f32::INFINITY, Specials::Kernel), encode(f32::NEG_INFINITY, Specials::Reference)], [7, 15]);
    }

    #[test]
    fn codes_begin_at_their_firsts() {
        for (code, first) in (1..).zip(FIRSTS) {
            assert_eq!(
                [encode(first.next_down(), Specials::Kernel), encode(first, Specials::Kernel)],
                [code - 1, code]
            );
        }
    }

    /// An independent statement of "nearest, ties to even": the closest value in f64, the even code
    /// among equals.
    fn nearest(x: f32) -> u8 {
        let distance = |code: u8| (f64::from(decode(code)) - f64::from(x).clamp(-6.0, 6.0)).abs();
        let sign = if x < 0.0 { SIGN } else { 0 };
        (0..8)
            .map(|c| c | sign)
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .unwrap()
    }

    #[test]
    fn every_16_bit_input_goes_to_the_nearest_code() {
        for bits in 0..=u16::MAX {
            for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                for specials in [Specials::Kernel, Specials::Reference] {
                    let expected = match (x.is_nan(), x == 0.0 && x.is_sign_negative(), specials) {
                        (true, _, specials) => nan_code(specials),
                        (_, true, Specials::Kernel) => 8,
                        _ => nearest(x),
                    };
                    assert_eq!(encode(x, specials), expected, "{x:e} {specials:?}");
                }
            }
        }
    }

    #[test]
    fn codes_survive_packing_and_the_round_trip() {
        for byte in 0..=255 {
            let [even, odd] = unpack(byte);
            assert_eq!(pack(even, odd), byte);
            assert_eq!(encode(decode(even), Specials::Kernel), even);
        }
    }
}
