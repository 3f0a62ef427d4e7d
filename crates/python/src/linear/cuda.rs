//! On a GPU: everything is queued on torch's stream, and nothing waits, so the interpreter's lock
//! is held throughout. Results are torch's own tensors; a quantized direction is one allocation.

use super::formats::Slot;
use super::{Backward, Forward, Scales, Watched, flat, with_last};
use crate::array::Array;
use crate::cuda::{Bias, first_not_finite, gpu, shown};
use crate::dlpack::{DataType, Tensor};
use crate::error::OrRaise;
use crate::place::Place;
use half::{bf16, f16};
use nvfp4::cuda::{
    Allocator, Direction, Gpu, Memory, Observed, Offset, Options, Plain, Product, Randomness, Slice, Stream, Values,
};
use nvfp4::{Accumulator, Directions, Element, Finite, Precision, Side};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, PoisonError};

type Object<'py> = Bound<'py, PyAny>;

pub fn forward<'py>(py: Python<'py>, call: &Forward<'_, 'py>, id: i32) -> PyResult<Vec<Object<'py>>> {
    let Forward { formats, x: (x, x_array), weight: (weight, weight_array), bias, scales, watched } = call;
    same_gpu("weight", weight_array.place, id)?;
    let blocks = Blocks::beside(x);
    let gpu = gpu(py, id)?.with_columns(blocks.clone());
    let [x_scales, weight_scales] = [[scales.0[0], scales.0[1]], [scales.0[2], scales.0[3]]];
    let flags = watched.flags(x, 2)?;
    let tensors = [
        (*x, x_array, &formats.input, x_scales, "input"),
        (*weight, weight_array, &formats.weight, weight_scales, "weight"),
    ];
    let mut quantized = Vec::with_capacity(tensors.len());
    for (number, (object, array, slot, scales, name)) in tensors.into_iter().enumerate() {
        if let Some(flags) = &flags {
            look(&gpu, object, array, flags, number)?;
        }
        let made = quantize(&gpu, array, slot, scales, None, id);
        quantized.push(made.map_err(|error| watched.name(name, py, error))?);
    }
    let y = empty(x, with_last(x_array.shape(), flat(weight_array.shape()).0), x_array.precision())?;
    let bias = bias.map(|bias| Bias::of_torch(&gpu, id, bias)).transpose()?;
    let bias = bias.as_ref().map(Bias::values).transpose()?;
    let [left, right] = [&quantized[0], &quantized[1]].map(|made| made.tensor.direction(Side::Row).or_raise());
    product(&gpu, (left?, right?), bias, formats.accumulators[0], &y, x_array.precision())?;
    let mut made = vec![y];
    if formats.directions == Directions::Both {
        made.extend(blocks.into_objects(py));
    }
    for (quantized, given) in quantized.into_iter().zip([x_scales, weight_scales]) {
        note(&mut made, x, quantized, given, id)?;
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
    let quantized = quantize(&gpu, array, &formats.grad_output, scales, drawn, id);
    let quantized = quantized.map_err(|error| watched.name("grad_output", py, error))?;
    let (tokens, out_features) = flat(array.shape());
    let [_, dgrad, wgrad] = formats.accumulators;
    let mut made = Vec::new();
    if let Some(precision) = wanted[0] {
        let weight = over(formats.weight.column()?, (*in_features, out_features), kept[1], id)?;
        let dx = empty(dy, with_last(array.shape(), *in_features), precision)?;
        product(&gpu, (quantized.tensor.direction(Side::Row).or_raise()?, &weight), None, dgrad, &dx, precision)?;
        made.push(dx);
    }
    if let Some(precision) = wanted[1] {
        let x = over(formats.input.column()?, (*in_features, tokens), kept[0], id)?;
        let dw = empty(dy, vec![out_features, *in_features], precision)?;
        product(&gpu, (quantized.tensor.direction(Side::Column).or_raise()?, &x), None, wgrad, &dw, precision)?;
        made.push(dw);
    }
    note(&mut made, dy, quantized, scales, id)?;
    made.extend(flag);
    Ok(made)
}

/// Gives the memory of column directions as tensors of torch, and keeps them in the order in which
/// they were asked for.
#[derive(Clone)]
struct Blocks {
    /// A tensor on the GPU.
    beside: Arc<Py<PyAny>>,
    made: Arc<Mutex<Vec<Py<PyAny>>>>,
}

impl Blocks {
    fn beside(x: &Object<'_>) -> Self {
        Blocks { beside: Arc::new(x.clone().unbind()), made: Arc::default() }
    }

