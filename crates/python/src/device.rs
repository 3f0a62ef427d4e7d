//! Where a tensor lies: the one place that looks at the device of memory that is lent to us.

use crate::dlpack::{Device, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory that the CPU reads.
    Host,
}

impl Place {
    /// The place of a tensor; an error for one that this build cannot compute on.
    pub fn of(tensor: &Tensor) -> PyResult<Place> {
        match tensor.device {
            Device { kind: 1 | 3, .. } => Ok(Place::Host),
            Device { kind: 2 | 13, .. } => Err(PyValueError::new_err(
                "the tensor is on a CUDA device, which this build does not compute on; move it with .cpu()",
            )),
            Device { kind, id } => Err(PyValueError::new_err(format!(
                "the tensor is on a device that is not known (DLPack's kind {kind}, number {id}); move it to the CPU"
            ))),
        }
    }
}
