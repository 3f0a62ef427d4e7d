//! The passes of a linear layer, each in one call: what `torch.ops.nvfp4.linear` and
//! `torch.ops.nvfp4.linear_backward` do.
//!
//! | product | reads | and |
//! |---|---|---|
//! | forward, `y = x·wᵀ` | x, row | w, row |
//! | `dx = dy·w` | dy, row | w, column |
//! | `dw = dyᵀ·x` | dy, column | x, column |
//!
//! What the backward pass reads of x and w is kept as one block of bytes each. A weight may also come
//! as the block of its row direction: one that was quantized before, or that exists as codes alone.

mod blocks;
#[cfg(feature = "cuda")]
mod cuda;
mod formats;
mod groups;
mod host;

use crate::array::Array;
use crate::error::OrRaise;
use crate::parts::flat;
use crate::place::Place;
use crate::words::{self, PRECISIONS};
pub use blocks::{dequantize, prepare, quantize};
use formats::{Formats, Pass};
use groups::{Tokens, Wanted, Weights};
use nvfp4::{Finite, Precision, Side};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// An optional tensor of torch.
type Given<'py> = Option<Bound<'py, PyAny>>;

/// What a forward pass is given.
struct Forward<'a, 'py> {
    formats: &'a Formats,
    x: (&'a Bound<'py, PyAny>, Array),
    weight: Weight<'a, 'py>,
    bias: Option<&'a Bound<'py, PyAny>>,
    /// The amax of x, if it is known before.
    amax: Option<&'a Bound<'py, PyAny>>,
    scales: Scales<'a, 'py, 4>,
    watched: Watched<'a>,
}

/// The weight of a forward pass.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CPU needs less of it
enum Weight<'a, 'py> {
    /// As it is.
    Plain(&'a Bound<'py, PyAny>, Array),
    /// The block of its row direction; and its block in the order of tensor cores or of this CPU, if there is one.
    Codes { block: &'a Bound<'py, PyAny>, prepared: Option<&'a Bound<'py, PyAny>>, out_features: usize },
}

impl Weight<'_, '_> {
    fn out_features(&self) -> usize {
        match self {
            Weight::Plain(_, array) => flat(array.shape()).0,
            Weight::Codes { out_features, .. } => *out_features,
        }
    }
}

impl<'py> Forward<'_, 'py> {
    /// Runs it where x lies.
    fn run(&self) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let py = self.x.0.py();
        match self.x.1.place {
            Place::Host => host::forward(py, self),
            #[cfg(feature = "cuda")]
            Place::Cuda(id) => cuda::forward(py, self, id),
        }
    }
}

/// What a backward pass is given.
struct Backward<'a, 'py> {
    formats: &'a Formats,
    dy: (&'a Bound<'py, PyAny>, Array),
    /// The blocks of x and w.
    kept: [&'a Bound<'py, PyAny>; 2],
    in_features: usize,
    /// The types of dx and dw, if they are wanted.
    wanted: [Option<Precision>; 2],
    seed: u64,
    offset: Option<&'a Bound<'py, PyAny>>,
    scales: Scales<'a, 'py, 2>,
    watched: Watched<'a>,
}

/// The scales of delayed scaling: for each tensor that of both directions or of the row direction,
/// then that of the column direction.
struct Scales<'a, 'py, const N: usize>([Option<&'a Bound<'py, PyAny>>; N]);

impl<'a, 'py, const N: usize> Scales<'a, 'py, N> {
    fn of(given: &'a [Given<'py>]) -> PyResult<Self> {
        match given.len() {
            0 => Ok(Scales([None; N])),
            len if len == N => Ok(Scales(std::array::from_fn(|at| given[at].as_ref()))),
            len => Err(PyValueError::new_err(format!("scales: expected {N} or none, got {len}"))),
        }
    }
}

/// The name of tensors that must be finite, with `{}` for the slot; nothing if they need not be.
#[derive(Clone, Copy)]
struct Watched<'a>(&'a str);

impl Watched<'_> {
    fn finite(self) -> Finite {
        if self.0.is_empty() { Finite::Keep } else { Finite::Refuse }
    }

    /// The exception about a tensor, which says its name if it must be finite.
    fn name(self, slot: &str, py: Python<'_>, error: PyErr) -> PyErr {
        match self.finite() {
            Finite::Refuse if error.is_instance_of::<PyValueError>(py) => {
                PyValueError::new_err(format!("{}: {}", self.0.replace("{}", slot), error.value(py)))
            }
            _ => error,
        }
    }
}

/// `x·wᵀ + bias`: y; the column direction of x if the weight's gradient is to come; the row direction
/// of the weight if it is to be kept; its column direction if a backward pass is to come, each a
/// block of bytes; the amax that was seen for each scale that is given; and if tensors must be
/// finite, the flags of x and the weight, -1 where nothing was found.
#[pyfunction]
#[pyo3(name = "_linear")]
pub fn forward<'py>(
    x: Bound<'py, PyAny>,
    weight: Bound<'py, PyAny>,
    bias: Given<'py>,
    formats: &str,
    scales: Vec<Given<'py>>,
    watched: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let call = Forward {
        formats: &*Formats::of(formats)?,
        x: (&x, Array::of_torch(&x)?),
        weight: Weight::Plain(&weight, Array::of_torch(&weight)?),
        bias: bias.as_ref(),
        amax: None,
        scales: Scales::of(&scales)?,
        watched: Watched(watched),
    };
    call.run()
}

