//! Choosing a block's scale by what its error does to the outputs of a layer, which statistics of
//! the layer's inputs `x` tell: an error `d` of a weight's row changes an output by `d·x`, the
//! square of which is `dᵀ·H·d` on average, with `H` the mean of `x·xᵀ`. Of `H` two parts are taken:
//! its diagonal ("importance matrix"), or its squares of 16×16 along the diagonal, one for the
//! columns of each block.
//!
//! Both are for 1×16 tiles, rounded to nearest. Neither changes what a byte means.

use crate::modelopt::{exported, first_least, is_searched, rounded, swept_amax, swept_scale};
use crate::scale::amax;
use crate::scaling::Scaling;
use crate::tile::Quantized;
use crate::{BLOCK, e2m1, e4m3, mse};

/// The mean of `x·xᵀ` over the inputs of a block's columns, row by row.
pub type BlockHessian = [[f32; BLOCK]; BLOCK];

/// Quantizes a block with the scale byte that has the smallest `Σ wᵢ·dᵢ²` in binary64, in the order
/// of columns. `wᵢ` is the mean square of column i. The bytes that are tried, and who wins ties, are
/// those of [`mse`](mod@mse): where all weights are 0, the rule "six".
pub fn by_columns(block: &[f32; BLOCK], weights: &[f32; BLOCK], scaling: &Scaling) -> Quantized<1> {
    let six = scaling.block_scale(amax(block, scaling.mode.amax_specials()));
    let quantize = |scale| mse::candidate(&[*block], scale, scaling);
    if six > e4m3::MAX_BYTE {
        return quantize(six); // NaN has no neighbours
    }
    mse::search(six, quantize, |q| {
        let factor = mse::decode_factor(q.scale, scaling);
        let pairs = block.iter().zip(&q.codes[0]);
        let differences = pairs.map(|(&x, &c)| f64::from(x) - f64::from(e2m1::decode(c) * factor));
        differences.zip(weights).map(|(d, &w)| f64::from(w) * d.powi(2)).sum()
    })
}

/// Quantizes a block with the scale byte, of those that [`modelopt::sweep`](crate::modelopt::sweep)
/// tries, that has the smallest [`hessian_error`]. The smallest byte wins ties. For ModelOpt's
/// profile alone.
pub fn by_hessian(block: &[f32; BLOCK], hessian: &BlockHessian, scaling: &Scaling) -> Quantized<1> {
    let (tile, global) = ([*block], scaling.global.amax);
    if !is_searched(&tile, global) {
        return mse::candidate(&tile, scaling.block_scale(amax(block, scaling.mode.amax_specials())), scaling);
    }
    let errors = (1..=e4m3::MAX_BYTE).map(|byte| hessian_error(block, swept_scale(byte, global), hessian));
    let best = 1 + first_least(errors) as u8;
    mse::candidate(&tile, exported(swept_amax(best, global), global, scaling.global.bound), scaling)
}

