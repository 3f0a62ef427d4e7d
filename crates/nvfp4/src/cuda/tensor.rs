//! Quantized tensors in the memory of a GPU.

use super::{Gpu, Memory, Owned, Plain, Slice, SliceMut};
use crate::direction::private;
use crate::{Array, Element, Error, Fp8Description, MemorySpace, Nvfp4Description, PlainMatrix, Result};
use nvfp4_kernels::dequantize::cuda as nvfp4_kernel;
use nvfp4_kernels::fp8::cuda as fp8_kernel;
use nvfp4_spec::check_len;
use nvfp4_spec::fp8::Scales;
use std::fmt;
use std::marker::PhantomData;

/// The memory of a GPU. What is not quantized stays with its owner, whose [`Input`](super::Input) products take as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuMemory;

/// No matrix: on a GPU what is not quantized is not a direction.
#[derive(Debug)]
pub enum Nothing {}

/// A quantized tensor in the memory of a GPU.
pub type QuantTensor = crate::QuantTensor<GpuMemory>;

/// A matrix along whose rows products run, in the memory of a GPU.
pub type Direction = crate::Direction<GpuMemory>;

/// A matrix in NVFP4, in the memory of a GPU.
pub type Nvfp4Direction = crate::Nvfp4Direction<GpuMemory>;

/// A matrix in FP8, in the memory of a GPU.
pub type Fp8Direction = crate::Fp8Direction<GpuMemory>;

impl MemorySpace for GpuMemory {
    type Bytes = Owned<u8>;
    type Floats = Owned<f32>;
    type Plain = Nothing;

    /// To look would be to wait.
    fn first_negative(_: &Owned<f32>) -> Option<(usize, f32)> {
        None
    }
}

impl<T: Plain> Array for Owned<T> {
    fn count(&self) -> usize {
        self.slice().len()
    }
}

impl PlainMatrix for Nothing {
    fn rows(&self) -> usize {
        match *self {}
    }

    fn cols(&self) -> usize {
        match *self {}
    }

    fn byte_len(&self) -> usize {
        match *self {}
    }

    fn shares(&self, _: &Self) -> bool {
        match *self {}
    }
}

impl fmt::Display for Nothing {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

impl private::Sealed for GpuMemory {}
impl private::Sealed for Nothing {}
impl<T: Plain> private::Sealed for Owned<T> {}

impl QuantTensor {
    /// A copy in the memory of the host. Waits.
    pub fn to_host(&self, gpu: &Gpu) -> Result<crate::QuantTensor> {
        let copy = |direction: &Option<Direction>| direction.as_ref().map(|d| d.to_host(gpu)).transpose();
        crate::QuantTensor::from_parts(&self.shape, copy(&self.row)?, copy(&self.col)?)
    }
}

impl crate::QuantTensor {
    /// A copy in the memory of a GPU. Directions that are not quantized are refused: upload what they hold.
    pub fn to_gpu(&self, gpu: &Gpu) -> Result<QuantTensor> {
        let copy = |direction: Option<&crate::Direction>| direction.map(|d| d.to_gpu(gpu)).transpose();
        Ok(QuantTensor { shape: self.shape.clone(), row: copy(self.row())?, col: copy(self.col())? })
    }
}

impl Direction {
    /// Decodes into a row-major matrix: `rows` × `cols`, or for MXFP8's column direction, which lies as the tensor does, `cols` × `rows`.
    /// Rotated values stay so.
    pub fn dequantize<T: Element + Plain>(&self, gpu: &Gpu, out: SliceMut<'_, T>) -> Result<()> {
        match self {
            Direction::Nvfp4(d) => nvfp4_kernel::dequantize(gpu.stream(), &d.view(), out)?,
            Direction::Fp8(d) => fp8_kernel::dequantize(gpu.stream(), &d.view(), out)?,
            Direction::Plain(nothing) => match *nothing {},
        }
        Ok(())
    }

