//! On the CPU.

use super::{Backward, Forward, Pass, Scales, Weight, flat, with_last};
use crate::array::{self, Array};
use crate::dlpack::{DataType, Lent, Tensor, show};
use crate::error::{OrRaise, Raised};
use crate::threads;
use half::{bf16, f16};
use nvfp4::{
    Accumulator, Element, Elements, Observed, Operand, Options, Precision, PreparedWeight, Product, Quantizer,
    Randomness, Side, TensorRef,
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
    let Forward { formats, x: (_, x), weight, bias, amax, scales, watched } = call;
    let bias = bias.map(numbers).transpose()?;
    let amax = amax.map(numbers).transpose()?;
    let [row, column, weight_row, weight_column] = values(scales)?;
    let x_maker = formats.input.maker([row, column], watched.finite())?;
    let (precision, shape, (_, cols)) = (x.precision(), with_last(x.shape(), weight.out_features()), flat(x.shape()));
    let x = x.tensor_ref()?;
    // A weight to quantize, or its bytes, and those in the order of this CPU.
    let [block, prepared] = match weight {
        Weight::Codes { block, prepared, .. } => [Some(*block), *prepared],
        Weight::Plain(..) => [None; 2],
    };
    let [block, prepared] = [block.map(Tensor::borrowed).transpose()?, prepared.map(Tensor::borrowed).transpose()?];
    let rows = weight.out_features();
    let codes = block.as_ref().map(bytes).transpose()?;
    let codes =
        codes.map(|codes| formats.weight.like(Side::Row)?.in_block(rows, cols, codes).or_raise()).transpose()?;
    let prepared = prepared.as_ref().map(bytes).transpose()?;
    let prepared = codes.zip(prepared).map(|(codes, prepared)| PreparedWeight::over(codes, prepared));
    let plain = match weight {
        Weight::Plain(_, array) => {
            let maker = formats.weight.maker([weight_row, weight_column], watched.finite())?;
            Some((maker, array.tensor_ref()?))
        }
        Weight::Codes { .. } => None,
    };
    let accumulator = formats.accumulators[0];
    let work = || -> Result<_, Failed> {
        let options = Options { row_amax: amax.as_deref(), ..Options::default() };
        let observed = |maker: &Quantizer, of: &TensorRef<'_>, options: &Options<'_>, slot| {
            maker.observe(of, options).map_err(|error| Failed::Slot(slot, error))
        };
        let x_made = match formats.input.is_plain() {
            true => None,
            false => Some(observed(&x_maker, &x, &options, "input")?),
        };
        let weight = match &plain {
            Some((maker, weight)) => Some(observed(maker, weight, &Options::default(), "weight")?),
            None => None,
        };
        let made = || -> nvfp4::Result<_> {
            let right = match (&weight, &prepared, codes) {
                (Some(weight), ..) => Operand::from(weight.tensor.direction(Side::Row)?),
                (None, Some(prepared), _) => prepared.into(),
                (None, None, Some(codes)) => codes.into(),
                (None, None, None) => unreachable!("a weight is one of both"),
            };
            let left = match &x_made {
                Some(made) => Left::Quantized(made.tensor.direction(Side::Row)?.into()),
                None => Left::Plain(&x),
            };
            let y = product(precision, left, right, bias.as_deref(), accumulator)?;
            let mut blocks = Vec::new();
            let mut keep = |of: &Option<Observed>, side, wanted: bool| match of.as_ref().filter(|_| wanted) {
                Some(of) => of.tensor.direction(side)?.to_block().map(|block| blocks.push(block)),
                None => Ok(()),
            };
            keep(&x_made, Side::Column, formats.pass == Pass::Trained)?;
            keep(&weight, Side::Row, formats.keeps)?;
            keep(&weight, Side::Column, formats.pass != Pass::Evaluated)?;
            Ok((y, blocks))
        };
        let (y, blocks) = made().map_err(Failed::Product)?;
        Ok((y, blocks, [x_made, weight].map(|of| of.map_or([None; 2], |of| [of.row_amax, of.col_amax]))))
    };
    let (y, blocks, seen) = threads::run(py, work)?.map_err(|failed| failed.raised(py, *watched))?;
    let mut made = vec![shown(py, y, &shape)?];
    for block in blocks {
        made.push(shown_block(py, block)?);
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
    // Where only dx is asked for, there is no column direction of x.
    let weight_like = formats.weight.like(Side::Column)?;
    let x_like = wanted[1].map(|_| formats.input.like(Side::Column)).transpose()?;
    let dy = dy.tensor_ref()?;
    let work = || -> Result<_, Failed> {
        let dy = maker.observe(&dy, &options).map_err(|error| Failed::Slot("grad_output", error))?;
        let made = || -> nvfp4::Result<_> {
            let [_, dgrad, wgrad] = formats.accumulators;
            let dx = wanted[0].map(|precision| {
                let weight = weight_like.in_block(*in_features, out_features, weight)?;
                product(precision, Left::of(&dy, Side::Row)?, weight, None, dgrad)
            });
            let dw = wanted[1].zip(x_like).map(|(precision, x_like)| {
                let x = x_like.in_block(*in_features, tokens, x)?;
                product(precision, Left::of(&dy, Side::Column)?, x, None, wgrad)
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

/// The left operand of a product.
#[derive(Clone, Copy)]
enum Left<'a> {
    Quantized(Operand<'a>),
    Plain(&'a TensorRef<'a>),
}

impl<'a> Left<'a> {
    fn of(made: &'a Observed, side: Side) -> nvfp4::Result<Self> {
        Ok(Left::Quantized(made.tensor.direction(side)?.into()))
    }
}

fn product<'a>(
    precision: Precision,
    left: Left<'a>,
    right: impl Into<Operand<'a>>,
    bias: Option<&[f32]>,
    accumulator: Accumulator,
) -> nvfp4::Result<Elements> {
    fn of<T: Element>(
        left: Left<'_>,
        right: Operand<'_>,
        bias: Option<&[f32]>,
        accumulator: Accumulator,
    ) -> nvfp4::Result<Vec<T>> {
        let product = Product { bias, accumulator, ..Product::default() };
        match left {
            Left::Quantized(left) => nvfp4::matmul(left, right, &product),
            Left::Plain(x) => nvfp4::matmul_plain(x, right, &product),
        }
    }
    let right = right.into();
    Ok(match precision {
        Precision::F32 => Elements::F32(of::<f32>(left, right, bias, accumulator)?),
        Precision::Bf16 => Elements::Bf16(of::<bf16>(left, right, bias, accumulator)?),
        Precision::F16 => Elements::F16(of::<f16>(left, right, bias, accumulator)?),
    })
}

/// A block of bytes as a tensor of torch.
pub fn shown_block(py: Python<'_>, block: Vec<u8>) -> PyResult<Bound<'_, PyAny>> {
    let len = block.len();
    show(py, Lent::owned(block, DataType::U8, &[len]))
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
pub fn bytes(block: &Tensor) -> PyResult<&[u8]> {
    block.slice::<u8>().ok_or_else(|| PyTypeError::new_err("expected a block of bytes on the CPU"))
}

pub fn shown<'py>(py: Python<'py>, elements: Elements, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
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
