//! A quantized tensor: a shape and one or two directions.

use crate::direction::{Direction, HostMemory, MemorySpace, Nvfp4Direction, PlainMatrix};
use crate::format::{Directions, Side};
use crate::{Element, Error, Fp8Tile, Layout, Result, TensorRef, shape};
use std::fmt;

/// A quantized tensor. Each direction has its own format and owns all that belongs to it: codes,
/// scales, rotation, layout. A clone has the same bytes. Its bytes lie in the memory of the host, or
/// in that of a GPU.
///
/// ```
/// use nvfp4::{Directions, Quantizer, Side, TensorRef};
///
/// let values = [3.0f32; 2 * 3 * 32];
/// let both = Quantizer::builder().directions(Directions::Both).build()?;
/// let q = both.quantize(&TensorRef::new(&values[..], &[2, 3, 32])?)?;
/// // Leading dimensions are rows. The column direction is the transposed matrix.
/// assert_eq!((q.shape(), q.rows(), q.cols()), (&[2, 3, 32][..], 6, 32));
/// assert_eq!(q.direction(Side::Column)?.rows(), 32);
/// assert_eq!(q.dequantize::<f32>(Side::Row)?, values);
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Debug)]
pub struct QuantTensor<M: MemorySpace = HostMemory> {
    pub(crate) shape: Vec<usize>,
    pub(crate) row: Option<Direction<M>>,
    pub(crate) col: Option<Direction<M>>,
}

impl Clone for QuantTensor {
    fn clone(&self) -> Self {
        QuantTensor { shape: self.shape.clone(), row: self.row.clone(), col: self.col.clone() }
    }
}

impl PartialEq for QuantTensor {
    fn eq(&self, other: &Self) -> bool {
        (&self.shape, &self.row, &self.col) == (&other.shape, &other.row, &other.col)
    }
}

impl<M: MemorySpace> QuantTensor<M> {
    /// A tensor over existing directions, at least one. The row direction must be [rows, cols] of the flattened shape and
    /// not rotated, the column direction [cols, rows]. Tiles of MXFP8 lie along the direction's rows as the tensor lies: 1×32 in the row
    /// direction, 32×1 in the column direction.
    pub fn from_parts(shape: &[usize], row: Option<Direction<M>>, col: Option<Direction<M>>) -> Result<Self> {
        let (rows, cols) = shape::flatten(shape)?;
        if row.is_none() && col.is_none() {
            return Err(Error::NoDirection);
        }
        let sides =
            [(Side::Row, &row, [rows, cols], Fp8Tile::Column32), (Side::Column, &col, [cols, rows], Fp8Tile::Row32)];
        for (side, direction, expected, other_tile) in sides {
            let Some(direction) = direction else { continue };
            let got = [direction.rows(), direction.cols()];
            if got != expected {
                return Err(Error::OtherShape { expected: expected.to_vec(), got: got.to_vec() });
            }
            if side == Side::Row && direction.rotation().is_some() {
                return Err(Error::RotatedRow);
            }
            if direction.fp8_tile() == Some(other_tile) {
                return Err(Error::MxTile(side));
            }
        }
        Ok(QuantTensor { shape: shape.to_vec(), row, col })
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
    #[doc(alias = "rowwise")]
    pub fn row(&self) -> Option<&Direction<M>> {
        self.row.as_ref()
    }

    /// The column direction, if the tensor holds it: the quantized transposed matrix.
    #[doc(alias = "column")]
    #[doc(alias = "columnwise")]
    pub fn col(&self) -> Option<&Direction<M>> {
        self.col.as_ref()
    }

    /// A direction, or an error that says it is missing.
    pub fn direction(&self, side: Side) -> Result<&Direction<M>> {
        match side {
            Side::Row => self.row.as_ref(),
            Side::Column => self.col.as_ref(),
        }
        .ok_or(Error::MissingDirection(side))
    }

    /// The directions by themselves.
    pub fn into_directions(self) -> (Option<Direction<M>>, Option<Direction<M>>) {
        (self.row, self.col)
    }

    /// A direction that is NVFP4, or an error that says what it is instead.
    pub fn nvfp4(&self, side: Side) -> Result<&Nvfp4Direction<M>> {
        self.direction(side)?.nvfp4()
    }

    /// Bytes that all directions take. Memory that both share counts once.
    pub fn byte_len(&self) -> usize {
        let bytes = |d: &Option<Direction<M>>| d.as_ref().map_or(0, Direction::byte_len);
        match (&self.row, &self.col) {
            (Some(Direction::Plain(row)), Some(Direction::Plain(col))) if row.shares(col) => row.byte_len(),
            (row, col) => bytes(row) + bytes(col),
        }
    }
}

impl QuantTensor {
    /// The decoded values of a direction. The row direction comes in the shape of the tensor. The column direction comes transposed,
    /// and rotated if the Hadamard transform was on.
    pub fn dequantize<T: Element>(&self, side: Side) -> Result<Vec<T>> {
        self.direction(side)?.dequantize()
    }

