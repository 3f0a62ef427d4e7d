//! The passes of a layer of experts on a GPU: each tensor is quantized in one launch, and each
//! product is one call. The CPU computes expert by expert.

#[cfg(feature = "cuda")]
use super::cuda;
use super::formats::Formats;
use super::{Given, precision};
use crate::array::Array;
use crate::place::Place;
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

/// `x·wᵀ + bias` of each expert: y; then blocks of all experts, as `_linear` gives them of one
/// weight. `weights` is the matrix of all of them, or with `codes` the block of its row direction.
/// `bias` has their biases one after the other.
#[pyfunction]
#[pyo3(name = "_linear_groups")]
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward_groups<'py>(
    x: Object<'py>,
    weights: Object<'py>,
    codes: bool,
    bias: Given<'py>,
    formats: &str,
    sizes: Vec<usize>,
    out_features: usize,
) -> PyResult<Vec<Object<'py>>> {
    let tokens = Tokens { formats: Formats::of(formats)?, x: &x, array: Array::of_torch(&x)?, sizes };
    let weights = match codes {
        true => Weights::Codes(&weights),
        false => Weights::Plain(Array::of_torch(&weights)?),
    };
    match tokens.array.place {
        Place::Host => Err(only_on_gpus()),
        #[cfg(feature = "cuda")]
        Place::Cuda(id) => cuda::groups::forward(&tokens, &weights, bias.as_ref(), out_features, id),
    }
}

/// The gradients of a forward pass in training: dx, and dw as a matrix for each expert, those of them
/// that have a type. An expert draws its random numbers two offsets after the one before it.
#[pyfunction]
#[pyo3(name = "_linear_groups_backward")]
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
#[allow(clippy::too_many_arguments)] // they are the operator's
pub fn backward_groups<'py>(
    dy: Object<'py>,
    x: Object<'py>,
    weights: Object<'py>,
    formats: &str,
    sizes: Vec<usize>,
    in_features: usize,
    dx: Given<'py>,
    dw: Given<'py>,
    seed: u64,
    offset: Given<'py>,
) -> PyResult<Vec<Object<'py>>> {
    let tokens = Tokens { formats: Formats::of(formats)?, x: &dy, array: Array::of_torch(&dy)?, sizes };
    let dtype = |dtype: Given<'py>| dtype.map(|dtype| precision(&dtype)).transpose();
    let wanted = Wanted { kept: [&x, &weights], in_features, gradients: [dtype(dx)?, dtype(dw)?], seed, offset };
    match tokens.array.place {
        Place::Host => Err(only_on_gpus()),
        #[cfg(feature = "cuda")]
        Place::Cuda(id) => cuda::groups::backward(&tokens, &wanted, id),
    }
}

fn only_on_gpus() -> PyErr {
    PyValueError::new_err("experts are multiplied together on GPUs alone; multiply one after the other")
}
