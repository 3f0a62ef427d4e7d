//! On a GPU: everything is queued on torch's stream, and nothing waits, so the interpreter's lock
//! is held throughout. Results are torch's own tensors; a quantized direction is one allocation.

pub mod groups;

use super::formats::Slot;
use super::{Backward, Forward, Scales, Watched, Weight, flat, with_last};
use crate::array::Array;
use crate::cuda::{Bias, first_not_finite, gpu, shown};
use crate::dlpack::{DataType, Tensor};
use crate::error::OrRaise;
use crate::place::Place;
use half::{bf16, f16};
use nvfp4::cuda::{
    Allocator, Direction, Factor, Gpu, Input, Memory, Observed, Offset, Options, Plain, PreparedWeight, Product,
    Randomness, Slice, Stream, Values,
};
use nvfp4::{Accumulator, Directions, Element, Finite, Precision, Side};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, PoisonError};

type Object<'py> = Bound<'py, PyAny>;

pub fn forward<'py>(py: Python<'py>, call: &Forward<'_, 'py>, id: i32) -> PyResult<Vec<Object<'py>>> {
    let Forward { formats, x: (x, x_array), weight, bias, amax, scales, watched } = call;
    let blocks = Blocks::beside(x);
    let mut gpu = gpu(py, id)?.with_kept(Directions::Column, blocks.clone());
    let [x_scales, weight_scales] = [[scales.0[0], scales.0[1]], [scales.0[2], scales.0[3]]];
    let flags = watched.flags(x, 2)?;
    let watch = |gpu: &Gpu, object, array, number| match &flags {
        Some(flags) => look(gpu, object, array, flags, number),
        None => Ok(()),
    };
    let amax = amax.map(|amax| one(amax, DataType::F32, "amax", id)).transpose()?;
    watch(&gpu, x, x_array, 0)?;
    let (rows, (tokens, cols)) = (weight.out_features(), flat(x_array.shape()));
    let like = formats.weight.like(Side::Row)?;
    // What is kept is codes; the rest is read by this product alone.
    let own_weight = matches!(weight, Weight::Plain(..)) && !formats.keeps;
    let values = !matches!(weight, Weight::Codes { prepared: Some(_), .. })
        && gpu.prefers_values((formats.input.like(Side::Row)?, like), (tokens, rows, cols));
    let x_made = match formats.input.is_plain() {
        true => None,
        false => {
            let values = values.then_some(Directions::Row);
            let given = Given { scales: x_scales, amax: amax.as_ref(), drawn: None, values };
            Some(quantize(&gpu, x_array, &formats.input, given, id).map_err(|error| watched.name("input", py, error))?)
        }
    };
    let weight_made = match weight {
        Weight::Plain(object, array) => {
            same_gpu("weight", array.place, id)?;
            if formats.keeps {
                gpu.keep(Directions::Both);
            }
            watch(&gpu, object, array, 1)?;
            let values = (values && own_weight).then_some(Directions::Row);
            let given = Given { scales: weight_scales, values, ..Given::default() };
            let made = quantize(&gpu, array, &formats.weight, given, id);
            Some(made.map_err(|error| watched.name("weight", py, error))?)
        }
        Weight::Codes { .. } => None,
    };
    let y = empty(x, with_last(x_array.shape(), rows), x_array.precision())?;
    let bias = bias.map(|bias| Bias::of_torch(&gpu, id, bias)).transpose()?;
    let bias = bias.as_ref().map(Bias::values).transpose()?;
    let left = match &x_made {
        Some(made) => Left::Quantized(made.factor(Side::Row).or_raise()?),
        None => Left::Plain(x_array.input().ok_or_else(misaligned)?),
    };
    let (codes, prepared);
    let right = match (&weight_made, weight) {
        (Some(made), _) => Right::Quantized(made.factor(Side::Row).or_raise()?),
        (None, Weight::Codes { prepared: Some(block), .. }) => {
            prepared = prepared_over(like, (rows, cols), block, id)?;
            Right::Prepared(&prepared)
        }
        (None, Weight::Codes { block, .. }) => {
            codes = over(like, (rows, cols), block, id)?;
            Right::Quantized((&codes).into())
        }
        (None, Weight::Plain(..)) => unreachable!("it was quantized"),
    };
    product(&gpu, (left, right), bias, formats.accumulators[0], &y, x_array.precision())?;
    let mut made = vec![y];
    made.extend(blocks.into_objects(py));
    for (quantized, given) in [x_made, weight_made].into_iter().zip([x_scales, weight_scales]) {
        if let Some(quantized) = quantized {
            note(&mut made, x, quantized, given, id)?;
        }
    }
    made.extend(flags);
    Ok(made)
}

