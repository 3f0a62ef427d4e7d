//! What the passes of a layer of experts are given. On a GPU each tensor is quantized in one launch,
//! and each product is one call; the CPU computes expert by expert.

use super::Given;
use super::formats::Formats;
use crate::array::Array;
use nvfp4::Precision;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

type Object<'py> = Bound<'py, PyAny>;

/// The tokens of all experts, one expert after the other, or their gradients.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CPU takes none
pub struct Tokens<'a, 'py> {
    pub formats: Arc<Formats>,
    pub x: &'a Object<'py>,
    pub array: Array,
    /// How many of them are each expert's.
    pub sizes: Vec<usize>,
}

impl<'a, 'py> Tokens<'a, 'py> {
    pub fn of(x: &'a Object<'py>, formats: &str, sizes: Vec<usize>) -> PyResult<Self> {
        let (formats, array) = (Formats::of(formats)?, Array::of_torch(x)?);
        match array.shape().len() {
            2 => Ok(Tokens { formats, x, array, sizes }),
            dimensions => Err(PyValueError::new_err(format!(
                "expected the tokens of all experts as a matrix, got {dimensions} dimensions"
            ))),
        }
    }
}

/// The weights of all experts, one after the other.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub enum Weights<'a, 'py> {
    /// As they are.
    Plain(Array),
    /// The block of their row direction.
    Codes(&'a Object<'py>),
}

/// What a backward pass asks for.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Wanted<'a, 'py> {
    /// The blocks of x and of the weights.
    pub kept: [&'a Object<'py>; 2],
    pub in_features: usize,
    /// The types of dx and dw, if they are wanted.
    pub gradients: [Option<Precision>; 2],
    pub seed: u64,
    pub offset: Given<'py>,
}
