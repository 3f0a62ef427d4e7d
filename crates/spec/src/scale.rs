//! Scales: from an amax to the global scale, from a block to its scale byte, and from both to the
//! factor that the block's elements are multiplied by. Source: numerics §2, §3.
//!
//! The order of operations is the rule: `(bm/6)·enc`, `(bm·enc)·r6` and `bm·(enc·r6)` are three
//! different numbers.

use crate::{Bound, Specials, e4m3};

/// `fl(1/6)`, bits 0x3E2AAAAB.
pub const SIXTH: f32 = 1.0 / 6.0;

/// The bits of the magnitude of `x` as amax sees them: an integer whose order is the order of
/// magnitudes.
///
/// NaN counts as 0 with kernel specials and is larger than everything with reference specials.
pub fn magnitude_bits(x: f32, specials: Specials) -> u32 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 && specials == Specials::Kernel { 0 } else { bits }
}

/// The largest magnitude of some values, 0 if there are none. An integer maximum, hence the same in
/// any order.
pub fn amax<'a>(values: impl IntoIterator<Item = &'a f32>, specials: Specials) -> f32 {
    f32::from_bits(values.into_iter().map(|&x| magnitude_bits(x, specials)).max().unwrap_or(0))
}

/// A tensor's or a row's global scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Global {
    /// The largest magnitude.
    pub amax: f32,
    /// What block scale the amax is mapped to.
    pub bound: Bound,
    /// What values are multiplied by before blocks are scaled: about `6E/amax`.
    pub encode: f32,
    /// `fl(1/encode)`. It may be subnormal (2⁻¹²⁸ for an encode scale of `f32::MAX`).
    pub decode: f32,
}

impl Global {
    /// `enc = min(fl(6E/amax), f32::MAX)`; 1 where the amax is 0 or ∞.
    ///
    /// The reference specials keep `f32::MAX` for an amax of 0, which shows only when a caller gives
    /// an amax of 0 for a tensor that is not zero. A NaN amax gives NaN with reference specials and
    /// `f32::MAX` with kernel specials, where no computed amax is NaN and only a caller can give one:
    /// almost every value saturates, and since the NaN is what is stored, all of it decodes to NaN.
    pub fn new(amax: f32, bound: Bound, specials: Specials) -> Self {
        let guarded = specials.min_with_max(bound.six_e() / amax);
        let encode = match (amax == 0.0, specials) {
            (true, Specials::Kernel) => 1.0,
            (true, Specials::Reference) => f32::MAX,
            (false, _) if guarded == 0.0 => 1.0,
            (false, _) => guarded,
        };
        Global { amax, bound, encode, decode: 1.0 / encode }
    }
}

/// The scale byte of a block whose largest magnitude is `block_amax`, by the rule "six": with
/// `mult = fl(enc · fl(1/6))`, the byte is `E4M3(min(fl(bm · mult), 448))`.
///
/// A non-zero block may underflow to the byte 0; it keeps its saturated codes and decodes to zero.
pub fn block_scale(block_amax: f32, global: &Global, specials: Specials) -> u8 {
    let multiplier = global.encode * SIXTH;
    e4m3::encode(specials.min_with_max(block_amax * multiplier))
}

/// What the elements of a block are multiplied by: `min(fl(1/fl(value(S) · dec)), f32::MAX)`.
///
/// A scale byte of 0, or a product that underflows to 0, gives `f32::MAX`.
pub fn inverse_scale(scale: u8, global: &Global, specials: Specials) -> f32 {
    specials.min_with_max(1.0 / (e4m3::decode(scale) * global.decode))
}

/// What the stored 32-bit number of a tensor or row means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// The largest magnitude; values are `code · scale · amax / 6E`.
    Amax(Bound),
    /// Values are `code · scale · g`.
    Multiplier,
    /// Values are `code · scale / g`.
    Divisor,
}

impl Unit {
    /// The stored number as a fraction (numerator, denominator): what a block's value is multiplied
    /// by in a product.
    ///
    /// A divisor is inverted, one rounding: as a denominator, two of them (2688/amax each) would
    /// overflow for amaxes below about 1.5·10⁻¹⁶.
    pub fn fraction(self, stored: f32) -> (f32, f32) {
        match self {
            Unit::Amax(bound) => (stored, bound.six_e()),
            Unit::Multiplier => (stored, 1.0),
            Unit::Divisor => (1.0 / stored, 1.0),
        }
    }

    /// What a block's code values are multiplied by to decode them: `fl(fl(value(S) · amax) ·
    /// fl(1/6E))` (numerics §8), `fl(value(S) · g)` or `fl(value(S) / g)`. One more rounding, of
    /// `code value · factor`, gives the element.
    pub fn decode_factor(self, scale: u8, stored: f32) -> f32 {
        let scale = e4m3::decode(scale);
        match self {
            Unit::Amax(bound) => scale * stored * (1.0 / bound.six_e()),
            Unit::Multiplier => scale * stored,
            Unit::Divisor => scale / stored,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_have_the_published_bits() {
        assert_eq!(SIXTH.to_bits(), 0x3E2A_AAAB);
        assert_eq!((1.0 / Bound::E448.six_e()).to_bits(), 0x39C3_0C31);
        assert_eq!((1.0 / Bound::E256.six_e()).to_bits(), 0x3A2A_AAAB);
    }

    #[test]
    fn extreme_amax_values() {
        let encode = |amax, specials| Global::new(amax, Bound::E448, specials).encode;
        for specials in [Specials::Kernel, Specials::Reference] {
            assert_eq!(encode(f32::INFINITY, specials), 1.0);
            assert_eq!(encode(1e-40, specials), f32::MAX);
            assert_eq!(Global::new(1e-40, Bound::E448, specials).decode.to_bits(), 1 << 21, "2⁻¹²⁸, a subnormal");
            assert_eq!(encode(2688.0, specials), 1.0);
        }
        assert_eq!([encode(0.0, Specials::Kernel), encode(0.0, Specials::Reference)], [1.0, f32::MAX]);
        assert_eq!(encode(f32::NAN, Specials::Kernel), f32::MAX);
        assert!(encode(f32::NAN, Specials::Reference).is_nan());
    }

    #[test]
    fn nan_is_invisible_to_amax_only_in_the_kernel_specials() {
        let values = [1.0, f32::NAN, -3.0];
        assert_eq!(amax(&values, Specials::Kernel), 3.0);
        assert!(amax(&values, Specials::Reference).is_nan());
        assert_eq!(amax(&[], Specials::Kernel), 0.0);
    }

    #[test]
    fn a_zero_scale_byte_multiplies_by_the_largest_float() {
        let global = Global::new(1.0, Bound::E448, Specials::Kernel);
        assert_eq!(block_scale(1e-9, &global, Specials::Kernel), 0);
        assert_eq!(inverse_scale(0, &global, Specials::Kernel), f32::MAX);
    }
}
