//! MXFP4 to NVFP4, by changing the scales and keeping the codes.
//!
//! An MXFP4 block is 32 E2M1 codes and a power of two. Both of its halves become NVFP4 blocks with
//! the same codes, if the power of two, divided by one tensor scale, is an E4M3 number. Powers of
//! two from 2⁻⁹ to 2⁸ are: with the matrix's largest exponent mapped to 2⁸, blocks down to 2¹⁷
//! times smaller are exact. Smaller ones are rounded to the smallest scale.

use super::weight::{MX_BLOCK, Weight};
use crate::Result;
use nvfp4_spec::{BLOCK, Specials, e2m1, e4m3, e8m0};
use std::ops::Range;

/// The exponent of the largest power of two among E4M3 numbers.
const TOP: i32 = 8;

/// The exponent of the smallest.
const BOTTOM: i32 = -9;

/// The largest exponent of some rows of a weight that any code other than zero has; 0 for none.
pub(super) fn top(
    weight: &Weight<'_>,
    rows: &Range<usize>,
    codes: &mut Vec<u8>,
    exponents: &mut Vec<u8>,
) -> Result<u32> {
    weight.mxfp4(rows.clone(), codes, exponents)?;
    Ok(largest(codes, exponents))
}

fn largest(codes: &[u8], exponents: &[u8]) -> u32 {
    let blocks = codes.chunks_exact(MX_BLOCK / 2).zip(exponents);
    let used = blocks.filter(|(codes, _)| codes.iter().any(|&b| b & 0x77 != 0)).map(|(_, &e)| u32::from(e));
    used.max().unwrap_or(0)
}

/// The exponent that maps to the largest power of two, kept where the tensor scale is a normal
/// binary32 number.
fn mapped(top: u32) -> i32 {
    if top == 0 { 127 + TOP } else { (top as i32).max(1 + TOP) }
}

/// The tensor scale, a multiplier, of a matrix with this largest exponent.
pub(super) fn scale(top: u32) -> f32 {
    e8m0::decode((mapped(top) - TOP) as u8)
}

/// Casts the codes of some rows in place; the largest exponent of their matrix is `top`.
///
/// `exponents` has a byte per 32 codes, none of them NaN; `scales` takes a byte per 16.
pub(super) fn cast(codes: &mut [u8], exponents: &[u8], top: u32, scales: &mut [u8]) {
    for ((codes, &exponent), scales) in
        codes.chunks_exact_mut(MX_BLOCK / 2).zip(exponents).zip(scales.chunks_exact_mut(MX_BLOCK / BLOCK))
    {
        let power = i32::from(exponent) - mapped(top) + TOP;
        let within = power.clamp(BOTTOM, TOP);
        scales.fill(e4m3::encode(2f32.powi(within)));
        if power < BOTTOM {
            let factor = 2f32.powi(power - BOTTOM);
            let round = |code: u8| e2m1::encode(e2m1::decode(code) * factor, Specials::Kernel);
            codes.iter_mut().for_each(|b| *b = e2m1::pack(round(*b & 15), round(*b >> 4)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(codes: &[u8], of: impl Fn(usize) -> f32) -> Vec<f32> {
        (0..codes.len() * 2).map(|i| e2m1::decode(e2m1::code_at(codes, i)) * of(i)).collect()
    }

    #[test]
    fn exact_over_seventeen_powers_of_two_and_rounded_below() {
        let original: Vec<u8> = (0..20 * 16).map(|i| (i * 37 % 251) as u8).collect();
        for base in [1u8, 60, 127, 200, 234] {
            let exponents: Vec<u8> = (0..20).map(|b| base + b).collect();
            let (mut codes, mut scales) = (original.clone(), vec![0; 40]);
            let top = largest(&codes, &exponents);
            cast(&mut codes, &exponents, top, &mut scales);
            let g = scale(top);
            let before = values(&original, |i| e8m0::decode(exponents[i / 32]));
            let after = values(&codes, |i| e4m3::decode(scales[i / 16]) * g);
            assert_eq!(before[64..], after[64..], "exponents {base}…");
            // Two blocks are further below the largest: off by at most half a step of the smallest
            // scale.
            let step = e4m3::decode(1) * g;
            assert!(before[..64].iter().zip(&after).all(|(x, y)| (x - y).abs() <= step), "exponents {base}…");
        }
    }

    #[test]
    fn zeros_with_a_large_exponent_do_not_count() {
        let mut codes = vec![0x11; 16];
        codes.extend([0x80; 16]);
        let mut scales = [0; 4];
        let top = largest(&codes, &[100, 250]);
        cast(&mut codes, &[100, 250], top, &mut scales);
        let g = scale(top);
        assert_eq!(e4m3::decode(scales[0]) * g, e8m0::decode(100));
        assert!(codes[16..].iter().all(|&b| b & 0x77 == 0));
    }
}
