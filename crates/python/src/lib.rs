//! NVFP4 in Python. The module `nvfp4._nvfp4`, which the package `nvfp4` presents: parse, call,
//! convert.
//!
//! Read in this order: `dlpack` (memory of other libraries), `place` (where it lies), `array`
//! (arrays in and out), `part` (the arrays of a quantized tensor), `cuda`, `held` (a quantized
//! tensor wherever it lies), `matmul`, `tensor`, `quantizer`, `linear` (the passes of a layer of
//! torch); then `recipe`, `plan`, `delayed`, `convert`, `verify` and `command`. The words of
//! settings are in `words`.

#![deny(unsafe_code)]

mod array;
mod command;
mod convert;
#[cfg(feature = "cuda")]
mod cuda;
mod delayed;
#[allow(unsafe_code)] // memory that other libraries lend us, and ours that we lend them
mod dlpack;
mod error;
mod generator;
mod held;
mod linear;
mod matmul;
mod part;
mod parts;
mod place;
mod plan;
mod quantizer;
mod recipe;
mod role;
mod storage;
mod tensor;
mod threads;
mod verify;
mod words;

/// NVFP4 and FP8 tensors: quantize, decode, multiply and store, exact to the bit.
#[pyo3::pymodule]
mod _nvfp4 {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::convert::convert;
    #[pymodule_export]
    use crate::delayed::Delayed;
    #[pymodule_export]
    use crate::dlpack::Lent;
    #[pymodule_export]
    use crate::generator::Generator;
    #[pymodule_export]
    use crate::linear::{
        backward, backward_groups, dequantize, forward, forward_codes, forward_groups, prepare, quantize, sizes,
    };
    #[pymodule_export]
    use crate::matmul::matmul;
    #[pymodule_export]
    use crate::parts::{extents, layout};
    #[pymodule_export]
    use crate::plan::Plan;
    #[pymodule_export]
    use crate::quantizer::{Quantizer, hadamard_matrix};
    #[pymodule_export]
    use crate::recipe::Recipe;
    #[pymodule_export]
    use crate::role::Role;
    #[pymodule_export]
    use crate::storage::{load, save};
    #[pymodule_export]
    use crate::tensor::{Direction, QuantTensor};
    #[pymodule_export]
    use crate::verify::verify;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::threads::remember();
        module.add("ConversionError", module.py().get_type::<crate::verify::ConversionError>())?;
        module.add("_block_alignment", nvfp4::Direction::BLOCK_ALIGNMENT)?;
        module.add("_hadamard_signs", nvfp4::Signs::FIXED.0)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("cuda", cfg!(feature = "cuda"))
    }
}
