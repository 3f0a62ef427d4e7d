//! Tensors on GPUs: torch's memory, torch's stream, and nothing waits.

use crate::array::{Array, Framework, check_torch, contiguous};
use crate::dlpack::{DataType, Device, Exchange, Lent, Tensor, borrow_stream, show};
use crate::error::OrRaise;
use crate::generator;
use crate::part::{self, Part};
use crate::place::Place;
use half::{bf16, f16};
use nvfp4::Quantizer;
use nvfp4::cuda::{
    Allocator, Direction, Gpu, Memory, Observed, Offset, Options, Owned, Plain, Product, QuantTensor, Randomness,
    Slice, SliceMut, Stream, Values, finite,
};
use nvfp4::{Accumulator, Element, Fp8Description, Fp8Direction, Nvfp4Description, Nvfp4Direction, Precision, Side};
use nvfp4_spec::fp8::Scales;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::process;
use std::sync::{Arc, OnceLock};

/// A quantized tensor and the number of its GPU.
pub struct Held {
    /// The tensor.
    pub tensor: QuantTensor,
    /// The GPU.
    pub id: i32,
}

/// torch's memory, for the stream that it works on. What asks for it holds the interpreter's lock
/// already: work is queued and not waited for, so the lock is not given away in between.
struct Torch {
    id: i32,
    exchange: Exchange,
}

impl Allocator for Torch {
    fn bytes(&self, _: &Stream, len: usize) -> Result<Memory, nvfp4_kernels::cuda::Error> {
        // torch has no address for 0 bytes.
        let device = Device { kind: 2, id: self.id };
        let tensor = Python::attach(|py| self.exchange.allocate(py, device, DataType::U8, len.max(1)));
        let failed = |reason: String| nvfp4_kernels::cuda::Error::Allocator { bytes: len, reason };
        let memory = tensor.map_err(|error| failed(error.to_string()))?.into_memory();
        Ok(memory.ok_or_else(|| failed("torch's memory is not aligned to 16 bytes".to_string()))?.first(len))
    }
}

fn too_old() -> PyErr {
    PyRuntimeError::new_err("tensors on GPUs need torch 2.10 or newer, which lends its memory and its stream")
}

/// What works on the stream that torch works on now, with torch's memory. For one call: the next
/// may be on another stream.
pub fn gpu(py: Python<'_>, id: i32) -> PyResult<Gpu> {
    static OPENED_BY: OnceLock<u32> = OnceLock::new();
    if *OPENED_BY.get_or_init(process::id) != process::id() {
        return Err(PyRuntimeError::new_err(
            "CUDA was used before this process was forked, and does not work in it; \
             start processes with multiprocessing.set_start_method('spawn')",
        ));
    }
    let exchange = Exchange::torch(py)?.ok_or_else(too_old)?;
    let stream = exchange.stream(py, Device { kind: 2, id })?;
    let device = nvfp4::cuda::Device::open(id as usize).map_err(nvfp4::Error::from).or_raise()?;
    Ok(Gpu::with(borrow_stream(device, stream), Torch { id, exchange }))
}

/// What a call gives beside the tensor.
pub struct Given<'py> {
    /// The seed, with an offset, if codes are drawn.
    pub seed: Option<(u64, Bound<'py, PyAny>)>,
    /// The row direction's amax.
    pub amax: Option<Bound<'py, PyAny>>,
    /// The column direction's amax.
    pub column_amax: Option<Bound<'py, PyAny>>,
    /// The scale of delayed scaling.
    pub scale: Option<Bound<'py, PyAny>>,
    /// The column direction's, where it has one of its own.
    pub column_scale: Option<Bound<'py, PyAny>>,
}

/// Numbers on a GPU that are borrowed, or were copied there.
enum Numbers<T: Plain> {
    Borrowed(Tensor),
    Copied(Owned<T>),
}

impl<T: Plain> Numbers<T> {
    fn slice(&self) -> Slice<'_, T> {
        match self {
            Numbers::Borrowed(tensor) => tensor.device_slice().expect("checked when it was borrowed"),
            Numbers::Copied(owned) => owned.slice(),
        }
    }
}

