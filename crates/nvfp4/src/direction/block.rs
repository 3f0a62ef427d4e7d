//! All arrays of a direction in one block of bytes, for callers that keep a direction as one piece of memory.

use super::fp8::Fp8Parts;
use super::nvfp4::Nvfp4Parts;
use super::{Direction, Fp8Description, Fp8Direction, Nvfp4Description, Nvfp4Direction};
use crate::{Error, Fp8Scales, Fp8Tile, Result};
use nvfp4_spec::check_len;
use nvfp4_spec::fp8::{ScaleRef, Scales};
use std::borrow::Cow;
use std::ops::Range;

/// Where `N` arrays lie in a block: codes, scales, and for NVFP4 the stored 32-bit scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block<const N: usize> {
    /// The bytes of each array.
    pub arrays: [Range<usize>; N],
    /// Bytes of the block.
    pub len: usize,
}

impl<const N: usize> Block<N> {
    fn of(lens: [usize; N]) -> Result<Self> {
        let mut len = 0usize;
        let arrays = lens.map(|bytes| {
            let start = len.checked_next_multiple_of(Direction::BLOCK_ALIGNMENT).unwrap_or(usize::MAX);
            len = start.saturating_add(bytes);
            start..len
        });
        match len {
            usize::MAX => Err(nvfp4_spec::Error::TooLarge { rows: len, cols: 1 }.into()),
            len => Ok(Block { arrays, len }),
        }
    }
}

impl Nvfp4Description {
    /// Where its codes, its block scales and its stored 32-bit scales lie in a block.
    pub fn block(&self) -> Result<Block<3>> {
        self.block_of(self.stored_len())
    }

    /// The same with so many stored scales.
    pub(crate) fn block_of(&self, stored: usize) -> Result<Block<3>> {
        Block::of([self.code_len()?, self.scale_len()?, stored.saturating_mul(size_of::<f32>())])
    }
}

impl Fp8Description {
    /// Where its codes and its scales lie in a block.
    pub fn block(&self) -> Result<Block<2>> {
        self.block_of(self.scale_len()?)
    }

    /// The same with so many scales.
    pub(crate) fn block_of(&self, scales: usize) -> Result<Block<2>> {
        let each = match self.tile {
            Fp8Tile::Row32 | Fp8Tile::Column32 => 1,
            Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128 => size_of::<f32>(),
        };
        Block::of([self.code_len()?, scales.saturating_mul(each)])
    }
}

impl Direction {
    /// Each array of a block begins at a multiple of this, as GPUs read memory.
    pub const BLOCK_ALIGNMENT: usize = 256;

    /// Bytes of the block of a direction in the format of this one, of `rows` × `cols`. What is not quantized is
    /// refused, here and below: its numbers are one array already.
    pub fn block_len(&self, rows: usize, cols: usize) -> Result<usize> {
        match self {
            Direction::Nvfp4(like) => Ok(Nvfp4Description { rows, cols, ..*like.description() }.block()?.len),
            Direction::Fp8(like) => Ok(Fp8Description { rows, cols, ..*like.description() }.block()?.len),
            Direction::Plain(_) => Err(Error::PlainBlock),
        }
    }

    /// Its arrays in one block.
    ///
    /// ```
    /// use nvfp4::{Quantizer, Side, TensorRef};
    ///
    /// let x = Quantizer::default().quantize(&TensorRef::new(&[2.0f32; 2 * 16][..], &[2, 16])?)?;
    /// let row = x.direction(Side::Row)?;
    /// assert_eq!(&row.from_block(2, 16, &row.to_block()?)?, row);
    /// # Ok::<(), nvfp4::Error>(())
    /// ```
    pub fn to_block(&self) -> Result<Vec<u8>> {
        fn joined<const N: usize>(block: &Block<N>, arrays: [&[u8]; N]) -> Vec<u8> {
            let mut bytes = Vec::with_capacity(block.len);
            for (at, array) in block.arrays.iter().zip(arrays) {
                bytes.resize(at.start, 0);
                bytes.extend_from_slice(array);
            }
            bytes
        }
        Ok(match self {
            Direction::Nvfp4(d) => {
                joined(&d.description().block()?, [d.codes(), d.scales(), bytemuck::cast_slice(d.stored())])
            }
            Direction::Fp8(d) => {
                let scales = match d.scales() {
                    ScaleRef::F32(scales) => bytemuck::cast_slice(scales),
                    ScaleRef::E8m0(scales) => scales,
                };
                joined(&d.description().block()?, [d.codes(), scales])
            }
            Direction::Plain(_) => return Err(Error::PlainBlock),
        })
    }

    /// A block with the arrays of a direction in the format of this one, of `rows` × `cols`: an operand of products that
    /// copies nothing.
    pub fn in_block<'a>(&'a self, rows: usize, cols: usize, bytes: &'a [u8]) -> Result<BlockRef<'a>> {
        check_len("block of a direction", self.block_len(rows, cols)?, bytes.len())?;
        Ok(BlockRef { like: self, rows, cols, bytes })
    }

