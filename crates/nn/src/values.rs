//! Tensors on the CPU: candle's storage as borrowed slices, results as tensors again. `gpu.rs` is
//! its twin; all else in this crate handles tensors and codes as wholes.

use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};
use half::{bf16, f16};
use nvfp4::{
    Accumulator, Direction, Element, Elements, Orientation, PlainDirection, Product, QuantTensor, Side, TensorRef,
};

/// Hands a tensor, of any strides, to `read`.
pub(crate) fn with_values<R>(x: &Tensor, read: impl FnOnce(&TensorRef<'_>) -> nvfp4::Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let (start, shape, strides) = (layout.start_offset(), layout.dims(), layout.stride());
    let cpu = match &*storage {
        Storage::Cpu(cpu) => cpu,
        Storage::Cuda(_) | Storage::Metal(_) => return Err(not_here(x)),
    };
    let tensor = match cpu {
        CpuStorage::F32(values) => TensorRef::strided(&values[start..], shape, strides)?,
        CpuStorage::BF16(values) => TensorRef::strided(&values[start..], shape, strides)?,
        CpuStorage::F16(values) => TensorRef::strided(&values[start..], shape, strides)?,
        _ => return Err(not_here(x)),
    };
    Ok(read(&tensor)?)
}

/// A copy of a result's storage, for the node of candle's graph that stands for it.
pub(crate) fn stored(result: &Tensor) -> candle_core::Result<(Storage, Shape)> {
    let result = result.contiguous()?;
    let (storage, layout) = result.storage_and_layout();
    if layout.start_offset() == 0 {
        return Ok((storage.try_clone(layout)?, layout.shape().clone()));
    }
    // Alone, what stands before it would come along.
    drop(storage);
    stored(&result.copy()?)
}

/// One operand of a product, with rows along the sum: a matrix as it is, or one direction of codes.
pub(crate) enum Operand<C> {
    Plain(Tensor),
    Codes(C, Side),
}

impl<C> Operand<C> {
    /// The same operand, with its codes seen by `f`.
    pub fn map<'a, D>(&'a self, f: impl FnOnce(&'a C) -> Result<D>) -> Result<Operand<D>> {
        Ok(match self {
            Operand::Plain(x) => Operand::Plain(x.clone()),
            Operand::Codes(codes, side) => Operand::Codes(f(codes)?, *side),
        })
    }
}

type CpuOperand<'a> = Operand<&'a QuantTensor>;

/// `a · bᵀ (+ c)` of operands of which one is codes, in the type asked for.
pub(crate) fn multiply(
    a: &CpuOperand<'_>,
    b: &CpuOperand<'_>,
    c: Option<&Tensor>,
    accumulator: Accumulator,
    dtype: DType,
) -> Result<Tensor> {
    match dtype {
        DType::F32 => multiply_as::<f32>(a, b, c, accumulator),
        DType::BF16 => multiply_as::<bf16>(a, b, c, accumulator),
        DType::F16 => multiply_as::<f16>(a, b, c, accumulator),
        other => Err(no_codes_of(other)),
    }
}

fn multiply_as<T: Number>(
    a: &CpuOperand<'_>,
    b: &CpuOperand<'_>,
    c: Option<&Tensor>,
    accumulator: Accumulator,
) -> Result<Tensor> {
    let (a, b) = (Held::new(a)?, Held::new(b)?);
    let (a, b) = (a.get()?, b.get()?);
    let product = |add| Product { add, accumulator, ..Product::default() };
    let y = match c {
        None => nvfp4::matmul::<T>(a, b, &product(None))?,
        Some(c) => {
            let c = c.flatten_all()?.to_vec1::<T>()?;
            nvfp4::matmul::<T>(a, b, &product(Some((&c, 1.0))))?
        }
    };
    Ok(Tensor::from_vec(y, (a.rows(), b.rows()), &Device::Cpu)?)
}

/// A matrix as it is, for a product with codes.
fn direction(x: &Tensor) -> Result<Direction> {
    let ((rows, cols), flat) = (x.dims2()?, x.flatten_all()?);
    let elements = match x.dtype() {
        DType::F32 => Elements::F32(flat.to_vec1()?),
        DType::BF16 => Elements::Bf16(flat.to_vec1()?),
        DType::F16 => Elements::F16(flat.to_vec1()?),
        other => return Err(no_codes_of(other)),
    };
    Ok(PlainDirection::from_parts(rows, cols, elements, Orientation::RowMajor)?.into())
}

/// An operand of a product of codes.
enum Held<'a> {
    Codes(&'a QuantTensor, Side),
    Plain(Direction),
}

impl<'a> Held<'a> {
    fn new(operand: &CpuOperand<'a>) -> Result<Self> {
        Ok(match operand {
            Operand::Codes(codes, side) => Held::Codes(codes, *side),
            Operand::Plain(x) => Held::Plain(direction(x)?),
        })
    }

    fn get(&self) -> Result<&Direction> {
        Ok(match self {
            Held::Codes(codes, side) => codes.direction(*side)?,
            Held::Plain(direction) => direction,
        })
    }
}

/// What a direction decodes to: its matrix, in the type asked for.
pub(crate) fn decoded(direction: &Direction, dtype: DType) -> Result<Tensor> {
    let (shape, on) = ((direction.rows(), direction.cols()), &Device::Cpu);
    Ok(match dtype {
        DType::F32 => Tensor::from_vec(direction.dequantize::<f32>()?, shape, on)?,
        DType::BF16 => Tensor::from_vec(direction.dequantize::<bf16>()?, shape, on)?,
        DType::F16 => Tensor::from_vec(direction.dequantize::<f16>()?, shape, on)?,
        other => return Err(no_codes_of(other)),
    })
}

/// Where the first value lies that is NaN or infinite, and the value.
pub(crate) fn first_not_finite(x: &Tensor) -> Result<Option<(Vec<usize>, f32)>> {
    match x.dtype() {
        // Codes are never made of these.
        DType::F64 => {
            let at = x.flatten_all()?.to_vec1::<f64>()?.iter().position(|x| !x.is_finite());
            Ok(at.map(|at| (vec![at], f32::NAN)))
        }
        _ => with_values(x, |x| Ok(x.first_not_finite())),
    }
}

/// Types that both libraries know.
trait Number: Element + candle_core::WithDType {}

impl Number for f32 {}
impl Number for bf16 {}
impl Number for f16 {}

pub(crate) fn no_codes_of(dtype: DType) -> Error {
    let message = format!(
        "tensors of type {dtype:?} cannot be quantized: use F32, BF16 or F16, or a recipe that leaves them alone"
    );
    Error::Candle(candle_core::Error::Msg(message))
}

fn not_here(x: &Tensor) -> Error {
    match x.device() {
        Device::Cpu => no_codes_of(x.dtype()),
        _ => Error::Candle(candle_core::Error::Msg("modules run on the CPU in this build".to_string())),
    }
}