/// Numbers of float32: a tensor on the GPU, or anything that the CPU can read.
fn floats(gpu: &Gpu, id: i32, x: &Bound<'_, PyAny>) -> PyResult<Numbers<f32>> {
    if Framework::of(x)? == Framework::Torch {
        let x = contiguous(&x.call_method0("detach")?)?;
        let tensor = Tensor::of(&x)?;
        if let Place::Cuda(other) = Place::of(&tensor)? {
            if other != id || tensor.dtype != DataType::F32 {
                return Err(PyTypeError::new_err(format!("expected float32 on cuda:{id}; cast it, or move it there")));
            }
            return Ok(Numbers::Borrowed(tensor));
        }
    }
    let values = crate::array::floats(x)?;
    Ok(Numbers::Copied(gpu.upload(&values).or_raise()?))
}

/// Quantizes an array on a GPU: the tensor, and the amaxes that delayed scaling is to remember.
pub fn quantize<'py>(
    py: Python<'py>,
    maker: &Quantizer,
    array: &Array,
    id: i32,
    given: Given<'py>,
) -> PyResult<(Held, [Option<Bound<'py, PyAny>>; 2])> {
    let gpu = gpu(py, id)?;
    let numbers = |amax: Option<Bound<'_, PyAny>>| amax.map(|amax| floats(&gpu, id, &amax)).transpose();
    let (row_amax, col_amax) = (numbers(given.amax)?, numbers(given.column_amax)?);
    let (row_scale, col_scale) = (numbers(given.scale)?, numbers(given.column_scale)?);
    let offset = given.seed.map(|(seed, offset)| Ok::<_, PyErr>((seed, Place64::of(&offset, id)?))).transpose()?;
    let options = Options {
        randomness: offset.as_ref().map(|(seed, offset)| Randomness { seed: *seed, offset: offset.offset() }),
        row_amax: row_amax.as_ref().map(Numbers::slice),
        col_amax: col_amax.as_ref().map(Numbers::slice),
        row_scale: row_scale.as_ref().map(Numbers::slice),
        col_scale: col_scale.as_ref().map(Numbers::slice),
        values: None,
    };
    let x = array.input().ok_or_else(|| PyValueError::new_err("the tensor's memory is not aligned; clone it"))?;
    let made = maker.observe_on(&gpu, &x, &options).or_raise()?;
    let Observed { tensor, row_amax, col_amax, .. } = made;
    let (row, col) = tensor.into_directions();
    let held = Held { tensor: QuantTensor::from_parts(&array.tensor().shape, row, col).or_raise()?, id };
    let seen = |amax: Option<Memory>| amax.map(|amax| shown(py, amax, id, Precision::F32, &[1])).transpose();
    Ok((held, [seen(row_amax)?, seen(col_amax)?]))
}

/// Looks for NaN and infinities in an array: the first is left in `found`, one int64 on the same
/// GPU that held -1, as four times its index plus 0 for infinity, 1 for its negative, 2 for NaN.
/// Does not wait.
pub fn watch(x: &Bound<'_, PyAny>, array: &Array, id: i32, found: &Bound<'_, PyAny>) -> PyResult<()> {
    let wrong = || PyTypeError::new_err(format!("watch: expected a tensor of one int64 on cuda:{id}"));
    check_torch(found)?;
    let mut found = Tensor::of(found)?;
    let fits = found.shape.iter().product::<usize>() == 1 && found.dtype == DataType::I64;
    if Place::of(&found)? != Place::Cuda(id) || !fits {
        return Err(wrong());
    }
    first_not_finite(&gpu(x.py(), id)?, x, array, found.device_slice_mut().ok_or_else(wrong)?)
}

/// Leaves the first NaN or infinity of an array in `found`, as [`watch`] says.
pub fn first_not_finite(gpu: &Gpu, x: &Bound<'_, PyAny>, array: &Array, found: SliceMut<'_, u64>) -> PyResult<()> {
    // Between rows that lie apart are numbers that are not the array's.
    let dense = match array.is_dense() {
        true => None,
        false => Some(Array::of(&contiguous(x)?)?),
    };
    let misaligned = || PyValueError::new_err("the tensor's memory is not aligned; clone it");
    let values = dense.as_ref().unwrap_or(array).device_values().ok_or_else(misaligned)?;
    finite::first_not_finite(gpu.stream(), values, found).map_err(nvfp4::Error::from).or_raise()
}

/// The scales of the next step of delayed scaling, in place: see `Delayed.update_`.
pub fn update(rule: &nvfp4_recipe::Delayed, tensors: [&Bound<'_, PyAny>; 3]) -> PyResult<()> {
    let wrong = || PyTypeError::new_err("expected contiguous float32 tensors of torch on one GPU");
    let borrow = |x: &Bound<'_, PyAny>| -> PyResult<(Tensor, i32)> {
        check_torch(x)?;
        let tensor = Tensor::of(x)?;
        match Place::of(&tensor)? {
            Place::Cuda(id) if tensor.dtype == DataType::F32 => Ok((tensor, id)),
            _ => Err(wrong()),
        }
    };
    let [(mut history, id), (mut scale, other), (amax, third)] =
        [borrow(tensors[0])?, borrow(tensors[1])?, borrow(tensors[2])?];
    let dense = amax.reach() == Some(amax.shape.iter().product());
    let parts = history.device_slice_mut().zip(scale.device_slice_mut()).zip(amax.device_slice().filter(|_| dense));
    let ((history, scale), amax) = parts.filter(|_| other == id && third == id).ok_or_else(wrong)?;
    rule.update_on(&gpu(tensors[0].py(), id)?, history, scale, amax).or_raise()
}

/// An offset that is known now, or one that the GPU reads when the work runs.
enum Place64 {
    Value(u64),
    Memory(Tensor),
}

impl Place64 {
    fn of(offset: &Bound<'_, PyAny>, id: i32) -> PyResult<Place64> {
        if offset.hasattr("__dlpack__")? && Framework::of(offset)? == Framework::Torch {
            let tensor = Tensor::of(offset)?;
            if let Place::Cuda(other) = Place::of(&tensor)? {
                let one = tensor.shape.iter().product::<usize>() == 1;
                if other != id || !one || tensor.dtype != DataType::I64 || tensor.device_slice::<u64>().is_none() {
                    return Err(PyTypeError::new_err(format!("expected an offset of one int64 on cuda:{id}")));
                }
                return Ok(Place64::Memory(tensor));
            }
        }
        Ok(Place64::Value(generator::offset(offset)?))
    }

    fn offset(&self) -> Offset<'_> {
        match self {
            Place64::Value(offset) => Offset::Value(*offset),
            Place64::Memory(tensor) => {
                Offset::Memory { at: tensor.device_slice().expect("checked when it was borrowed"), plus: 0 }
            }
        }
    }
}

