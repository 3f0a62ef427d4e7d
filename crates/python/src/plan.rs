//! Plans: the formats of a whole model, checked before the first step.

use crate::error::OrRaise;
use crate::quantizer::Quantizer;
use crate::recipe::Recipe;
use crate::words::{self, ACCUMULATORS, FINITES};
use nvfp4_recipe::{self as recipe, Capabilities, Model, Module, Purpose, Site, States};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What every tensor of a model resolves to, checked as a whole: a ValueError lists everything that
/// is wrong.
///
/// `modules` are pairs of a path and a kind: 'linear', 'attention', or 'grouped' with a number of
/// experts.
///
/// >>> import nvfp4
/// >>> plan = nvfp4.Plan(nvfp4.Recipe("nvfp4"), [("fc1", "linear"), ("experts", "grouped", 4)])
/// >>> plan.spec("fc1", "input"), plan.quantizer("fc1", "input").directions
/// ('nvfp4(hadamard)', 'both')
#[pyclass(frozen, module = "nvfp4")]
pub struct Plan(recipe::Plan);

/// A module as Python passes it.
#[derive(FromPyObject)]
enum Entry {
    Grouped(String, String, u32),
    Plain(String, String),
}

impl Entry {
    fn module(self) -> PyResult<Module> {
        let unknown = |kind: &str, fix: &str| {
            let known = "('path', 'linear'), ('path', 'attention') and ('path', 'grouped', experts)";
            Err(PyValueError::new_err(format!("unknown module kind '{kind}'{fix}; there are {known}")))
        };
        match self {
            Entry::Plain(path, kind) => match kind.as_str() {
                "linear" => Ok(Module::linear(path.as_str())),
                "attention" => Ok(Module::attention(path.as_str())),
                "grouped" => unknown("grouped", " without a number of experts"),
                other => unknown(other, ""),
            },
            Entry::Grouped(path, kind, experts) => match kind.as_str() {
                "grouped" => Ok(Module::grouped_linear(path.as_str(), experts)),
                other => unknown(other, " with a number of experts"),
            },
        }
    }
}

impl Plan {
    fn site(path: &str, slot: &str, expert: Option<u32>) -> PyResult<Site> {
        Ok(Site::new(path, words::slot(slot, expert)?))
    }

    fn build(py: Python<'_>, recipe: &Recipe, model: &Model) -> PyResult<Self> {
        Ok(Plan(recipe.explain(py, recipe::Plan::build(model, recipe.inner(), &Capabilities::software()))?))
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (recipe, modules, *, purpose="training"))]
    fn new(py: Python<'_>, recipe: &Bound<'_, Recipe>, modules: Vec<Entry>, purpose: &str) -> PyResult<Self> {
        const PURPOSES: words::Words<Purpose> = &[("training", Purpose::Training), ("inference", Purpose::Inference)];
        let mut model = match words::choose("purpose", PURPOSES, purpose)? {
            Purpose::Training => Model::new(),
            Purpose::Inference => Model::for_inference(),
        };
        for entry in modules {
            model.add(entry.module()?);
        }
        Plan::build(py, recipe.get(), &model)
    }

    /// The plan of a model that a Hugging Face `config.json` describes; `config` is its text.
    #[staticmethod]
    fn from_config(py: Python<'_>, recipe: &Bound<'_, Recipe>, config: &str) -> PyResult<Self> {
        Plan::build(py, recipe.get(), &Model::from_config(config).or_raise()?)
    }

    /// The spec of a tensor.
    #[pyo3(signature = (path, slot, *, expert=None))]
    fn spec(&self, path: &str, slot: &str, expert: Option<u32>) -> PyResult<String> {
        let site = Plan::site(path, slot, expert)?;
        let absent = || PyValueError::new_err(format!("{site}: the plan has no such tensor"));
        Ok(self.0.spec(&site).ok_or_else(absent)?.to_string())
    }

    /// The quantizer of a tensor, in the directions that something reads. A tensor with delayed
    /// scaling begins with a scale of 1.
    #[pyo3(signature = (path, slot, *, expert=None))]
    fn quantizer(&self, path: &str, slot: &str, expert: Option<u32>) -> PyResult<Quantizer> {
        let site = Plan::site(path, slot, expert)?;
        let scales = States::new(&self.0).or_raise()?.scales();
        let maker = self.0.quantizer(&site, &scales).or_raise()?;
        let spec = self.0.spec(&site).expect("it has a quantizer").clone();
        Ok(Quantizer::from_parts(spec, maker))
    }

    /// Every tensor: (module and slot, spec, what that follows from).
    #[getter]
    fn entries(&self) -> Vec<(String, String, String)> {
        let entries = self.0.entries().iter();
        entries.map(|e| (e.role.to_string(), e.spec.to_string(), e.reason.to_string())).collect()
    }

    /// What is done about NaN and infinities in tensors that are quantized: 'keep' or 'refuse'.
    #[getter]
    fn finite(&self) -> &'static str {
        words::word(FINITES, self.0.finite())
    }

    /// How precisely a GPU adds the products of FP8 operands in fprop, dgrad and wgrad: 'precise',
    /// 'split' or 'fast'.
    #[getter]
    fn accumulators(&self) -> (&'static str, &'static str, &'static str) {
        let all = self.0.accumulators();
        let word = |one| words::word(ACCUMULATORS, one);
        (word(all.fprop), word(all.dgrad), word(all.wgrad))
    }

    /// Warnings: what is allowed, but probably not meant.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings().iter().map(ToString::to_string).collect()
    }

    /// The multiple that the tokens of a module's input are padded to, or None.
    fn alignment(&self, path: &str) -> Option<usize> {
        self.0.alignment(&path.into())
    }

    /// A number that is the same for plans with the same tensors and specs.
    #[getter]
    fn fingerprint(&self) -> u64 {
        self.0.fingerprint()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Plan>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Plan({}, {} tensors)", self.0.recipe(), self.0.entries().len())
    }
}
