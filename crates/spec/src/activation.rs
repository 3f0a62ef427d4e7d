//! Activations under a stored scale: what a model with 4-bit activations multiplies by when it runs.
//! Source: numerics §3.2.
//!
//! The stored number is `g`, a multiplier: ModelOpt's `input_scale`. It was found on other inputs, so
//! a block may be beyond it, and saturates, or far below it, and vanishes.

use crate::scale::amax;
use crate::tile::Quantized;
use crate::{BLOCK, Specials, e2m1, e4m3};

/// Quantizes a block: `S = E4M3(fl(bm / fl(6g)))`, at most 448, and each element becomes
/// `E2M1(fl(x / fl(value(S) · g)))`. Where `S` is 0, so are all codes. NaN gives the scale NaN.
pub fn quantize(block: &[f32; BLOCK], g: f32) -> Quantized<1> {
    let scale = e4m3::encode(amax(block, Specials::Reference) / (6.0 * g));
    if scale == 0 {
        return Quantized { scale, codes: [[0; BLOCK]] };
    }
    let divisor = e4m3::decode(scale) * g;
    Quantized { scale, codes: [block.map(|x| e2m1::encode(x / divisor, Specials::Reference))] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::Scaling;
    use crate::{Mode, Precision, Profile, Rounding, block};

    /// Where no scale underflows, this is what ModelOpt does with weights whose tensor scale is the same.
    #[test]
    fn within_the_range_of_its_scale_a_block_has_the_codes_of_a_weight() {
        let mode = Mode { profile: Profile::ModelOpt, ..Mode::default() };
        for exponent in -20..20 {
            let amax = 1.1 * 2f32.powi(exponent);
            let scaling = Scaling::new(amax, &mode, Precision::F32);
            let g = Profile::ModelOpt.stored(amax, crate::Bound::E448, Precision::F32);
            let row: [f32; BLOCK] = std::array::from_fn(|i| amax * (i as f32 - 7.3) / (8.0 + i as f32));
            assert_eq!(quantize(&row, g), block::quantize(&[row], &scaling, Rounding::NearestEven));
        }
    }

    #[test]
    fn a_block_that_is_beyond_saturates_and_one_far_below_vanishes() {
        let beyond = quantize(&[1e9; BLOCK], 1.0);
        assert_eq!((beyond.scale, beyond.codes[0]), (e4m3::MAX_BYTE, [7; BLOCK]));
        // 2⁻¹⁰ is the tie between 0 and the smallest scale.
        let tie = 6.0 / 1024.0;
        assert_eq!(quantize(&[tie; BLOCK], 1.0), Quantized { scale: 0, codes: [[0; BLOCK]] });
        assert_eq!(quantize(&[tie * 1.001; BLOCK], 1.0).scale, 1);
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        let mut row = [1.0; BLOCK];
        row[3] = f32::NAN;
        assert_eq!(quantize(&row, 1.0).scale, e4m3::NAN_BYTE);
    }
}
