//! Borrowed tensors of any rank and stride.

use crate::{Element, Elements, Error, Result, Values, shape};
use nvfp4_kernels::Input;
use nvfp4_spec::zeros;

/// Borrowed values with a shape. The last dimension is the one that blocks run along in the row direction; all others
/// are flattened into rows.
///
/// A tensor without elements may have any other dimensions, as long as its rows can be counted.
///
/// ```
/// use nvfp4::TensorRef;
///
/// let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
/// let x = TensorRef::new(&values[..], &[2, 3, 4])?;
/// assert_eq!((x.rows(), x.cols()), (6, 4));
/// // The same memory as a transposed matrix.
/// let transposed = TensorRef::strided(&values[..], &[4, 6], &[1, 4])?;
/// assert_eq!((transposed.rows(), transposed.cols()), (4, 6));
/// # Ok::<(), nvfp4::Error>(())
/// ```
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
        let (rows, cols) = shape::flatten(shape)?;
        let mut strides = vec![1usize; shape.len()];
        for d in (1..shape.len()).rev() {
            // Overflows only where there are no elements, and then strides say nothing.
            strides[d - 1] = strides[d].saturating_mul(shape[d]);
        }
        if values.len() != rows * cols {
            let shape = shape.to_vec();
            return Err(Error::Shape { shape, strides, needed: rows * cols, got: values.len() });
        }
        Ok(TensorRef { values, shape: shape.to_vec(), strides })
    }

    /// A tensor whose neighbours along dimension `d` are `strides[d]` elements apart. A stride of 0 repeats.
    pub fn strided(values: impl Into<Values<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let values = values.into();
        if shape.len() != strides.len() {
            return Err(Error::Strides { shape: shape.to_vec(), strides: strides.to_vec() });
        }
        let (rows, cols) = shape::flatten(shape)?;
        let reach = |n: usize, (&d, &s): (&usize, &usize)| n.checked_add((d - 1).checked_mul(s)?);
        let needed = match rows * cols {
            0 => 0,
            // Where the reach overflows, no slice is long enough.
            _ => shape.iter().zip(strides).try_fold(1, reach).unwrap_or(usize::MAX),
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
        shape::flattened(&self.shape).0
    }

    /// Number of columns: the last dimension.
    pub fn cols(&self) -> usize {
        shape::flattened(&self.shape).1
    }

    /// An error at the first value that is not finite.
    pub(crate) fn check_finite(&self) -> Result<()> {
        match self.first_not_finite() {
            Some((index, value)) => Err(Error::NotFinite { index, value }),
            None => Ok(()),
        }
    }

    /// Index of the first value that is NaN or infinite, in row-major order of the shape, and the value.
    pub fn first_not_finite(&self) -> Option<(Vec<usize>, f32)> {
        match self.values {
            Values::F32(x) => self.find(x, |x| !x.is_finite()),
            Values::Bf16(x) => self.find(x, |x| !x.is_finite()),
            Values::F16(x) => self.find(x, |x| !x.is_finite()),
        }
    }

    /// Index and value of the first element with a property.
    fn find<T: Element>(&self, x: &[T], wanted: impl Fn(&T) -> bool) -> Option<(Vec<usize>, f32)> {
        // Along a repeated dimension the first element stands for all.
        let once = |(&size, &stride): (&usize, &usize)| if stride == 0 { size.min(1) } else { size };
        let shape: Vec<usize> = self.shape.iter().zip(&self.strides).map(once).collect();
        let (rows, cols) = shape::flattened(&shape);
        (0..if cols == 0 { 0 } else { rows }).find_map(|r| {
            let (start, step) = self.row_at(&shape, r);
            let c = match step {
                // Looking at all of a row is faster than stopping at the first; few rows have one.
                1 => {
                    let row = &x[start..][..cols];
                    row.iter().fold(false, |any, x| any | wanted(x)).then(|| row.iter().position(&wanted))?
                }
                _ => (0..cols).position(|c| wanted(&x[start + c * step])),
            }?;
            Some((index_of(&shape, r * cols + c), x[start + c * step].to_f32()))
        })
    }

    /// Where row `r` of a tensor of this shape and our strides starts, and how far apart its elements are.
    fn row_at(&self, shape: &[usize], mut r: usize) -> (usize, usize) {
        let (Some((_, leading)), Some((&step, strides))) = (shape.split_last(), self.strides.split_last()) else {
            return (0, 1);
        };
        let mut start = 0;
        for (&size, &stride) in leading.iter().zip(strides).rev() {
            start += r % size * stride;
            r /= size;
        }
        (start, step)
    }

    /// Hands the tensor as a matrix to `use_input`: without a copy where rows are contiguous and evenly spaced.
    pub(crate) fn with_input<R>(&self, use_input: impl FnOnce(&Input<'_>) -> Result<R>) -> Result<R> {
        let (rows, cols) = shape::flattened(&self.shape);
        if let Some(stride) = row_stride(&self.shape, &self.strides) {
            return use_input(&Input::strided(self.values, rows, cols, stride)?);
        }
        match self.values {
            Values::F32(x) => use_input(&Input::new(Values::F32(&self.gather(x)?), rows, cols)?),
            Values::Bf16(x) => use_input(&Input::new(Values::Bf16(&self.gather(x)?), rows, cols)?),
            Values::F16(x) => use_input(&Input::new(Values::F16(&self.gather(x)?), rows, cols)?),
        }
    }

    /// A contiguous copy, bit for bit.
    pub(crate) fn to_elements(&self) -> Result<Elements> {
        Ok(match self.values {
            Values::F32(x) => Elements::F32(self.gather(x)?),
            Values::Bf16(x) => Elements::Bf16(self.gather(x)?),
            Values::F16(x) => Elements::F16(self.gather(x)?),
        })
    }

    /// A contiguous copy.
    fn gather<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        let (rows, cols) = shape::flattened(&self.shape);
        let mut copy = zeros(rows * cols, rows, cols)?;
        // `chunks_exact_mut` takes no width of 0.
        for (r, row) in copy.chunks_exact_mut(cols.max(1)).enumerate() {
            let (start, step) = self.row_at(&self.shape, r);
            match step {
                1 => row.copy_from_slice(&x[start..][..cols]),
                _ => row.iter_mut().enumerate().for_each(|(c, value)| *value = x[start + c * step]),
            }
        }
        Ok(copy)
    }
}

