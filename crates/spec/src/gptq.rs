//! GPTQ with fixed scales: the codes of a row are found one after the other, and what the rounding
//! of one column does to the layer's outputs is mended in the columns that come after it. The tensor
//! scale and the block scales are those of the row as it was.
//!
//! `H` is the mean of `x·xᵀ` over a layer's inputs. The rows of a weight do not depend on each other.

use crate::scaling::Scaling;
use crate::{BLOCK, e2m1, mse};

/// In which order columns get their codes. A column keeps the scale of its own block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// As they are.
    #[default]
    Natural,
    /// Those with the largest inputs first: by the diagonal of `H`, equal ones as they are. Others
    /// call it the static activation order.
    Activation,
}

/// What is added to the diagonal of `H`, as a share of its mean, if nothing else is said.
pub const DAMPING: f64 = 0.01;

/// What the errors of columns do to those after them: the upper triangular `U` with `UᵀU = H⁻¹`.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    /// The column at each place of the order.
    pub order: Vec<usize>,
    /// `U` over places, row by row; zeros below the diagonal.
    pub upper: Vec<f32>,
}

impl Factor {
    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.order.len()
    }
}

/// The order of columns, and what `H` is damped with: [`damped`] has the rest.
pub fn order(diagonal: &[f32], order: Order) -> Vec<usize> {
    let mut places: Vec<usize> = (0..diagonal.len()).collect();
    if order == Order::Activation {
        places.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a]));
    }
    places
}

/// The diagonal of `H` that is worked with. A column whose inputs were always 0 gets the mean of
/// the others, so that it is rounded to nearest, and all get `damping` times that mean. None if all
/// inputs were 0.
pub fn damped(diagonal: &[f32], damping: f64) -> Option<Vec<f64>> {
    let live: Vec<f64> = diagonal.iter().filter(|&&h| h != 0.0).map(|&h| f64::from(h)).collect();
    let mean = live.iter().sum::<f64>() / live.len() as f64;
    let own = |&h: &f32| (if h == 0.0 { mean } else { f64::from(h) }) + damping * mean;
    (!live.is_empty()).then(|| diagonal.iter().map(own).collect())
}

/// Finds `U`, in binary64, rounded to binary32 at the end. None where `H` is not positive definite:
/// such a layer is rounded to nearest.
///
/// `H⁻¹ = UᵀU` means `H = U⁻¹·U⁻ᵀ`, so that `U⁻¹` is the Cholesky factor of `H` from its end: with
/// rows and columns in reverse, `H = CᵀC` with an upper triangular `C`, and `U` is the inverse of
/// `Cᵀ` in reverse. `H` itself is never inverted. Each element is computed by subtracting one product
/// after the other, in the order of rows of `C`.
pub fn factor(hessian: &[f32], columns: usize, damping: f64, by: Order) -> Option<Factor> {
    let n = columns;
    let diagonal: Vec<f32> = (0..n).map(|i| hessian[i * n + i]).collect();
    let (order, damped) = (order(&diagonal, by), damped(&diagonal, damping)?);
    let place = |i: usize| order[n - 1 - i];
    let mut c = vec![0f64; n * n];
    for i in 0..n {
        for j in i..n {
            c[i * n + j] = element(hessian, &damped, place(i), place(j));
        }
    }
    for k in 0..n {
        let pivot = c[k * n + k].sqrt();
        if !(pivot > 0.0 && pivot.is_finite()) {
            return None;
        }
        c[k * n + k] = pivot;
        (k + 1..n).for_each(|j| c[k * n + j] /= pivot);
        for i in k + 1..n {
            (i..n).for_each(|j| c[i * n + j] -= c[k * n + i] * c[k * n + j]);
        }
    }
    let mut inverse = vec![0f64; n * n];
    for i in 0..n {
        inverse[i * n + i] = 1.0;
        for k in 0..i {
            (0..=k).for_each(|j| inverse[i * n + j] -= c[k * n + i] * inverse[k * n + j]);
        }
        (0..=i).for_each(|j| inverse[i * n + j] /= c[i * n + i]);
    }
    let upper = (0..n * n).map(|at| inverse[n * n - 1 - at] as f32).collect();
    Some(Factor { order, upper })
}

/// An element of `H` that is worked with: the one above the diagonal, 0 for a column whose inputs
/// were always 0.
pub fn element(hessian: &[f32], damped: &[f64], a: usize, b: usize) -> f64 {
    let n = damped.len();
    let dead = |i: usize| hessian[i * n + i] == 0.0;
    match a == b {
        true => damped[a],
        false if dead(a) || dead(b) => 0.0,
        false => f64::from(hessian[a.min(b) * n + a.max(b)]),
    }
}

