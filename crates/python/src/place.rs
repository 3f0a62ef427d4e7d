//! Where memory that is lent to us lies: the one place that looks at its device.

use crate::dlpack::{Device, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::fmt;

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
