//! Tensors on a GPU: candle's memory and stream, lent to the engine. Twin of `values.rs`.

use crate::values::{Operand, no_codes_of};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Storage, Tensor};
use half::{bf16, f16};
use nvfp4::Quantizer;
use nvfp4::cuda::{Direction, Gpu, Input, Options, Plain, Product, QuantTensor, Slice, Stream, Values, finite, shared};
use nvfp4::{Accumulator, Directions, Element, Randomness, Side};
use std::sync::Arc;

/// Codes in the memory of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    row: Option<Arc<Direction>>,
    col: Option<Arc<Direction>>,
    shape: Vec<usize>,
    home: Home,
}

/// candle's device, and the engine on its stream. Nothing is shared between calls: each host thread
/// has a stream of its own under one handle.
#[derive(Clone, Debug)]
struct Home {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    gpu: Arc<Gpu>,
}

impl Home {
    fn of(device: &Device) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        let stream = device.cuda_stream();
        let gpu = Gpu::with(Stream::shared(&stream).map_err(nvfp4::Error::from)?, stream.clone());
        Ok(Home { device, stream, gpu: Arc::new(gpu) })
    }

    /// A new tensor, which `fill` writes.
    fn tensor<T: Number>(
        &self,
        shape: impl Into<Shape>,
        fill: impl FnOnce(nvfp4::cuda::SliceMut<'_, T>) -> nvfp4::Result<()>,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let mut room = shared::room::<T>(&self.stream, shape.elem_count()).map_err(nvfp4::Error::from)?;
        shared::write(&mut room, &self.stream, fill)?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(room, self.device.clone()));
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
    }

    /// Hands the elements of a contiguous tensor to work that reads them.
    fn read<T: Number, R>(&self, x: &Tensor, work: impl FnOnce(Slice<'_, T>) -> Result<R>) -> Result<R> {
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return Err(elsewhere()) };
        let (start, count) = (layout.start_offset(), layout.shape().elem_count());
        let elements = storage.as_cuda_slice::<T>()?;
        shared::read(elements, &self.stream, |elements| work(elements.range(start..start + count)))
    }

    /// The same of any tensor of one of the three types.
    fn values<R>(&self, x: &Tensor, work: impl FnOnce(Values<'_>) -> Result<R>) -> Result<R> {
        let x = x.contiguous()?;
        match x.dtype() {
            DType::F32 => self.read::<f32, R>(&x, |slice| work(Values::F32(slice))),
            DType::BF16 => self.read::<bf16, R>(&x, |slice| work(Values::Bf16(slice))),
            DType::F16 => self.read::<f16, R>(&x, |slice| work(Values::F16(slice))),
            other => Err(no_codes_of(other)),
        }
    }

    /// The same as a matrix.
    fn matrix<R>(&self, x: &Tensor, work: impl FnOnce(&Input<'_>) -> Result<R>) -> Result<R> {
        let (rows, cols) = x.dims2()?;
        self.values(x, |values| work(&Input::new(values, rows, cols).map_err(nvfp4::Error::from)?))
    }
}

/// An amax in the memory of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Amax {
    home: Home,
    memory: Arc<nvfp4::cuda::Memory>,
}

/// Answers that stay on the GPU until they are asked for: waiting for each would leave the GPU
/// idle.
pub(crate) struct Answers<N: Plain, T> {
    home: Home,
    /// Bytes of 0xFF where there is no answer yet.
    memory: nvfp4::cuda::Owned<N>,
    /// What each answer is about, in order.
    about: Vec<T>,
}

/// Whether tensors are finite.
pub(crate) type Looks<T> = Answers<u64, T>;

/// Amaxes of tensors.
pub(crate) type Amaxes<T> = Answers<f32, T>;

impl<N: Plain + Default, T> Answers<N, T> {
    /// The most that are kept; whoever has this many [settles](Self::settle) them.
    const MOST: usize = 1024;

    fn new(home: Home) -> Result<Self> {
        let memory = home.gpu.alloc(Self::MOST)?;
        let mut answers = Answers { home, memory, about: Vec::new() };
        answers.clear()?;
        Ok(answers)
    }

    pub fn is_full(&self) -> bool {
        self.about.len() == Self::MOST
    }

