//! Quantized tensors in files.

use crate::array::Framework;
use crate::error::OrRaise;
use crate::tensor::QuantTensor;
use crate::threads;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Writes quantized tensors, by name, to a safetensors file.
#[pyfunction]
pub fn save(py: Python<'_>, path: PathBuf, tensors: BTreeMap<String, Py<QuantTensor>>) -> PyResult<()> {
    let tensors: Vec<(String, Arc<nvfp4::QuantTensor>)> = tensors
        .into_iter()
        .map(|(name, tensor)| Ok((name, Arc::clone(tensor.get().held.to_host(py)?.host()?))))
        .collect::<PyResult<_>>()?;
    threads::run(py, || nvfp4::save(&path, tensors.iter().map(|(name, tensor)| (name.as_str(), &**tensor))))?.or_raise()
}

/// Reads the quantized tensors of a file that `save` wrote, with arrays of numpy.
#[pyfunction]
pub fn load(py: Python<'_>, path: PathBuf) -> PyResult<BTreeMap<String, QuantTensor>> {
    let tensors = threads::run(py, || nvfp4::load(&path))?.or_raise()?;
    Ok(tensors.into_iter().map(|(name, tensor)| (name, QuantTensor::on_host(tensor, Framework::Numpy))).collect())
}