    fn new_block(&self, len: usize) -> PyResult<Option<Memory>> {
        Python::attach(|py| {
            let block = new(self.beside.bind(py), vec![len], "uint8")?;
            let memory = Tensor::borrowed(&block)?.into_memory();
            self.made.lock().unwrap_or_else(PoisonError::into_inner).push(block.unbind());
            Ok(memory)
        })
    }

    fn into_objects(self, py: Python<'_>) -> Vec<Object<'_>> {
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
fn new<'py>(beside: &Object<'py>, shape: Vec<usize>, dtype: &str) -> PyResult<Object<'py>> {
    let py = beside.py();
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "dtype"), py.import(intern!(py, "torch"))?.getattr(dtype)?)?;
    beside.call_method(intern!(py, "new_empty"), (shape,), Some(&kwargs))
}

fn empty<'py>(beside: &Object<'py>, shape: Vec<usize>, precision: Precision) -> PyResult<Object<'py>> {
    new(beside, shape, crate::words::word(crate::words::PRECISIONS, precision))
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

/// Quantizes a tensor; `drawn` are the seed and the offset of random numbers.
fn quantize(
    gpu: &Gpu,
    array: &Array,
    slot: &Slot,
    scales: [Option<&Object<'_>>; 2],
    drawn: Option<(u64, &Tensor)>,
    id: i32,
) -> PyResult<Observed> {
    let [row, column] = scales.map(|scale| scale.map(|scale| one(scale, DataType::F32, "scale", id)).transpose());
    let (row, column) = (row?, column?);
    let misaligned = || PyValueError::new_err("the tensor's memory is not aligned; clone it");
    let randomness = match drawn {
        Some((seed, offset)) => {
            let at = offset.device_slice().ok_or_else(misaligned)?;
            Some(Randomness { seed, offset: Offset::Memory { at, plus: 0 } })
        }
        None => None,
    };
    let [row_scale, col_scale]: [Option<Slice<'_, f32>>; 2] =
        [&row, &column].map(|scale| scale.as_ref().and_then(Tensor::device_slice));
    let options = Options { randomness, row_scale, col_scale, ..Options::default() };
    let x = array.input().ok_or_else(misaligned)?;
    slot.maker([None, None], Finite::Keep)?.observe_on(gpu, &x, &options).or_raise()
}

fn product(
    gpu: &Gpu,
    operands: (&Direction, &Direction),
    bias: Option<Values<'_>>,
    accumulator: Accumulator,
    out: &Object<'_>,
    precision: Precision,
) -> PyResult<()> {
    fn into<T: Element + Plain>(
        gpu: &Gpu,
        (a, b): (&Direction, &Direction),
        bias: Option<Values<'_>>,
        accumulator: Accumulator,
        out: &Object<'_>,
    ) -> PyResult<()> {
        let mut out = Tensor::borrowed(out)?;
        let out = out.device_slice_mut::<T>().expect("torch aligns what it allocates");
        gpu.matmul(a, b, &Product { bias, accumulator, ..Product::default() }, out).or_raise()
    }
    match precision {
        Precision::F32 => into::<f32>(gpu, operands, bias, accumulator, out),
        Precision::Bf16 => into::<bf16>(gpu, operands, bias, accumulator, out),
        Precision::F16 => into::<f16>(gpu, operands, bias, accumulator, out),
    }
}

/// A direction over its block.
fn over(like: &nvfp4::Direction, (rows, cols): (usize, usize), block: &Object<'_>, id: i32) -> PyResult<Direction> {
    let tensor = Tensor::borrowed(block)?;
    same_gpu("block of a direction", Place::of(&tensor)?, id)?;
    // A hook may have brought it back to another address.
    let memory = match tensor.into_memory() {
        Some(memory) => Some(memory),
        None => Tensor::of(&block.call_method0("clone")?)?.into_memory(),
    };
    let misaligned = || PyValueError::new_err("the memory of a block is not aligned to 16 bytes");
    Direction::over_block(like, rows, cols, memory.ok_or_else(misaligned)?).or_raise()
}

impl Watched<'_> {
    /// Flags for tensors that must be finite.
    fn flags<'py>(self, beside: &Object<'py>, count: usize) -> PyResult<Option<Object<'py>>> {
        match self.finite() {
            Finite::Keep => Ok(None),
            Finite::Refuse => {
                let flags = new(beside, vec![count], "int64")?;
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
