//! All experts of a layer at once.

use super::{Blocks, Object, empty, memory_of, misaligned, randomness, same_gpu};
use crate::array::Array;
use crate::cuda::{Bias, gpu};
use crate::dlpack::{DataType, Tensor};
use crate::error::OrRaise;
use crate::linear::formats::{Formats, Slot};
use crate::linear::groups::{Tokens, Wanted, Weights};
use half::{bf16, f16};
use nvfp4::cuda::{Gpu, GroupedTensor, Groups, Options, Plain, Product, Values};
use nvfp4::{Accumulator, Directions, Element, Finite, Precision, Side};
use pyo3::prelude::*;
use std::sync::Arc;

/// A quantized tensor in groups, and the direction that a product reads.
type Factor<'a> = (&'a GroupedTensor, Side);

pub fn forward<'py>(
    tokens: &Tokens<'_, 'py>,
    weights: &Weights<'_, 'py>,
    bias: Option<&Object<'py>>,
    out_features: usize,
    id: i32,
) -> PyResult<Vec<Object<'py>>> {
    let Tokens { formats, x, array, sizes } = tokens;
    let (py, cols) = (x.py(), array.shape()[1]);
    let blocks = Blocks::beside(x);
    let mut gpu = gpu(py, id)?.with_kept(Directions::Column, blocks.clone());
    let (groups, each) = (gpu.groups(sizes).or_raise()?, equal(&gpu, sizes, out_features)?);
    let x_made = quantize(&gpu, array, &formats.input, &groups, None)?;
    let weights = match weights {
        Weights::Plain(weights) => {
            same_gpu("weight", weights.place, id)?;
            if formats.keeps {
                gpu.keep(Directions::Both);
            }
            quantize(&gpu, weights, &formats.weight, &each, None)?
        }
        Weights::Codes(block) => over(&formats.weight, Side::Row, &each, cols, block, id)?,
    };
    let y = empty(x, vec![array.shape()[0], out_features], array.precision())?;
    let bias = bias.map(|bias| Bias::of_torch(&gpu, id, bias)).transpose()?;
    let bias = bias.as_ref().map(Bias::values).transpose()?;
    let [accumulator, ..] = formats.accumulators;
    product(&gpu, [(&x_made, Side::Row), (&weights, Side::Row)], bias, accumulator, &y, array.precision())?;
    let mut made = vec![y];
    made.extend(blocks.into_objects(py));
    Ok(made)
}

pub fn backward<'py>(tokens: &Tokens<'_, 'py>, wanted: &Wanted<'_, 'py>, id: i32) -> PyResult<Vec<Object<'py>>> {
    let Tokens { formats, x: dy, array, sizes } = tokens;
    let Wanted { kept: [x, weights], in_features, gradients, seed, offset } = wanted;
    let (gpu, out_features) = (gpu(dy.py(), id)?, array.shape()[1]);
    let (groups, each) = (gpu.groups(sizes).or_raise()?, equal(&gpu, sizes, out_features)?);
    let offset = offset.as_ref().map(|offset| super::one(offset, DataType::I64, "offset", id)).transpose()?;
    let drawn = offset.as_ref().map(|offset| (*seed, offset));
    let quantized = quantize(&gpu, array, &formats.grad_output, &groups, drawn)?;
    let Formats { accumulators: [_, dgrad, wgrad], .. } = **formats;
    let mut made = Vec::new();
    if let Some(precision) = gradients[0] {
        let weights = over(&formats.weight, Side::Column, &each, *in_features, weights, id)?;
        let dx = empty(dy, vec![array.shape()[0], *in_features], precision)?;
        product(&gpu, [(&quantized, Side::Row), (&weights, Side::Column)], None, dgrad, &dx, precision)?;
        made.push(dx);
    }
    if let Some(precision) = gradients[1] {
        let x = over(&formats.input, Side::Column, &groups, *in_features, x, id)?;
        let dw = empty(dy, vec![sizes.len(), out_features, *in_features], precision)?;
        product(&gpu, [(&quantized, Side::Column), (&x, Side::Column)], None, wgrad, &dw, precision)?;
        made.push(dw);
    }
    Ok(made)
}

/// The groups of the weights.
fn equal(gpu: &Gpu, sizes: &[usize], out_features: usize) -> PyResult<Arc<Groups>> {
    gpu.groups(&vec![out_features; sizes.len()]).or_raise()
}

fn quantize(
    gpu: &Gpu,
    array: &Array,
    slot: &Slot,
    groups: &Arc<Groups>,
    drawn: Option<(u64, &Tensor)>,
) -> PyResult<GroupedTensor> {
    let options = Options { randomness: randomness(drawn)?, ..Options::default() };
    let x = array.input().ok_or_else(misaligned)?;
    let maker = slot.maker([None, None], Finite::Keep)?;
    Ok(gpu.quantize_groups(&maker, &x, groups, &options).or_raise()?.tensor)
}

/// A direction of all experts over its block.
fn over(
    slot: &Slot,
    side: Side,
    groups: &Arc<Groups>,
    cols: usize,
    block: &Object<'_>,
    id: i32,
) -> PyResult<GroupedTensor> {
    GroupedTensor::over_block(slot.like(side)?, side, groups, cols, memory_of(block, id)?).or_raise()
}

fn product(
    gpu: &Gpu,
    operands: [Factor<'_>; 2],
    bias: Option<Values<'_>>,
    accumulator: Accumulator,
    out: &Object<'_>,
    precision: Precision,
) -> PyResult<()> {
    fn into<T: Element + Plain>(
        gpu: &Gpu,
        [a, b]: [Factor<'_>; 2],
        bias: Option<Values<'_>>,
        accumulator: Accumulator,
        out: &Object<'_>,
    ) -> PyResult<()> {
        let mut out = Tensor::borrowed(out)?;
        let out = out.device_slice_mut::<T>().expect("torch aligns what it allocates");
        gpu.matmul_groups(a, b, &Product { bias, accumulator, ..Product::default() }, out).or_raise()
    }
    match precision {
        Precision::F32 => into::<f32>(gpu, operands, bias, accumulator, out),
        Precision::Bf16 => into::<bf16>(gpu, operands, bias, accumulator, out),
        Precision::F16 => into::<f16>(gpu, operands, bias, accumulator, out),
    }
}
