//! The factor, some rows at a time. Twin of [`nvfp4_spec::gptq::factor`].
//!
//! Rows of a panel are finished first; then the rows after it, each on any thread, take the products
//! of all of them in turn. An element is subtracted from in the same order as by the rule. `C` and
//! the inverse of its transpose share one square: `C` above the diagonal, the inverse below it, and
//! the diagonal of `C` apart.

use super::subtract::subtract;
use crate::Result;
use crate::input::check_len;
use nvfp4_spec::area;
use nvfp4_spec::gptq::{Factor, Order, damped, element, order};
use rayon::prelude::*;

/// Rows of a panel.
const PANEL: usize = 64;

/// Bytes that [`factor`] takes for this many columns, its result included.
pub fn bytes(columns: u64) -> u64 {
    12 * columns * columns
}

/// Finds the factor of a symmetric matrix; none where it is not positive definite. `hessian` gives
/// its rows, of which the part above the diagonal is read.
pub fn factor(hessian: Vec<f32>, columns: usize, damping: f64, by: Order) -> Result<Option<Factor>> {
    let n = columns;
    check_len("Hessian", area(n, n)?, hessian.len())?;
    let diagonal: Vec<f32> = (0..n).map(|i| hessian[i * n + i]).collect();
    let order = order(&diagonal, by);
    let Some(damped) = damped(&diagonal, damping) else { return Ok(None) };
    let mut square = vec![0f64; n * n];
    square.par_chunks_exact_mut(n.max(1)).enumerate().for_each(|(i, row)| {
        let own = order[n - 1 - i];
        (i..n).for_each(|j| row[j] = element(&hessian, &damped, own, order[n - 1 - j]));
    });
    drop(hessian);
    let Some(pivots) = decompose(&mut square, n) else { return Ok(None) };
    invert(&mut square, &pivots);
    let mut upper = vec![0f32; n * n];
    upper.par_chunks_exact_mut(n.max(1)).enumerate().for_each(|(i, row)| {
        let inverse = &square[(n - 1 - i) * n..][..n];
        (i..n).for_each(|j| row[j] = inverse[n - 1 - j] as f32);
    });
    Ok(Some(Factor { order, upper }))
}

/// Leaves `C` above the diagonal. Returns its diagonal, if all of it is positive.
fn decompose(square: &mut [f64], n: usize) -> Option<Vec<f64>> {
    let mut pivots = vec![0.0; n];
    for start in (0..n).step_by(PANEL) {
        let end = (start + PANEL).min(n);
        for k in start..end {
            let (before, after) = square.split_at_mut((k + 1) * n);
            let row = &mut before[k * n..];
            let pivot = row[k].sqrt();
            if !(pivot > 0.0 && pivot.is_finite()) {
                return None;
            }
            pivots[k] = pivot;
            row[k + 1..].iter_mut().for_each(|c| *c /= pivot);
            for (i, later) in (k + 1..end).zip(after.chunks_exact_mut(n)) {
                subtract(&mut later[i..], &[(row[i], &row[i..])]);
            }
        }
        let (done, rest) = square.split_at_mut(end * n);
        let panel: Vec<&[f64]> = done[start * n..].chunks_exact(n).collect();
        rest.par_chunks_exact_mut(n).enumerate().for_each(|(i, later)| {
            let i = end + i;
            let products: Vec<(f64, &[f64])> = panel.iter().map(|row| (row[i], &row[i..])).collect();
            subtract(&mut later[i..], &products);
        });
    }
    Some(pivots)
}

/// Leaves the inverse of the transpose of `C` on and below the diagonal. `C` is above it, and its
/// diagonal is `pivots`.
fn invert(square: &mut [f64], pivots: &[f64]) {
    let n = pivots.len();
    for i in 0..n {
        square[i * n + i] = 1.0;
    }
    for start in (0..n).step_by(PANEL) {
        let end = (start + PANEL).min(n);
        for i in start..end {
            let (before, after) = square.split_at_mut(i * n);
            let row = &mut after[..n];
            for k in start..i {
                let above = &before[k * n..][..n];
                subtract(&mut row[..=k], &[(above[i], &above[..=k])]);
            }
            row[..=i].iter_mut().for_each(|x| *x /= pivots[i]);
        }
        let (done, rest) = square.split_at_mut(end * n);
        let panel: Vec<&[f64]> = done[start * n..].chunks_exact(n).collect();
        rest.par_chunks_exact_mut(n).enumerate().for_each(|(i, later)| {
            let i = end + i;
            // Zeros above the diagonal of the inverse: the rows of the panel end at different places.
            let products: Vec<(f64, &[f64])> = panel.iter().map(|row| (row[i], &row[..start])).collect();
            subtract(&mut later[..start], &products);
            for (k, row) in (start..end).zip(&panel) {
                subtract(&mut later[start..=k], &[(row[i], &row[start..=k])]);
            }
        });
    }
}