pub fn backward<'py>(py: Python<'py>, call: &Backward<'_, 'py>, id: i32) -> PyResult<Vec<Object<'py>>> {
    let Backward { formats, dy: (dy, array), kept, in_features, wanted, seed, offset, scales, watched } = call;
    let Scales(scales) = *scales;
    let gpu = gpu(py, id)?;
    let flag = watched.flags(dy, 1)?;
    if let Some(flag) = &flag {
        look(&gpu, dy, array, flag, 0)?;
    }
    let offset = offset.map(|offset| one(offset, DataType::I64, "offset", id)).transpose()?;
    let drawn = offset.as_ref().map(|offset| (*seed, offset));
    let (tokens, out_features) = flat(array.shape());
    // What is made of dy is read by one product each.
    let values = |side, kept: &Slot, sizes| -> PyResult<bool> {
        let formats = (formats.grad_output.like(side)?, kept.like(Side::Column)?);
        Ok(gpu.prefers_values(formats, sizes))
    };
    let for_dx = wanted[0].is_some() && values(Side::Row, &formats.weight, (tokens, *in_features, out_features))?;
    let for_dw = wanted[1].is_some() && values(Side::Column, &formats.input, (out_features, *in_features, tokens))?;
    let values = Directions::of(for_dx, for_dw);
    let given = Given { scales, drawn, amax: None, values };
    let quantized = quantize(&gpu, array, &formats.grad_output, given, id);
    let quantized = quantized.map_err(|error| watched.name("grad_output", py, error))?;
    let [_, dgrad, wgrad] = formats.accumulators;
    let mut made = Vec::new();
    if let Some(precision) = wanted[0] {
        let weight = over(formats.weight.like(Side::Column)?, (*in_features, out_features), kept[1], id)?;
        let dx = empty(dy, with_last(array.shape(), *in_features), precision)?;
        let row = Left::Quantized(quantized.factor(Side::Row).or_raise()?);
        product(&gpu, (row, Right::Quantized((&weight).into())), None, dgrad, &dx, precision)?;
        made.push(dx);
    }
    if let Some(precision) = wanted[1] {
        let x = over(formats.input.like(Side::Column)?, (*in_features, tokens), kept[0], id)?;
        let dw = empty(dy, vec![out_features, *in_features], precision)?;
        let column = Left::Quantized(quantized.factor(Side::Column).or_raise()?);
        product(&gpu, (column, Right::Quantized((&x).into())), None, wgrad, &dw, precision)?;
        made.push(dw);
    }
    note(&mut made, dy, quantized, scales, id)?;
    made.extend(flag);
    Ok(made)
}

/// Gives the memory of directions as tensors of torch, and keeps them in the order in which
/// they were asked for.
#[derive(Clone)]
pub struct Blocks {
    /// A tensor on the GPU.
    beside: Arc<Py<PyAny>>,
    made: Arc<Mutex<Vec<Py<PyAny>>>>,
}

impl Blocks {
    pub fn beside(x: &Object<'_>) -> Self {
        Blocks { beside: Arc::new(x.clone().unbind()), made: Arc::default() }
    }

    fn new_block(&self, len: usize) -> PyResult<Option<Memory>> {
        Python::attach(|py| {
            let block = new(self.beside.bind(py), vec![len], Made::Bytes)?;
            let memory = Tensor::borrowed(&block)?.into_memory();
            self.made.lock().unwrap_or_else(PoisonError::into_inner).push(block.unbind());
            Ok(memory)
        })
    }

    pub fn into_objects(self, py: Python<'_>) -> Vec<Object<'_>> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *made).into_iter().map(|block| block.into_bound(py)).collect()
    }
}

impl Allocator for Blocks {
    fn bytes(&self, _: &Stream, len: usize) -> Result<Memory, nvfp4_kernels::cuda::Error> {
        let failed = |reason: String| nvfp4_kernels::cuda::Error::Allocator { bytes: len, reason };
        let memory = self.new_block(len).map_err(|error| failed(error.to_string()))?;
        memory.ok_or_else(|| failed("torch's memory is not aligned to 16 bytes".to_string()))
    }
}