/// Decodes a direction into a new tensor of torch.
pub fn dequantize<'py>(
    py: Python<'py>,
    direction: &Direction,
    id: i32,
    precision: Precision,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    fn decoded<T: Element + Plain>(gpu: &Gpu, direction: &Direction) -> nvfp4::Result<Memory> {
        let mut out = gpu.alloc::<T>(direction.rows() * direction.cols())?;
        direction.dequantize(gpu, out.slice_mut())?;
        Ok(out.into_memory())
    }
    let gpu = gpu(py, id)?;
    let memory = match precision {
        Precision::F32 => decoded::<f32>(&gpu, direction),
        Precision::Bf16 => decoded::<bf16>(&gpu, direction),
        Precision::F16 => decoded::<f16>(&gpu, direction),
    };
    // MXFP8's column direction lies as the tensor does.
    let turned = matches!(direction, Direction::Fp8(d) if d.tile() == nvfp4::Fp8Tile::Column32);
    match turned {
        false => shown(py, memory.or_raise()?, id, precision, shape),
        true => {
            let lies = [direction.cols(), direction.rows()];
            shown(py, memory.or_raise()?, id, precision, &lies)?.call_method0("t")?.call_method0("contiguous")
        }
    }
}

/// A tensor of torch over memory that nobody else has.
pub fn shown<'py>(
    py: Python<'py>,
    memory: Memory,
    id: i32,
    precision: Precision,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let lent = Lent::on_gpu(Arc::new(memory), id, |memory| Ok::<_, PyErr>((memory, precision.into(), shape.to_vec())))?;
    show(py, lent)
}

/// The left side of a product.
pub enum Left<'a> {
    /// Quantized.
    Quantized(&'a Direction),
    /// As it is.
    Plain(&'a Array),
}

/// What is added to a product, and its factors.
pub struct Terms<'py> {
    /// α.
    pub alpha: f32,
    /// One value per output column.
    pub bias: Option<Bound<'py, PyAny>>,
    /// The matrix C.
    pub c: Option<Array>,
    /// Its factor.
    pub beta: f32,
    /// How precisely products of FP8 are added.
    pub accumulator: Accumulator,
}

