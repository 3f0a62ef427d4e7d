//! What factors and rows are made of.

use std::ops::{Mul, Sub};

/// Subtracts products of numbers with rows, in order. Four at a time, which keeps an element in a
/// register; products are not fused.
pub(super) fn subtract<T: Copy + Mul<Output = T> + Sub<Output = T>>(row: &mut [T], products: &[(T, &[T])]) {
    let (fours, rest) = products.as_chunks::<4>();
    for [a, b, c, d] in fours {
        let rows = a.1.iter().zip(b.1).zip(c.1).zip(d.1);
        for (x, (((&p, &q), &r), &s)) in row.iter_mut().zip(rows) {
            *x = *x - a.0 * p - b.0 * q - c.0 * r - d.0 * s;
        }
    }
    for (factor, other) in rest {
        row.iter_mut().zip(*other).for_each(|(x, &y)| *x = *x - *factor * y);
    }
}
