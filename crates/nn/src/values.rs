//! The one place where a tensor's numbers are touched: candle's storage as borrowed slices, results as tensors again.
//!
//! All else in this crate handles tensors and codes as wholes. Another device is another arm of [`with_values`] and of [`stored`].

use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};
use half::{bf16, f16};
use nvfp4::{Direction, Element, Elements, Lies, PlainDirection, Product, TensorRef};

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
pub(crate) fn stored(result: &Tensor) -> candle_core::Result<(CpuStorage, Shape)> {
    let result = result.contiguous()?;
    let (storage, layout) = result.storage_and_layout();
    let (start, end) = (layout.start_offset(), layout.start_offset() + layout.shape().elem_count());
    let Storage::Cpu(cpu) = &*storage else { return Err(not_here(&result).into()) };
    let copy = match cpu {
        CpuStorage::F32(values) => CpuStorage::F32(values[start..end].to_vec()),
        CpuStorage::F64(values) => CpuStorage::F64(values[start..end].to_vec()),
        CpuStorage::BF16(values) => CpuStorage::BF16(values[start..end].to_vec()),
        CpuStorage::F16(values) => CpuStorage::F16(values[start..end].to_vec()),
        _ => return Err(not_here(&result).into()),
    };
    Ok((copy, layout.shape().clone()))
}

/// `a · bᵀ (+ c)`, in the type asked for.
pub(crate) fn multiply(a: &Direction, b: &Direction, c: Option<&Tensor>, dtype: DType, on: &Device) -> Result<Tensor> {
    match dtype {
        DType::F32 => multiply_as::<f32>(a, b, c, on),
        DType::BF16 => multiply_as::<bf16>(a, b, c, on),
        DType::F16 => multiply_as::<f16>(a, b, c, on),
        other => Err(no_codes_of(other)),
    }
}

fn multiply_as<T: Number>(a: &Direction, b: &Direction, c: Option<&Tensor>, on: &Device) -> Result<Tensor> {
    let shape = (a.rows(), b.rows());
    let product = |add| Product { add, ..Product::default() };
    let y = match c {
        None => nvfp4::matmul::<T>(a, b, &product(None))?,
        Some(c) => {
            let c = c.flatten_all()?.to_vec1::<T>()?;
            nvfp4::matmul::<T>(a, b, &product(Some((&c, 1.0))))?
        }
    };
    Ok(Tensor::from_vec(y, shape, on)?)
}

/// A matrix as it is, for a product with codes.
pub(crate) fn direction(x: &Tensor) -> Result<Direction> {
    let ((rows, cols), flat) = (x.dims2()?, x.flatten_all()?);
    let elements = match x.dtype() {
        DType::F32 => Elements::F32(flat.to_vec1()?),
        DType::BF16 => Elements::Bf16(flat.to_vec1()?),
        DType::F16 => Elements::F16(flat.to_vec1()?),
        other => return Err(no_codes_of(other)),
    };
    Ok(PlainDirection::from_parts(rows, cols, elements, Lies::Upright)?.into())
}

/// What a direction decodes to: its matrix, in the type asked for.
pub(crate) fn decoded(direction: &Direction, dtype: DType, on: &Device) -> Result<Tensor> {
    let shape = (direction.rows(), direction.cols());
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
        // Codes are never made of these, and candle has them on the CPU alone.
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

fn no_codes_of(dtype: DType) -> Error {
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
