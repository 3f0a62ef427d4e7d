//! The amaxes that a quantization needs before it starts.

use super::target::Target;
use super::{Job, PANEL, column, wide};
use crate::Result;
use crate::amax::{self, Outputs};
use nvfp4_spec::hadamard::{FACTOR, PRECISION, Signs};
use nvfp4_spec::{BLOCK, Element, GlobalScale, Mode, Precision, Specials};
use rayon::prelude::*;

impl<T: Element> Job<'_, T> {
    /// Computes the missing amaxes: in one pass over the matrix, in two if the directions treat NaN
    /// differently, plus one for the Hadamard transform. Row amaxes are left out if there is only
    /// the row direction: they are computed together with the codes.
    pub(super) fn find_amaxes<'a>(&self, row: &mut Option<Target<'a>>, col: &mut Option<Target<'a>>) -> Result<()> {
        if let Some(target) = col
            && let Some(signs) = target.transform
            && target.needs_amax()
        {
            target.set_amax(self.transformed_amax(signs, &target.mode)?);
        }
        let rows_too = col.is_some();
        for specials in [Specials::Kernel, Specials::Reference] {
            let needs = |target: &Option<Target<'_>>, global| {
                target
                    .as_ref()
                    .is_some_and(|t| t.needs_amax() && t.mode.amax_specials() == specials && t.mode.global == global)
            };
            let of_tensor = needs(row, GlobalScale::PerTensor) || needs(col, GlobalScale::PerTensor);
            let of_rows = rows_too && needs(row, GlobalScale::PerRow);
            let of_cols = needs(col, GlobalScale::PerRow);
            let (mut tensor, mut rows, mut cols) = (0.0, vec![], vec![]);
            rows.resize(if of_rows { self.x.rows() } else { 0 }, 0.0);
            cols.resize(if of_cols { self.x.cols() } else { 0 }, 0.0);
            let outputs = Outputs {
                tensor: of_tensor.then_some(&mut tensor),
                rows: of_rows.then_some(&mut rows[..]),
                cols: of_cols.then_some(&mut cols[..]),
            };
            if of_tensor || of_rows || of_cols {
                amax::amax(self.token.into(), self.x, specials, outputs)?;
            }
            for (target, of_each, values) in [(row.as_mut(), of_rows, rows), (col.as_mut(), of_cols, cols)] {
                let Some(target) = target.filter(|t| t.needs_amax() && t.mode.amax_specials() == specials) else {
                    continue;
                };
                match target.mode.global {
                    GlobalScale::PerTensor => target.set_amax(vec![tensor]),
                    GlobalScale::PerRow if of_each => target.set_amax(values),
                    GlobalScale::PerRow => {}
                }
            }
        }
        Ok(())
    }

    /// The rows in panels.
    fn panels(&self) -> impl ParallelIterator<Item = (usize, usize)> {
        let rows = self.x.rows();
        (0..rows.div_ceil(PANEL)).into_par_iter().map(move |p| (p * PANEL, rows.min((p + 1) * PANEL)))
    }

    /// The amax of the transformed columns: of the whole, or of each column.
    fn transformed_amax(&self, signs: Signs, mode: &Mode) -> Result<Vec<f32>> {
        let cols = self.x.cols();
        if let Some(token) = self.wide
            && mode.global == GlobalScale::PerTensor
            && T::PRECISION == Precision::Bf16
        {
            let largest = self.panels().map(|range| wide::largest(token, &self.submatrix(range, (0, cols)), signs));
            // Without an infinity or NaN, of which the rest takes care.
            let largest = largest.collect::<Option<Vec<_>>>();
            if let Some(largest) = largest {
                return Ok(vec![PRECISION.round(FACTOR * largest.into_iter().fold(0.0, f32::max))]);
            }
        }
        let empty = || (vec![0f32; cols.next_multiple_of(BLOCK)], false);
        let (maxima, nan) = self
            .panels()
            .map(|range| {
                let (mut maxima, _) = empty();
                // SAFETY: an Avx2 token is only made after detection.
                let nan = unsafe { column::hadamard_maxima(&self.submatrix(range, (0, cols)), signs, &mut maxima) };
                (maxima, nan)
            })
            .reduce(empty, |(mut a, m), (b, n)| {
                a.iter_mut().zip(b).for_each(|(a, b)| *a = a.max(b));
                (a, m | n)
            });
        if nan && mode.amax_specials() == Specials::Reference {
            // Which maxima are NaN was not recorded; the rules compute it.
            let transposed = nvfp4_spec::matrix::columns(&self.x.to_matrix(), Some(signs))?;
            return Ok(nvfp4_spec::matrix::amax(&transposed, mode.global, mode.amax_specials())?);
        }
        let values = (0..cols).map(|c| PRECISION.round(FACTOR * maxima[column::maximum_of::<T>(c)]));
        Ok(match mode.global {
            GlobalScale::PerRow => values.collect(),
            GlobalScale::PerTensor => vec![values.fold(0.0, f32::max)],
        })
    }
}
