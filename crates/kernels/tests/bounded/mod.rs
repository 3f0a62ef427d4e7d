//! Compares outputs with the bound of their sums.

use nvfp4_spec::Element;
use nvfp4_spec::gemm::{Accumulate, Interval, Operand, Product, Sums};

/// Checks that every output lies within its interval.
#[allow(dead_code, reason = "not every test that has this module asks")]
pub fn check<T: Element>(a: &Operand<'_>, b: &Operand<'_>, product: &Product<'_, T>, out: &[T], name: &str) {
    let (m, n) = (a.rows(), b.rows());
    assert_eq!(out.len(), m * n);
    check_at(a, b, product, (0..m * n).map(|at| (at / n, at % n)), out, name);
}

/// Checks that the outputs at some positions lie within their intervals.
pub fn check_at<T: Element>(
    a: &Operand<'_>,
    b: &Operand<'_>,
    product: &Product<'_, T>,
    positions: impl IntoIterator<Item = (usize, usize)>,
    out: &[T],
    name: &str,
) {
    let sums = Sums::new(a, b, Accumulate::Exact);
    for (i, j) in positions {
        let (got, interval) = (out[i * b.rows() + j], Interval::new((a, i), (b, j), product, &sums));
        let (m, n, k) = (a.rows(), b.rows(), a.cols());
        assert!(interval.holds(got.to_f32()), "{name} ({i}, {j}) of {m} × {n} × {k}: {got:?} for {interval:?}");
    }
}
