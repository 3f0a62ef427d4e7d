//! How far apart the scales of a row's blocks are. That says how its sums can be taken exactly.
//!
//! A scale is a number of at most 15 times a power of two. The scales of some blocks are integers
//! in the unit of the smallest of them, and small ones where scales are close together, as those of
//! ordinary rows are. Then a block's term is an integer too, and terms add up in 32 bits.

use nvfp4_spec::e4m3;
use std::ops::Range as Blocks;
use std::sync::LazyLock;

/// Blocks whose terms are added up in 32 bits.
///
/// Also the blocks of a sum that is exact in binary64 however far apart scales are:
/// 32·2304·(448·2⁹)² < 2⁵³ units. Even, and a multiple of what [`super::row`] takes at a time.
pub const RUN: usize = 32;

/// The largest product of two integer scales with which `RUN` terms of at most 2304 times it fit 32
/// bits. It fits 16 bits itself.
const MOST: u64 = (1 << 31) / (2304 * RUN as u64);

/// The values of every scale byte.
pub static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3::decode(byte as u8)));

/// The integers of every scale byte that is positive, in units of every power, in both halves of a
/// word. What does not fit is not used.
static INTEGERS: [[u32; 128]; 16] = {
    let mut all = [[0; 128]; 16];
    let mut power = 1;
    while power < 16 {
        let mut byte = 0;
        while byte < 128 {
            let integer = integer(byte as u8, power as u8) & 0xFFFF;
            all[power][byte] = integer << 16 | integer;
            byte += 1;
        }
        power += 1;
    }
    all
};

/// The power of two that a positive scale is a multiple of; subnormal ones have the smallest.
const fn power(byte: u8) -> u8 {
    if byte < 8 { 1 } else { byte >> 3 }
}

/// A positive scale in units of a power.
const fn integer(byte: u8, unit: u8) -> u32 {
    let significand = if byte < 8 { byte } else { 8 | byte & 7 } as u32;
    significand << power(byte).saturating_sub(unit)
}

/// The scales of some blocks of a row, or of several rows.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The power of two that all are multiples of.
    power: u8,
    /// The largest magnitude in those units.
    largest: u32,
    sign: Sign,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Sign {
    Positive,
    /// Some are negative or NaN.
    Any,
}

impl Range {
    pub fn of(scales: &[u8]) -> Self {
        // Values and their units grow with the byte, so the largest and the smallest that is not
        // zero say it all. NaN makes its outputs NaN whatever the range.
        let (mut largest, mut below, mut all) = (0, e4m3::MAX_BYTE - 1, 0);
        for &byte in scales {
            let magnitude = (byte & 0x7F).min(e4m3::MAX_BYTE);
            largest = magnitude.max(largest);
            // One less, so that zero is the largest of all.
            below = magnitude.wrapping_sub(1).min(below);
            all = byte.max(all);
        }
        let power = power(below + 1);
        let sign = if all > e4m3::MAX_BYTE { Sign::Any } else { Sign::Positive };
        Range { power, largest: integer(largest, power), sign }
    }

    /// Whether a sum of `blocks` terms of two such rows is exact in binary64.
    pub fn fits(self, other: Range, blocks: usize) -> bool {
        2304.0 * f64::from(self.largest) * f64::from(other.largest) * (blocks as f64) < 2f64.powi(53)
    }

    /// Whether a sum of [`RUN`] terms of two such rows fits 32 bits, and their scales 16.
    pub fn fits_integers(self, other: Range) -> bool {
        self.has_integers() && other.has_integers() && u64::from(self.largest) * u64::from(other.largest) <= MOST
    }

    /// Whether the scales have integers at all.
    pub fn has_integers(self) -> bool {
        self.sign == Sign::Positive && u64::from(self.largest) <= MOST
    }

    /// The largest in units of the power of two that all are multiples of.
    pub fn largest(self) -> u32 {
        self.largest
    }

    /// Whether every scale is four significant bits and a shift of three.
    pub fn has_shifts(self) -> bool {
        self.has_integers() && self.largest <= 15 << 7
    }

    /// A scale as its significant bits, and above them how far they are shifted.
    pub fn shifted(self, byte: u8) -> u8 {
        integer(byte, power(byte)) as u8 | power(byte).saturating_sub(self.power) << 4
    }

    /// The integer of a scale in both halves of a word, where there are integers.
    pub fn integers(self) -> &'static [u32; 128] {
        &INTEGERS[usize::from(self.power)]
    }

    /// The unit of the integers.
    pub fn unit(self) -> f32 {
        e4m3::MIN_POSITIVE * f32::from(1u16 << (self.power - 1))
    }

    /// That of which rows have the largest integers, each in units of its own.
    pub fn largest_of(self, other: Range) -> Range {
        let Range { power, .. } = self.and(other);
        let largest = self.largest.max(other.largest);
        Range { power, largest, sign: if self.sign == other.sign { self.sign } else { Sign::Any } }
    }

    pub fn and(self, other: Range) -> Range {
        let power = self.power.min(other.power);
        let largest = (self.largest << (self.power - power)).max(other.largest << (other.power - power));
        Range { power, largest, sign: if self.sign == other.sign { self.sign } else { Sign::Any } }
    }
}

/// The runs of some blocks; the last may be short.
pub fn runs(blocks: Blocks<usize>) -> impl Iterator<Item = Blocks<usize>> {
    blocks.clone().step_by(RUN).map(move |first| first..blocks.end.min(first + RUN))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The integers of a range are the scales.
    #[test]
    fn integers_times_the_unit_are_the_scales() {
        for smallest in 1..=e4m3::MAX_BYTE {
            for largest in smallest..=e4m3::MAX_BYTE {
                let range = Range::of(&[largest, 0, smallest]);
                assert_eq!(range.largest as f32 * range.unit(), e4m3::decode(largest));
                if range.has_shifts() {
                    for byte in [0, smallest, largest] {
                        let (significant, shift) = (range.shifted(byte) & 15, range.shifted(byte) >> 4);
                        assert!(shift < 8);
                        assert_eq!(f32::from(u16::from(significant) << shift) * range.unit(), e4m3::decode(byte));
                    }
                }
                if range.has_integers() {
                    for byte in [0, smallest, largest] {
                        let both = range.integers()[usize::from(byte)];
                        assert_eq!(both >> 16, both & 0xFFFF);
                        assert_eq!((both >> 16) as f32 * range.unit(), e4m3::decode(byte), "{byte} in {range:?}");
                    }
                }
            }
        }
        assert!(!Range::of(&[0x38, 0x7F]).has_integers(), "NaN");
        assert!(!Range::of(&[0x38, 0xB8]).has_integers(), "a negative one");
        assert!(Range::of(&[0; 5]).fits_integers(Range::of(&[0x7E, 0x60])));
    }
}
