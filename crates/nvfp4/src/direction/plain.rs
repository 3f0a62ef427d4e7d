//! A direction that is not quantized.

use super::cut::{cut, transposed};
use crate::format::Stored;
use crate::{Element, Precision, Result, Values};
use half::{bf16, f16};
use nvfp4_kernels::Input;
use nvfp4_spec::{area, check_len};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Numbers of one of the three types. They are equal if their bits are.
#[derive(Clone, Debug)]
pub enum Elements {
    /// binary32.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// binary16.
    F16(Vec<f16>),
}

impl Elements {
    /// Borrowed.
    pub fn values(&self) -> Values<'_> {
        match self {
            Elements::F32(x) => Values::F32(x),
            Elements::Bf16(x) => Values::Bf16(x),
            Elements::F16(x) => Values::F16(x),
        }
    }

    /// In another type: one rounding each. In their own type they keep their bits.
    pub(crate) fn stored_as(self, stored: Stored) -> Self {
        match stored {
            Stored::AsIs => self,
            Stored::Cast(precision) if precision == self.values().precision() => self,
            Stored::Cast(Precision::F32) => Elements::F32(self.to_vec()),
            Stored::Cast(Precision::Bf16) => Elements::Bf16(self.to_vec()),
            Stored::Cast(Precision::F16) => Elements::F16(self.to_vec()),
        }
    }

    /// As numbers of a type: one rounding each, none in their own.
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        fn cast<S: Element, T: Element>(values: &[S]) -> Vec<T> {
            // A type's own numbers are copied: going through binary32 would make a signalling NaN a quiet one.
            let value = |x: &S| (x as &dyn Any).downcast_ref::<T>().copied().unwrap_or_else(|| T::from_f32(x.to_f32()));
            values.iter().map(value).collect()
        }
        match self {
            Elements::F32(x) => cast(x),
            Elements::Bf16(x) => cast(x),
            Elements::F16(x) => cast(x),
        }
    }

    /// The same change to numbers of any type.
    fn map(&self, change: impl Change) -> Self {
        match self {
            Elements::F32(x) => Elements::F32(change.of(x)),
            Elements::Bf16(x) => Elements::Bf16(change.of(x)),
            Elements::F16(x) => Elements::F16(change.of(x)),
        }
    }
}

impl PartialEq for Elements {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Elements::F32(a), Elements::F32(b)) => a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())),
            (Elements::Bf16(a), Elements::Bf16(b)) => a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())),
            (Elements::F16(a), Elements::F16(b)) => a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())),
            (Elements::F32(_) | Elements::Bf16(_) | Elements::F16(_), _) => false,
        }
    }
}

/// A change that moves numbers and does not look at them.
trait Change {
    fn of<T: Copy>(&self, values: &[T]) -> Vec<T>;
}

struct Cut(usize, Range<usize>, Range<usize>);
struct Transpose(usize, usize);

impl Change for Cut {
    fn of<T: Copy>(&self, values: &[T]) -> Vec<T> {
        cut(values, self.0, (self.1.clone(), self.2.clone()))
    }
}

impl Change for Transpose {
    fn of<T: Copy>(&self, values: &[T]) -> Vec<T> {
        transposed(values, (self.0, self.1))
    }
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// Row by row.
    RowMajor,
    /// Column by column: as the transposed matrix would row by row.
    ColumnMajor,
}

/// A matrix that is not quantized. Both directions of a tensor share one buffer, which is column-major for one of them.
#[derive(Clone, Debug, PartialEq)]
pub struct PlainDirection {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) elements: Arc<Elements>,
    pub(crate) orientation: Orientation,
}

impl PlainDirection {
    /// A direction of `rows` × `cols` over existing numbers.
    pub fn from_parts(
        rows: usize,
        cols: usize,
        elements: impl Into<Arc<Elements>>,
        orientation: Orientation,
    ) -> Result<Self> {
        let elements = elements.into();
        check_len("elements", area(rows, cols)?, elements.values().len())?;
        Ok(PlainDirection { rows, cols, elements, orientation })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The numbers as they lie.
    pub fn values(&self) -> Values<'_> {
        self.elements.values()
    }

    /// How they lie.
    pub fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// Bytes that the numbers take.
    pub fn byte_len(&self) -> usize {
        self.values().len() * element_size(self.values().precision())
    }

    /// Whether another direction is in the same memory.
    pub(crate) fn shares(&self, other: &PlainDirection) -> bool {
        Arc::ptr_eq(&self.elements, &other.elements)
    }

    /// The transposed matrix in the same memory.
    pub(crate) fn turned(&self) -> Self {
        let orientation = match self.orientation {
            Orientation::RowMajor => Orientation::ColumnMajor,
            Orientation::ColumnMajor => Orientation::RowMajor,
        };
        PlainDirection { rows: self.cols, cols: self.rows, elements: Arc::clone(&self.elements), orientation }
    }

    /// Row by row.
    pub(crate) fn upright(&self) -> Arc<Elements> {
        match self.orientation {
            Orientation::RowMajor => Arc::clone(&self.elements),
            Orientation::ColumnMajor => Arc::new(self.elements.map(Transpose(self.cols, self.rows))),
        }
    }

    pub(crate) fn to_vec<T: Element>(&self) -> Vec<T> {
        self.upright().to_vec()
    }

    /// A part of it, in memory of its own.
    pub(crate) fn slice(&self, rows: Range<usize>, cols: Range<usize>) -> Result<Self> {
        let part = (rows.len(), cols.len());
        let elements = match self.orientation {
            Orientation::RowMajor => self.elements.map(Cut(self.cols, rows, cols)),
            Orientation::ColumnMajor => self.elements.map(Cut(self.rows, cols, rows)),
        };
        PlainDirection::from_parts(part.0, part.1, elements, self.orientation)
    }
}

/// An input of kernels over numbers that lie row by row.
pub(crate) fn input(elements: &Elements, rows: usize, cols: usize) -> Result<Input<'_>> {
    Ok(Input::new(elements.values(), rows, cols)?)
}

/// Bytes of a number.
fn element_size(precision: Precision) -> usize {
    match precision {
        Precision::F32 => 4,
        Precision::Bf16 | Precision::F16 => 2,
    }
}

/// In recipe syntax.
impl fmt::Display for PlainDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.values().precision() {
            Precision::F32 => "high-precision(f32)",
            Precision::Bf16 => "high-precision(bf16)",
            Precision::F16 => "high-precision(f16)",
        })
    }
}