/// The codes of a row whose blocks have these scale bytes, one per byte. Each place of the order in
/// turn: the element is rounded to nearest, its error is divided by `U`'s diagonal, and its products
/// with the rest of `U`'s row are subtracted from the elements after it, in binary32.
pub fn codes(row: &[f32], scales: &[u8], scaling: &Scaling, factor: &Factor) -> Vec<u8> {
    let n = factor.columns();
    let mut row: Vec<f32> = factor.order.iter().map(|&column| row[column]).collect();
    let mut codes = vec![0; n];
    for (place, &column) in factor.order.iter().enumerate() {
        let (upper, scale) = (&factor.upper[place * n..][..n], scales[column / BLOCK]);
        let code = scaling.code(scaling.factor(scale).apply(row[place]), None);
        let decoded = e2m1::decode(code) * mse::decode_factor(scale, scaling);
        let error = (row[place] - decoded) / upper[place];
        (place + 1..n).for_each(|later| row[later] -= error * upper[later]);
        codes[column] = code;
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, Precision, Profile};

    /// Inputs of `n` columns that depend on each other, and the mean of their products.
    fn inputs(n: usize, rows: usize, seed: u32) -> (Vec<f64>, Vec<f32>) {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            f64::from(state >> 8) / 8388608.0 - 1.0
        };
        let mut x = vec![0.0; rows * n];
        for row in x.chunks_exact_mut(n) {
            let shared = [next(), next(), next()];
            for (j, x) in row.iter_mut().enumerate() {
                *x = (shared[j % 3] + 0.3 * next()) * (1.0 + (j % 5) as f64);
            }
        }
        let mut hessian = vec![0f32; n * n];
        for (i, h) in hessian.iter_mut().enumerate() {
            *h = (x.chunks_exact(n).map(|x| x[i / n] * x[i % n]).sum::<f64>() / rows as f64) as f32;
        }
        (x, hessian)
    }

    #[test]
    fn the_factor_is_that_of_the_inverse() {
        let n = 24;
        let (_, hessian) = inputs(n, 64, 1);
        for by in [Order::Natural, Order::Activation] {
            let factor = factor(&hessian, n, DAMPING, by).unwrap();
            let diagonal: Vec<f32> = (0..n).map(|i| hessian[i * n + i]).collect();
            let damped = damped(&diagonal, DAMPING).unwrap();
            // H · UᵀU is the identity.
            for i in 0..n {
                for j in 0..n {
                    let inverse = |a: usize, b: usize| -> f64 {
                        let u = |k: usize, c: usize| f64::from(factor.upper[k * n + c]);
                        (0..n).map(|k| u(k, a) * u(k, b)).sum()
                    };
                    let at = |k: usize| element(&hessian, &damped, factor.order[i], factor.order[k]);
                    let product: f64 = (0..n).map(|k| at(k) * inverse(k, j)).sum();
                    assert!((product - f64::from(u8::from(i == j))).abs() < 1e-4, "{i} {j} {product}");
                }
            }
            assert!((0..n).all(|i| (0..i).all(|j| factor.upper[i * n + j] == 0.0)));
        }
    }

    #[test]
    fn codes_reduce_the_error_of_outputs_and_an_identity_rounds_to_nearest() {
        let (n, rows) = (64, 256);
        let (x, hessian) = inputs(n, rows, 2);
        let mode = Mode { profile: Profile::ModelOpt, ..Mode::default() };
        let scaling = Scaling::new(1.0, &mode, Precision::F32);
        let row: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 50.5 - 1.0).collect();
        let blocks: Vec<_> = row
            .as_chunks::<BLOCK>()
            .0
            .iter()
            .map(|b| crate::block::six(&[*b], &scaling, crate::Rounding::NearestEven))
            .collect();
        let scales: Vec<u8> = blocks.iter().map(|q| q.scale).collect();
        let nearest: Vec<u8> = blocks.iter().flat_map(|q| q.codes[0]).collect();
        let error = |codes: &[u8]| -> f64 {
            let decoded = |i: usize| e2m1::decode(codes[i]) * mse::decode_factor(scales[i / BLOCK], &scaling);
            let d: Vec<f64> = (0..n).map(|i| f64::from(row[i]) - f64::from(decoded(i))).collect();
            x.chunks_exact(n).map(|x| x.iter().zip(&d).map(|(x, d)| x * d).sum::<f64>().powi(2)).sum()
        };
        for by in [Order::Natural, Order::Activation] {
            let found = codes(&row, &scales, &scaling, &factor(&hessian, n, DAMPING, by).unwrap());
            assert!(error(&found) < 0.5 * error(&nearest), "{} {}", error(&found), error(&nearest));
        }
        let mut identity = vec![0f32; n * n];
        (0..n).for_each(|i| identity[i * n + i] = 3.0);
        assert_eq!(codes(&row, &scales, &scaling, &factor(&identity, n, DAMPING, Order::Natural).unwrap()), nearest);
    }

    #[test]
    fn columns_without_inputs_are_rounded_to_nearest_and_impossible_matrices_have_no_factor() {
        let n = 16;
        let (_, mut hessian) = inputs(n, 64, 3);
        (0..n).for_each(|i| (hessian[5 * n + i], hessian[i * n + 5]) = (0.0, 0.0));
        let found = factor(&hessian, n, DAMPING, Order::Natural).unwrap();
        assert!((0..n).all(|i| i == 5 || (found.upper[5 * n + i] == 0.0 && found.upper[i * n + 5] == 0.0)));
        assert!(factor(&vec![0.0; n * n], n, DAMPING, Order::Natural).is_none());
        hessian[1] = 1e6;
        assert!(factor(&hessian, n, DAMPING, Order::Natural).is_none());
    }
}