/// A bias: a tensor of torch on the GPU as it is, or numbers that were copied there.
pub enum Bias {
    /// A tensor of torch.
    There(Array),
    /// A copy of numbers.
    Copied(Owned<f32>),
}

impl Bias {
    fn of(gpu: &Gpu, id: i32, x: &Bound<'_, PyAny>) -> PyResult<Bias> {
        if Framework::of(x)? == Framework::Torch {
            let array = Array::of(&contiguous(&x.call_method0("detach")?)?)?;
            match array.place {
                Place::Cuda(other) if other == id => return Ok(Bias::There(array)),
                Place::Cuda(other) => {
                    return Err(PyValueError::new_err(format!("the bias is on cuda:{other}; move it to cuda:{id}")));
                }
                Place::Host => {}
            }
        }
        Ok(Bias::Copied(gpu.upload(&crate::array::floats(x)?).or_raise()?))
    }

    /// That of a layer, a tensor of torch.
    pub fn of_torch(gpu: &Gpu, id: i32, x: &Bound<'_, PyAny>) -> PyResult<Bias> {
        match Array::of_torch(x)? {
            array if array.place == Place::Cuda(id) && array.is_dense() => Ok(Bias::There(array)),
            _ => Bias::of(gpu, id, x),
        }
    }

    /// Its numbers where they lie.
    pub fn values(&self) -> PyResult<Values<'_>> {
        match self {
            Bias::There(array) => {
                array.device_values().ok_or_else(|| PyValueError::new_err("the bias's memory is not aligned; clone it"))
            }
            Bias::Copied(owned) => Ok(Values::F32(owned.slice())),
        }
    }
}

/// A product on a GPU, as a new tensor of torch.
pub fn matmul<'py>(
    py: Python<'py>,
    (a, b): (Left<'_>, &Direction),
    id: i32,
    terms: &Terms<'py>,
    precision: Precision,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let gpu = gpu(py, id)?;
    let bias = terms.bias.as_ref().map(|bias| Bias::of(&gpu, id, bias)).transpose()?;
    let bias = bias.as_ref().map(Bias::values).transpose()?;
    let memory = match precision {
        Precision::F32 => product::<f32>(&gpu, (a, b), terms, bias),
        Precision::Bf16 => product::<bf16>(&gpu, (a, b), terms, bias),
        Precision::F16 => product::<f16>(&gpu, (a, b), terms, bias),
    }?;
    shown(py, memory, id, precision, shape)
}

