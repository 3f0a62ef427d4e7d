//! A conversion under way: what it was asked for, what it will write, and what it found so far.

use super::beside::{self, Beside};
use super::dialect::Model;
use super::plan::{Item, Plan};
use super::settings::{Observer, Settings};
use super::shards::{self, Shard, Shards};
use super::split::split_experts;
use super::stamp::Stamp;
use super::target::{Extras, Target};
use super::weighing::Weighing;
use super::{Checkpoint, comfyui, complete, gguf, inputs};
use crate::{Error, Result, Setting};
use nvfp4_files::durable::Disk;
use nvfp4_spec::Mode;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// What is to be done, and who watches.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub disk: &'a Disk,
    pub source: &'a Path,
    pub target: &'a Path,
    pub settings: &'a Settings,
    pub observer: &'a dyn Observer,
    pub stop: &'a AtomicBool,
}

/// What the first pass found, by module: for every matrix the bits of its amax, or for MXFP4 its
/// largest exponent.
pub(super) type Amaxes = BTreeMap<String, Vec<u32>>;

/// A conversion under way.
pub(super) struct Conversion<'a, 'p> {
    pub settings: &'a Settings,
    /// What gets its name at the end.
    pub target: &'a Path,
    pub mode: Mode,
    pub model: &'p Model<'p>,
    pub plan: &'a Plan<'p>,
    pub files: Vec<Shard<'p>>,
    /// The activation scale of every weight.
    pub inputs: BTreeMap<String, f32>,
    /// What is known of the inputs of layers.
    pub weighing: Weighing,
    pub beside: Beside,
    /// The files of the source, as they were at the beginning.
    pub stamps: Vec<(PathBuf, Stamp)>,
    /// Empty until the first pass is over.
    pub amaxes: Amaxes,
    pub observer: &'a dyn Observer,
    pub stop: &'a AtomicBool,
}

/// Plans a conversion, and carries it out. Whatever is wrong with the source or the settings is an
/// error before that.
pub(super) fn laid_out<R>(task: &Task<'_>, carry_out: impl FnOnce(Conversion<'_, '_>) -> Result<R>) -> Result<R> {
    let Task { source, settings, observer, stop, .. } = *task;
    let mode = settings.mode()?;
    // `out/.` and `out/` mean `out`, to which a folder can be renamed.
    let target = &task.target.components().collect::<PathBuf>();
    if let Some(end) = settings.target.extension().filter(|end| target.extension().is_none_or(|own| own != *end)) {
        let (name, what) = (target.display(), if end == "gguf" { "GGUF" } else { "ComfyUI's form" });
        return Err(Error::Refused(format!("{name}: {what} is one file; give the target a name that ends in .{end}")));
    }
    let checkpoint = Checkpoint::open(source)?;
    check_apart(source, target)?;
    let checkpoint = match settings.target {
        Target::Plain(_) => checkpoint,
        target => split_experts(checkpoint, &settings.selection, target, settings.source)?,
    };
    let model = match settings.source {
        Some(dialect) => Model::with_dialect(&checkpoint, dialect)?,
        None => Model::new(&checkpoint)?,
    };
    complete::refuse_incomplete(&model)?;
    let plan = match settings.target {
        Target::Plain(_) => Plan::decode(&model),
        target => Plan::new(&model, &settings.selection, target)?,
    };
    let (files, extras) = lay_out(&model, &plan, settings)?;
    let inputs = inputs::scales(settings, &plan, extras.activations)?;
    let beside = Beside::new(settings.target, &model, &plan, extras, &files)?;
    let weighing = Weighing::new(settings, &plan)?;
    let mut stamps = beside::stamps(&checkpoint, &beside.companions)?;
    if let Some(path) = &settings.statistics {
        stamps.push((path.clone(), Stamp::of(path)?));
    }
    carry_out(Conversion {
        settings,
        target,
        mode,
        model: &model,
        plan: &plan,
        files,
        inputs,
        weighing,
        beside,
        stamps,
        amaxes: Amaxes::new(),
        observer,
        stop,
    })
}

/// The files that are written, and what they say beside weights.
pub(super) fn lay_out<'p>(model: &Model<'p>, plan: &Plan<'p>, settings: &Settings) -> Result<(Vec<Shard<'p>>, Extras)> {
    if !matches!(settings.target, Target::Plain(_)) && !plan.items.iter().any(|item| item.action.is_quantized()) {
        return Err(Error::NothingToQuantize);
    }
    if settings.target == Target::CompressedTensors && plan.quantized().any(|item| item.weight.is_transposed()) {
        let reason = "compressed-tensors has no form for experts in one tensor; convert to ModelOpt's form";
        return Err(Error::setting(Setting::Target, reason));
    }
    if settings.target == Target::ComfyUi {
        comfyui::check(plan)?;
    }
    let extras = inputs::extras(settings, model, plan)?;
    let files = match settings.target {
        Target::Gguf => vec![gguf::lay_out(model, plan, extras.activations)?],
        Target::ComfyUi => shards::lay_out(model, plan, Target::ComfyUi, extras, Shards::AtMost(u64::MAX))?,
        target => shards::lay_out(model, plan, target, extras, settings.shards)?,
    };
    Ok((files, extras))
}

impl Conversion<'_, '_> {
    /// The tensor scales that a weight shares with the weights that it is joined with, if its
    /// source has others.
    pub fn rescaled(&self, item: &Item<'_>) -> Option<&[f32]> {
        self.plan.groups[item.group?].rescaled.as_deref()
    }

    /// What the first pass found: the bits of an amax, or the largest exponent of MXFP4.
    pub fn found(&self, item: &Item<'_>, matrix: usize) -> u32 {
        self.amaxes[&item.weight.module][matrix]
    }

    pub fn amax(&self, item: &Item<'_>) -> f32 {
        f32::from_bits(self.found(item, 0))
    }

    /// An error if a file of the source is not what it was when the conversion began.
    pub fn check_source(&self) -> Result<()> {
        for (path, stamp) in &self.stamps {
            if Stamp::of(path)? != *stamp {
                return Err(Error::SourceChanged { path: path.clone() });
            }
        }
        Ok(())
    }
}

/// Neither of source and target may be inside the other: what is written would be read as part of
/// the source, or replacing the target would remove the source.
fn check_apart(source: &Path, target: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().map_err(|source| Error::io(path, source));
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let there = match (real(target), parent.canonicalize()) {
        (Ok(there), _) => there,
        (Err(_), Ok(parent)) => parent.join(target.file_name().unwrap_or_default()),
        // Folders that do not exist yet hold nothing.
        (Err(_), Err(_)) => return Ok(()),
    };
    let from = real(source)?;
    if there.starts_with(&from) || from.starts_with(&there) {
        let (source, target) = (source.display(), target.display());
        return Err(Error::Refused(format!(
            "one of {target} and the source {source} is inside the other; choose another target"
        )));
    }
    Ok(())
}
