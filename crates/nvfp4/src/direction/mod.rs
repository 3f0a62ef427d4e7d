//! One direction of a quantized tensor: everything that a consumer needs, so that nothing can be lost on the way.

mod block;
mod cut;
mod fp8;
mod memory;
mod nvfp4;
mod plain;

pub(crate) use block::Parts;
pub use block::{Block, BlockRef};
pub(crate) use fp8::Fp8Parts;
pub use fp8::{Fp8Description, Fp8Direction};
#[cfg(feature = "cuda")]
pub(crate) use memory::private;
pub use memory::{Array, HostMemory, MemorySpace, PlainMatrix};
pub(crate) use nvfp4::Nvfp4Parts;
pub use nvfp4::{Nvfp4Description, Nvfp4Direction};
pub(crate) use plain::input as plain_input;
pub use plain::{Elements, Orientation, PlainDirection};

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
///
/// Exhaustive on purpose, as [`Format`](crate::format::Format) is.
#[derive(Debug)]
pub enum Direction<M: MemorySpace = HostMemory> {
    /// NVFP4.
    Nvfp4(Nvfp4Direction<M>),
    /// FP8 with a scale per tensor or per 128 values, or MXFP8.
    Fp8(Fp8Direction<M>),
    /// Not quantized.
    Plain(M::Plain),
}

impl Clone for Direction {
    fn clone(&self) -> Self {
        match self {
            Direction::Nvfp4(d) => Direction::Nvfp4(d.clone()),
            Direction::Fp8(d) => Direction::Fp8(d.clone()),
            Direction::Plain(d) => Direction::Plain(d.clone()),
        }
    }
}

impl PartialEq for Direction {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Direction::Nvfp4(a), Direction::Nvfp4(b)) => a == b,
            (Direction::Fp8(a), Direction::Fp8(b)) => a == b,
            (Direction::Plain(a), Direction::Plain(b)) => a == b,
            (Direction::Nvfp4(_) | Direction::Fp8(_) | Direction::Plain(_), _) => false,
        }
    }
}

impl<M: MemorySpace> From<Nvfp4Direction<M>> for Direction<M> {
    fn from(direction: Nvfp4Direction<M>) -> Self {
        Direction::Nvfp4(direction)
    }
}

impl<M: MemorySpace> From<Fp8Direction<M>> for Direction<M> {
    fn from(direction: Fp8Direction<M>) -> Self {
        Direction::Fp8(direction)
    }
}

impl From<PlainDirection> for Direction {
    fn from(direction: PlainDirection) -> Self {
        Direction::Plain(direction)
    }
}

impl<M: MemorySpace> Direction<M> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.rows(),
            Direction::Fp8(d) => d.rows(),
            Direction::Plain(d) => d.rows(),
        }
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.cols(),
            Direction::Fp8(d) => d.cols(),
            Direction::Plain(d) => d.cols(),
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
    pub fn nvfp4(&self) -> Result<&Nvfp4Direction<M>> {
        match self {
            Direction::Nvfp4(d) => Ok(d),
            Direction::Fp8(_) | Direction::Plain(_) => Err(Error::NotNvfp4 { got: self.family() }),
        }
    }

    /// The signs of the Hadamard transform that the values went through.
    pub fn rotation(&self) -> Option<Signs> {
        match self {
            Direction::Nvfp4(d) => d.rotation(),
            Direction::Fp8(_) | Direction::Plain(_) => None,
        }
    }

    /// Which elements share a scale, of FP8.
    pub(crate) fn fp8_tile(&self) -> Option<Fp8Tile> {
        match self {
            Direction::Fp8(d) => Some(d.tile()),
            Direction::Nvfp4(_) | Direction::Plain(_) => None,
        }
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.byte_len(),
            Direction::Fp8(d) => d.byte_len(),
            Direction::Plain(d) => d.byte_len(),
        }
    }
}

impl Direction {
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
            Direction::Fp8(d) => d.slice(start..end, 0..d.cols()).into(),
            Direction::Plain(d) => d.slice(start..end, 0..d.cols())?.into(),
        })
    }

    /// Elements `start..end` of every row, under the same condition.
    pub(crate) fn slice_cols(&self, start: usize, end: usize) -> Result<Self> {
        Ok(match self {
            Direction::Nvfp4(d) => d.slice_cols(start, end)?.into(),
            Direction::Fp8(d) => d.slice(0..d.rows(), start..end).into(),
            Direction::Plain(d) => d.slice(0..d.rows(), start..end)?.into(),
        })
    }
}

/// In recipe syntax.
impl<M: MemorySpace> fmt::Display for Direction<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Direction::Nvfp4(d) => d.fmt(f),
            Direction::Fp8(d) => d.fmt(f),
            Direction::Plain(d) => d.fmt(f),
        }
    }
}