/// `dᵀ·H·d` in binary64: for each row of `H` its products with `d` are added in order, then the
/// products of these sums with `d`, in order. `d` is in binary32, as the sweep has it.
pub fn hessian_error(block: &[f32; BLOCK], scale: f32, hessian: &BlockHessian) -> f64 {
    let d = block.map(|x| {
        let e = x.abs() - rounded(x.abs(), scale);
        f64::from(if x < 0.0 { -e } else { e })
    });
    let row = |h: &[f32; BLOCK]| h.iter().zip(&d).map(|(&h, d)| f64::from(h) * d).sum::<f64>();
    hessian.iter().zip(&d).map(|(h, d)| d * row(h)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, Precision, Profile, ScaleRule, modelopt};

    fn scaling(rule: ScaleRule) -> Scaling {
        Scaling::new(1.0, &Mode { profile: Profile::ModelOpt, rule, ..Mode::default() }, Precision::F32)
    }

    /// Numbers from -1 to 1.
    fn numbers<const N: usize>(seed: &mut u32) -> [f32; N] {
        std::array::from_fn(|_| {
            *seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
            (*seed >> 8) as f32 / 8388608.0 - 1.0
        })
    }

    const IDENTITY: BlockHessian = {
        let (mut h, mut i) = ([[0.0; BLOCK]; BLOCK], 0);
        while i < BLOCK {
            h[i][i] = 1.0;
            i += 1;
        }
        h
    };

    #[test]
    fn equal_columns_have_the_unweighted_choice() {
        let mut seed = 1;
        for _ in 0..100 {
            let block = numbers(&mut seed);
            let plain = mse::quantize(&[block], &scaling(ScaleRule::Mse));
            assert_eq!(by_columns(&block, &[2.0; BLOCK], &scaling(ScaleRule::Mse)), plain);
        }
    }

    #[test]
    fn an_identity_has_the_error_of_the_sweep() {
        let mut seed = 2;
        for _ in 0..100 {
            let block = numbers(&mut seed);
            let scaling = scaling(ScaleRule::ModelOptMse);
            let (a, b) = (by_hessian(&block, &IDENTITY, &scaling), modelopt::sweep(&[block], &scaling));
            // The sweep adds in binary32, and may take another of two that are as good.
            let error = |q: &Quantized<1>| mse::error(&[block], q, mse::decode_factor(q.scale, &scaling));
            assert!(a == b || (error(&a) / error(&b) - 1.0).abs() < 1e-5, "{a:?} {b:?}");
        }
    }

    #[test]
    fn the_choice_is_the_best_by_a_sum_of_another_order() {
        let mut seed = 3;
        for _ in 0..100 {
            let block: [f32; BLOCK] = numbers(&mut seed);
            let weights = numbers::<BLOCK>(&mut seed).map(|w| w * w);
            let scaling = scaling(ScaleRule::Mse);
            let error = |scale: u8| -> f64 {
                let (q, factor) = (mse::candidate(&[block], scale, &scaling), mse::decode_factor(scale, &scaling));
                let each = |i: usize| f64::from(block[i]) - f64::from(e2m1::decode(q.codes[0][i]) * factor);
                (0..BLOCK).rev().map(|i| each(i) * each(i) * f64::from(weights[i])).sum()
            };
            let six = scaling.block_scale(amax(&block, scaling.mode.amax_specials()));
            let tried = mse::OFFSETS.map(|offset| (i32::from(six) + offset).clamp(1, 0x7E) as u8);
            let least = tried.into_iter().map(error).fold(f64::INFINITY, f64::min);
            assert!(error(by_columns(&block, &weights, &scaling).scale) <= least * (1.0 + 1e-12));
        }
    }

    #[test]
    fn correlated_inputs_let_errors_cancel() {
        // Inputs that are always the same see the sum of errors alone.
        let (ones, mut seed, mut better) = ([[1.0; BLOCK]; BLOCK], 4, 0);
        let scaling = scaling(ScaleRule::ModelOptMse);
        for _ in 0..100 {
            let block: [f32; BLOCK] = numbers(&mut seed);
            let sum = |q: Quantized<1>| -> f64 {
                let factor = mse::decode_factor(q.scale, &scaling);
                block.iter().zip(&q.codes[0]).map(|(&x, &c)| f64::from(x - e2m1::decode(c) * factor)).sum()
            };
            let (plain, own) = (modelopt::sweep(&[block], &scaling), by_hessian(&block, &ones, &scaling));
            assert!(sum(own).abs() <= sum(plain).abs() + 1e-6);
            better += usize::from(sum(own).abs() < 0.5 * sum(plain).abs());
        }
        assert!(better > 50, "{better}");
    }

    #[test]
    fn inputs_that_are_always_zero_keep_the_rule_six() {
        let mut seed = 5;
        let (block, scaling) = (numbers(&mut seed), scaling(ScaleRule::Mse));
        let six = scaling.block_scale(amax(&block, scaling.mode.amax_specials()));
        assert_eq!(by_columns(&block, &[0.0; BLOCK], &scaling).scale, six);
    }
}
