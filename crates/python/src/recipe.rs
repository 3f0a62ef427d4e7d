//! Recipes: which tensor of which layer is quantized how.

use crate::error::OrRaise;
use crate::role::Role;
use crate::words::{self, ACCUMULATORS, BACKWARDS, FINITES, choose};
use nvfp4_recipe::{self as recipe, Error, Preset, QuantSpec, Site};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The last exception that a recipe's function raised.
type Raised = Arc<Mutex<Option<PyErr>>>;

/// Gives each tensor of a model its format: a preset by its name, a rule file, or a function.
///
/// >>> import nvfp4
/// >>> nvfp4.Recipe("nvfp4").spec("layers.0.fc1", "weight")
/// 'nvfp4(16x16)'
#[pyclass(frozen, module = "nvfp4")]
pub struct Recipe {
    inner: recipe::Recipe,
    raised: Raised,
}

impl Recipe {
    fn of(inner: recipe::Recipe) -> Self {
        Recipe { inner, raised: Raised::default() }
    }

    /// As the library has it.
    pub fn inner(&self) -> &recipe::Recipe {
        &self.inner
    }

    /// A result, or the exception whose cause is what the recipe's function raised.
    pub fn explain<T>(&self, py: Python<'_>, result: nvfp4_recipe::Result<T>) -> PyResult<T> {
        let cause = self.raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.or_raise().inspect_err(|error| error.set_cause(py, cause))
    }
}

#[pymethods]
impl Recipe {
    /// A preset; `Recipe.presets()` lists them, each also with "+attention".
    #[new]
    fn new(name: &str) -> PyResult<Self> {
        Ok(Recipe::of(name.parse().or_raise()?))
    }

    /// The names of all presets.
    #[staticmethod]
    fn presets() -> Vec<&'static str> {
        Preset::names().collect()
    }

    /// A recipe from the text of a rule file.
    #[staticmethod]
    fn from_toml(text: &str) -> PyResult<Self> {
        Ok(Recipe::of(recipe::Recipe::from_toml(text).or_raise()?))
    }

    /// A recipe from a rule file.
    #[staticmethod]
    fn from_file(path: PathBuf) -> PyResult<Self> {
        Ok(Recipe::of(recipe::Recipe::from_file(&path).or_raise()?))
    }

    /// The recipe that TransformerEngine's environment variables ask for.
    #[staticmethod]
    fn from_env() -> PyResult<Self> {
        Ok(Recipe::of(recipe::Recipe::from_env().or_raise()?))
    }

    /// A recipe from a function of a `Role` that returns the text of a spec. The key stands for the
    /// function where recipes are compared.
    ///
    /// What the function raises becomes a ValueError that names the role, with the exception as its
    /// cause.
    #[staticmethod]
    fn from_function(key: &str, function: Py<PyAny>) -> Self {
        let raised = Raised::default();
        let seen = Arc::clone(&raised);
        let spec = move |role: &recipe::Role| {
            Python::attach(|py| {
                ask(py, &function, role).map_err(|error| {
                    let reason = format!("the recipe's function failed for {role}: {error}");
                    seen.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    Error::Setting(reason)
                })
            })
        };
        Recipe { inner: recipe::Recipe::from_fn(key, spec), raised }
    }

    /// The same recipe with another backward pass: 'none', 'high-precision' or 'dequantized'.
    fn with_backward(&self, backward: &str) -> PyResult<Self> {
        let inner = self.inner.with_backward(choose("backward", BACKWARDS, backward)?);
        Ok(Recipe { inner, raised: Arc::clone(&self.raised) })
    }

    /// The same recipe with another answer to NaN and infinities in the tensors that it quantizes:
    /// 'keep' or 'refuse'.
    fn with_finite(&self, finite: &str) -> PyResult<Self> {
        let inner = self.inner.with_finite(choose("finite", FINITES, finite)?);
        Ok(Recipe { inner, raised: Arc::clone(&self.raised) })
    }

    /// What is done about NaN and infinities: 'keep' or 'refuse'.
    #[getter]
    fn finite(&self) -> &'static str {
        words::word(FINITES, self.inner.finite())
    }

    /// The same recipe with other accumulators of FP8 products on a GPU: 'precise', 'split' or 'fast' for each product of a
    /// linear layer. What is not given stays.
    #[pyo3(signature = (*, fprop=None, dgrad=None, wgrad=None))]
    fn with_accumulators(&self, fprop: Option<&str>, dgrad: Option<&str>, wgrad: Option<&str>) -> PyResult<Self> {
        let mut accumulators = self.inner.accumulators();
        for (name, word, into) in [
            ("fprop", fprop, &mut accumulators.fprop),
            ("dgrad", dgrad, &mut accumulators.dgrad),
            ("wgrad", wgrad, &mut accumulators.wgrad),
        ] {
            if let Some(word) = word {
                *into = choose(name, ACCUMULATORS, word)?;
            }
        }
        let inner = self.inner.with_accumulators(accumulators);
        Ok(Recipe { inner, raised: Arc::clone(&self.raised) })
    }

    /// A short name.
    #[getter]
    fn name(&self) -> String {
        self.inner.name()
    }

    /// The spec of a tensor: `recipe.spec("layers.0.fc1", "weight")`.
    #[pyo3(signature = (path, slot, *, expert=None))]
    fn spec(&self, py: Python<'_>, path: &str, slot: &str, expert: Option<u32>) -> PyResult<String> {
        let role = recipe::Role::new(Site::new(path, words::slot(slot, expert)?));
        Ok(self.explain(py, self.inner.spec(&role))?.to_string())
    }

    /// The spec of a role: how a function delegates to another recipe.
    fn spec_of(&self, py: Python<'_>, role: &Bound<'_, Role>) -> PyResult<String> {
        Ok(self.explain(py, self.inner.spec(role.get().inner()))?.to_string())
    }

    /// Itself: a recipe does not change.
    fn __deepcopy__<'py>(slf: &Bound<'py, Self>, _memo: &Bound<'py, PyAny>) -> Bound<'py, Self> {
        slf.clone()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Recipe>().is_ok_and(|other| other.get().inner == self.inner)
    }

    fn __repr__(&self) -> String {
        format!("Recipe({})", self.inner.name())
    }
}

/// What a function answers.
fn ask(py: Python<'_>, function: &Py<PyAny>, role: &recipe::Role) -> PyResult<QuantSpec> {
    let answer = function.call1(py, (Role::new(role.clone()),))?;
    let text: String = answer.extract(py).map_err(|_| {
        let kind = answer.bind(py).get_type().to_string();
        PyTypeError::new_err(format!("expected the text of a spec, such as 'nvfp4', got {kind}"))
    })?;
    text.parse().or_raise()
}
