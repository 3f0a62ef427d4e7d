//! ModelOpt's searches of scales, for its profile: the sweep over every scale byte
//! (`NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG`) and four-over-six (`NVFP4_FOUR_OVER_SIX_CFG`), as its version
//! 0.47 computes them. Source: numerics §5.8.
//!
//! Both try amaxes for a block and keep the one with the smallest squared error. What is tried has
//! an arithmetic of its own: neither the scales nor the errors are those of the codes that are
//! written in the end. Errors are summed in binary32. The order of a sum is the device's own there;
//! here it is [`error`]'s.

use crate::profile::at_least;
use crate::scale::amax;
use crate::scaling::Scaling;
use crate::tile::{Quantized, Rows};
use crate::{BLOCK, Bound, e2m1, e4m3, four_over_six, mse};

/// Quantizes a tile with the scale byte, of all that are positive, whose scale has the smallest
/// error. The smallest byte wins ties, so a tile of zeros has byte 1.
pub fn sweep<const H: usize>(tile: &Rows<f32, H>, scaling: &Scaling) -> Quantized<H> {
    let global = scaling.global.amax;
    let own = amax(tile.as_flattened(), scaling.mode.amax_specials());
    if !is_searched(tile, global) {
        return mse::candidate(tile, scaling.block_scale(own), scaling);
    }
    let errors = (1..=e4m3::MAX_BYTE).map(|byte| error(tile, swept_scale(byte, global)));
    let best = 1 + first_least(errors) as u8;
    mse::candidate(tile, exported(swept_amax(best, global), global, scaling.global.bound), scaling)
}

/// Quantizes a tile with its own amax or with 1.5 times that, which maps its largest magnitude to
/// 6 or to 4. Ties keep 6.
pub fn four_over_six<const H: usize>(tile: &Rows<f32, H>, scaling: &Scaling) -> Quantized<H> {
    let global = scaling.global.amax;
    let own = amax(tile.as_flattened(), scaling.mode.amax_specials());
    if !is_searched(tile, global) {
        return mse::candidate(tile, scaling.block_scale(own), scaling);
    }
    let amaxes = MULTIPLIERS.map(|multiplier| own * multiplier);
    let best = amaxes[first_least(amaxes.map(|amax| error(tile, tried_scale(amax, global))))];
    mse::candidate(tile, exported(best, global, scaling.global.bound), scaling)
}

/// What four-over-six multiplies an amax by, in its order.
pub const MULTIPLIERS: [f32; 2] = [1.0, 1.5];

/// ModelOpt refuses what is not finite, and writes NaN for a tensor of zeros. Those have the
/// rule "six".
pub(crate) fn is_searched<const H: usize>(tile: &Rows<f32, H>, global: f32) -> bool {
    global > 0.0 && global.is_finite() && tile.as_flattened().iter().all(|x| x.is_finite())
}

/// The index of the first of the smallest errors.
pub(crate) fn first_least<E: PartialOrd + From<f32>>(errors: impl IntoIterator<Item = E>) -> usize {
    let (mut best, mut least) = (0, E::from(f32::INFINITY));
    for (i, error) in errors.into_iter().enumerate() {
        if error < least {
            (best, least) = (i, error);
        }
    }
    best
}

/// The amax that the sweep tries for a scale byte, `S/448` of the tensor's.
pub fn swept_amax(byte: u8, global: f32) -> f32 {
    e4m3::decode(byte) / e4m3::MAX * global
}

/// The scale of that amax.
pub fn swept_scale(byte: u8, global: f32) -> f32 {
    match swept_amax(byte, global) / 6.0 {
        0.0 => 1.0,
        scale => scale,
    }
}

/// The scale that four-over-six tries for an amax: rounded to E4M3 in units that map the tensor's
/// amax to 256, which are left alone where they are 2⁻²⁴ or less.
pub fn tried_scale(block_amax: f32, global: f32) -> f32 {
    let unit = unit(global);
    let byte = e4m3::encode(e4m3::MAX.min(block_amax / 6.0 * unit));
    e4m3::decode(byte) * (1.0 / unit)
}

