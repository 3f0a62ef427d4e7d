//! How far the outputs of faster products may be from the exact ones.

use super::operand::Operand;
use super::output_scale::OutputScale;
use super::sums::Sums;
use super::{Epilogue, Product};
use crate::{Element, Precision};

/// How far a sum in binary32 may be from the exact one, given the sum of the products' magnitudes:
/// `(K + 8)·2⁻²²` of it.
///
/// On a CPU: a chain of K fused or separate multiply-adds errs by at most `K·2⁻²⁴·(1 + …)` of the
/// magnitudes per rounding, and has at most two roundings per step; any order of additions is
/// within that.
///
/// On a GPU this is assumed of tensor cores, whose additions are not documented: an instruction
/// adds its products, which are exact, and the accumulator by aligning all of them to the largest
/// exponent and keeping at least 24 bits of each, cut off or rounded. With 16 products each of the
/// 17 summands then loses less than 2⁻²³ of the largest, so K/16 instructions err by at most
/// `17/16·K·2⁻²³` of the magnitudes; fewer products per addition by at most `2·K·2⁻²³`, which is
/// the bound. Block-scaled tensor cores, which add products of codes times the scales of their
/// blocks, are compared with the bound before they are used.
///
/// It holds while values, products and partial sums stay in the normal range of binary32, block
/// scales left out: plain values of 2⁻¹²⁶ to 2¹²¹ are enough for NVFP4 on the other side. Beyond,
/// sums may overflow or lose what is subnormal.
///
/// Decoding FP8 adds nothing: an [`Operand`]'s values are by definition what it decodes to, rounded
/// once where a tile has a scale that is no power of two. Values of codes (4 significant bits, 2⁻¹⁶
/// to 57344) are exact in bf16 and f16, and MXFP8's in bf16 while they are normal numbers; where
/// they are, a product of two is exact in binary32 and only additions round.
pub fn bound(k: usize, magnitude: f64) -> f64 {
    (k + 8) as f64 * 2f64.powi(-22) * magnitude
}

/// The interval of an output whose sum is within the bound of the product's
/// [`Accumulator`](super::Accumulator).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The exact output, in binary64: NaN if it is.
    pub exact: f64,
    /// How far from it: the bound of the sum, scaled, and the roundings after it.
    pub allowed: f64,
}

impl Interval {
    /// The interval of output (i, j) of type `T`; `sums` are those of the operands.
    pub fn new<T: Element>(
        (a, i): (&Operand<'_>, usize),
        (b, j): (&Operand<'_>, usize),
        product: &Product<'_, T>,
        sums: &Sums<'_>,
    ) -> Self {
        let factors = match OutputScale::new(product.epilogue, (a, i), (b, j)) {
            OutputScale::Folded(x) => [x, 1.0, 1.0],
            OutputScale::OneRow(x, y) => [x, y, 1.0],
            OutputScale::BothRows(x, y, z) => [x, y, z],
        };
        let scale = factors.into_iter().chain([product.alpha]).map(f64::from).product::<f64>();
        let (sum, magnitude) = (f64::from(sums.sum(i, j)), sums.magnitude(i, j));
        let bias = product.bias.map_or(0.0, |bias| f64::from(bias[j]));
        let add = product.add.filter(|&(_, beta)| beta != 0.0);
        let c = add.map_or(0.0, |(c, beta)| f64::from(beta) * f64::from(c[i * b.rows() + j].to_f32()));
        let before = sum * scale + bias;
        let exact = before + c;
        // Half a unit in the last place of the output's type, and of its subnormal numbers.
        let (unit, least) = match T::PRECISION {
            Precision::F32 => (2f64.powi(-24), 2f64.powi(-150)),
            Precision::Bf16 => (2f64.powi(-8), 2f64.powi(-134)),
            Precision::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        };
        // What is rounded to that type: the result, and both of its parts where they are rounded
        // before.
        let rounded = match (product.epilogue.unwrap_or_else(|| Epilogue::of(a, b)), add) {
            (Epilogue::RowScaled, Some(_)) => exact.abs() + before.abs() + c.abs(),
            _ => exact.abs(),
        };
        // The sum is rounded here, and at most seven roundings to binary32 follow; 1 % covers their
        // interaction.
        let wide = 8.0 * 2f64.powi(-24) * ((magnitude * scale).abs() + bias.abs() + c.abs());
        let allowed =
            product.accumulator.bound(a.cols(), magnitude) * scale.abs() + wide + 1.01 * unit * rounded + 3.0 * least;
        Interval { exact, allowed }
    }

    /// Whether an output lies within. Where the exact one is NaN, NaN does.
    pub fn holds(&self, output: f32) -> bool {
        if self.exact.is_nan() { output.is_nan() } else { (f64::from(output) - self.exact).abs() <= self.allowed }
    }
}