fn product<T: Element + Plain>(
    gpu: &Gpu,
    (a, b): (Left<'_>, &Direction),
    terms: &Terms<'_>,
    bias: Option<Values<'_>>,
) -> PyResult<Memory> {
    let mismatch = || PyValueError::new_err("c has another dtype or device than the result: cast or move it");
    let add = match &terms.c {
        Some(c) if DataType::from(T::PRECISION) != c.tensor().dtype => return Err(mismatch()),
        Some(c) => Some((c.tensor().device_slice::<T>().ok_or_else(mismatch)?, terms.beta)),
        None => None,
    };
    let Terms { alpha, accumulator, .. } = *terms;
    let product = Product { alpha, bias, add, accumulator, ..Product::default() };
    let room = |rows| gpu.alloc::<T>(rows * b.rows()).or_raise();
    let out = match a {
        Left::Quantized(a) => {
            let mut out = room(a.rows())?;
            gpu.matmul(a, b, &product, out.slice_mut()).or_raise()?;
            out
        }
        Left::Plain(array) => {
            let x = array.input().ok_or_else(|| PyValueError::new_err("the tensor is not aligned; clone it"))?;
            let mut out = room(x.rows())?;
            gpu.matmul_plain(&x, b, &product, out.slice_mut()).or_raise()?;
            out
        }
    };
    Ok(out.into_memory())
}

/// The memory of an array of a direction.
pub fn memory(direction: &Direction, part: Part) -> Option<&Memory> {
    match (direction, part) {
        (Direction::Nvfp4(d), Part::Codes) => Some(d.codes().memory()),
        (Direction::Nvfp4(d), Part::Scales) => Some(d.scales().memory()),
        (Direction::Nvfp4(d), Part::Global) => Some(d.stored().memory()),
        (Direction::Fp8(d), Part::Codes) => Some(d.codes().memory()),
        (Direction::Fp8(d), Part::Scales) => Some(match d.scales() {
            Scales::F32(scales) => scales.memory(),
            Scales::E8m0(scales) => scales.memory(),
        }),
        (Direction::Plain(_), _) | (_, Part::Values) | (Direction::Fp8(_), Part::Global) => None,
    }
}

/// Puts a direction together from tensors on a GPU, without copies.
pub fn direction(
    like: &nvfp4::Direction,
    (rows, cols): (usize, usize),
    arrays: &[Bound<'_, PyAny>],
    id: i32,
) -> PyResult<Direction> {
    let memory = |x: &Bound<'_, PyAny>| -> PyResult<Memory> {
        check_torch(x)?;
        let x = contiguous(x)?;
        let fresh = || x.call_method0("clone").and_then(|x| Tensor::of(&x));
        let tensor = Tensor::of(&x)?;
        if Place::of(&tensor)? != Place::Cuda(id) {
            return Err(PyValueError::new_err(format!("expected all arrays on cuda:{id}; move them there")));
        }
        let misaligned = || PyValueError::new_err("the memory of an array is not aligned to 16 bytes");
        match tensor.into_memory() {
            Some(memory) => Ok(memory),
            None => fresh()?.into_memory().ok_or_else(misaligned),
        }
    };
    let parts = arrays.iter().map(memory).collect::<PyResult<_>>()?;
    Direction::over(like, rows, cols, parts).or_raise()
}

/// A copy of a tensor in the host's memory. Waits.
pub fn to_host(py: Python<'_>, held: &Held) -> PyResult<nvfp4::QuantTensor> {
    let gpu = gpu(py, held.id)?;
    py.detach(|| held.tensor.to_host(&gpu)).or_raise()
}

/// A copy of a tensor in memory of its own.
pub fn copied(py: Python<'_>, held: &Arc<Held>) -> PyResult<Held> {
    let made = |side| -> PyResult<Option<Direction>> {
        let Ok(direction) = held.tensor.direction(side) else { return Ok(None) };
        let like = twin(direction)?;
        let copy = |&part| Framework::Torch.array(py, lend(held, side, part)?)?.call_method0("clone");
        let arrays = Part::of(&like).iter().map(copy).collect::<PyResult<Vec<_>>>()?;
        self::direction(&like, (direction.rows(), direction.cols()), &arrays, held.id).map(Some)
    };
    let (row, col) = (made(Side::Row)?, made(Side::Column)?);
    Ok(Held { tensor: QuantTensor::from_parts(held.tensor.shape(), row, col).or_raise()?, id: held.id })
}

/// A direction of the host without rows, which has the settings of one on a GPU.
pub fn twin(direction: &Direction) -> PyResult<nvfp4::Direction> {
    Ok(match direction {
        Direction::Nvfp4(d) => {
            let about = Nvfp4Description { rows: 0, cols: 0, ..*d.description() };
            let stored = vec![0.0; about.stored_len()];
            Nvfp4Direction::from_parts(about, Vec::new(), Vec::new(), stored).or_raise()?.into()
        }
        Direction::Fp8(d) => {
            let about = Fp8Description { rows: 0, cols: 0, ..*d.description() };
            let count = about.scale_len().or_raise()?;
            let scales = match d.scales() {
                Scales::F32(_) => Scales::F32(vec![0.0; count]),
                Scales::E8m0(_) => Scales::E8m0(vec![0; count]),
            };
            Fp8Direction::from_parts(about, Vec::new(), scales).or_raise()?.into()
        }
        Direction::Plain(nothing) => match *nothing {},
    })
}

/// An array of a direction, lent out.
pub fn lend(held: &Arc<Held>, side: Side, part: Part) -> PyResult<Lent> {
    Lent::on_gpu(Arc::clone(held), held.id, |held| {
        let direction = held.tensor.direction(side).or_raise()?;
        let like = twin(direction)?;
        let (dtype, shape) = part::shape(&like, part, (direction.rows(), direction.cols()))
            .ok_or_else(|| part::absent(&like, side, part))?;
        let memory = memory(direction, part).ok_or_else(|| part::absent(&like, side, part))?;
        Ok((memory, dtype, shape))
    })
}
