//! Checkpoints to NVFP4.

use crate::error::OrRaise;
use crate::verify::{self, ConversionError, DIALECTS};
use crate::words::{PROFILES, Words, choose};
use nvfp4::Implementation;
use nvfp4_checkpoint::{
    Acts, Architectures, DefaultSkips, Differing, Existing, Finding, Fuse, KvCache, Moments, Observer, Pass, Pattern,
    Round, Rules, ScaleChoice, Selection, Settings, Severity, Shards, Summary,
};
use nvfp4_spec::gptq::{DAMPING, Order};
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const SCALES: Words<ScaleChoice> = &[
    ("max", ScaleChoice::Max),
    ("mse", ScaleChoice::Mse),
    ("4over6", ScaleChoice::FourOverSix),
    ("modelopt-mse", ScaleChoice::ModelOptMse),
    ("modelopt-4over6", ScaleChoice::ModelOptFourOverSix),
    ("imatrix", ScaleChoice::Imatrix),
    ("local-hessian", ScaleChoice::LocalHessian),
];
const ROUNDS: Words<Round> =
    &[("nearest", Round::Nearest), ("gptq", Round::Gptq { order: Order::Natural, damping: DAMPING })];
const ORDERS: Words<Order> = &[("natural", Order::Natural), ("static", Order::Activation)];
const EXISTING: Words<Existing> =
    &[("refuse", Existing::Refuse), ("resume", Existing::Resume), ("replace", Existing::Replace)];
const FUSES: Words<Fuse> = &[("auto", Fuse::Auto), ("off", Fuse::Off)];
const KVS: Words<KvCache> = &[
    ("none", KvCache::Unsaid),
    ("fp8", KvCache::Fp8(BTreeMap::new())),
    ("fp8-cast", KvCache::Fp8Cast),
    ("nvfp4-cast", KvCache::Nvfp4Cast),
];
const PASSES: Words<Pass> = &[("amax", Pass::Amax), ("write", Pass::Write)];

