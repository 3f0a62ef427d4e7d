//! What a conversion is asked for, and what it reports.

use super::Dialect;
use super::action::Action;
use super::existing::{Existing, Outcome};
use super::finding::Finding;
use super::measure::Measure;
use super::names::Pattern;
use super::selection::Selection;
use super::shards::Shards;
use super::stamp::Stamp;
use super::target::Target;
use crate::{Error, Result, Setting};
use nvfp4::{Bound, ErrorPath, Metric, Profile, ScaleRule};
use nvfp4_kernels::Implementation;
use nvfp4_spec::gptq::Order;
use nvfp4_spec::{Mode, Rounding, mse};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How block scales are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ScaleChoice {
    /// The largest magnitude of a block maps to 6.
    #[default]
    Max,
    /// The scale with the smallest squared error around that one; see [`nvfp4_spec::mse`].
    Mse,
    /// To 6 or to 4, whichever has the smaller squared error; see [`nvfp4_spec::four_over_six`].
    FourOverSix,
    /// ModelOpt's sweep over all scale bytes; see [`nvfp4_spec::modelopt`].
    ModelOptMse,
    /// ModelOpt's choice between 6 and 4; see [`nvfp4_spec::modelopt`].
    ModelOptFourOverSix,
    /// The scale with the smallest squared error, weighted by the mean squares of inputs, of those
    /// that `Mse` tries; see [`nvfp4_spec::weighted`].
    Imatrix,
    /// The scale with the smallest error of outputs, as far as the inputs of one block tell, of those
    /// that `ModelOptMse` tries; see [`nvfp4_spec::weighted`].
    LocalHessian,
}

/// How numbers become codes, when scales are found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Round {
    /// To the nearest code.
    #[default]
    Nearest,
    /// By GPTQ with fixed scales; see [`nvfp4_spec::gptq`].
    Gptq {
        /// The order of columns.
        order: Order,
        /// What is added to the diagonal of the Hessian, as a share of its mean.
        damping: f64,
    },
}

/// The activation scales.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Acts {
    /// None are written: weights only. An NVFP4 source keeps the ones that it has.
    #[default]
    None,
    /// The same for every weight.
    Constant(f32),
    /// From the largest activation of each module.
    Amaxes(BTreeMap<String, f32>),
}

/// How a server keeps keys and values.
#[derive(Clone, Debug, PartialEq, Default)]
#[non_exhaustive]
pub enum KvCache {
    /// The server decides. An NVFP4 source that says FP8 keeps saying so.
    #[default]
    Unsaid,
    /// In FP8 with the scale 1: a cast, which needs no data.
    Fp8Cast,
    /// In FP8 with these scales, such as `model.layers.0.self_attn.k_scale`: the largest magnitude
    /// of keys or values over 448.
    Fp8(BTreeMap<String, f32>),
    /// In NVFP4 with the tensor scale 1, which needs no data either: ModelOpt's format alone.
    Nvfp4Cast,
}

/// What to convert to, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The format that is written.
    pub target: Target,
    /// The dialect of the source, where it cannot be detected.
    pub source: Option<Dialect>,
    /// Which weights.
    pub selection: Selection,
    /// How block scales are chosen.
    pub scale: ScaleChoice,
    /// The library whose arithmetic is reproduced. Default: ModelOpt; for 4over6 TransformerEngine,
    /// which alone has it.
    pub profile: Option<Profile>,
    /// How numbers become codes.
    pub round: Round,
    /// A file of statistics of activations, for scales and codes that are chosen by them.
    pub statistics: Option<PathBuf>,
    /// Activation scales.
    pub acts: Acts,
    /// The key-value cache.
    pub kv: KvCache,
    /// How the output is split. GGUF is one file.
    pub shards: Shards,
    /// Where weights are quantized: the bytes are the same everywhere.
    pub implementation: Implementation,
    /// Number of threads.
    pub threads: usize,
    /// Bytes of memory to stay below.
    pub memory: u64,
    /// What to do if the target exists.
    pub existing: Existing,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            target: Target::default(),
            source: None,
            selection: Selection::default(),
            scale: ScaleChoice::default(),
            profile: None,
            round: Round::default(),
            statistics: None,
            acts: Acts::default(),
            kv: KvCache::default(),
            implementation: Implementation::best(),
            shards: Shards::AtMost(5_000_000_000),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory: 2_000_000_000,
            existing: Existing::default(),
        }
    }
}

/// The two passes, and what ends a conversion in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Finding the amax of every weight.
    Amax,
    /// Quantizing and writing.
    Write,
    /// Copying what several parts wrote into one file.
    Join,
}

/// Receives the progress of a conversion. Calls come from several threads.
pub trait Observer: Sync {
    /// A pass begins, over this many bytes of the source.
    fn begin(&self, _pass: Pass, _bytes: u64) {}
    /// This many more bytes of the source are done.
    fn advance(&self, _bytes: u64) {}
    /// A weight is written.
    fn finished(&self, _weight: &Finished) {}
}

