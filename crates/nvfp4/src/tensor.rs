//! A quantized tensor: a shape and one or two directions.

use crate::direction::Direction;
use crate::{Directions, Element, Error, Layout, Options, Quantizer, Result, TensorRef, shape};
use nvfp4_spec::BLOCK;
use std::fmt;

/// One of a tensor's two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Blocks along the rows.
    Row,
    /// Blocks along the columns.
    Column,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Row => "row",
            Side::Column => "column",
        })
    }
}

/// Whether an update takes place, for callers who decide late (a gradient overflow, a micro-batch that changes nothing).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Update {
    /// Write the new values.
    #[default]
    Apply,
    /// Leave the tensor as it is.
    Skip,
}

/// A quantized tensor. Each direction owns its codes, scales, global scale, rotation, bound and layout. A clone has the same
/// bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) row: Option<Direction>,
    pub(crate) col: Option<Direction>,
}

impl QuantTensor {
    /// A tensor over existing directions, at least one. The row direction must be [rows, cols] of the flattened shape and
    /// not rotated, the column direction [cols, rows].
    pub fn from_parts(shape: &[usize], row: Option<Direction>, col: Option<Direction>) -> Result<Self> {
        let (rows, cols) = shape::flatten(shape)?;
        let tensor = QuantTensor { shape: shape.to_vec(), row, col };
        for (direction, expected) in [(&tensor.row, [rows, cols]), (&tensor.col, [cols, rows])] {
            if let Some(d) = direction
                && [d.rows, d.cols] != expected
            {
                return Err(Error::OtherShape { expected: expected.to_vec(), got: vec![d.rows, d.cols] });
            }
        }
        if tensor.row.is_none() && tensor.col.is_none() {
            return Err(Error::NoDirection);
        }
        if tensor.row.as_ref().is_some_and(|d| d.rotation.is_some()) {
            return Err(Error::RotatedRow);
        }
        Ok(tensor)
    }

    /// The shape of the tensor that was quantized.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        shape::flattened(&self.shape).0
    }

    /// Number of columns: the last dimension.
    pub fn cols(&self) -> usize {
        shape::flattened(&self.shape).1
    }

    /// The row direction, if the tensor holds it.
    pub fn row(&self) -> Option<&Direction> {
        self.row.as_ref()
    }

    /// The column direction, if the tensor holds it: the quantized transposed matrix.
    pub fn col(&self) -> Option<&Direction> {
        self.col.as_ref()
    }

    /// A direction, or an error that says it is missing.
    pub fn direction(&self, side: Side) -> Result<&Direction> {
        match side {
            Side::Row => self.row.as_ref(),
            Side::Column => self.col.as_ref(),
        }
        .ok_or(Error::MissingDirection(side))
    }

    /// Bytes that all directions take.
    pub fn byte_len(&self) -> usize {
        [&self.row, &self.col].into_iter().flatten().map(Direction::byte_len).sum()
    }

    /// The decoded values of a direction. The row direction comes in the shape of the tensor. The column direction comes as
    /// it is stored: transposed, and rotated if the Hadamard transform was on.
    pub fn dequantize<T: Element>(&self, side: Side) -> Result<Vec<T>> {
        self.direction(side)?.dequantize()
    }

    /// Quantizes `x`, of the same shape, into the directions that this tensor holds. On an error nothing is changed.
    pub fn update_in_place(
        &mut self,
        quantizer: &Quantizer,
        x: &TensorRef<'_>,
        options: &Options<'_>,
        update: Update,
    ) -> Result<()> {
        if x.shape() != self.shape {
            return Err(Error::OtherShape { expected: self.shape.clone(), got: x.shape().to_vec() });
        }
        for (direction, side) in [(&self.row, Side::Row), (&self.col, Side::Column)] {
            if direction.is_some() && !quantizer.directions().has(side) {
                return Err(Error::NotProduced(side));
            }
        }
        match update {
            Update::Apply => quantizer.write(x, options, self.row.as_mut(), self.col.as_mut()),
            Update::Skip => Ok(()),
        }
    }

    /// Keeps exactly these directions and drops the other. Asking for one that is not there is an error and changes
    /// nothing.
    pub fn keep(&mut self, directions: Directions) -> Result<()> {
        for side in [Side::Row, Side::Column] {
            if directions.has(side) {
                self.direction(side)?;
            }
        }
        if !directions.has(Side::Row) {
            self.row = None;
        }
        if !directions.has(Side::Column) {
            self.col = None;
        }
        Ok(())
    }

    /// The same tensor with its scales in another layout.
    pub fn with_layout(self, layout: Layout) -> Result<Self> {
        let convert = |d: Option<Direction>| d.map(|d| d.with_layout(layout)).transpose();
        Ok(QuantTensor { shape: self.shape, row: convert(self.row)?, col: convert(self.col)? })
    }

    /// Rows `start..end` of the flattened tensor, with the bytes that they have in the whole. The result has two dimensions.
    ///
    /// A column direction can be cut at multiples of 16 rows only.
    pub fn slice_rows(&self, start: usize, end: usize) -> Result<Self> {
        let rows = self.rows();
        if start > end || end > rows {
            return Err(Error::OutOfRange { start, end, rows });
        }
        let whole_blocks = |row: usize| row.is_multiple_of(BLOCK) || row == rows;
        if self.col.is_some() && !(whole_blocks(start) && whole_blocks(end)) {
            return Err(Error::CutsBlock { start, end });
        }
        let row = self.row.as_ref().map(|d| d.slice_rows(start, end)).transpose()?;
        let col = self.col.as_ref().map(|d| d.slice_cols(start, end)).transpose()?;
        Ok(QuantTensor { shape: vec![end - start, self.cols()], row, col })
    }
}