/// Converts a checkpoint, a folder or a safetensors file, to an NVFP4 checkpoint that servers load;
/// needs no GPU and little memory.
///
/// `to` is 'modelopt', 'compressed-tensors' or, for a target that is a file, 'gguf' or 'comfyui';
/// `from_` is the format of the source, where it cannot be detected. `skip` and `only` are patterns of module
/// names; `no_default_skips` quantizes embeddings, heads, routers and vision layers too. `acts` is
/// None (weights only), one scale for all activations, a dict of the amax of each module, or a
/// .safetensors file of `nvfp4.calibrate`; `kv` is 'fp8-cast' to say that keys and values are kept in
/// FP8, or 'fp8' to say so with the scales in that file. `any_architecture` also converts
/// models that no server loads. `fuse` says which weights share a tensor scale: 'auto', 'off', or
/// lists of the last names of modules, as [['q_proj', 'k_proj']]. `fix_scales` gives weights of an
/// NVFP4 source that share a tensor scale, but carry different ones, the largest. `device` is
/// 'cpu', 'cuda' or 'cuda:N', for the same bytes. `stats` is a file that `nvfp4 calibrate` wrote: the
/// scales 'imatrix' and 'local-hessian' read it, and round='gptq', with `gptq_order` ('natural' or
/// 'static') and `gptq_damping`.
///
/// The result is read back and checked as `verify` does: problems raise a ConversionError, with the
/// target left where it is. Returns a dict of what was done: bytes before and after, files, the
/// relative error of each weight, and notes of the check. `progress(pass, done, total)` is called
/// with the bytes of a pass, 'amax' or 'write'. Ctrl-C, or an exception of `progress`, stops the
/// conversion; existing='resume' continues it.
#[pyfunction]
#[pyo3(signature = (source, target, *, to="modelopt", skip=Vec::new(), only=Vec::new(), preset="all", scale="max",
                    profile=None, acts=None, fuse=FuseWord::Word("auto".to_string()), fix_scales=false, max_shard=5_000_000_000,
                    threads=None, memory=2_000_000_000, existing="refuse", from_=None, no_default_skips=false, kv="none",
                    device="cpu", keep_shards=false, any_architecture=false, progress=None, rules=None,
                    stats=None, round="nearest", gptq_order="natural", gptq_damping=DAMPING),
       text_signature = "(source, target, *, to='modelopt', skip=(), only=(), preset='all', scale='max', profile=None, acts=None, fuse='auto', fix_scales=False, max_shard=5000000000, threads=None, memory=2000000000, existing='refuse', from_=None, no_default_skips=False, kv='none', device='cpu', keep_shards=False, any_architecture=False, progress=None, rules=None, stats=None, round='nearest', gptq_order='natural', gptq_damping=0.01)")]
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
    fuse: FuseWord,
    fix_scales: bool,
    max_shard: u64,
    threads: Option<usize>,
    memory: u64,
    existing: &str,
    from_: Option<&str>,
    no_default_skips: bool,
    kv: &str,
    device: &str,
    keep_shards: bool,
    any_architecture: bool,
    progress: Option<Bound<'py, PyAny>>,
    rules: Option<&str>,
    stats: Option<PathBuf>,
    round: &str,
    gptq_order: &str,
    gptq_damping: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let (preset, of_preset) = Rules::preset(preset).or_raise()?;
    let patterns =
        |texts: Vec<String>| texts.iter().map(|text| text.parse()).collect::<nvfp4_checkpoint::Result<Vec<Pattern>>>();
    let defaults = Settings::default();
    let order = choose("gptq_order", ORDERS, gptq_order)?;
    let round = match choose("round", ROUNDS, round)? {
        Round::Gptq { .. } => Round::Gptq { order, damping: gptq_damping },
        nearest => nearest,
    };
    let settings = Settings {
        target: to.parse().or_raise()?,
        source: from_.map(|dialect| choose("from_", DIALECTS, dialect)).transpose()?,
        selection: Selection {
            preset,
            rules: rules.map_or(Ok(of_preset), Rules::from_toml).or_raise()?,
            skip: patterns(skip).or_raise()?,
            only: patterns(only).or_raise()?,
            default_skips: if no_default_skips { DefaultSkips::Off } else { DefaultSkips::On },
            fuse: match fuse {
                FuseWord::Word(word) => choose("fuse", FUSES, &word)?,
                FuseWord::Names(names) => Fuse::Names(names),
            },
            differing: if fix_scales { Differing::Rescale } else { Differing::Keep },
            architectures: if any_architecture { Architectures::Any } else { Architectures::Served },
        },
        scale: choose("scale", SCALES, scale)?,
        profile: profile.map(|profile| choose("profile", PROFILES, profile)).transpose()?,
        round,
        statistics: stats,
        kv: match choose("kv", KVS, kv)? {
            KvCache::Fp8(_) => KvCache::Fp8(cache_scales(acts.as_ref())?),
            kv => kv,
        },
        acts: activations(acts.as_ref())?,
        implementation: implementation(device)?,
        shards: if keep_shards { Shards::AsSource } else { Shards::AtMost(max_shard) },
        threads: threads.unwrap_or(defaults.threads).max(1),
        memory,
        existing: choose("existing", EXISTING, existing)?,
    };
    let summary = watched(py, progress.as_ref(), |observer, stop| {
        let summary = nvfp4_checkpoint::convert(&source, &target, &settings, observer, stop)?;
        Ok(summary)
    })?;
    check(py, &target, &summary.findings)?;
    report(py, &summary)
}

/// Which weights share a tensor scale: a word, or lists of the last names of modules.
#[derive(FromPyObject)]
pub enum FuseWord {
    #[pyo3(annotation = "'auto' or 'off'")]
    Word(String),
    #[pyo3(annotation = "lists of the last names of modules, as [['q_proj', 'k_proj'], ['w1', 'w3']]")]
    Names(Vec<Vec<String>>),
}

/// What quantizes on a device.
fn implementation(device: &str) -> PyResult<Implementation> {
    let ordinal = match device {
        "cpu" => return Ok(Implementation::best()),
        "cuda" => Some(0),
        _ => device.strip_prefix("cuda:").and_then(|number| number.parse::<usize>().ok()),
    };
    let ordinal = ordinal.ok_or_else(|| {
        PyValueError::new_err(format!(
            "unknown device '{device}'; there are 'cpu', 'cuda' and 'cuda:N' with N the number of a GPU"
        ))
    })?;
    on_gpu(ordinal)
}

