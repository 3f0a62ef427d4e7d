//! A tensor's shape as a matrix: all dimensions but the last are flattened into rows, the last is the columns.

use crate::{Error, Result};

/// Rows and columns of a shape; a shape without dimensions is 1 × 1.
///
/// An error where the rows or the elements are more than an address can count. A dimension of 0 makes a product 0,
/// whatever the other dimensions.
pub(crate) fn flatten(shape: &[usize]) -> Result<(usize, usize)> {
    let (&cols, leading) = shape.split_last().unwrap_or((&1, &[]));
    let rows = product(leading).filter(|&rows| product(&[rows, cols]).is_some());
    rows.map(|rows| (rows, cols)).ok_or_else(|| Error::Overflow { shape: shape.to_vec() })
}

/// Rows and columns of a shape that was checked when its tensor was made.
pub(crate) fn flattened(shape: &[usize]) -> (usize, usize) {
    flatten(shape).expect("a tensor's shape does not overflow")
}

fn product(dimensions: &[usize]) -> Option<usize> {
    match dimensions.contains(&0) {
        true => Some(0),
        false => dimensions.iter().try_fold(1usize, |n, &d| n.checked_mul(d)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_dimension_makes_a_product_zero_wherever_it_stands() {
        const MAX: usize = usize::MAX;
        let flat = |shape: &[usize]| flatten(shape).ok();
        assert_eq!([flat(&[]), flat(&[5]), flat(&[2, 3, 4])], [Some((1, 1)), Some((1, 5)), Some((6, 4))]);
        assert_eq!([flat(&[0, MAX, 2]), flat(&[MAX, 0, 2]), flat(&[MAX, MAX, 0, 2])], [Some((0, 2)); 3]);
        assert_eq!([flat(&[MAX, 0]), flat(&[0, MAX])], [Some((MAX, 0)), Some((0, MAX))]);
        assert_eq!([flat(&[MAX, 2, 0]), flat(&[MAX, 2]), flat(&[2, MAX])], [None; 3], "rows or elements overflow");
        let message = flatten(&[MAX, 2]).unwrap_err().to_string();
        assert_eq!(message, format!("the shape [{MAX}, 2] has more elements than an address can count"));
    }
}