/// A tensor of torch beside another one, with undefined contents.
fn new<'py>(beside: &Object<'py>, shape: Vec<usize>, dtype: Made) -> PyResult<Object<'py>> {
    let py = beside.py();
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "dtype"), dtype.of_torch(py)?)?;
    beside.call_method(intern!(py, "new_empty"), (shape,), Some(&kwargs))
}

/// The types of what is made.
#[derive(Clone, Copy)]
enum Made {
    Bytes,
    Flags,
    Floats(Precision),
}

impl Made {
    /// The `torch.dtype`, looked up once.
    fn of_torch(self, py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
        static KNOWN: [PyOnceLock<Py<PyAny>>; 5] = [const { PyOnceLock::new() }; 5];
        let (name, at) = match self {
            Made::Bytes => ("uint8", 0),
            Made::Flags => ("int64", 1),
            Made::Floats(precision) => {
                (crate::words::word(crate::words::PRECISIONS, precision), 2 + precision as usize)
            }
        };
        let find = || Ok::<_, PyErr>(py.import("torch")?.getattr(name)?.unbind());
        Ok(KNOWN[at].get_or_try_init(py, find)?.bind(py))
    }
}

fn empty<'py>(beside: &Object<'py>, shape: Vec<usize>, precision: Precision) -> PyResult<Object<'py>> {
    new(beside, shape, Made::Floats(precision))
}

fn same_gpu(what: &str, place: Place, id: i32) -> PyResult<()> {
    match place {
        Place::Cuda(other) if other == id => Ok(()),
        place => Err(PyValueError::new_err(format!("the {what} is on {place}; move it to cuda:{id}"))),
    }
}

/// One number of a type in the memory of the GPU.
fn one(x: &Object<'_>, dtype: DataType, what: &str, id: i32) -> PyResult<Tensor> {
    let tensor = Tensor::borrowed(x)?;
    let fits = tensor.dtype == dtype && tensor.shape.iter().product::<usize>() == 1;
    match Place::of(&tensor)? {
        Place::Cuda(other) if other == id && fits => Ok(tensor),
        _ => Err(PyTypeError::new_err(format!("expected the {what} as one {} on cuda:{id}", dtype.name()))),
    }
}

/// What a call gives to a quantizer: scales of delayed scaling, an amax, and the seed and the offset
/// of random numbers.
#[derive(Clone, Copy, Default)]
struct Given<'a, 'py> {
    scales: [Option<&'a Object<'py>>; 2],
    amax: Option<&'a Tensor>,
    drawn: Option<(u64, &'a Tensor)>,
    /// The directions that are written as values.
    values: Option<Directions>,
}

pub fn misaligned() -> PyErr {
    PyValueError::new_err("the tensor's memory is not aligned; clone it")
}

/// An offset that is read when the work runs.
fn offset_in(tensor: &Tensor) -> PyResult<Offset<'_>> {
    Ok(Offset::Memory { at: tensor.device_slice().ok_or_else(misaligned)?, plus: 0 })
}

fn quantize(gpu: &Gpu, array: &Array, slot: &Slot, given: Given<'_, '_>, id: i32) -> PyResult<Observed> {
    let [row, column] = given.scales.map(|scale| scale.map(|scale| one(scale, DataType::F32, "scale", id)).transpose());
    let (row, column) = (row?, column?);
    let randomness = randomness(given.drawn)?;
    let [row_scale, col_scale]: [Option<Slice<'_, f32>>; 2] =
        [&row, &column].map(|scale| scale.as_ref().and_then(Tensor::device_slice));
    let row_amax = given.amax.map(|amax| amax.device_slice().ok_or_else(misaligned)).transpose()?;
    let options = Options { randomness, row_amax, row_scale, col_scale, values: given.values, ..Options::default() };
    let x = array.input().ok_or_else(misaligned)?;
    slot.maker([None, None], Finite::Keep)?.observe_on(gpu, &x, &options).or_raise()
}

/// The random numbers from a seed and an offset.
fn randomness(drawn: Option<(u64, &Tensor)>) -> PyResult<Option<Randomness<'_>>> {
    drawn.map(|(seed, offset)| Ok(Randomness { seed, offset: offset_in(offset)? })).transpose()
}

