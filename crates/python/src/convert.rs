//! Checkpoints to NVFP4.

use crate::error::OrRaise;
use crate::words::{PROFILES, Words, choose};
use nvfp4::checkpoint::{Acts, Differing, Existing, Fuse, Pattern, ScaleChoice, Selection, Settings, Shards, Summary};
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const SCALES: Words<ScaleChoice> =
    &[("max", ScaleChoice::Max), ("mse", ScaleChoice::Mse), ("4over6", ScaleChoice::FourOverSix)];
const EXISTING: Words<Existing> =
    &[("refuse", Existing::Refuse), ("resume", Existing::Resume), ("replace", Existing::Replace)];
const FUSES: Words<Fuse> = &[("auto", Fuse::Auto), ("off", Fuse::Off)];

/// convert(source, target, *, to="modelopt", skip=(), only=(), preset="all", scale="max", profile=None, acts=None, fuse="auto", fix_scales=False, max_shard=5000000000, threads=None, memory=2000000000, existing="refuse")
/// --
///
/// Converts a checkpoint, a folder or a safetensors file, to an NVFP4 checkpoint that servers load; needs no GPU and little memory.
///
/// `to` is 'modelopt', 'compressed-tensors' or, for a target that is a file, 'gguf'; `skip` and `only` are patterns of module names; `acts` is None (weights only), one scale for
/// all activations, or a dict of the amax of each module; `fix_scales` gives weights of an NVFP4 source that share a tensor scale, but carry
/// different ones, the largest. Gives a dict of what was done: bytes before and after, files, the relative
/// error of each weight, and what a check of the result found. Ctrl-C stops it; existing='resume' goes on.
#[pyfunction]
#[pyo3(signature = (source, target, *, to="modelopt", skip=Vec::new(), only=Vec::new(), preset="all", scale="max",
                    profile=None, acts=None, fuse="auto", fix_scales=false, max_shard=5_000_000_000, threads=None, memory=2_000_000_000,
                    existing="refuse"))]
#[allow(clippy::too_many_arguments)] // each is a setting with a name
pub fn convert<'py>(
    py: Python<'py>,
    source: PathBuf,
    target: PathBuf,
    to: &str,
    skip: Vec<String>,
    only: Vec<String>,
    preset: &str,
    scale: &str,
    profile: Option<&str>,
    acts: Option<Bound<'py, PyAny>>,
    fuse: &str,
    fix_scales: bool,
    max_shard: u64,
    threads: Option<usize>,
    memory: u64,
    existing: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let patterns = |texts: Vec<String>| texts.iter().map(|text| text.parse()).collect::<nvfp4::Result<Vec<Pattern>>>();
    let defaults = Settings::default();
    let settings = Settings {
        target: to.parse().or_raise()?,
        selection: Selection {
            preset: preset.parse().or_raise()?,
            skip: patterns(skip).or_raise()?,
            only: patterns(only).or_raise()?,
            fuse: choose("fuse", FUSES, fuse)?,
            differing: if fix_scales { Differing::Rescale } else { Differing::Keep },
            ..Selection::default()
        },
        scale: choose("scale", SCALES, scale)?,
        profile: profile.map(|profile| choose("profile", PROFILES, profile)).transpose()?,
        acts: activations(acts)?,
        shards: Shards::AtMost(max_shard),
        threads: threads.unwrap_or(defaults.threads).max(1),
        memory,
        existing: choose("existing", EXISTING, existing)?,
        ..defaults
    };
    let summary = watched(py, |stop| nvfp4::checkpoint::convert(&source, &target, &settings, &(), stop))?;
    report(py, &summary)
}

fn activations(acts: Option<Bound<'_, PyAny>>) -> PyResult<Acts> {
    let Some(acts) = acts else { return Ok(Acts::None) };
    match (acts.extract::<f32>(), acts.extract::<BTreeMap<String, f32>>()) {
        (Ok(scale), _) => Ok(Acts::Constant(scale)),
        (_, Ok(amaxes)) => Ok(Acts::Amaxes(amaxes)),
        _ => Err(PyTypeError::new_err("acts: expected None, a number, or a dict of module names and amaxes")),
    }
}

/// Runs `work` in another thread, so that this one can look for Ctrl-C, and tells it to stop then.
fn watched<R: Send>(py: Python<'_>, work: impl FnOnce(&AtomicBool) -> nvfp4::Result<R> + Send) -> PyResult<R> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let worker = scope.spawn(|| work(&stop));
        let mut interrupt = None;
        while !worker.is_finished() {
            py.detach(|| thread::sleep(Duration::from_millis(20)));
            if let Err(signal) = py.check_signals() {
                stop.store(true, Ordering::Relaxed);
                interrupt.get_or_insert(signal);
            }
        }
        let result = py.detach(|| worker.join());
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (result, interrupt) {
            (Err(nvfp4::Error::Interrupted), Some(signal)) if !signal.is_instance_of::<PyKeyboardInterrupt>(py) => {
                Err(signal)
            }
            (result, _) => result.or_raise(),
        }
    })
}

fn report<'py>(py: Python<'py>, summary: &Summary) -> PyResult<Bound<'py, PyDict>> {
    let weights = PyDict::new(py);
    for weight in &summary.quantized {
        weights.set_item(&weight.module, weight.measure.relative_error())?;
    }
    let report = PyDict::new(py);
    report.set_item("before", summary.before)?;
    report.set_item("after", summary.after)?;
    report.set_item("files", &summary.files)?;
    report.set_item("relative_error", weights)?;
    let findings = summary.findings.iter().map(|f| format!("{}: {}", f.about, f.text)).collect::<Vec<_>>();
    report.set_item("findings", findings)?;
    Ok(report)
}