    /// An error unless an update with `x` in these directions leaves none as it is.
    pub(crate) fn check_update(&self, x: &TensorRef<'_>, produced: Directions) -> Result<()> {
        if x.shape() != self.shape {
            return Err(Error::OtherShape { expected: self.shape.clone(), got: x.shape().to_vec() });
        }
        for (direction, side) in [(&self.row, Side::Row), (&self.col, Side::Column)] {
            if direction.is_some() && !produced.has(side) {
                return Err(Error::NotProduced(side));
            }
        }
        Ok(())
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

    /// The same tensor with its scales in another layout, of which only NVFP4 has two.
    pub fn with_layout(self, layout: Layout) -> Result<Self> {
        let convert = |d: Option<Direction>| d.map(|d| d.with_layout(layout)).transpose();
        Ok(QuantTensor { shape: self.shape, row: convert(self.row)?, col: convert(self.col)? })
    }

    /// Rows `start..end` of the flattened tensor, with the bytes that they have in the whole. The result has two dimensions.
    ///
    /// Blocks must stay whole: NVFP4's column direction can be cut at multiples of 16 rows only, MXFP8's at multiples of 32, and FP8 in
    /// blocks at multiples of 128, in squares in either direction.
    pub fn slice_rows(&self, start: usize, end: usize) -> Result<Self> {
        let rows = self.rows();
        if start > end || end > rows {
            return Err(Error::OutOfRange { start, end, rows });
        }
        let grains = [
            (Side::Row, self.row.as_ref().map_or(1, |d| d.grain().0)),
            (Side::Column, self.col.as_ref().map_or(1, |d| d.grain().1)),
        ];
        for (side, of) in grains {
            let whole_blocks = |row: usize| row.is_multiple_of(of) || row == rows;
            if !(whole_blocks(start) && whole_blocks(end)) {
                return Err(Error::CutsBlock { start, end, side, of });
            }
        }
        let row = self.row.as_ref().map(|d| d.slice_rows(start, end)).transpose()?;
        let col = match (&self.row, &self.col, &row) {
            (Some(Direction::Plain(a)), Some(Direction::Plain(b)), Some(Direction::Plain(row))) if a.shares(b) => {
                Some(row.turned().into())
            }
            _ => self.col.as_ref().map(|d| d.slice_cols(start, end)).transpose()?,
        };
        Ok(QuantTensor { shape: vec![end - start, self.cols()], row, col })
    }
}

/// The shape, and each direction in recipe syntax.
impl<M: MemorySpace> fmt::Display for QuantTensor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.shape)?;
        for (side, direction) in [(Side::Row, &self.row), (Side::Column, &self.col)] {
            if let Some(direction) = direction {
                write!(f, " {side}: {direction}")?;
            }
        }
        Ok(())
    }
}
