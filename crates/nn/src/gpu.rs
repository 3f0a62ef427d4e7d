//! Tensors on a GPU: candle's memory and stream, lent to the engine. Twin of `values.rs`.

use crate::codes::{Amax as AnyAmax, Codes as AnyCodes, Observed, Operand};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Storage, Tensor};
use half::{bf16, f16};
use nvfp4::Quantizer;
use nvfp4::cuda::{Direction, Gpu, Input, Options, Plain, Product, QuantTensor, Slice, Stream, Values, finite, shared};
use nvfp4::{Directions, Element, Randomness, Side};
use std::sync::Arc;

/// Codes in the memory of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    row: Option<Arc<Direction>>,
    col: Option<Arc<Direction>>,
    shape: Vec<usize>,
    home: Home,
}

/// candle's device, and the engine on its stream. Nothing is shared between calls: each host thread has a stream of its own under one
/// handle.
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
            other => Err(crate::values::no_codes_of(other)),
        }
    }

    /// The same as a matrix.
    fn matrix<R>(&self, x: &Tensor, work: impl FnOnce(&Input<'_>) -> Result<R>) -> Result<R> {
        let (rows, cols) = x.dims2()?;
        self.values(x, |values| work(&Input::new(values, rows, cols).map_err(nvfp4::Error::from)?))
    }
}

/// Tensors that were looked at for numbers that are not finite. What was found stays on the GPU until it is asked for: waiting for an
/// answer after each tensor would leave the GPU idle.
pub(crate) struct Looks<T> {
    home: Home,
    found: nvfp4::cuda::Owned<u64>,
    /// What each of them is, in the order of the looks.
    about: Vec<T>,
}

impl<T> Looks<T> {
    /// The most that are kept; whoever has so many [settles](Self::settle) them.
    pub const MOST: usize = 1024;

    pub fn new(device: &Device) -> Result<Self> {
        let home = Home::of(device)?;
        let found = home.gpu.alloc(Self::MOST)?;
        let mut looks = Looks { home, found, about: Vec::new() };
        looks.forget()?;
        Ok(looks)
    }

    pub fn len(&self) -> usize {
        self.about.len()
    }

    /// Queues a look at a tensor of one of the three types.
    pub fn add(&mut self, x: &Tensor, about: T) -> Result<()> {
        let (at, stream) = (self.about.len(), self.home.gpu.stream());
        let found = self.found.slice_mut().range(at..at + 1);
        self.home.values(x, |x| Ok(finite::first_not_finite(stream, x, found).map_err(nvfp4::Error::from)?))?;
        self.about.push(about);
        Ok(())
    }

    /// Waits, and forgets all: what is known of the first tensor that is not finite, and the index and value of its first such number.
    pub fn settle(&mut self) -> Result<Option<(T, usize, f32)>> {
        let found = self.found.slice().range(0..self.about.len());
        let found = self.home.gpu.stream().to_host::<u64>(found).map_err(nvfp4::Error::from)?;
        let about = std::mem::take(&mut self.about);
        self.forget()?;
        Ok(about.into_iter().zip(found).find_map(|(about, found)| {
            let (index, value) = finite::decode(found)?;
            Some((about, index, value))
        }))
    }

    pub fn forget(&mut self) -> Result<()> {
        self.about.clear();
        let found = self.found.slice_mut();
        Ok(self.home.gpu.stream().fill_bytes(found, 0xFF).map_err(nvfp4::Error::from)?)
    }
}

/// An amax in the memory of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Amax {
    home: Home,
    memory: Arc<nvfp4::cuda::Memory>,
}

/// Amaxes that stay on the GPU until they are asked for.
pub(crate) struct Amaxes<T> {
    home: Home,
    values: nvfp4::cuda::Owned<f32>,
    /// Whose they are, in order.
    about: Vec<T>,
}

impl<T> Amaxes<T> {
    /// The most that are kept; whoever has so many [settles](Self::settle) them.
    const MOST: usize = 1024;

    /// Where an amax lies.
    pub fn new(beside: &Amax) -> Result<Self> {
        let home = beside.home.clone();
        let values = home.gpu.alloc(Self::MOST)?;
        Ok(Amaxes { home, values, about: Vec::new() })
    }