    /// Waits, if there are any answers, and gives them away.
    pub fn settle(&mut self) -> Result<Vec<(T, N)>> {
        if self.about.is_empty() {
            return Ok(Vec::new());
        }
        let answers = self.memory.slice().range(0..self.about.len());
        let answers = self.home.gpu.stream().to_host::<N>(answers).map_err(nvfp4::Error::from)?;
        let about = std::mem::take(&mut self.about);
        self.clear()?;
        Ok(about.into_iter().zip(answers).collect())
    }

    pub fn forget(&mut self) -> Result<()> {
        if self.about.is_empty() {
            return Ok(());
        }
        self.about.clear();
        self.clear()
    }

    fn clear(&mut self) -> Result<()> {
        Ok(self.home.gpu.stream().fill_bytes(self.memory.slice_mut(), 0xFF).map_err(nvfp4::Error::from)?)
    }

    /// Where the next answer goes.
    fn next(&mut self) -> nvfp4::cuda::SliceMut<'_, N> {
        let at = self.about.len();
        self.memory.slice_mut().range(at..at + 1)
    }
}

impl<T> Looks<T> {
    pub fn on(device: &Device) -> Result<Self> {
        Answers::new(Home::of(device)?)
    }

    /// Queues a look at a tensor of one of the three types.
    pub fn look(&mut self, x: &Tensor, about: T) -> Result<()> {
        let home = self.home.clone();
        let (stream, found) = (home.gpu.stream(), self.next());
        home.values(x, |x| Ok(finite::first_not_finite(stream, x, found).map_err(nvfp4::Error::from)?))?;
        self.about.push(about);
        Ok(())
    }

    /// Waits, if there were looks, and forgets them: what the first tensor that is not finite is,
    /// and the index and value of its first such number.
    pub fn first_not_finite(&mut self) -> Result<Option<(T, usize, f32)>> {
        Ok(self.settle()?.into_iter().find_map(|(about, found)| {
            let (index, value) = finite::decode(found)?;
            Some((about, index, value))
        }))
    }
}

impl<T> Amaxes<T> {
    /// On the device of an amax.
    pub fn beside(amax: &Amax) -> Result<Self> {
        Answers::new(amax.home.clone())
    }

    /// Queues a copy.
    pub fn copy(&mut self, amax: &Amax, about: T) -> Result<()> {
        let home = self.home.clone();
        home.gpu.stream().copy::<f32>(amax.memory.slice(), self.next()).map_err(nvfp4::Error::from)?;
        self.about.push(about);
        Ok(())
    }
}

/// Quantizes a matrix: its codes, and the amaxes of the row and the column direction, where they
/// are delayed.
pub(crate) fn quantize(
    quantizer: &Quantizer,
    x: &Tensor,
    randomness: Option<Randomness<'static>>,
) -> Result<(Codes, [Option<Amax>; 2])> {
    let home = Home::of(x.device())?;
    let randomness = randomness.map(TryInto::try_into).transpose()?;
    let options = Options { randomness, ..Options::default() };
    let observed = home.matrix(x, |x| Ok(quantizer.observe_on(&home.gpu, x, &options)?))?;
    let amax = |memory: Option<nvfp4::cuda::Memory>| {
        memory.map(|memory| Amax { home: home.clone(), memory: Arc::new(memory) })
    };
    let amaxes = [amax(observed.row_amax), amax(observed.col_amax)];
    Ok((Codes::new(home, observed.tensor), amaxes))
}

type GpuOperand<'a> = Operand<&'a Codes>;

impl Codes {
    fn new(home: Home, tensor: QuantTensor) -> Self {
        let shape = tensor.shape().to_vec();
        let (row, col) = tensor.into_directions();
        Codes { row: row.map(Arc::new), col: col.map(Arc::new), shape, home }
    }

    pub fn byte_len(&self) -> usize {
        [&self.row, &self.col].into_iter().flatten().map(|direction| direction.byte_len()).sum()
    }

    pub fn only(self, directions: Directions) -> Self {
        let Codes { row, col, shape, home } = self;
        let (row, col) = (row.filter(|_| directions.has(Side::Row)), col.filter(|_| directions.has(Side::Column)));
        Codes { row, col, shape, home }
    }

