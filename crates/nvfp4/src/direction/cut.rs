//! Parts of a matrix, and the transposed matrix, element by element.

use std::ops::Range;

/// Rows and columns of a matrix whose rows are `width` long.
pub(super) fn cut<T: Copy>(data: &[T], width: usize, (rows, cols): (Range<usize>, Range<usize>)) -> Vec<T> {
    match cols.is_empty() {
        // Without columns there may be any number of rows.
        true => Vec::new(),
        false => rows.flat_map(|r| &data[r * width..][cols.clone()]).copied().collect(),
    }
}

/// The transposed matrix of one of `rows` × `cols`.
pub(super) fn transposed<T: Copy>(data: &[T], (rows, cols): (usize, usize)) -> Vec<T> {
    match data.is_empty() {
        true => Vec::new(),
        false => (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect(),
    }
}