/// What four-over-six multiplies scales by before it rounds them to E4M3.
pub fn unit(global: f32) -> f32 {
    const LEAST: f32 = 1.0 / (1 << 24) as f32;
    let range = global * (e4m3::MAX / Bound::E256.value()) / 6.0;
    e4m3::MAX / if range <= LEAST { 1.0 } else { range }
}

/// The squared error of a tile with a scale that is tried. In a row the squares of elements 8 apart
/// are added first, then those of neighbours, pairwise.
pub fn error<const H: usize>(tile: &Rows<f32, H>, scale: f32) -> f32 {
    four_over_six::sum_rows(tile.map(|row| {
        let squares = row.map(|x| {
            let e = x.abs() - rounded(x.abs(), scale);
            e * e
        });
        let mut sums: [f32; BLOCK / 2] = std::array::from_fn(|i| squares[i] + squares[i + BLOCK / 2]);
        for width in [4, 2, 1] {
            for i in 0..width {
                sums[i] = sums[2 * i] + sums[2 * i + 1];
            }
        }
        sums[0]
    }))
}

/// The multiple of the scale that a magnitude is rounded to. A scale of 0 makes zeros.
pub(crate) fn rounded(x: f32, scale: f32) -> f32 {
    let usable = scale != 0.0 && scale.is_finite();
    let divisor = if usable { scale } else { 1.0 };
    let value = e2m1::decode(e2m1::encode(x / divisor, crate::Specials::Kernel)) * divisor;
    if scale == 0.0 { 0.0 } else { value }
}

/// The scale byte that is written for a block whose amax was found.
pub fn exported(block_amax: f32, global: f32, bound: Bound) -> u8 {
    let scale = match block_amax / 6.0 {
        0.0 => 1.0,
        scale => scale,
    };
    e4m3::encode(at_least(e4m3::MIN_POSITIVE, scale * bound.value() / (global / 6.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, Precision, Profile, Rounding, ScaleRule, block};

    fn scaling(rule: ScaleRule, amax: f32) -> Scaling {
        Scaling::new(amax, &Mode { profile: Profile::ModelOpt, rule, ..Mode::default() }, Precision::F32)
    }

    #[test]
    fn a_swept_amax_is_written_as_the_byte_that_it_was_made_of() {
        for exponent in -100..100 {
            let global = 1.37 * 2f32.powi(exponent);
            for byte in 1..=e4m3::MAX_BYTE {
                assert_eq!(exported(swept_amax(byte, global), global, Bound::E448), byte);
            }
        }
    }

    #[test]
    fn ties_go_to_the_smallest_byte_and_to_six() {
        let zeros = [[0.0; 16]];
        assert_eq!(sweep(&zeros, &scaling(ScaleRule::ModelOptMse, 1.0)).scale, 1);
        // Both multipliers are exact for a block of zeros, whose scale of 1 saturates.
        assert_eq!(four_over_six(&zeros, &scaling(ScaleRule::ModelOptFourOverSix, 1.0)).scale, e4m3::MAX_BYTE);
    }

    #[test]
    fn four_wins_where_its_grid_fits_better() {
        let row: [f32; 16] = std::array::from_fn(|i| if i % 2 == 0 { 4.0 } else { 3.0 });
        let q = four_over_six(&[row], &scaling(ScaleRule::ModelOptFourOverSix, 1536.0));
        assert_eq!((q.scale, q.codes[0][0], q.codes[0][1]), (0x38, 6, 5));
    }

    #[test]
    fn what_is_not_finite_has_the_rule_six() {
        for rule in [ScaleRule::ModelOptMse, ScaleRule::ModelOptFourOverSix] {
            for (x, global) in [(f32::NAN, 1.0), (f32::INFINITY, f32::INFINITY), (1.0, f32::NAN), (0.0, 0.0)] {
                let (row, scaling) = ([[x; 16]], scaling(rule, global));
                let expected = block::six(&row, &scaling, Rounding::NearestEven);
                assert_eq!(block::quantize(&row, &scaling, Rounding::NearestEven), expected);
            }
        }
    }
}
