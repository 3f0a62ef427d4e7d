//! A quantized tensor, wherever it lies: the one place that chooses between the code for the CPU
//! and the code for GPUs.

use crate::array::Framework;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::dlpack::Lent;
use crate::error::OrRaise;
use crate::part::{self, Part};
use crate::place::Place;
use crate::threads;
use half::{bf16, f16};
use nvfp4::{Direction, Elements, Precision, QuantTensor, Side};
#[cfg(feature = "cuda")]
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::borrow::Cow;
use std::sync::Arc;

/// A quantized tensor, wherever it lies.
#[derive(Clone)]
pub enum Held {
    /// In memory that the CPU reads.
    Host(Arc<QuantTensor>),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Held>),
}

impl Held {
    /// Where it lies.
    pub fn place(&self) -> Place {
        match self {
            Held::Host(_) => Place::Host,
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => Place::Cuda(held.id),
        }
    }

    /// The shape of the tensor that was quantized.
    pub fn shape(&self) -> &[usize] {
        match self {
            Held::Host(tensor) => tensor.shape(),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => held.tensor.shape(),
        }
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> usize {
        match self {
            Held::Host(tensor) => tensor.byte_len(),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => held.tensor.byte_len(),
        }
    }

    /// Rows and columns of a direction; an error that says that it is missing.
    pub fn size(&self, side: Side) -> PyResult<(usize, usize)> {
        match self {
            Held::Host(tensor) => tensor.direction(side).map(|d| (d.rows(), d.cols())),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => held.tensor.direction(side).map(|d| (d.rows(), d.cols())),
        }
        .or_raise()
    }

    /// A direction with all that can be said about it but, on a GPU, its bytes.
    pub fn twin(&self, side: Side) -> PyResult<Cow<'_, Direction>> {
        match self {
            Held::Host(tensor) => Ok(Cow::Borrowed(tensor.direction(side).or_raise()?)),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => Ok(Cow::Owned(cuda::twin(held.tensor.direction(side).or_raise()?)?)),
        }
    }

    /// A direction as it is on a GPU.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(&self, side: Side) -> PyResult<&nvfp4::cuda::Direction> {
        match self {
            Held::Host(_) => Err(PyValueError::new_err("expected a tensor on a GPU")),
            Held::Cuda(held) => held.tensor.direction(side).or_raise(),
        }
    }

    /// An array of a direction, lent out.
    pub fn lend(&self, side: Side, part: Part) -> PyResult<Lent> {
        match self {
            Held::Host(tensor) => part::lend(tensor, side, part),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => cuda::lend(held, side, part),
        }
    }

    /// The decoded values of a direction.
    pub fn dequantize<'py>(
        &self,
        py: Python<'py>,
        side: Side,
        precision: Precision,
        shape: &[usize],
        framework: Framework,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Held::Host(tensor) => {
                let direction = tensor.direction(side).or_raise()?;
                let values = threads::run(py, || match precision {
                    Precision::F32 => direction.dequantize::<f32>().map(Elements::F32),
                    Precision::Bf16 => direction.dequantize::<bf16>().map(Elements::Bf16),
                    Precision::F16 => direction.dequantize::<f16>().map(Elements::F16),
                })?;
                framework.owned(py, values.or_raise()?, shape)
            }
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => {
                cuda::dequantize(py, held.tensor.direction(side).or_raise()?, held.id, precision, shape)
            }
        }
    }

    /// The tensor in the host's memory, for what only works there.
    pub fn host(&self) -> PyResult<&Arc<QuantTensor>> {
        match self {
            Held::Host(tensor) => Ok(tensor),
            #[cfg(feature = "cuda")]
            Held::Cuda(_) => {
                Err(PyValueError::new_err("the tensor is on a GPU: `.cpu()` gives a copy that this works with"))
            }
        }
    }

    /// The same tensor in other memory of the same device.
    pub fn copied(&self, py: Python<'_>) -> PyResult<Held> {
        match self {
            Held::Host(tensor) => {
                // Through its bytes: a clone shares the numbers of what is not quantized.
                let copied = || nvfp4::from_bytes(&nvfp4::to_bytes(tensor)?);
                Ok(Held::Host(Arc::new(threads::run(py, copied)?.or_raise()?)))
            }
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => Ok(Held::Cuda(Arc::new(cuda::copied(py, held)?))),
        }
    }

    /// The tensor in the host's memory, copied there if it has to be.
    pub fn to_host(&self, py: Python<'_>) -> PyResult<Held> {
        let _ = py;
        match self {
            Held::Host(tensor) => Ok(Held::Host(Arc::clone(tensor))),
            #[cfg(feature = "cuda")]
            Held::Cuda(held) => Ok(Held::Host(Arc::new(cuda::to_host(py, held)?))),
        }
    }
}
