//! One direction of a quantized tensor: everything that a consumer needs, so that nothing can be lost on the way.

mod fp8;
mod nvfp4;
mod plain;

pub use fp8::Fp8Direction;
pub use nvfp4::{Global, Nvfp4Direction};
pub(crate) use plain::input as plain_input;
pub use plain::{Elements, Lies, PlainDirection};

use crate::format::Family;
use crate::{Element, Error, Fp8Tile, Implementation, Layout, Result, Signs};
use std::fmt;

/// A matrix along whose rows products run, in the format that it is stored in. For a tensor's column direction that matrix is the
/// transposed one.
///
/// ```
/// use nvfp4::format::Mxfp8;
/// use nvfp4::{Direction, Directions, Quantizer, Side, TensorRef};
///
/// let x: Vec<f32> = (0..64 * 96).map(|i| (i as f32 * 0.1).sin()).collect();
/// let mxfp8 = Quantizer::new(Mxfp8::default(), Directions::Both)?;
/// let x = mxfp8.quantize(&TensorRef::new(&x[..], &[64, 96])?)?;
/// match x.direction(Side::Row)? {
///     Direction::Nvfp4(d) => println!("{} bytes, two codes each", d.codes().len()),
///     Direction::Fp8(d) => println!("{} codes, {} scales", d.codes().len(), d.scales().len()),
///     Direction::Plain(d) => println!("{} numbers as they are", d.values().len()),
/// }
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Direction {
    /// NVFP4.
    Nvfp4(Nvfp4Direction),
    /// FP8 with a scale per tensor or per 128 values, or MXFP8.
    Fp8(Fp8Direction),
    /// Not quantized.
    Plain(PlainDirection),
}

impl From<Nvfp4Direction> for Direction {
    fn from(direction: Nvfp4Direction) -> Self {
        Direction::Nvfp4(direction)
    }
}

impl From<Fp8Direction> for Direction {
    fn from(direction: Fp8Direction) -> Self {
        Direction::Fp8(direction)
    }
}

impl From<PlainDirection> for Direction {
    fn from(direction: PlainDirection) -> Self {
        Direction::Plain(direction)
    }
}

/// What a tensor asks of a direction, wherever its bytes lie.
pub(crate) struct Outline {
    pub rows: usize,
    pub cols: usize,
    pub rotation: Option<Signs>,
    /// Of FP8.
    pub tile: Option<Fp8Tile>,
}

impl Direction {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.rows,
            Direction::Fp8(d) => d.rows,
            Direction::Plain(d) => d.rows,
        }
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.cols,
            Direction::Fp8(d) => d.cols,
            Direction::Plain(d) => d.cols,
        }
    }

    /// The formats that it can be multiplied with.
    pub fn family(&self) -> Family {
        match self {
            Direction::Nvfp4(_) => Family::Nvfp4,
            Direction::Fp8(d) => d.family(),
            Direction::Plain(_) => Family::HighPrecision,
        }
    }

    /// The NVFP4 direction, or an error that says what it is instead.
    pub fn nvfp4(&self) -> Result<&Nvfp4Direction> {
        match self {
            Direction::Nvfp4(d) => Ok(d),
            Direction::Fp8(_) | Direction::Plain(_) => Err(Error::NotNvfp4 { got: self.family() }),
        }
    }

    /// The signs of the Hadamard transform that the values went through.
    pub fn rotation(&self) -> Option<Signs> {
        match self {
            Direction::Nvfp4(d) => d.rotation,
            Direction::Fp8(_) | Direction::Plain(_) => None,
        }
    }

    pub(crate) fn outline(&self) -> Outline {
        let tile = match self {
            Direction::Fp8(d) => Some(d.tile),
            Direction::Nvfp4(_) | Direction::Plain(_) => None,
        };
        Outline { rows: self.rows(), cols: self.cols(), rotation: self.rotation(), tile }
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.byte_len(),
            Direction::Fp8(d) => d.byte_len(),
            Direction::Plain(d) => d.byte_len(),
        }
    }

    /// The same direction with its scales in another layout, of which only NVFP4 has two.
    pub fn with_layout(self, layout: Layout) -> Result<Self> {
        match (self, layout) {
            (Direction::Nvfp4(d), _) => Ok(d.with_layout(layout)?.into()),
            (other, Layout::Linear) => Ok(other),
            (other, Layout::Swizzled) => Err(Error::NotNvfp4 { got: other.family() }),
        }
    }

    /// The decoded matrix, still transposed and rotated if this is a transformed column direction.
    pub fn dequantize<T: Element>(&self) -> Result<Vec<T>> {
        self.dequantize_with(Implementation::best())
    }

    /// The decoded matrix, computed by the implementation asked for. All give the same bits. What is not quantized comes out as it went
    /// in, bit for bit, if `T` is its type.
    pub fn dequantize_with<T: Element>(&self, implementation: Implementation) -> Result<Vec<T>> {
        match self {
            Direction::Nvfp4(d) => d.dequantize_with(implementation),
            Direction::Fp8(d) => d.dequantize_with(implementation),
            Direction::Plain(d) => Ok(d.to_vec()),
        }
    }

    /// At multiples of how many rows, and of how many columns, it can be cut.
    pub(crate) fn grain(&self) -> (usize, usize) {
        match self {
            Direction::Nvfp4(_) => (1, nvfp4_spec::BLOCK),
            Direction::Fp8(d) => d.grain(),
            Direction::Plain(_) => (1, 1),
        }
    }

    /// Rows `start..end`, which keep their bytes; both at multiples of the grain, or at the end.
    pub(crate) fn slice_rows(&self, start: usize, end: usize) -> Result<Self> {
        Ok(match self {
            Direction::Nvfp4(d) => d.slice_rows(start, end)?.into(),
            Direction::Fp8(d) => d.slice(start..end, 0..d.cols).into(),
            Direction::Plain(d) => d.slice(start..end, 0..d.cols)?.into(),
        })
    }

    /// Elements `start..end` of every row, under the same condition.
    pub(crate) fn slice_cols(&self, start: usize, end: usize) -> Result<Self> {
        Ok(match self {
            Direction::Nvfp4(d) => d.slice_cols(start, end)?.into(),
            Direction::Fp8(d) => d.slice(0..d.rows, start..end).into(),
            Direction::Plain(d) => d.slice(0..d.rows, start..end)?.into(),
        })
    }
}

/// In the words of a spec.
impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Direction::Nvfp4(d) => d.fmt(f),
            Direction::Fp8(d) => d.fmt(f),
            Direction::Plain(d) => d.fmt(f),
        }
    }
}
