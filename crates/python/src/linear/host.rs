//! On the CPU.

use super::{Backward, Forward, Scales, flat, with_last};
use crate::array::{self, Array};
use crate::dlpack::{DataType, Lent, Tensor, show};
use crate::error::Raised;
use crate::threads;
use half::{bf16, f16};
use nvfp4::{
    Accumulator, Direction, Directions, Element, Elements, Observed, Options, Precision, Product, Randomness, Side,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// What failed: a tensor that could not be quantized, by its slot, or a product.
enum Failed {
    Slot(&'static str, nvfp4::Error),
    Product(nvfp4::Error),
}

impl Failed {
    fn raised(self, py: Python<'_>, watched: super::Watched<'_>) -> PyErr {
        match self {
            Failed::Slot(slot, error) => watched.name(slot, py, error.raised()),
            Failed::Product(error) => error.raised(),
        }
    }
}

pub fn forward<'py>(py: Python<'py>, call: &Forward<'_, 'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let Forward { formats, x: (_, x), weight: (_, weight), bias, scales, watched } = call;
    let bias = bias.map(numbers).transpose()?;
    let [row, column, weight_row, weight_column] = values(scales)?;
    let makers = (
        formats.input.maker([row, column], watched.finite())?,
        formats.weight.maker([weight_row, weight_column], watched.finite())?,
    );
    let (precision, shape) = (x.precision(), with_last(x.shape(), flat(weight.shape()).0));
    let (x, weight) = (x.tensor_ref()?, weight.tensor_ref()?);
    let accumulator = formats.accumulators[0];
    let work = || -> Result<_, Failed> {
        let x = makers.0.observe(&x, &Options::default()).map_err(|error| Failed::Slot("input", error))?;
        let weight = makers.1.observe(&weight, &Options::default()).map_err(|error| Failed::Slot("weight", error))?;
        let made = || -> nvfp4::Result<_> {
            let (left, right) = (x.tensor.direction(Side::Row)?, weight.tensor.direction(Side::Row)?);
            let y = product(precision, left, right, bias.as_deref(), accumulator)?;
            let block = |of: &Observed| of.tensor.direction(Side::Column)?.to_block();
            Ok((y, [&x, &weight].into_iter().filter(|_| formats.directions == Directions::Both).map(block).collect()))
        };
        let (y, blocks): (_, nvfp4::Result<Vec<_>>) = made().map_err(Failed::Product)?;
        Ok((y, blocks.map_err(Failed::Product)?, [x, weight].map(|of| [of.row_amax, of.col_amax])))
    };
    let (y, blocks, seen) = threads::run(py, work)?.map_err(|failed| failed.raised(py, *watched))?;
    let mut made = vec![shown(py, y, &shape)?];
    for block in blocks {
        let len = block.len();
        made.push(show(py, Lent::owned(block, DataType::U8, &[len]))?);
    }
    for ([row, column], given) in seen.into_iter().zip(scales.0.chunks(2)) {
        note(py, &mut made, [row, column], [given[0], given[1]])?;
    }
    if watched.finite() == nvfp4::Finite::Refuse {
        made.push(flags(py, 2)?);
    }
    Ok(made)
}

pub fn backward<'py>(py: Python<'py>, call: &Backward<'_, 'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let Backward { formats, dy: (_, dy), kept, in_features, wanted, seed, offset, scales, watched } = call;
    let maker = formats.grad_output.maker(values(scales)?, watched.finite())?;
    let offset = offset.map(integer).transpose()?;
    let options =
        Options { randomness: offset.map(|offset| Randomness::At { seed: *seed, offset }), ..Options::default() };
    let (tokens, out_features) = flat(dy.shape());
    let shapes = [with_last(dy.shape(), *in_features), vec![out_features, *in_features]];
    let [x, weight] = [Tensor::borrowed(kept[0])?, Tensor::borrowed(kept[1])?];
    let [x, weight] = [bytes(&x)?, bytes(&weight)?];
    let (x_like, weight_like) = (formats.input.column()?, formats.weight.column()?);
    let dy = dy.tensor_ref()?;
    let work = || -> Result<_, Failed> {
        let dy = maker.observe(&dy, &options).map_err(|error| Failed::Slot("grad_output", error))?;
        let made = || -> nvfp4::Result<_> {
            let [_, dgrad, wgrad] = formats.accumulators;
            let dx = wanted[0].map(|precision| {
                let weight = weight_like.from_block(*in_features, out_features, weight)?;
                product(precision, dy.tensor.direction(Side::Row)?, &weight, None, dgrad)
            });
            let dw = wanted[1].map(|precision| {
                let x = x_like.from_block(*in_features, tokens, x)?;
                product(precision, dy.tensor.direction(Side::Column)?, &x, None, wgrad)
            });
            Ok([dx.transpose()?, dw.transpose()?])
        };
        Ok((made().map_err(Failed::Product)?, [dy.row_amax, dy.col_amax]))
    };
    let (gradients, seen) = threads::run(py, work)?.map_err(|failed| failed.raised(py, *watched))?;
    let mut made = Vec::new();
    for (gradient, shape) in gradients.into_iter().zip(shapes) {
        if let Some(gradient) = gradient {
            made.push(shown(py, gradient, &shape)?);
        }
    }
    note(py, &mut made, seen, scales.0)?;
    if watched.finite() == nvfp4::Finite::Refuse {
        made.push(flags(py, 1)?);
    }
    Ok(made)
}