/// The left operand of a product.
enum Left<'a> {
    Quantized(Factor<'a>),
    Plain(Input<'a>),
}

/// The right operand.
enum Right<'a> {
    Quantized(Factor<'a>),
    Prepared(&'a PreparedWeight),
}

fn product(
    gpu: &Gpu,
    operands: (Left<'_>, Right<'_>),
    bias: Option<Values<'_>>,
    accumulator: Accumulator,
    out: &Object<'_>,
    precision: Precision,
) -> PyResult<()> {
    fn into<T: Element + Plain>(
        gpu: &Gpu,
        operands: (Left<'_>, Right<'_>),
        bias: Option<Values<'_>>,
        accumulator: Accumulator,
        out: &Object<'_>,
    ) -> PyResult<()> {
        let mut out = Tensor::borrowed(out)?;
        let out = out.device_slice_mut::<T>().expect("torch aligns what it allocates");
        let product = Product { bias, accumulator, ..Product::default() };
        match operands {
            (Left::Quantized(a), Right::Quantized(b)) => gpu.matmul(a, b, &product, out),
            (Left::Quantized(Factor::Direction(a)), Right::Prepared(b)) => gpu.matmul_on_prepared(a, b, &product, out),
            (Left::Quantized(Factor::Values(_)), Right::Prepared(_)) => {
                unreachable!("nothing is written as values for it")
            }
            (Left::Plain(x), Right::Quantized(b)) => gpu.matmul_plain(&x, b, &product, out),
            (Left::Plain(x), Right::Prepared(b)) => gpu.matmul_prepared(&x, b, &product, out),
        }
        .or_raise()
    }
    match precision {
        Precision::F32 => into::<f32>(gpu, operands, bias, accumulator, out),
        Precision::Bf16 => into::<bf16>(gpu, operands, bias, accumulator, out),
        Precision::F16 => into::<f16>(gpu, operands, bias, accumulator, out),
    }
}

/// A direction over its block.
pub fn over(like: &nvfp4::Direction, (rows, cols): (usize, usize), block: &Object<'_>, id: i32) -> PyResult<Direction> {
    Direction::over_block(like, rows, cols, memory_of(block, id)?).or_raise()
}

/// A prepared weight over its block.
fn prepared_over(
    like: &nvfp4::Direction,
    (rows, cols): (usize, usize),
    block: &Object<'_>,
    id: i32,
) -> PyResult<PreparedWeight> {
    let like = like.nvfp4().or_raise()?;
    let made = PreparedWeight::over(rows, cols, (like.global(), like.unit()), memory_of(block, id)?);
    made.map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The memory of a block.
fn memory_of(block: &Object<'_>, id: i32) -> PyResult<Memory> {
    let tensor = Tensor::borrowed(block)?;
    same_gpu("block of a direction", Place::of(&tensor)?, id)?;
    // A hook may have brought it back to another address.
    let memory = match tensor.into_memory() {
        Some(memory) => Some(memory),
        None => Tensor::of(&block.call_method0("clone")?)?.into_memory(),
    };
    memory.ok_or_else(|| PyValueError::new_err("the memory of a block is not aligned to 16 bytes"))
}

impl Watched<'_> {
    /// Flags for tensors that must be finite.
    fn flags<'py>(self, beside: &Object<'py>, count: usize) -> PyResult<Option<Object<'py>>> {
        match self.finite() {
            Finite::Keep => Ok(None),
            Finite::Refuse => {
                let flags = new(beside, vec![count], Made::Flags)?;
                flags.call_method1("fill_", (-1,)).map(Some)
            }
        }
    }
}

/// Looks for NaN and infinities, and leaves the first in a flag.
fn look(gpu: &Gpu, x: &Object<'_>, array: &Array, flags: &Object<'_>, number: usize) -> PyResult<()> {
    let mut flags = Tensor::borrowed(flags)?;
    let flags = flags.device_slice_mut().expect("torch aligns what it allocates");
    first_not_finite(gpu, x, array, flags.range(number..number + 1))
}

/// Adds the amaxes that were seen for the scales that are given, 0 if one was not used.
fn note<'py>(
    made: &mut Vec<Object<'py>>,
    beside: &Object<'py>,
    quantized: Observed,
    given: [Option<&Object<'py>>; 2],
    id: i32,
) -> PyResult<()> {
    let Observed { row_amax, col_amax, .. } = quantized;
    // One scale serves both directions.
    let (row, column) = if given[1].is_none() { (row_amax.or(col_amax), None) } else { (row_amax, col_amax) };
    for (seen, _) in [row, column].into_iter().zip(given).filter(|(_, given)| given.is_some()) {
        made.push(match seen {
            Some(amax) => shown(beside.py(), amax, id, Precision::F32, &[1])?,
            None => empty(beside, vec![1], Precision::F32)?.call_method0("zero_")?,
        });
    }
    Ok(())
}