    /// A copy in the memory of the host. Waits.
    pub fn to_host(&self, gpu: &Gpu) -> Result<crate::Direction> {
        let (bytes, numbers) =
            (|slice: Slice<'_, u8>| gpu.stream().to_host(slice), |slice: Slice<'_, f32>| gpu.stream().to_host(slice));
        Ok(match self {
            Direction::Nvfp4(d) => {
                let (codes, scales) = (bytes(d.codes.slice())?, bytes(d.scales.slice())?);
                crate::Nvfp4Direction::from_parts(d.about, codes, scales, numbers(d.stored.slice())?)?.into()
            }
            Direction::Fp8(d) => {
                let scales = match &d.scales {
                    Scales::F32(scales) => Scales::F32(numbers(scales.slice())?),
                    Scales::E8m0(scales) => Scales::E8m0(bytes(scales.slice())?),
                };
                crate::Fp8Direction::from_parts(d.about, bytes(d.codes.slice())?, scales)?.into()
            }
            Direction::Plain(nothing) => match *nothing {},
        })
    }
}

impl crate::Direction {
    /// A copy in the memory of a GPU. One that is not quantized is refused: upload what it holds.
    pub fn to_gpu(&self, gpu: &Gpu) -> Result<Direction> {
        Ok(match self {
            crate::Direction::Nvfp4(d) => {
                let (codes, scales) = (gpu.upload(&d.codes)?, gpu.upload(&d.scales)?);
                Direction::Nvfp4(Nvfp4Direction::from_parts(d.about, codes, scales, gpu.upload(&d.stored)?)?)
            }
            crate::Direction::Fp8(d) => {
                let scales = match &d.scales {
                    Scales::F32(scales) => Scales::F32(gpu.upload(scales)?),
                    Scales::E8m0(scales) => Scales::E8m0(gpu.upload(scales)?),
                };
                Direction::Fp8(Fp8Direction::from_parts(d.about, gpu.upload(&d.codes)?, scales)?)
            }
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        })
    }
}

impl Gpu {
    /// A copy of the host's elements.
    pub fn upload<T: Plain>(&self, values: &[T]) -> Result<Owned<T>> {
        let mut owned = self.alloc(values.len())?;
        self.stream().upload(values, owned.slice_mut())?;
        Ok(owned)
    }
}

impl Nvfp4Direction {
    /// Packed codes, `rows` × `ceil(cols/2)`.
    pub fn codes(&self) -> &Owned<u8> {
        &self.codes
    }

    /// E4M3 scale bytes in the layout of this direction.
    pub fn scales(&self) -> &Owned<u8> {
        &self.scales
    }

    /// The stored 32-bit scale: one number, or one per row.
    pub fn stored(&self) -> &Owned<f32> {
        &self.stored
    }

    /// As kernels take it.
    pub fn view(&self) -> nvfp4_kernel::View<'_> {
        let Nvfp4Description { rows, cols, global, unit, layout, .. } = self.about;
        let (codes, scales, stored) = (self.codes.slice(), self.scales.slice(), self.stored.slice());
        nvfp4_kernel::View { rows, cols, codes, scales, layout, stored, global, unit }
    }
}

impl Fp8Direction {
    /// A byte per element, as [`crate::Fp8Direction::codes`].
    pub fn codes(&self) -> &Owned<u8> {
        &self.codes
    }

    /// What code values are multiplied by, one per tile, row by row as the codes lie.
    pub fn scales(&self) -> &Scales<Owned<f32>, Owned<u8>> {
        &self.scales
    }

    /// As kernels take it.
    pub fn view(&self) -> fp8_kernel::View<'_> {
        let (rows, cols) = self.about.stored_shape();
        let Fp8Description { code, tile, .. } = self.about;
        let scales = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice()),
        };
        fp8_kernel::View { rows, cols, format: code, tile, codes: self.codes.slice(), scales }
    }
}

/// Memory as elements: as many whole ones as it holds.
impl<T: Plain> From<Memory> for Owned<T> {
    fn from(memory: Memory) -> Self {
        Owned { memory, elements: PhantomData }
    }
}

impl Direction {
    /// [`Direction::over`] a block with all arrays, as [`crate::Direction::to_block`] makes it on the host.
    pub fn over_block(like: &crate::Direction, rows: usize, cols: usize, block: Memory) -> Result<Self> {
        check_len("block of a direction", like.block_len(rows, cols)?, block.len())?;
        let parts = match like {
            crate::Direction::Nvfp4(like) => {
                Vec::from(block.parts(Nvfp4Description { rows, cols, ..like.about }.block()?.arrays))
            }
            crate::Direction::Fp8(like) => {
                Vec::from(block.parts(Fp8Description { rows, cols, ..like.about }.block()?.arrays))
            }
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        };
        Direction::over(like, rows, cols, parts)
    }

    /// A direction of `rows` × `cols` over existing memory, in the format and with the settings of `like`: codes, scales, and for NVFP4 the
    /// stored 32-bit scale. Lengths are checked.
    pub fn over(like: &crate::Direction, rows: usize, cols: usize, parts: Vec<Memory>) -> Result<Self> {
        let expected = match like {
            crate::Direction::Nvfp4(_) => 3,
            crate::Direction::Fp8(_) => 2,
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        };
        check_len("arrays of a direction", expected, parts.len())?;
        let mut parts = parts.into_iter();
        let mut next = || parts.next().expect("as many as were counted");
        Ok(match like {
            crate::Direction::Nvfp4(like) => {
                let about = Nvfp4Description { rows, cols, ..like.about };
                let (codes, scales) = (next().into(), next().into());
                Direction::Nvfp4(Nvfp4Direction::from_parts(about, codes, scales, next().into())?)
            }
            crate::Direction::Fp8(like) => {
                let codes = next().into();
                let scales = match like.scales {
                    Scales::F32(_) => Scales::F32(next().into()),
                    Scales::E8m0(_) => Scales::E8m0(next().into()),
                };
                Direction::Fp8(Fp8Direction::from_parts(Fp8Description { rows, cols, ..like.about }, codes, scales)?)
            }
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        })
    }
}
