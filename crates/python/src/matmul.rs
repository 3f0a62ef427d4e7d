//! Products.

use crate::array::{Array, Framework, contiguous, floats};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::OrRaise;
use crate::held::Held;
use crate::place::Place;
use crate::threads;
use crate::words::{self, ACCUMULATORS};
use half::{bf16, f16};
use nvfp4::{Accumulator, Element, Elements, Precision, Product, Side, Values};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// One operand of a product. `tensor.rs`, where the classes are, reads it from Python's objects.
pub enum Operand {
    /// One direction of a quantized tensor.
    Quantized {
        /// The tensor.
        held: Held,
        /// Which direction of it.
        side: Side,
        /// In whose arrays results come.
        framework: Framework,
    },
    /// An array as it is.
    Plain(Array),
}

impl Operand {
    fn place(&self) -> Place {
        match self {
            Operand::Quantized { held, .. } => held.place(),
            Operand::Plain(array) => array.place,
        }
    }

    fn framework(&self) -> Framework {
        match self {
            Operand::Quantized { framework, .. } => *framework,
            Operand::Plain(array) => array.framework,
        }
    }
}

/// alpha · a · bᵀ + bias + beta · c, where a is [M, K] and b is [N, K].
///
/// `a` is a quantized tensor (its row direction), a direction of one, or an array; `b` is
/// quantized. The three products of a linear layer are `matmul(x, w)`, `matmul(dy, w.column)` and
/// `matmul(dy.column, x.column)`. NVFP4 × NVFP4 on a CPU is rounded once per output; other products
/// are summed in float32. Two FP8 operands on a GPU may have another `accumulator` than 'precise':
/// 'split' and 'fast' use FP8 tensor cores, which add in fewer bits. A result is [M, N], or the
/// shape of `a` but for the last dimension if `a` is an array.
#[pyfunction]
#[pyo3(signature = (a, b, *, bias=None, alpha=1.0, c=None, beta=1.0, dtype=None, accumulator="precise"))]
#[allow(clippy::too_many_arguments)] // each is an option with a name
pub fn matmul<'py>(
    py: Python<'py>,
    a: &Bound<'py, PyAny>,
    b: &Bound<'py, PyAny>,
    bias: Option<Bound<'py, PyAny>>,
    alpha: f32,
    c: Option<Bound<'py, PyAny>>,
    beta: f32,
    dtype: Option<Bound<'py, PyAny>>,
    accumulator: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let (a, b) = (a.extract::<Operand>()?, b.extract::<Operand>()?);
    let Operand::Quantized { held: right, side: right_side, .. } = &b else {
        return Err(PyTypeError::new_err(
            "the right operand is an array: quantize it, or multiply arrays with their own library",
        ));
    };
    let precision = dtype.map_or(Ok(Precision::F32), |dtype| words::precision(&dtype))?;
    let accumulator = words::choose("accumulator", ACCUMULATORS, accumulator)?;
    let c = c.map(|c| Array::of(&contiguous(&c)?)).transpose()?;
    let mut shape = match &a {
        Operand::Quantized { held, side, .. } => vec![held.size(*side)?.0],
        Operand::Plain(array) => array.shape().split_last().map_or(vec![], |(_, leading)| leading.to_vec()),
    };
    shape.push(right.size(*right_side)?.0);
    match (a.place(), b.place()) {
        (Place::Host, Place::Host) => {
            let bias = bias.map(|bias| floats(&bias)).transpose()?;
            let c = c.as_ref().map(Array::tensor_ref).transpose()?.map(|c| c.values());
            let terms = Terms { alpha, bias: bias.as_deref(), c, beta, accumulator };
            let b = right.host()?.direction(*right_side).or_raise()?;
            let values = match precision {
                Precision::F32 => Elements::F32(product::<f32>(py, &a, b, &terms)?),
                Precision::Bf16 => Elements::Bf16(product::<bf16>(py, &a, b, &terms)?),
                Precision::F16 => Elements::F16(product::<f16>(py, &a, b, &terms)?),
            };
            a.framework().owned(py, values, &shape)
        }
        #[cfg(feature = "cuda")]
        (Place::Cuda(id), Place::Cuda(other)) if id == other => {
            let left = match &a {
                Operand::Quantized { held, side, .. } => cuda::Left::Quantized(held.on_gpu(*side)?),
                Operand::Plain(array) => cuda::Left::Plain(array),
            };
            let terms = cuda::Terms { alpha, bias, c, beta, accumulator };
            cuda::matmul(py, (left, right.on_gpu(*right_side)?), id, &terms, precision, &shape)
        }
        #[cfg(feature = "cuda")]
        (left, right) => Err(PyValueError::new_err(format!(
            "the left operand is on {left}, the right operand on {right}; move them to one device"
        ))),
    }
}

/// What is added to a product, and its factors.
struct Terms<'a> {
    alpha: f32,
    bias: Option<&'a [f32]>,
    c: Option<Values<'a>>,
    beta: f32,
    accumulator: Accumulator,
}

/// Element types by which C is read.
trait Output: Element {
    fn of<'a>(values: Values<'a>) -> Option<&'a [Self]>;
}

impl Output for f32 {
    fn of<'a>(values: Values<'a>) -> Option<&'a [f32]> {
        if let Values::F32(values) = values { Some(values) } else { None }
    }
}

impl Output for bf16 {
    fn of<'a>(values: Values<'a>) -> Option<&'a [bf16]> {
        if let Values::Bf16(values) = values { Some(values) } else { None }
    }
}

impl Output for f16 {
    fn of<'a>(values: Values<'a>) -> Option<&'a [f16]> {
        if let Values::F16(values) = values { Some(values) } else { None }
    }
}

fn product<T: Output>(py: Python<'_>, a: &Operand, b: &nvfp4::Direction, terms: &Terms<'_>) -> PyResult<Vec<T>> {
    let mismatch = || PyValueError::new_err("c has another dtype than the result: cast it, or ask for its dtype");
    let add = match terms.c {
        Some(c) => Some((T::of(c).ok_or_else(mismatch)?, terms.beta)),
        None => None,
    };
    let Terms { alpha, bias, accumulator, .. } = *terms;
    let product = Product { alpha, bias, add, accumulator, ..Product::default() };
    match a {
        Operand::Quantized { held, side, .. } => {
            let a = held.host()?.direction(*side).or_raise()?;
            threads::run(py, || nvfp4::matmul(a, b, &product))?.or_raise()
        }
        Operand::Plain(array) => {
            let a = array.tensor_ref()?;
            threads::run(py, || nvfp4::matmul_plain(&a, b, &product))?.or_raise()
        }
    }
}