#[cfg(feature = "cuda")]
fn on_gpu(ordinal: usize) -> PyResult<Implementation> {
    let device = nvfp4::cuda::Device::open(ordinal).map_err(nvfp4::Error::from).or_raise()?;
    Ok(Implementation::Cuda(device))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(ordinal: usize) -> PyResult<Implementation> {
    Err(PyValueError::new_err(format!(
        "device 'cuda:{ordinal}': this build does not compute on GPUs; use 'cpu', or install a build with the feature `cuda`"
    )))
}

/// An exception if the target would not load, or load wrongly.
fn check(py: Python<'_>, target: &Path, findings: &[Finding]) -> PyResult<()> {
    let problems = verify::texts(findings, Severity::Problem);
    if problems.is_empty() {
        return Ok(());
    }
    let text =
        format!("{} was written, but would not load, or load wrongly:\n{}", target.display(), problems.join("\n"));
    let error = ConversionError::new_err(text);
    error.value(py).setattr("problems", problems)?;
    Err(error)
}

fn activations(acts: Option<&Bound<'_, PyAny>>) -> PyResult<Acts> {
    let Some(acts) = acts else { return Ok(Acts::None) };
    match (acts.extract::<f32>(), acts.extract::<BTreeMap<String, f32>>(), statistics(acts)) {
        (Ok(scale), ..) => Ok(Acts::Constant(scale)),
        (_, Ok(amaxes), _) => Ok(Acts::Amaxes(amaxes)),
        (.., Some(path)) => Ok(Acts::Amaxes(Moments::open(&path).and_then(|file| file.amaxes()).or_raise()?)),
        _ => Err(PyTypeError::new_err(
            "acts: expected None, a number, a dict of module names and amaxes, or a .safetensors file of nvfp4.calibrate",
        )),
    }
}

/// The path of a file of statistics.
fn statistics(acts: &Bound<'_, PyAny>) -> Option<PathBuf> {
    acts.extract::<PathBuf>().ok().filter(|path| path.extension().is_some_and(|of| of == "safetensors"))
}

/// The scales of keys and values in the file of `acts`.
fn cache_scales(acts: Option<&Bound<'_, PyAny>>) -> PyResult<BTreeMap<String, f32>> {
    let path = acts.and_then(statistics).ok_or_else(|| {
        PyValueError::new_err(
            "kv='fp8' takes the scales that nvfp4.calibrate finds: give acts='FILE.safetensors', or kv='fp8-cast', which \
             needs none",
        )
    })?;
    Moments::open(&path).and_then(|file| file.cache_scales()).or_raise()
}

/// The progress of a conversion: the pass, the bytes of it that are done, and all its bytes.
#[derive(Clone, Copy, PartialEq)]
struct Done(Pass, u64, u64);

/// What the threads of a conversion report, until the interpreter's thread reads it.
#[derive(Default)]
struct Heard(Mutex<Option<Done>>);

impl Heard {
    fn with<R>(&self, look: impl FnOnce(&mut Option<Done>) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Observer for Heard {
    fn begin(&self, pass: Pass, bytes: u64) {
        self.with(|heard| *heard = Some(Done(pass, 0, bytes)));
    }

    fn advance(&self, bytes: u64) {
        self.with(|heard| {
            if let Some(Done(_, done, _)) = heard {
                *done += bytes;
            }
        });
    }
}

/// Runs `work` in another thread, so that this one can watch for Ctrl-C and report progress; the
/// work is told to stop if either raises.
fn watched<R: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Heard, &AtomicBool) -> nvfp4_checkpoint::Result<R> + Send,
) -> PyResult<R> {
    let (heard, stop) = (Heard::default(), AtomicBool::new(false));
    let mut told = None;
    let mut tell = || {
        let news = heard.with(|heard| *heard).filter(|&news| told != Some(news));
        if let (Some(progress), Some(Done(pass, done, total))) = (progress, news) {
            progress.call1((crate::words::word(PASSES, pass), done, total))?;
            told = news;
        }
        PyResult::Ok(())
    };
    thread::scope(|scope| {
        let worker = thread::Builder::new().spawn_scoped(scope, || work(&heard, &stop))?;
        let mut interrupt = None;
        while !worker.is_finished() {
            py.detach(|| thread::sleep(Duration::from_millis(20)));
            if interrupt.is_none()
                && let Err(signal) = py.check_signals().and_then(|()| tell())
            {
                stop.store(true, Ordering::Relaxed);
                interrupt = Some(signal);
            }
        }
        let result = py.detach(|| worker.join());
        if interrupt.is_none() {
            tell()?;
        }
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (result, interrupt) {
            // It was done before it could stop; what was raised still goes to the caller.
            (Ok(_), Some(signal)) => Err(signal),
            (Err(nvfp4_checkpoint::Error::Interrupted), Some(signal))
                if !signal.is_instance_of::<PyKeyboardInterrupt>(py) =>
            {
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
    report.set_item("notes", verify::texts(&summary.findings, Severity::Note))?;
    Ok(report)
}
