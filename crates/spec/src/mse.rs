//! Choosing a block's scale by its squared error: the scale bytes around the rule "six" are tried,
//! and the best one kept.
//!
//! This is our own rule, for weights that are quantized once and used often. It changes which byte
//! a block gets, never what a byte means, so that every reader of the profile reads it.

use crate::scale::amax;
use crate::scaling::Scaling;
use crate::tile::{Quantized, Rows};
use crate::{e2m1, e4m3};

/// Distances from the byte of the rule "six", in the order in which ties are won: nearest first,
/// then the smaller. A scale that maps the largest element to 4 instead of 6 is 4 or 5 bytes above.
pub const OFFSETS: [i32; 11] = [0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6];

/// Quantizes a tile with the scale byte, of those from 4 below to 6 above the one of the rule "six"
/// and within 1…0x7E, that gives the smallest sum of squared errors in binary64 between the
/// elements and what they decode to. The byte of "six" itself is among them, also if it is 0.
pub fn quantize<const H: usize>(tile: &Rows<f32, H>, scaling: &Scaling) -> Quantized<H> {
    let six = scaling.block_scale(amax(tile.as_flattened(), scaling.mode.amax_specials()));
    if six > e4m3::MAX_BYTE {
        return candidate(tile, six, scaling); // NaN has no neighbours
    }
    search(six, |scale| candidate(tile, scale, scaling), |q| error(tile, q, decode_factor(q.scale, scaling)))
}

/// What codes with this scale byte are multiplied by to decode them.
pub fn decode_factor(scale: u8, scaling: &Scaling) -> f32 {
    let profile = scaling.mode.profile;
    let stored = profile.stored(scaling.global.amax, scaling.global.bound, scaling.precision);
    profile.unit(scaling.global.bound).decode_factor(scale, stored)
}

/// The sum of squared errors of a quantized tile whose codes are multiplied by `factor` to decode
/// them.
pub(crate) fn error<const H: usize>(tile: &Rows<f32, H>, q: &Quantized<H>, factor: f32) -> f64 {
    let pairs = tile.as_flattened().iter().zip(q.codes.as_flattened());
    pairs.map(|(&x, &c)| squared(x, c, factor)).sum()
}

/// The squared error of an element whose code is multiplied by `factor` to decode it.
pub fn squared(x: f32, code: u8, factor: f32) -> f64 {
    (f64::from(x) - f64::from(e2m1::decode(code) * factor)).powi(2)
}

/// The scale bytes that a search around `centre` tries, in the order in which ties are won.
pub fn candidates(centre: u8) -> impl Iterator<Item = u8> {
    let bytes = OFFSETS.into_iter().map(move |offset| i32::from(centre) + offset);
    let tried = move |byte: &i32| *byte == i32::from(centre) || (1..=i32::from(e4m3::MAX_BYTE)).contains(byte);
    bytes.filter(tried).map(|byte| byte as u8)
}

/// The quantized tile with the smallest error among those of the scale bytes around `centre`.
/// `quantize` makes a tile with a scale byte.
pub(crate) fn search<const H: usize>(
    centre: u8,
    quantize: impl Fn(u8) -> Quantized<H>,
    error: impl Fn(&Quantized<H>) -> f64,
) -> Quantized<H> {
    let (mut best, mut least) = (quantize(centre), f64::INFINITY);
    for byte in candidates(centre) {
        let other = quantize(byte);
        let sum = error(&other);
        if sum < least {
            (best, least) = (other, sum);
        }
    }
    best
}

/// The tile with this scale byte.
pub(crate) fn candidate<const H: usize>(tile: &Rows<f32, H>, scale: u8, scaling: &Scaling) -> Quantized<H> {
    let factor = scaling.factor(scale);
    Quantized { scale, codes: tile.map(|row| row.map(|x| scaling.code(factor.apply(x), None))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::six;
    use crate::{Mode, Precision, Profile, Rounding};

    fn quantize(row: &[f32; 16], scaling: &Scaling) -> Quantized<1> {
        super::quantize(&[*row], scaling)
    }

    fn scaling(amax: f32) -> Scaling {
        Scaling::new(amax, &Mode { profile: Profile::ModelOpt, ..Mode::default() }, Precision::F32)
    }

    #[test]
    fn a_block_on_the_grid_keeps_its_scale() {
        let row = [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 6.0];
        let scaling = scaling(2688.0);
        assert_eq!(quantize(&row, &scaling), six(&[row], &scaling, Rounding::NearestEven));
    }

    #[test]
    fn a_lone_outlier_is_clipped_for_the_sake_of_the_others() {
        // With the scale of "six" all of the others lie between codes; one step down they do not.
        let mut row = [4.375f32; 16];
        row[0] = 6.0;
        let q = quantize(&row, &scaling(2688.0));
        assert_ne!(q.scale, 0x38);
    }

    #[test]
    fn ties_stay_at_the_rule_six_and_zeros_keep_their_byte() {
        let scaling = scaling(1.0);
        let zeros = [0.0; 16];
        assert_eq!(quantize(&zeros, &scaling), six(&[zeros], &scaling, Rounding::NearestEven));
    }

    #[test]
    fn never_worse_than_six_and_within_four_below_and_six_above() {
        let mut x = 12345u32;
        for _ in 0..200 {
            let row: [f32; 16] = std::array::from_fn(|_| {
                x = x.wrapping_mul(1664525).wrapping_add(1013904223);
                (x >> 8) as f32 / 8388608.0 - 1.0
            });
            let scaling = scaling(1.0);
            let (a, b) = (quantize(&row, &scaling), six(&[row], &scaling, Rounding::NearestEven));
            let g = Profile::ModelOpt.stored(1.0, crate::Bound::E448, Precision::F32);
            let error = |q: &Quantized<1>| -> f64 {
                let decode = |c: u8| f64::from(e2m1::decode(c) * (e4m3::decode(q.scale) * g));
                row.iter().zip(&q.codes[0]).map(|(&x, &c)| (f64::from(x) - decode(c)).powi(2)).sum()
            };
            assert!(error(&a) <= error(&b));
            assert!((-4..=6).contains(&(i32::from(a.scale) - i32::from(b.scale))));
        }
    }
}