/// The same with a weight that is there as the block of its row direction: y, then what of the above
/// is x's. `prepared` is the weight's block as `_prepare_block` gave it, `amax` that of x where it is
/// known before.
#[pyfunction]
#[pyo3(name = "_linear_codes")]
#[allow(clippy::too_many_arguments)] // they are the operator's
pub fn forward_codes<'py>(
    x: Bound<'py, PyAny>,
    weight: Bound<'py, PyAny>,
    prepared: Given<'py>,
    bias: Given<'py>,
    formats: &str,
    out_features: usize,
    amax: Given<'py>,
    scales: Vec<Given<'py>>,
    watched: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let call = Forward {
        formats: &*Formats::of(formats)?,
        x: (&x, Array::of_torch(&x)?),
        weight: Weight::Codes { block: &weight, prepared: prepared.as_ref(), out_features },
        bias: bias.as_ref(),
        amax: amax.as_ref(),
        scales: Scales::of(&scales)?,
        watched: Watched(watched),
    };
    call.run()
}

/// The gradients of a forward pass in training: dx and dw, those of them that have a type; then the
/// amaxes and the flag of dy, as the forward pass gives them.
#[pyfunction]
#[pyo3(name = "_linear_backward")]
#[allow(clippy::too_many_arguments)] // they are the operator's
pub fn backward<'py>(
    dy: Bound<'py, PyAny>,
    x: Bound<'py, PyAny>,
    weight: Bound<'py, PyAny>,
    formats: &str,
    in_features: usize,
    dx: Given<'py>,
    dw: Given<'py>,
    seed: u64,
    offset: Given<'py>,
    scales: Vec<Given<'py>>,
    watched: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let precision = |dtype: Given<'py>| dtype.map(|dtype| precision(&dtype)).transpose();
    let call = Backward {
        formats: &*Formats::of(formats)?,
        dy: (&dy, Array::of_torch(&dy)?),
        kept: [&x, &weight],
        in_features,
        wanted: [precision(dx)?, precision(dw)?],
        seed,
        offset: offset.as_ref(),
        scales: Scales::of(&scales)?,
        watched: Watched(watched),
    };
    match call.dy.1.place {
        Place::Host => host::backward(dy.py(), &call),
        #[cfg(feature = "cuda")]
        Place::Cuda(id) => cuda::backward(dy.py(), &call, id),
    }
}

/// `x·wᵀ + bias` of each expert: y; then blocks of all experts, as `_linear` gives them of one
/// weight. `weights` is the matrix of all of them, or with `codes` the block of its row direction.
/// `bias` has their biases one after the other.
#[pyfunction]
#[pyo3(name = "_linear_groups")]
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward_groups<'py>(
    x: Bound<'py, PyAny>,
    weights: Bound<'py, PyAny>,
    codes: bool,
    bias: Given<'py>,
    formats: &str,
    sizes: Vec<usize>,
    out_features: usize,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let tokens = Tokens::of(&x, formats, sizes)?;
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
    dy: Bound<'py, PyAny>,
    x: Bound<'py, PyAny>,
    weights: Bound<'py, PyAny>,
    formats: &str,
    sizes: Vec<usize>,
    in_features: usize,
    dx: Given<'py>,
    dw: Given<'py>,
    seed: u64,
    offset: Given<'py>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let tokens = Tokens::of(&dy, formats, sizes)?;
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

/// Bytes of the blocks that a forward pass gives: of x's column direction, of the weight's row and
/// column direction; none for those that it does not give.
#[pyfunction]
#[pyo3(name = "_linear_blocks")]
pub fn sizes(
    formats: &str,
    tokens: usize,
    in_features: usize,
    out_features: usize,
) -> PyResult<(Option<usize>, Option<usize>, Option<usize>)> {
    let formats = Formats::of(formats)?;
    let Formats { input, weight, pass, keeps, .. } = &*formats;
    let len = |given: bool, slot: &formats::Slot, side, rows, cols| match given {
        true => slot.like(side)?.block_len(rows, cols).or_raise().map(Some),
        false => Ok(None),
    };
    Ok((
        len(*pass == Pass::Trained, input, Side::Column, in_features, tokens)?,
        len(*keeps, weight, Side::Row, out_features, in_features)?,
        len(*pass != Pass::Evaluated, weight, Side::Column, in_features, out_features)?,
    ))
}

/// A `torch.dtype`.
fn precision(dtype: &Bound<'_, PyAny>) -> PyResult<Precision> {
    let text = dtype.str()?;
    let text = text.to_str()?;
    words::choose("dtype", PRECISIONS, text.strip_prefix("torch.").unwrap_or(text))
}

/// The shape of a tensor whose last dimension has another size.
fn with_last(shape: &[usize], last: usize) -> Vec<usize> {
    let leading = shape.split_last().map_or(&[][..], |(_, leading)| leading);
    leading.iter().copied().chain([last]).collect()
}
