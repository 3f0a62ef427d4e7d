//! What a recipe is asked about.

use nvfp4_recipe::{self as recipe, Slot};
use pyo3::prelude::*;

/// One tensor of one module: what a recipe's function is asked about.
#[pyclass(frozen, module = "nvfp4")]
pub struct Role(recipe::Role);

impl Role {
    /// For a role of the library.
    pub fn new(role: recipe::Role) -> Self {
        Role(role)
    }

    /// The role of the library.
    pub fn inner(&self) -> &recipe::Role {
        &self.0
    }
}

#[pymethods]
impl Role {
    /// The module's path.
    #[getter]
    fn path(&self) -> &str {
        self.0.path().as_str()
    }

    /// The tensor: 'input', 'weight', 'grad_output', … or of attention 'qkv', 's', …
    #[getter]
    fn slot(&self) -> String {
        match self.0.slot() {
            Slot::Linear(slot) | Slot::Grouped { slot, .. } => slot.name().to_string(),
            Slot::Attention(slot) => slot.name().to_string(),
            slot @ Slot::Extension(_) => slot.to_string(),
        }
    }

    /// Which expert of a grouped layer, or None.
    #[getter]
    fn expert(&self) -> Option<u32> {
        match self.0.slot() {
            Slot::Grouped { expert, .. } => Some(*expert),
            _ => None,
        }
    }

    /// The kind of module: 'linear', 'grouped', 'attention' or 'extension'.
    #[getter]
    fn module(&self) -> &'static str {
        match self.0.slot() {
            Slot::Linear(_) => "linear",
            Slot::Grouped { .. } => "grouped",
            Slot::Attention(_) => "attention",
            Slot::Extension(_) => "extension",
        }
    }

    /// The pass that makes the tensor, as rule files name it: 'forward' or 'backward'.
    #[getter]
    fn pass_(&self) -> String {
        self.0.pass().to_string()
    }

    /// The older name of `pass_`. Elsewhere a direction is 'row' or 'column'.
    #[getter]
    fn direction(&self) -> String {
        self.pass_()
    }

    /// TransformerEngine's words for it: module_type, tensor_type and name.
    #[getter]
    fn legacy(&self) -> (String, String, String) {
        let legacy = self.0.legacy();
        (legacy.module_type, legacy.tensor_type, legacy.name)
    }

    fn __repr__(&self) -> String {
        format!("Role({})", self.0)
    }
}