    pub fn is_full(&self) -> bool {
        self.about.len() == Self::MOST
    }

    /// Queues a copy.
    pub fn add(&mut self, amax: &Amax, about: T) -> Result<()> {
        let at = self.about.len();
        let place = self.values.slice_mut().range(at..at + 1);
        self.home.gpu.stream().copy::<f32>(amax.memory.slice(), place).map_err(nvfp4::Error::from)?;
        self.about.push(about);
        Ok(())
    }

    /// Waits, if there are any, and gives them away.
    pub fn settle(&mut self) -> Result<Vec<(T, f32)>> {
        let about = std::mem::take(&mut self.about);
        if about.is_empty() {
            return Ok(Vec::new());
        }
        let values = self.values.slice().range(0..about.len());
        let values = self.home.gpu.stream().to_host::<f32>(values).map_err(nvfp4::Error::from)?;
        Ok(about.into_iter().zip(values).collect())
    }

    pub fn forget(&mut self) {
        self.about.clear();
    }
}

/// Quantizes a matrix.
pub(crate) fn quantize(quantizer: &Quantizer, x: &Tensor, randomness: Option<Randomness<'static>>) -> Result<Observed> {
    let home = Home::of(x.device())?;
    let randomness = randomness.map(TryInto::try_into).transpose()?;
    let options = Options { randomness, ..Options::default() };
    let observed = home.matrix(x, |x| Ok(quantizer.observe_on(&home.gpu, x, &options)?))?;
    let amax = |memory: Option<nvfp4::cuda::Memory>| {
        memory.map(|memory| AnyAmax::Gpu(Amax { home: home.clone(), memory: Arc::new(memory) }))
    };
    let (row_amax, col_amax) = (amax(observed.row_amax), amax(observed.col_amax));
    Ok(Observed { codes: AnyCodes::Gpu(Codes::new(home, observed.tensor)), row_amax, col_amax })
}

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
            other => Err(crate::values::no_codes_of(other)),
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
    pub fn multiply(&self, a: &Operand, b: &Operand, c: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.multiply_as::<f32>(a, b, c),
            DType::BF16 => self.multiply_as::<bf16>(a, b, c),
            DType::F16 => self.multiply_as::<f16>(a, b, c),
            other => Err(crate::values::no_codes_of(other)),
        }
    }

    fn multiply_as<T: Number>(&self, a: &Operand, b: &Operand, c: Option<&Tensor>) -> Result<Tensor> {
        let home = &self.home;
        match c.map(|c| c.contiguous()).transpose()? {
            None => self.product::<T>(a, b, Product::default()),
            Some(c) => home.read::<T, Tensor>(&c, |c| {
                self.product::<T>(a, b, Product { add: Some((c, 1.0)), ..Product::default() })
            }),
        }
    }

    fn product<T: Number>(&self, a: &Operand, b: &Operand, product: Product<'_, T>) -> Result<Tensor> {
        let home = &self.home;
        match (a, b) {
            (Operand::Codes(AnyCodes::Gpu(a), a_side), Operand::Codes(AnyCodes::Gpu(b), b_side)) => {
                let (a, b) = (a.direction(*a_side)?, b.direction(*b_side)?);
                home.tensor((a.rows(), b.rows()), |out| home.gpu.matmul(a, b, &product, out))
            }
            (Operand::Plain(x), Operand::Codes(AnyCodes::Gpu(w), side)) => {
                let w = w.direction(*side)?;
                home.matrix(x, |x| home.tensor((x.rows(), w.rows()), |out| home.gpu.matmul_plain(x, w, &product, out)))
            }
            (Operand::Codes(AnyCodes::Gpu(a), side), Operand::Plain(x)) => {
                let a = a.direction(*side)?;
                home.matrix(x, |x| {
                    home.tensor((a.rows(), x.rows()), |out| home.gpu.matmul_by_plain(a, x, &product, out))
                })
            }
            _ => Err(elsewhere()),
        }
    }
}

/// Types that both libraries know.
trait Number: Element + Plain + CudaDType + DeviceRepr {}

impl Number for f32 {}
impl Number for bf16 {}
impl Number for f16 {}

fn elsewhere() -> Error {
    Error::Candle(candle_core::Error::Msg("the operands of a product lie on different devices".to_string()))
}
