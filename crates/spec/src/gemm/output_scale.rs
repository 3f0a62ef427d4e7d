//! From the sum of an output to the output.

use super::Epilogue;
use super::operand::Operand;
use crate::{Element, GlobalScale};

/// What the sum of an output is multiplied by, in the epilogue's order. With numerators `na`, `nb`
/// and the product of the denominators `d`, which is exact for amaxes: 36·EA·EB = 7225344, 4128768
/// or 2359296.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OutputScale {
    /// [`Epilogue::Folded`]: by `fl(fl(na·nb) / d)`.
    Folded(f32),
    /// [`Epilogue::RowScaled`], a side with a single scale: by `fl(1/d)`, then by `fl(na·nb)`.
    OneRow(f32, f32),
    /// [`Epilogue::RowScaled`], both per row: by `fl(1/d)`, `na`, `nb`.
    BothRows(f32, f32, f32),
}

impl OutputScale {
    /// That of output (i, j); `None` picks [`Epilogue::of`] the operands.
    pub fn new(epilogue: Option<Epilogue>, (a, i): (&Operand<'_>, usize), (b, j): (&Operand<'_>, usize)) -> Self {
        let ((na, da), (nb, db)) = (a.fraction(i), b.fraction(j));
        let denominator = da * db;
        match (epilogue.unwrap_or_else(|| Epilogue::of(a, b)), a.global(), b.global()) {
            (Epilogue::Folded, ..) => OutputScale::Folded(na * nb / denominator),
            (Epilogue::RowScaled, GlobalScale::PerRow, GlobalScale::PerRow) => {
                OutputScale::BothRows(1.0 / denominator, na, nb)
            }
            (Epilogue::RowScaled, ..) => OutputScale::OneRow(1.0 / denominator, na * nb),
        }
    }

    /// The output: the scaled sum, `·α`, `+ bias`, and `β·C` as the epilogue has it.
    #[inline]
    pub fn finish<T: Element>(self, sum: f32, alpha: f32, bias: Option<f32>, c: Option<(T, f32)>) -> T {
        let scaled = match self {
            OutputScale::Folded(factor) => factor * sum,
            OutputScale::OneRow(reciprocal, factor) => reciprocal * sum * factor,
            OutputScale::BothRows(reciprocal, na, nb) => reciprocal * sum * na * nb,
        };
        let mut y = scaled * alpha;
        if let Some(bias) = bias {
            y += bias;
        }
        match (c, self) {
            (None, _) => T::from_f32(y),
            (Some((c, beta)), OutputScale::Folded(_)) => T::from_f32(y + beta * c.to_f32()),
            // In the output type: β·C is rounded to it, and so is the sum.
            (Some((c, beta)), _) => {
                let y = T::from_f32(y);
                T::from_f32(y.to_f32() + T::from_f32(beta * c.to_f32()).to_f32())
            }
        }
    }
}