/// Ignores the progress.
impl Observer for () {}

/// A weight that was written.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its module.
    pub module: String,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// Bytes that it took.
    pub before: u64,
    /// Bytes that it takes.
    pub after: u64,
    /// What happened to it.
    pub action: Action,
    /// The kind of group that it shares a tensor scale with, such as `q/k/v`.
    pub group: Option<String>,
    /// Its error against the source; all zeros where it kept its numbers.
    pub measure: Measure,
}

/// What a conversion did.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Summary {
    /// Whether it had anything to do.
    pub outcome: Outcome,
    /// The weights that were quantized, with their errors. Weights that kept their codes are not
    /// among them.
    pub quantized: Vec<Finished>,
    /// The NVFP4 weights that got another tensor scale, with what it did to them.
    pub rescaled: Vec<Finished>,
    /// The weights that were decoded, with what rounding to their new type did to them.
    pub decoded: Vec<Finished>,
    /// Bytes of the source's tensors.
    pub before: u64,
    /// Bytes of the written tensors.
    pub after: u64,
    /// The files that were written.
    pub files: Vec<String>,
    /// What [`super::verify`] finds in the result, for vLLM or llama.cpp. A decoded result is only
    /// read back.
    pub findings: Vec<Finding>,
    /// Weights that were quantized as without statistics, which were asked to decide, and why.
    pub plain: BTreeMap<String, String>,
    /// Why no server runs the result, if none does. That is no fault of the conversion.
    pub unserved: Option<Finding>,
}

impl Settings {
    /// The mode that blocks are quantized in.
    pub(super) fn mode(&self) -> Result<Mode> {
        let (rule, default) = match self.scale {
            ScaleChoice::Max => (ScaleRule::Six, Profile::ModelOpt),
            // With statistics the same bytes are tried, and their errors weighted.
            ScaleChoice::Mse | ScaleChoice::Imatrix => (ScaleRule::Mse, Profile::ModelOpt),
            ScaleChoice::ModelOptMse | ScaleChoice::LocalHessian => (ScaleRule::ModelOptMse, Profile::ModelOpt),
            ScaleChoice::ModelOptFourOverSix => (ScaleRule::ModelOptFourOverSix, Profile::ModelOpt),
            ScaleChoice::FourOverSix => (
                ScaleRule::FourOverSix { metric: Metric::Mse, error: ErrorPath::Strict, bound: Bound::E256 },
                Profile::TransformerEngine,
            ),
        };
        if self.scale == ScaleChoice::FourOverSix && self.profile.is_some_and(|p| p != Profile::TransformerEngine) {
            let reason = "4over6 with another producer's profile: only TransformerEngine has the \
                          rule; take its profile, or another choice of scales";
            return Err(Error::setting(Setting::Profile, reason));
        }
        if rule.is_modelopt() && self.profile.is_some_and(|p| p != Profile::ModelOpt) {
            let reason = "a search of ModelOpt's with another producer's profile: only ModelOpt has \
                          the rule; take its profile, or another choice of scales";
            return Err(Error::setting(Setting::Profile, reason));
        }
        let mode = Mode { rule, profile: self.profile.unwrap_or(default), ..Mode::default() };
        mode.check(&Rounding::<()>::NearestEven)?;
        Ok(mode)
    }

    /// What must be the same for a conversion to be continued: everything that decides about bytes.
    pub(super) fn request(&self, stamps: &[(PathBuf, Stamp)]) -> Value {
        let patterns = |patterns: &[Pattern]| patterns.iter().map(Pattern::to_string).collect::<Vec<_>>();
        let stamp =
            |(path, stamp): &(PathBuf, Stamp)| json!([path.file_name().unwrap_or_default().to_string_lossy(), stamp]);
        let s = &self.selection;
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": self.target.to_string(),
            "source": self.source.map(|d| d.to_string()),
            "preset": s.preset.to_string(),
            "skip": patterns(&s.skip),
            "only": patterns(&s.only),
            "default_skips": format!("{:?}", s.default_skips),
            "fuse": format!("{:?}", s.fuse),
            "differing": format!("{:?}", s.differing),
            "architectures": format!("{:?}", s.architectures),
            "rules": s.rules.to_string(),
            "scale": format!("{:?}", self.scale),
            // Those of the repair of scales too.
            "scale_offsets": mse::OFFSETS,
            "round": format!("{:?}", self.round),
            "profile": format!("{:?}", self.profile),
            "acts": format!("{:?}", self.acts),
            "kv": format!("{:?}", self.kv),
            "shards": format!("{:?}", self.shards),
            "files": stamps.iter().map(stamp).collect::<Vec<_>>(),
        })
    }

    /// Elements that a piece may have.
    pub(super) fn piece(&self) -> usize {
        // An element is in memory as it was read, decoded, as codes and scales, and decoded again
        // for its error: at most 12 bytes. A third of the memory is left for the rest.
        let each = self.memory / self.threads.max(1) as u64 / 18;
        each.clamp(1 << 15, 4 << 20) as usize
    }
}
