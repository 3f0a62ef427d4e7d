//! Quantized tensors in the memory of a GPU: what [`QuantTensor`](crate::QuantTensor) and its quantizers are on the CPU, with the same bits.
//!
//! A [`Gpu`] is a stream and a source of memory. Everything is queued on that stream and nothing waits, unless it says so.
//!
//! ```no_run
//! use nvfp4::cuda::{Device, Gpu, Input, Options, Product, Values};
//! use nvfp4::{Quantizer, Side};
//!
//! # fn main() -> nvfp4::Result<()> {
//! let gpu = Gpu::new(Device::open(0)?)?;
//! let x: Vec<f32> = (0..256 * 512).map(|i| (i as f32 * 0.1).sin()).collect();
//! let x = gpu.stream().to_device(&x)?;
//! let x = gpu.quantize(&Quantizer::default(), &Input::new(Values::F32(x.slice()), 256, 512)?, &Options::default())?;
//!
//! let mut y = gpu.alloc::<f32>(256 * 256)?; // x · xᵀ
//! let row = x.direction(Side::Row)?;
//! gpu.matmul(row, row, &Product::default(), y.slice_mut())?;
//! let y: Vec<f32> = gpu.stream().to_host(y.slice())?; // waits
//! # Ok(())
//! # }
//! ```

mod delayed;
mod groups;
mod matmul;
mod observe;
mod quantize;
mod tensor;
mod values;

pub use groups::{GroupOnHost, GroupedObserved, GroupedTensor};
pub use nvfp4_kernels::cuda::{
    Allocator, Device, Groups, Input, Memory, Place, Plain, Pool, Recycled, Slice, SliceMut, Stream, Values, shared,
};
pub use nvfp4_kernels::finite;
pub use nvfp4_kernels::gemm::cuda::{PreparedWeight, Product};
pub use nvfp4_kernels::quantize::cuda::Offset;
pub use quantize::{Observed, Options, Randomness};
pub use tensor::{Direction, Fp8Direction, GpuMemory, Nothing, Nvfp4Direction, QuantTensor};
pub use values::{DirectionValues, Factor};

use crate::{Block, Directions, Result, Side};
use std::fmt;
use std::marker::PhantomData;

/// A stream of a GPU, and where the memory for its work comes from, scratch included. Nothing is kept between calls, so one is cheap to make.
///
/// Tensors that another stream made must be complete, or this stream must be made to wait for that one. Who drops a tensor gives its memory
/// to later work of the stream that made it: drop it when the work of other streams with it has ended.
pub struct Gpu {
    stream: Stream,
    memory: Box<dyn Allocator + Send + Sync>,
    /// Directions whose memory comes from elsewhere, and from where.
    kept: Option<(Directions, Box<dyn Allocator + Send + Sync>)>,
}

impl Gpu {
    /// A stream of its own, with the driver's stream-ordered memory.
    pub fn new(device: Device) -> Result<Self> {
        let stream = Stream::new(device)?;
        Ok(Gpu::with(stream, Pool))
    }

    /// A stream, and the memory that another framework gives for its work.
    pub fn with(stream: Stream, memory: impl Allocator + Send + Sync + 'static) -> Self {
        Gpu { stream, memory: Box::new(memory), kept: None }
    }

    /// The same, where another allocator gives the memory of the directions that are made, of these: those that a backward pass or a
    /// later call reads are kept longer than the rest. A direction is one allocation, with the arrays that
    /// [`Nvfp4Description::block`](crate::Nvfp4Description::block) and [`Fp8Description::block`](crate::Fp8Description::block) say.
    #[must_use]
    pub fn with_kept(self, directions: Directions, memory: impl Allocator + Send + Sync + 'static) -> Self {
        Gpu { kept: Some((directions, Box::new(memory))), ..self }
    }

    /// From here on the allocator of [`Gpu::with_kept`] gives the memory of these directions.
    pub fn keep(&mut self, directions: Directions) {
        if let Some((kept, _)) = &mut self.kept {
            *kept = directions;
        }
    }

    /// Memory for the arrays of a direction.
    pub(crate) fn block<const N: usize>(&self, side: Side, block: Block<N>) -> Result<[Memory; N]> {
        let kept = self.kept.as_ref().filter(|(directions, _)| directions.has(side)).map(|(_, memory)| memory);
        let memory = kept.unwrap_or(&self.memory).bytes(&self.stream, block.len)?;
        Ok(memory.parts(block.arrays))
    }

    /// Where work is queued.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Memory for `len` elements.
    pub fn alloc<T: Plain>(&self, len: usize) -> Result<Owned<T>> {
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or(nvfp4_spec::Error::TooLarge { rows: len, cols: size_of::<T>() })?;
        Ok(Owned { memory: self.memory.bytes(&self.stream, bytes)?, elements: PhantomData })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({:?})", self.stream.device())
    }
}

/// Elements in the memory of a GPU. What they are at first is undefined.
pub struct Owned<T: Plain> {
    memory: Memory,
    elements: PhantomData<T>,
}

impl<T: Plain> Owned<T> {
    /// All of them, to read.
    pub fn slice(&self) -> Slice<'_, T> {
        self.memory.slice()
    }

    /// All of them, to write.
    pub fn slice_mut(&mut self) -> SliceMut<'_, T> {
        self.memory.slice_mut()
    }

    /// The memory, and what owns it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The memory alone.
    pub fn into_memory(self) -> Memory {
        self.memory
    }
}

impl<T: Plain> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}