    /// A direction in the format of this one, of `rows` × `cols`, from a block with its arrays.
    pub fn from_block(&self, rows: usize, cols: usize, bytes: &[u8]) -> Result<Self> {
        // They need not be aligned.
        let floats = |at: Range<usize>| bytes[at].chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>).collect();
        check_len("block of a direction", self.block_len(rows, cols)?, bytes.len())?;
        Ok(match self {
            Direction::Nvfp4(like) => {
                let about = Nvfp4Description { rows, cols, ..*like.description() };
                let [codes, scales, stored] = about.block()?.arrays;
                Nvfp4Direction::from_parts(about, bytes[codes].to_vec(), bytes[scales].to_vec(), floats(stored))?.into()
            }
            Direction::Fp8(like) => {
                let about = Fp8Description { rows, cols, ..*like.description() };
                let [codes, scales] = about.block()?.arrays;
                let scales = match like.scales() {
                    ScaleRef::F32(_) => Fp8Scales::F32(floats(scales)),
                    ScaleRef::E8m0(_) => Fp8Scales::E8m0(bytes[scales].to_vec()),
                };
                Fp8Direction::from_parts(about, bytes[codes].to_vec(), scales)?.into()
            }
            Direction::Plain(_) => return Err(Error::PlainBlock),
        })
    }
}

/// A block of bytes as a direction.
#[derive(Clone, Copy, Debug)]
pub struct BlockRef<'a> {
    like: &'a Direction,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

/// The arrays in a block.
pub(crate) enum Parts<'a> {
    Nvfp4(Nvfp4Parts<'a>),
    Fp8(Fp8Parts<'a>),
}

impl<'a> BlockRef<'a> {
    /// A direction of its format.
    pub(crate) fn like(self) -> &'a Direction {
        self.like
    }

    /// The direction, with bytes of its own.
    pub fn to_direction(self) -> Result<Direction> {
        self.like.from_block(self.rows, self.cols, self.bytes)
    }

    pub(crate) fn parts(self) -> Result<Parts<'a>> {
        let BlockRef { like, rows, cols, bytes } = self;
        let floats = |at: Range<usize>| match bytemuck::try_cast_slice(&bytes[at.clone()]) {
            Ok(floats) => Cow::Borrowed(floats),
            Err(_) => bytes[at].chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>).collect(),
        };
        Ok(match like {
            Direction::Nvfp4(like) => {
                let about = Nvfp4Description { rows, cols, ..*like.description() };
                let [codes, scales, stored] = about.block()?.arrays;
                let (scales, stored) = (about.linear_scales(&bytes[scales])?, floats(stored));
                about.check_stored(&stored)?;
                Parts::Nvfp4(Nvfp4Parts { about, codes: &bytes[codes], scales, stored })
            }
            Direction::Fp8(like) => {
                let about = Fp8Description { rows, cols, ..*like.description() };
                let [codes, scales] = about.block()?.arrays;
                let scales = match like.scales() {
                    ScaleRef::F32(_) => Scales::F32(floats(scales)),
                    ScaleRef::E8m0(_) => Scales::E8m0(&bytes[scales]),
                };
                Parts::Fp8(Fp8Parts { about, codes: &bytes[codes], scales })
            }
            Direction::Plain(_) => return Err(Error::PlainBlock),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Directions, QuantSpec, Quantizer, Side, TensorRef};

    #[test]
    fn a_block_gives_the_direction_back() {
        let x: Vec<f32> = (0..96 * 160).map(|i| (i as f32 * 0.1).sin()).collect();
        let x = TensorRef::new(&x[..], &[96, 160]).unwrap();
        let specs =
            ["nvfp4(hadamard)", "nvfp4(row-scaled)", "nvfp4(16x16)", "fp8", "mxfp8", "fp8-block", "fp8-block(128x128)"];
        for text in specs {
            let spec: QuantSpec = text.parse().unwrap();
            let quantized = Quantizer::new(spec, Directions::Both).unwrap().quantize(&x).unwrap();
            for side in [Side::Row, Side::Column] {
                let direction = quantized.direction(side).unwrap();
                let (rows, cols) = (direction.rows(), direction.cols());
                let block = direction.to_block().unwrap();
                assert_eq!(block.len(), direction.block_len(rows, cols).unwrap(), "{text} {side}");
                assert_eq!(&direction.from_block(rows, cols, &block).unwrap(), direction, "{text} {side}");
                // A product reads it where it lies, aligned or not.
                let product = crate::Product::<f32>::default();
                let expected = crate::matmul(direction, direction, &product).unwrap();
                let mut moved = vec![0; 1];
                moved.extend_from_slice(&block);
                for bytes in [&block[..], &moved[1..]] {
                    let there = direction.in_block(rows, cols, bytes).unwrap();
                    assert_eq!(crate::matmul(direction, there, &product).unwrap(), expected, "{text} {side}");
                    assert_eq!(&there.to_direction().unwrap(), direction);
                }
                assert!(direction.in_block(rows, cols, &moved).is_err());
                let error = direction.from_block(rows, cols, &block[1..]).unwrap_err().to_string();
                assert!(error.contains("block of a direction"), "{error}");
            }
        }
    }
}