fn product(
    precision: Precision,
    a: &Direction,
    b: &Direction,
    bias: Option<&[f32]>,
    accumulator: Accumulator,
) -> nvfp4::Result<Elements> {
    fn of<T: Element>(
        a: &Direction,
        b: &Direction,
        bias: Option<&[f32]>,
        accumulator: Accumulator,
    ) -> nvfp4::Result<Vec<T>> {
        nvfp4::matmul(a, b, &Product { bias, accumulator, ..Product::default() })
    }
    Ok(match precision {
        Precision::F32 => Elements::F32(of::<f32>(a, b, bias, accumulator)?),
        Precision::Bf16 => Elements::Bf16(of::<bf16>(a, b, bias, accumulator)?),
        Precision::F16 => Elements::F16(of::<f16>(a, b, bias, accumulator)?),
    })
}

/// The values of delayed scaling's scales.
fn values<const N: usize>(scales: &Scales<'_, '_, N>) -> PyResult<[Option<f32>; N]> {
    let mut values = [None; N];
    for (value, scale) in values.iter_mut().zip(scales.0) {
        if let Some(scale) = scale {
            let tensor = Tensor::borrowed(scale)?;
            let one = tensor.slice::<f32>().filter(|_| tensor.dtype == DataType::F32).and_then(|all| all.first());
            *value = Some(*one.ok_or_else(|| PyTypeError::new_err("expected a scale of one float32 on the CPU"))?);
        }
    }
    Ok(values)
}

/// The numbers of a bias.
fn numbers(bias: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    let array = Array::of_torch(bias)?;
    match array.is_dense() {
        true => Ok(match array.tensor_ref()?.values() {
            nvfp4::Values::F32(x) => x.to_vec(),
            nvfp4::Values::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
            nvfp4::Values::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
        }),
        false => numbers(&array::contiguous(bias)?),
    }
}

/// An offset of random numbers.
fn integer(offset: &Bound<'_, PyAny>) -> PyResult<u64> {
    let tensor = Tensor::borrowed(offset)?;
    let one = tensor.slice::<i64>().filter(|_| tensor.dtype == DataType::I64).and_then(|all| all.first());
    let wrong = || PyTypeError::new_err("expected an offset of one int64 from 0 on, on the CPU");
    one.and_then(|&offset| u64::try_from(offset).ok()).ok_or_else(wrong)
}

/// The bytes of a block.
fn bytes(block: &Tensor) -> PyResult<&[u8]> {
    block.slice::<u8>().ok_or_else(|| PyTypeError::new_err("expected a block of bytes on the CPU"))
}

fn shown<'py>(py: Python<'py>, elements: Elements, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    show(
        py,
        match elements {
            Elements::F32(x) => Lent::owned(x, DataType::F32, shape),
            Elements::Bf16(x) => Lent::owned(x, DataType::BF16, shape),
            Elements::F16(x) => Lent::owned(x, DataType::F16, shape),
        },
    )
}

/// Adds the amaxes that were seen for the scales that are given, 0 if one was not used.
fn note<'py>(
    py: Python<'py>,
    made: &mut Vec<Bound<'py, PyAny>>,
    [row, column]: [Option<f32>; 2],
    given: [Option<&Bound<'py, PyAny>>; 2],
) -> PyResult<()> {
    // One scale serves both directions.
    let row = if given[1].is_none() { row.or(column) } else { row };
    for (seen, _) in [row, column].into_iter().zip(given).filter(|(_, given)| given.is_some()) {
        made.push(show(py, Lent::owned(vec![seen.unwrap_or(0.0)], DataType::F32, &[1]))?);
    }
    Ok(())
}

/// Flags of tensors in which nothing was found: the CPU refuses the others.
fn flags<'py>(py: Python<'py>, count: usize) -> PyResult<Bound<'py, PyAny>> {
    show(py, Lent::owned(vec![-1i64; count], DataType::I64, &[count]))
}