/// The distance between rows, if rows are contiguous, evenly spaced and do not overlap. The last
/// dimension is a row.
///
/// ```
/// assert_eq!(nvfp4::row_stride(&[2, 3, 8], &[48, 16, 1]), Some(16));
/// assert_eq!(nvfp4::row_stride(&[2, 3, 8], &[24, 16, 1]), None);
/// ```
pub fn row_stride(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let (rows, cols) = shape::flattened(shape);
    if rows == 0 || cols == 0 {
        return Some(cols);
    }
    // Dimensions of size 1 have no neighbours, so their strides say nothing.
    let mut dims = shape.iter().zip(strides).rev().filter(|(size, _)| **size > 1).peekable();
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

/// The index of the `i`-th element in row-major order; zeros where the shape has no elements.
pub fn index_of(shape: &[usize], mut i: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (d, size) in shape.iter().map(|&size| size.max(1)).enumerate().rev() {
        (index[d], i) = (i % size, i / size);
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn gathered(tensor: &TensorRef<'_>) -> Vec<f32> {
        tensor.with_input(|input| Ok(input.to_matrix().data().to_vec())).unwrap()
    }

    #[test]
    fn leading_dimensions_flatten_without_a_copy_where_rows_are_evenly_spaced() {
        assert_eq!(row_stride(&[2, 3, 8], &[24, 8, 1]), Some(8));
        assert_eq!(row_stride(&[2, 3, 4], &[24, 8, 1]), Some(8));
        assert_eq!(row_stride(&[2, 2, 4], &[24, 8, 1]), None, "uneven");
        assert_eq!(row_stride(&[6, 8], &[1, 6]), None, "transposed");
        assert_eq!(row_stride(&[3, 8], &[0, 1]), None, "repeated rows");
        assert_eq!(row_stride(&[1, 6, 1, 8], &[99, 8, 77, 1]), Some(8));
        assert_eq!(row_stride(&[5], &[1]), Some(5));
        assert_eq!(row_stride(&[5], &[2]), None);
        assert_eq!(row_stride(&[], &[]), Some(1));
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
    fn an_index_is_counted_from_the_last_dimension_and_a_dimension_of_zero_has_only_zeros() {
        assert_eq!(index_of(&[2, 3, 4], 17), [1, 1, 1]);
        assert_eq!(index_of(&[], 0), [0usize; 0]);
        assert_eq!(index_of(&[3, 0, 2], 3), [1, 0, 1]);
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
            "expected a stride for each dimension of the shape [2, 4], got [1]"
        );
        const MAX: usize = usize::MAX;
        assert_eq!(
            message(TensorRef::new(&values[..], &[MAX, MAX])),
            format!("the shape [{MAX}, {MAX}] has more elements than an address can count")
        );
        assert!(TensorRef::strided(&values[..], &[2, 2], &[MAX, 1]).is_err());
    }

    #[test]
    fn contiguous_and_strided_tensors_agree_on_what_a_shape_may_be() {
        const MAX: usize = usize::MAX;
        let none = &[0f32; 0][..];
        for shape in [&[0, MAX, 2][..], &[MAX, 0, 2], &[MAX, 0], &[0, MAX], &[1 << 62, 0]] {
            for tensor in [TensorRef::new(none, shape), TensorRef::strided(none, shape, &vec![1; shape.len()])] {
                let tensor = tensor.unwrap();
                assert_eq!((gathered(&tensor), tensor.first_not_finite()), (vec![], None), "{shape:?}");
            }
        }
        for shape in [&[MAX, 2, 0][..], &[MAX, 2], &[2, MAX, 3]] {
            for tensor in [TensorRef::new(none, shape), TensorRef::strided(none, shape, &vec![0; shape.len()])] {
                assert!(matches!(tensor, Err(Error::Overflow { .. })), "{shape:?}");
            }
        }
    }

    #[test]
    fn a_repeated_value_may_claim_more_elements_than_memory_holds() {
        for (shape, strides) in [([1 << 30, 1 << 30], [0, 0]), ([1 << 60, 1], [0, 1]), ([1, 1 << 60], [1, 0])] {
            let tensor = TensorRef::strided(&[f32::NAN][..], &shape, &strides).unwrap();
            let refused = tensor.with_input(|_| Ok(())).unwrap_err().to_string();
            assert_eq!(refused, format!("a matrix of {} × {} elements is too large", shape[0], shape[1]));
            assert!(matches!(tensor.first_not_finite(), Some((index, nan)) if index == [0, 0] && nan.is_nan()));
            assert_eq!(TensorRef::strided(&[1f32][..], &shape, &strides).unwrap().first_not_finite(), None);
        }
    }

    #[test]
    fn the_first_value_that_is_not_finite_is_found_by_its_index() {
        let mut values = [0.0f32; 24];
        (values[17], values[20]) = (f32::NEG_INFINITY, f32::NAN);
        let tensor = TensorRef::new(&values[..], &[2, 3, 4]).unwrap();
        assert_eq!(tensor.first_not_finite(), Some((vec![1, 1, 1], f32::NEG_INFINITY)));
        assert!(TensorRef::new(&values[..16], &[16]).unwrap().first_not_finite().is_none());
        let transposed = TensorRef::strided(&values[..], &[4, 6], &[1, 4]).unwrap();
        assert_eq!(transposed.first_not_finite().map(|(index, _)| index), Some(vec![0, 5]), "NaN at 20 = 5 · 4");
        let repeated = TensorRef::strided(&values[12..], &[3, 5, 2, 4], &[0, 2, 0, 1]).unwrap();
        assert_eq!(repeated.first_not_finite(), Some((vec![0, 1, 0, 3], f32::NEG_INFINITY)));
        let halves = values.map(f16::from_f32);
        let tensor = TensorRef::new(&halves[..], &[24]).unwrap();
        assert_eq!(tensor.first_not_finite(), Some((vec![17], f32::NEG_INFINITY)));
    }
}
