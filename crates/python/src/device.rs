//! Where a tensor lies: the one place that looks at the device of memory that is lent to us, and the tensors that are made from it.

use crate::array::Framework;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::dlpack::{Device, Lent, Tensor};
use crate::error::OrRaise;
use crate::parts::{self, Part};
use crate::threads;
use half::{bf16, f16};
use nvfp4::{Direction, Elements, Precision, QuantTensor, Side};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory that the CPU reads.
    Host,
    /// Memory of a GPU, by its number.
    #[cfg(feature = "cuda")]
    Cuda(i32),
}

impl Place {
    /// The place of a tensor; an error for one that this build cannot compute on.
    pub fn of(tensor: &Tensor) -> PyResult<Place> {
        match tensor.device {
            Device { kind: 1 | 3, .. } => Ok(Place::Host),
            #[cfg(feature = "cuda")]
            Device { kind: 2 | 13, id } => Ok(Place::Cuda(id)),
            #[cfg(not(feature = "cuda"))]
            Device { kind: 2 | 13, .. } => Err(PyValueError::new_err(
                "the tensor is on a CUDA device, which this build does not compute on; move it with .cpu(), or install a \
                 build with the feature `cuda`",
            )),
            Device { kind, id } => Err(PyValueError::new_err(format!(
                "the tensor is on a device that is not known (DLPack's kind {kind}, number {id}); move it to the CPU"
            ))),
        }
    }

    /// An error unless this is the host's memory, which it always is in a build without GPUs.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn host(self, what: &str) -> PyResult<()> {
        match self {
            Place::Host => Ok(()),
            #[cfg(feature = "cuda")]
            Place::Cuda(_) => {
                Err(PyValueError::new_err(format!("{what} is on {self}, the rest on the CPU; move them to one device")))
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("the CPU"),
            #[cfg(feature = "cuda")]
            Place::Cuda(id) => write!(f, "cuda:{id}"),
        }
    }
}

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

    /// An array of a direction, lent out.
    pub fn lend(&self, side: Side, part: Part) -> PyResult<Lent> {
        match self {
            Held::Host(tensor) => parts::lend(tensor, side, part),
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
