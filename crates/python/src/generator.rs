//! Random numbers for stochastic rounding.

use crate::error::OrRaise;
use nvfp4::Randomness;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Seed, first offset, next offset and end.
type State = (u64, u64, u64, u64);

/// Hands out offsets of a seed that never overlap.
#[pyclass(frozen, module = "nvfp4")]
pub struct Generator(Mutex<nvfp4::Generator>);

impl Generator {
    fn with<R>(&self, work: impl FnOnce(&mut nvfp4::Generator) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Generator {
    /// A generator over all offsets of a seed.
    #[new]
    fn new(seed: u64) -> Self {
        Generator(Mutex::new(nvfp4::Generator::new(seed)))
    }

    /// The seed and the offset of one quantization: `quantize(x, rounding="stochastic", seed=seed,
    /// offset=offset)`.
    pub fn draw(&self) -> PyResult<(u64, u64)> {
        match self.with(nvfp4::Generator::draw).or_raise()? {
            Randomness::At { seed, offset } => Ok((seed, offset)),
            Randomness::Streams { .. } | Randomness::Bytes { .. } => unreachable!("generators hand out offsets"),
        }
    }

    /// How many offsets were handed out.
    #[getter]
    fn consumed(&self) -> u64 {
        self.with(|generator| generator.consumed())
    }

    /// Seed, first offset, next offset and end, for `Generator.from_state`.
    #[getter]
    fn state(&self) -> State {
        self.with(|generator| generator.state()).into()
    }

    /// A generator that goes on where another one was.
    #[staticmethod]
    fn from_state(state: State) -> PyResult<Self> {
        Ok(Generator(Mutex::new(nvfp4::Generator::from_state(state.into()).or_raise()?)))
    }

    /// Splits the offsets that are left evenly among workers.
    fn split(&self, workers: usize) -> Vec<Generator> {
        let generator = self.with(|generator| generator.clone());
        generator.split(workers).map(|worker| Generator(Mutex::new(worker))).collect()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (State,))> {
        Ok((slf.get_type().getattr("from_state")?, (slf.get().state(),)))
    }

    fn __repr__(&self) -> String {
        let (seed, _, offset, _) = self.state();
        format!("Generator(seed={seed}, next offset {offset})")
    }
}

/// An offset: a number, or an array of one.
pub fn offset(offset: &Bound<'_, PyAny>) -> PyResult<u64> {
    let item = if offset.hasattr("item")? { offset.call_method0("item")? } else { offset.clone() };
    item.extract().map_err(|_| PyTypeError::new_err("expected an offset from 0 to 2**64 - 1"))
}