    fn direction(&self, side: Side) -> Result<&Arc<Direction>> {
        let direction = match side {
            Side::Row => &self.row,
            Side::Column => &self.col,
        };
        direction.as_ref().ok_or(Error::Nvfp4(nvfp4::Error::MissingDirection(side)))
    }

    pub fn decoded(&self, side: Side, dtype: DType) -> Result<Tensor> {
        let (direction, home) = (self.direction(side)?, &self.home);
        let shape = (direction.rows(), direction.cols());
        match dtype {
            DType::F32 => home.tensor::<f32>(shape, |out| direction.dequantize(&home.gpu, out)),
            DType::BF16 => home.tensor::<bf16>(shape, |out| direction.dequantize(&home.gpu, out)),
            DType::F16 => home.tensor::<f16>(shape, |out| direction.dequantize(&home.gpu, out)),
            other => Err(no_codes_of(other)),
        }
    }

    pub fn to_host(&self) -> Result<nvfp4::QuantTensor> {
        let copy = |direction: &Option<Arc<Direction>>| {
            direction.as_ref().map(|direction| direction.to_host(&self.home.gpu)).transpose()
        };
        Ok(nvfp4::QuantTensor::from_parts(&self.shape, copy(&self.row)?, copy(&self.col)?)?)
    }

    pub fn upload(&self, codes: &nvfp4::QuantTensor) -> Result<Self> {
        Ok(Codes::new(self.home.clone(), codes.to_gpu(&self.home.gpu)?))
    }

    /// `a · bᵀ (+ c)`, where these codes lie.
    pub fn multiply(
        &self,
        a: &GpuOperand<'_>,
        b: &GpuOperand<'_>,
        c: Option<&Tensor>,
        accumulator: Accumulator,
        dtype: DType,
    ) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.multiply_as::<f32>(a, b, c, accumulator),
            DType::BF16 => self.multiply_as::<bf16>(a, b, c, accumulator),
            DType::F16 => self.multiply_as::<f16>(a, b, c, accumulator),
            other => Err(no_codes_of(other)),
        }
    }

    fn multiply_as<T: Number>(
        &self,
        a: &GpuOperand<'_>,
        b: &GpuOperand<'_>,
        c: Option<&Tensor>,
        accumulator: Accumulator,
    ) -> Result<Tensor> {
        let home = &self.home;
        match c.map(|c| c.contiguous()).transpose()? {
            None => self.product::<T>(a, b, Product { accumulator, ..Product::default() }),
            Some(c) => home.read::<T, Tensor>(&c, |c| {
                self.product::<T>(a, b, Product { add: Some((c, 1.0)), accumulator, ..Product::default() })
            }),
        }
    }

    fn product<T: Number>(&self, a: &GpuOperand<'_>, b: &GpuOperand<'_>, product: Product<'_, T>) -> Result<Tensor> {
        let home = &self.home;
        match (a, b) {
            (Operand::Codes(a, a_side), Operand::Codes(b, b_side)) => {
                let (a, b) = (a.direction(*a_side)?, b.direction(*b_side)?);
                home.tensor((a.rows(), b.rows()), |out| home.gpu.matmul(a, b, &product, out))
            }
            (Operand::Plain(x), Operand::Codes(w, side)) => {
                let w = w.direction(*side)?;
                home.matrix(x, |x| home.tensor((x.rows(), w.rows()), |out| home.gpu.matmul_plain(x, w, &product, out)))
            }
            (Operand::Codes(a, side), Operand::Plain(x)) => {
                let a = a.direction(*side)?;
                home.matrix(x, |x| {
                    home.tensor((a.rows(), x.rows()), |out| home.gpu.matmul_by_plain(a, x, &product, out))
                })
            }
            (Operand::Plain(_), Operand::Plain(_)) => unreachable!("candle multiplies plain matrices"),
        }
    }
}

/// Types that both libraries know.
trait Number: Element + Plain + CudaDType + DeviceRepr {}

impl Number for f32 {}
impl Number for bf16 {}
impl Number for f16 {}

pub(crate) fn elsewhere() -> Error {
    Error::Candle(candle_core::Error::Msg("the operands of a product lie on different devices".to_string()))
}
