//! Borrowed tensors of any rank and stride.

use crate::{Error, Result, Values};
use half::{bf16, f16};
use nvfp4_kernels::Input;

/// Borrowed values with a shape. The last dimension is the one that blocks run along in the row direction; all others
/// are flattened into rows.
#[derive(Clone, Debug)]
pub struct TensorRef<'a> {
    values: Values<'a>,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl<'a> TensorRef<'a> {
    /// A contiguous row-major tensor. A shape without dimensions is a single value.
    pub fn new(values: impl Into<Values<'a>>, shape: &[usize]) -> Result<Self> {
        let values = values.into();
        let mut strides = vec![1usize; shape.len()];
        for d in (0..shape.len().saturating_sub(1)).rev() {
            strides[d] = strides[d + 1]
                .checked_mul(shape[d + 1])
                .ok_or_else(|| Error::Strides { shape: shape.to_vec(), strides: vec![] })?;
        }
        let tensor = Self::strided(values, shape, &strides)?;
        let needed: usize = shape.iter().product();
        if values.len() != needed {
            return Err(Error::Shape { shape: shape.to_vec(), strides, needed, got: values.len() });
        }
        Ok(tensor)
    }

    /// A tensor whose neighbours along dimension `d` are `strides[d]` elements apart. A stride of 0 repeats.
    pub fn strided(values: impl Into<Values<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let values = values.into();
        let refuse = || Error::Strides { shape: shape.to_vec(), strides: strides.to_vec() };
        if shape.len() != strides.len() {
            return Err(refuse());
        }
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(refuse)?;
        let needed = match elements {
            0 => 0,
            _ => shape
                .iter()
                .zip(strides)
                .try_fold(1usize, |n, (&d, &s)| n.checked_add((d - 1).checked_mul(s)?))
                .ok_or_else(refuse)?,
        };
        if values.len() < needed {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            return Err(Error::Shape { shape, strides, needed, got: values.len() });
        }
        Ok(TensorRef { values, shape: shape.to_vec(), strides: strides.to_vec() })
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values, whatever lies between them included.
    pub fn values(&self) -> Values<'a> {
        self.values
    }

    /// Number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
    }

    /// Number of columns: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Index of the first value that is NaN or infinite, in row-major order of the shape, and the value.
    pub fn first_not_finite(&self) -> Option<(Vec<usize>, f32)> {
        let elements = self.rows() * self.cols();
        (0..elements).find_map(|i| {
            let value = self.values.get(self.position(i));
            (!value.is_finite()).then(|| (self.index(i), value))
        })
    }

    /// The index of the `i`-th element in row-major order.
    fn index(&self, mut i: usize) -> Vec<usize> {
        let mut index = vec![0; self.shape.len()];
        for (d, &size) in self.shape.iter().enumerate().rev() {
            (index[d], i) = (i % size, i / size);
        }
        index
    }

    /// Where the `i`-th element in row-major order lies.
    fn position(&self, i: usize) -> usize {
        self.index(i).iter().zip(&self.strides).map(|(i, s)| i * s).sum()
    }

    /// Hands the tensor as a matrix to `use_input`: without a copy where rows are contiguous and evenly spaced.
    pub(crate) fn with_input<R>(&self, use_input: impl FnOnce(&Input<'_>) -> Result<R>) -> Result<R> {
        let (rows, cols) = (self.rows(), self.cols());
        if let Some(stride) = self.row_stride() {
            return use_input(&Input::strided(self.values, rows, cols, stride)?);
        }
        let positions = (0..rows * cols).map(|i| self.position(i));
        match self.values {
            Values::F32(x) => {
                let x: Vec<f32> = positions.map(|p| x[p]).collect();
                use_input(&Input::new(Values::F32(&x), rows, cols)?)
            }
            Values::Bf16(x) => {
                let x: Vec<bf16> = positions.map(|p| x[p]).collect();
                use_input(&Input::new(Values::Bf16(&x), rows, cols)?)
            }
            Values::F16(x) => {
                let x: Vec<f16> = positions.map(|p| x[p]).collect();
                use_input(&Input::new(Values::F16(&x), rows, cols)?)
            }
        }
    }

    /// The distance between rows, if rows are contiguous, evenly spaced and do not overlap.
    fn row_stride(&self) -> Option<usize> {
        let (rows, cols) = (self.rows(), self.cols());
        if rows == 0 || cols == 0 {
            return Some(cols);
        }
        // Dimensions of size 1 have no neighbours, so their strides say nothing.
        let mut dims = self.shape.iter().zip(&self.strides).rev().filter(|(size, _)| **size > 1).peekable();
        if cols > 1 && *dims.next()?.1 != 1 {
            return None;
        }
        let stride = dims.peek().map_or(cols, |(_, stride)| **stride);
        let mut expected = stride;
        for (&size, &actual) in dims {
            if actual != expected {
                return None;
            }
            expected = actual.checked_mul(size)?;
        }
        (stride >= cols).then_some(stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(tensor: &TensorRef<'_>) -> Vec<f32> {
        tensor.with_input(|input| Ok(input.to_matrix().data().to_vec())).unwrap()
    }

    #[test]
    fn leading_dimensions_flatten_without_a_copy_where_rows_are_evenly_spaced() {
        let values: Vec<f32> = (0..48).map(|i| i as f32).collect();
        let view = |shape: &[usize], strides: &[usize]| TensorRef::strided(&values[..], shape, strides).unwrap();
        assert_eq!(view(&[2, 3, 8], &[24, 8, 1]).row_stride(), Some(8));
        assert_eq!(view(&[2, 3, 4], &[24, 8, 1]).row_stride(), Some(8));
        assert_eq!(view(&[2, 2, 4], &[24, 8, 1]).row_stride(), None, "uneven");
        assert_eq!(view(&[6, 8], &[1, 6]).row_stride(), None, "transposed");
        assert_eq!(view(&[3, 8], &[0, 1]).row_stride(), None, "repeated rows");
        assert_eq!(view(&[1, 6, 1, 8], &[99, 8, 77, 1]).row_stride(), Some(8));
        assert_eq!(view(&[5], &[1]).row_stride(), Some(5));
        assert_eq!(view(&[5], &[2]).row_stride(), None);
        assert_eq!(view(&[], &[]).row_stride(), Some(1));
    }

    #[test]
    fn any_strides_gather_the_right_values() {
        let values: Vec<f32> = (0..48).map(|i| i as f32).collect();
        let transposed = TensorRef::strided(&values[..], &[6, 8], &[1, 6]).unwrap();
        assert_eq!(gathered(&transposed)[..9], [0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 42.0, 1.0]);
        let repeated = TensorRef::strided(&values[..], &[2, 3], &[0, 1]).unwrap();
        assert_eq!(gathered(&repeated), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        let scalar = TensorRef::new(&values[..1], &[]).unwrap();
        assert_eq!((scalar.rows(), scalar.cols(), gathered(&scalar)), (1, 1, vec![0.0]));
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let values = [0.0f32; 10];
        let message = |r: Result<TensorRef>| r.unwrap_err().to_string();
        assert_eq!(
            message(TensorRef::new(&values[..], &[3, 4])),
            "the shape [3, 4] with strides [4, 1] needs 12 elements, got 10"
        );
        assert_eq!(
            message(TensorRef::new(&values[..], &[2, 4])),
            "the shape [2, 4] with strides [4, 1] needs 8 elements, got 10"
        );
        assert_eq!(
            message(TensorRef::strided(&values[..], &[2, 4], &[1])),
            "the shape [2, 4] with strides [1] is not a tensor's"
        );
        let huge = usize::MAX;
        assert!(TensorRef::new(&values[..], &[huge, huge]).is_err());
        assert!(TensorRef::new(&values[..], &[0, huge, huge]).is_err());
        assert!(TensorRef::strided(&values[..], &[2, 2], &[huge, 1]).is_err());
    }

    #[test]
    fn the_first_value_that_is_not_finite_is_found_by_its_index() {
        let mut values = [0.0f32; 24];
        (values[17], values[20]) = (f32::NEG_INFINITY, f32::NAN);
        let tensor = TensorRef::new(&values[..], &[2, 3, 4]).unwrap();
        assert_eq!(tensor.first_not_finite(), Some((vec![1, 1, 1], f32::NEG_INFINITY)));
        assert!(TensorRef::new(&values[..16], &[16]).unwrap().first_not_finite().is_none());
    }
}
