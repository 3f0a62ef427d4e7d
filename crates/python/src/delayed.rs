//! Delayed scaling: how a tensor's scale follows from the amaxes of earlier steps. The caller keeps
//! both.

use crate::error::OrRaise;
use crate::words::{self, REDUCTIONS};
#[cfg(not(feature = "cuda"))]
use crate::{dlpack::Tensor, place::Place};
use nvfp4_recipe::{self as recipe, AmaxRule, AmaxRules, Format, QuantSpec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// How a scale follows from the amaxes of earlier steps. `spec` is the text of such a format,
/// 'fp8-delayed' for instance.
///
/// >>> import nvfp4
/// >>> delayed = nvfp4.Delayed("fp8-delayed(history=3)")
/// >>> delayed.update([7.0, 0.0, 2.0], 1.0, 7.0)
/// ([0.0, 2.0, 7.0], 64.0)
///
/// A history begins with zeros and a scale with 1. A step quantizes with the scale, joins the
/// amaxes that it sees to the history's first place by a maximum (`Quantizer.observe` gives them),
/// and then updates both.
#[pyclass(frozen, module = "nvfp4", eq)]
#[derive(PartialEq)]
pub struct Delayed(recipe::Delayed);

#[pymethods]
impl Delayed {
    #[new]
    fn new(spec: &str) -> PyResult<Self> {
        match spec.parse().or_raise()? {
            QuantSpec::Uniform(Format::Delayed(delayed)) => match delayed.amax() {
                AmaxRule::Named(name) => Err(PyValueError::new_err(format!(
                    "the amax rule '{name}' is not known here; 'max' and 'most-recent' are"
                ))),
                _ => Ok(Delayed(delayed)),
            },
            other => {
                Err(PyValueError::new_err(format!("expected delayed scaling, such as 'fp8-delayed', got {other}")))
            }
        }
    }

    /// The scales that a spec asks for, as texts of delayed scaling: one under 'both', or one each
    /// under 'row' and 'column'.
    #[staticmethod]
    fn parts(spec: &str) -> PyResult<BTreeMap<&'static str, String>> {
        let parts = parts(&spec.parse().or_raise()?);
        Ok(parts.into_iter().map(|(part, delayed)| (part, QuantSpec::delayed(delayed).to_string())).collect())
    }

    /// How many steps are remembered, the one under way included.
    #[getter]
    fn history(&self) -> usize {
        self.0.history()
    }

    /// 'max' where workers agree on amaxes, 'local' where each has its own.
    #[getter]
    fn reduction(&self) -> &'static str {
        words::word(REDUCTIONS, self.0.reduction())
    }

    /// The history and the scale of the next step. `amax` is that of this step, among all workers
    /// if there are several.
    fn update(&self, mut history: Vec<f32>, scale: f32, amax: f32) -> PyResult<(Vec<f32>, f32)> {
        if history.len() != self.0.history() {
            let (expected, got) = (self.0.history(), history.len());
            return Err(PyValueError::new_err(format!("expected a history of {expected} steps, got {got}")));
        }
        let scale = self.0.update(&mut history, scale, amax, &AmaxRules::default()).or_raise()?;
        Ok((history, scale))
    }

    /// The same for many tensors whose state lies on a GPU, in place and without waiting: `history`
    /// is a tensor of torch with a row for each step, of an amax per tensor, `scale` and `amax`
    /// have a number per tensor.
    fn update_(&self, history: &Bound<'_, PyAny>, scale: &Bound<'_, PyAny>, amax: &Bound<'_, PyAny>) -> PyResult<()> {
        let tensors = [history, scale, amax];
        #[cfg(feature = "cuda")]
        return crate::cuda::update(&self.0, tensors);
        // What lies on a GPU is refused when it is borrowed.
        #[cfg(not(feature = "cuda"))]
        {
            tensors.into_iter().try_for_each(|x| Place::of(&Tensor::of(x)?).map(drop))?;
            Err(PyValueError::new_err("expected tensors on a GPU; `update` takes numbers on the CPU"))
        }
    }

    /// What a pickle keeps: the text.
    fn __getnewargs__(&self) -> (String,) {
        (QuantSpec::delayed(self.0.clone()).to_string(),)
    }

    fn __repr__(&self) -> String {
        format!("Delayed('{}')", QuantSpec::delayed(self.0.clone()))
    }
}

/// What has delayed scaling: both directions with one scale, or either with one of its own.
fn parts(spec: &QuantSpec) -> Vec<(&'static str, recipe::Delayed)> {
    let formats = match spec {
        QuantSpec::Uniform(format) => vec![("both", format)],
        QuantSpec::Split(split) => vec![("row", split.row()), ("column", split.col())],
    };
    let delayed = |(part, format): (_, &Format)| match format {
        Format::Delayed(delayed) => Some((part, delayed.clone())),
        _ => None,
    };
    formats.into_iter().filter_map(delayed).collect()
}

/// An error if a scale is given that nothing takes.
pub fn check_scales(spec: &QuantSpec, scale: bool, column_scale: bool) -> PyResult<()> {
    let has = |wanted: &[&str]| parts(spec).iter().any(|(part, _)| wanted.contains(part));
    if scale && !has(&["both", "row"]) {
        return Err(PyValueError::new_err(format!("{spec} takes no `scale`: only delayed scaling does")));
    }
    if column_scale && !has(&["column"]) {
        let fix = if has(&["both"]) { "`scale` serves both directions" } else { "only delayed scaling does" };
        return Err(PyValueError::new_err(format!("{spec} takes no `column_scale`: {fix}")));
    }
    Ok(())
}
