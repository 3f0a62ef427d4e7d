//! Borrowed matrices of the three element types.

use crate::Result;
use half::{bf16, f16};
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::{Element, Error, Precision, area};
use std::ops::Range;

pub(crate) use nvfp4_spec::check_len;

/// Elements in memory.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// binary16.
    F16(&'a [f16]),
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Self {
        Values::F32(values)
    }
}

impl<'a> From<&'a [bf16]> for Values<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Values::Bf16(values)
    }
}

impl<'a> From<&'a [f16]> for Values<'a> {
    fn from(values: &'a [f16]) -> Self {
        Values::F16(values)
    }
}

impl<'a> Values<'a> {
    /// The elements from index `at` on.
    pub(crate) fn from(&self, at: usize) -> Values<'a> {
        match self {
            Values::F32(x) => Values::F32(&x[at..]),
            Values::Bf16(x) => Values::Bf16(&x[at..]),
            Values::F16(x) => Values::F16(&x[at..]),
        }
    }

    /// The type of the elements.
    pub fn precision(&self) -> Precision {
        match self {
            Values::F32(_) => Precision::F32,
            Values::Bf16(_) => Precision::Bf16,
            Values::F16(_) => Precision::F16,
        }
    }

    /// Element `i` in binary32.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Values::F32(x) => x[i],
            Values::Bf16(x) => x[i].to_f32(),
            Values::F16(x) => x[i].to_f32(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(x) => x.len(),
            Values::Bf16(x) => x.len(),
            Values::F16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Checks that `len` elements hold a matrix whose row `r` starts at element `r · stride`.
pub(crate) fn check_strided(len: usize, rows: usize, cols: usize, stride: usize) -> Result<()> {
    if stride < cols {
        return Err(
            Error::Length { what: "row stride (at least the number of columns)", expected: cols, got: stride }.into()
        );
    }
    let needed = match rows {
        0 => 0,
        _ => (rows - 1).checked_mul(stride).and_then(|x| x.checked_add(cols)).ok_or(Error::TooLarge { rows, cols })?,
    };
    if len < needed {
        return Err(Error::Length { what: "input (at least)", expected: needed, got: len }.into());
    }
    Ok(())
}

/// A borrowed row-major matrix with a row stride: in host memory ([`Input`]) or in GPU memory.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<V> {
    values: V,
    rows: usize,
    cols: usize,
    stride: usize,
}

/// A matrix in the host's memory.
pub type Input<'a> = MatrixRef<Values<'a>>;

/// Elements that can be counted.
pub trait Elements: Copy {
    /// Number of elements.
    fn count(&self) -> usize;
}

impl Elements for Values<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl<V: Elements> MatrixRef<V> {
    /// A contiguous matrix: `values` has `rows · cols` elements.
    pub fn new(values: V, rows: usize, cols: usize) -> Result<Self> {
        check_len("input", area(rows, cols)?, values.count())?;
        Ok(MatrixRef { values, rows, cols, stride: cols })
    }

    /// A matrix whose row `r` starts at element `r · stride`; the last row may end the slice.
    pub fn strided(values: V, rows: usize, cols: usize, stride: usize) -> Result<Self> {
        check_strided(values.count(), rows, cols, stride)?;
        Ok(MatrixRef { values, rows, cols, stride })
    }

    /// The elements, gaps between rows included.
    pub fn values(&self) -> V {
        self.values
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Distance between the starts of two rows, in elements.
    pub fn stride(&self) -> usize {
        self.stride
    }
}

impl<'a> Input<'a> {
    /// Some of its rows.
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Input<'a> {
        let values = self.values.from(rows.start * self.stride);
        MatrixRef { values, rows: rows.len(), ..*self }
    }

    /// Some of its columns.
    pub(crate) fn columns(&self, cols: Range<usize>) -> Input<'a> {
        MatrixRef { values: self.values.from(cols.start), cols: cols.len(), ..*self }
    }

    /// The matrix in binary32, contiguous.
    pub fn to_matrix(&self) -> Matrix {
        match self.values {
            Values::F32(x) => self.gather(x),
            Values::Bf16(x) => self.gather(x),
            Values::F16(x) => self.gather(x),
        }
    }

    fn gather<T: Element>(&self, x: &[T]) -> Matrix {
        let data: Vec<T> = match self.cols {
            // Without columns there may be any number of rows.
            0 => Vec::new(),
            _ => (0..self.rows).flat_map(|r| &x[r * self.stride..][..self.cols]).copied().collect(),
        };
        Matrix::new(self.rows, self.cols, &data).expect("the lengths were checked when the input was made")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strided_input_reads_only_its_rows() {
        let values: Vec<f32> = (0..11).map(|i| i as f32).collect();
        let input = Input::strided(Values::F32(&values), 3, 3, 4).unwrap();
        assert_eq!(input.to_matrix().data(), [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 8.0, 9.0, 10.0]);
    }

    #[test]
    fn an_input_without_columns_may_claim_any_number_of_rows() {
        for (rows, cols) in [(1 << 62, 0), (usize::MAX, 0), (0, usize::MAX)] {
            let matrix = Input::new(Values::F32(&[]), rows, cols).unwrap().to_matrix();
            assert_eq!((matrix.rows(), matrix.cols(), matrix.data().len()), (rows, cols, 0));
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let values = Values::F32(&[0.0; 10]);
        let message = |r: Result<Input>| r.unwrap_err().to_string();
        assert_eq!(message(Input::new(values, 3, 4)), "input: expected length 12, got 10");
        assert_eq!(message(Input::strided(values, 3, 3, 4)), "input (at least): expected length 11, got 10");
        assert_eq!(
            message(Input::strided(values, 3, 3, 2)),
            "row stride (at least the number of columns): expected length 3, got 2"
        );
        assert!(Input::new(values, usize::MAX, 2).is_err());
        assert!(Input::strided(values, usize::MAX, 0, usize::MAX).is_err());
    }
}
