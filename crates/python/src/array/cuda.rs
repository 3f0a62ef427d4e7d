//! Arrays of torch on a GPU, as kernels take them.

use super::{Array, Framework, contiguous};
use crate::dlpack::Tensor;
use nvfp4::Precision;
use nvfp4::cuda::{Input, Values};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// An error for arrays of other libraries than torch: their work is queued on streams that ours
/// does not wait for.
pub fn check_torch(x: &Bound<'_, PyAny>) -> PyResult<()> {
    Framework::of(x)?.check_torch()
}

impl Framework {
    fn check_torch(self) -> PyResult<()> {
        match self {
            Framework::Torch => Ok(()),
            Framework::Numpy => Err(PyTypeError::new_err(
                "expected torch's tensors on a GPU; torch.from_dlpack(x) makes one of another library's array, without a copy, and waits for its stream",
            )),
        }
    }
}

impl Array {
    /// As it was lent.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// A matrix as kernels take it: rows are contiguous and evenly spaced.
    pub fn input(&self) -> Option<Input<'_>> {
        let tensor = &self.tensor;
        let (&cols, leading) = tensor.shape.split_last().unwrap_or((&1, &[]));
        let rows = leading.iter().product();
        let strides: Vec<usize> = tensor.strides.iter().map(|&s| usize::try_from(s)).collect::<Result<_, _>>().ok()?;
        let stride = nvfp4::row_stride(&tensor.shape, &strides)?;
        Input::strided(self.device_values()?, rows, cols, stride).ok()
    }

    /// The elements where they lie.
    pub fn device_values(&self) -> Option<Values<'_>> {
        let tensor = &self.tensor;
        Some(match self.precision {
            Precision::F32 => Values::F32(tensor.device_slice()?),
            Precision::Bf16 => Values::Bf16(tensor.device_slice()?),
            Precision::F16 => Values::F16(tensor.device_slice()?),
        })
    }

    /// An array of torch whose rows are contiguous and evenly spaced: itself, or a copy.
    pub(super) fn with_rows(self, x: &Bound<'_, PyAny>) -> PyResult<Array> {
        self.framework.check_torch()?;
        match self.input() {
            Some(_) => Ok(self),
            None => Ok(Array { tensor: Tensor::borrowed(&contiguous(x)?)?, ..self }),
        }
    }
}
