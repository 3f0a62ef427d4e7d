//! What a conversion will do to each weight, and why.

use super::architecture::{self, Architectures};
use super::dialect::{Dialect, Model};
use super::folder::{Checkpoint, Located};
use super::form::{Eight, Form};
use super::joined;
use super::keep::Defaults;
use super::names::{Pattern, Preset};
use super::outline::Outline;
use super::rules::Rules;
use super::stacked;
use super::target::Target;
use super::weight::{Stored, Weight};
use crate::{Error, Result, Setting};
use nvfp4::Unit;
use nvfp4_spec::{BLOCK, gguf};
use safetensors::Dtype;
use std::collections::BTreeMap;

pub(super) use super::stacked::experts;

/// Whether the weights that are better left alone (embeddings, output head, routers, vision) stay
/// as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DefaultSkips {
    /// They stay.
    #[default]
    On,
    /// They are quantized like any other weight.
    Off,
}

/// Whether weights that servers join share one tensor scale.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Fuse {
    /// q/k/v, gate/up and all others that are known do, inside every expert too.
    #[default]
    Auto,
    /// Every weight has its own.
    Off,
    /// Weights of one parent whose last names are in one of these lists do.
    Names(Vec<Vec<String>>),
}

/// What happens to weights of an NVFP4 source that servers join and whose tensor scales differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Differing {
    /// They keep their bytes, and `verify` reports them.
    #[default]
    Keep,
    /// They get the largest of their tensor scales; see [`nvfp4_spec::rescale`].
    Rescale,
}

/// Which weights are quantized.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Part of the model.
    pub preset: Preset,
    /// Modules to leave alone.
    pub skip: Vec<Pattern>,
    /// If not empty, only these modules.
    pub only: Vec<Pattern>,
    /// The built-in list.
    pub default_skips: DefaultSkips,
    /// Shared tensor scales.
    pub fuse: Fuse,
    /// Tensor scales that should be shared and are not.
    pub differing: Differing,
    /// Whether models that no program would load are converted.
    pub architectures: Architectures,
    /// Forms by module; NVFP4 where there are none.
    pub rules: Rules,
}

/// What happens to a weight.
///
/// Exhaustive on purpose: a program that shows a plan has words for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Quantized to NVFP4.
    Quantize,
    /// NVFP4 already: the same codes and scales under the target's names.
    Relabel,
    /// NVFP4 already, with another tensor scale than the weights that it is joined with: expressed
    /// with theirs.
    Rescale,
    /// Quantized to FP8, or to MXFP8.
    Eight(Eight),
    /// FP8 or MXFP8 already: the same bytes under the target's names.
    Retain(Eight),
    /// Decoded, because the target has no name for how it is stored, or nothing is quantized there.
    Decode(String),
    /// Copied as it is.
    Keep(String),
}

impl Action {
    /// Whether its numbers differ from those of the source, so that it has an error.
    pub(super) fn is_measured(&self) -> bool {
        matches!(self, Action::Quantize | Action::Rescale | Action::Eight(_) | Action::Decode(_))
    }

    /// Whether it is made with the amax of the whole weight.
    pub(super) fn needs_amax(&self) -> bool {
        matches!(self, Action::Quantize | Action::Eight(Eight::Tensor))
    }

    /// Whether numbers are quantized, and not taken over as they are.
    pub fn is_made(&self) -> bool {
        matches!(self, Action::Quantize | Action::Eight(_))
    }

    /// Whether the weight is quantized afterwards, in any form.
    pub fn is_quantized(&self) -> bool {
        self.is_nvfp4() || self.eight().is_some()
    }

    /// Which elements share a scale, where the weight is FP8 or MXFP8 afterwards.
    pub fn eight(&self) -> Option<Eight> {
        match self {
            Action::Eight(eight) | Action::Retain(eight) => Some(*eight),
            Action::Quantize | Action::Relabel | Action::Rescale | Action::Decode(_) | Action::Keep(_) => None,
        }
    }

    /// Whether the weight is NVFP4 afterwards.
    pub fn is_nvfp4(&self) -> bool {
        matches!(self, Action::Quantize | Action::Relabel | Action::Rescale)
    }
}

/// A weight with what happens to it.
#[derive(Clone, Debug)]
pub struct Item<'a> {
    /// The weight.
    pub weight: Weight<'a>,
    /// What happens.
    pub action: Action,
    /// The form that a rule asks for.
    pub form: Option<Form>,
    /// The group that shares its tensor scale: an index into [`Plan::groups`].
    pub group: Option<usize>,
}

/// Weights that share a tensor scale.
#[derive(Clone, Debug)]
pub struct Group {
    /// What they are, such as `q/k/v`.
    pub kind: String,
    /// Indices into [`Plan::items`].
    pub members: Vec<usize>,
    /// The tensor scales of a group that is rescaled, one for each matrix, as the source stores
    /// them.
    pub rescaled: Option<Vec<f32>>,
}

/// A tensor that is copied although it looks like a weight.
#[derive(Clone, Debug)]
pub struct Copied<'a> {
    /// The tensor.
    pub tensor: Located<'a>,
    /// Why it is not quantized.
    pub reason: String,
}

/// What a conversion will do.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Every weight, in the order of the source's files.
    pub items: Vec<Item<'a>>,
    /// Weights that share a tensor scale.
    pub groups: Vec<Group>,
    /// Tensors of several dimensions that are copied: experts in one tensor, types and names that
    /// are not quantized.
    pub copied: Vec<Copied<'a>>,
}

impl<'a> Plan<'a> {
    /// Decides about every weight of a model.
    pub fn new(model: &Model<'a>, selection: &Selection, target: Target) -> Result<Self> {
        if let (Architectures::Served, Some(reason)) = (selection.architectures, architecture::refusal(model)?) {
            return Err(Error::setting(Setting::Architectures, reason));
        }
        let rules = Deciding::new(model.checkpoint, model.dialect, selection, target);
        let decide = |weight: &Weight<'a>| {
            let form = selection.rules.form(&weight.module);
            Item { weight: weight.clone(), action: rules.action(weight), form, group: None }
        };
        let mut plan = Plan {
            items: model.weights.iter().map(decide).collect(),
            groups: Vec::new(),
            copied: model.others.iter().filter_map(|tensor| rules.copied(model.checkpoint, tensor)).collect(),
        };
        for pattern in selection.skip.iter().chain(&selection.only).chain(selection.rules.patterns()) {
            let copied = |c: &Copied<'_>| stacked::is_named(model.checkpoint, &c.tensor, |name| pattern.matches(name));
            let items = plan.items.iter().any(|item| pattern.matches(&item.weight.module));
            if !items && !plan.copied.iter().any(copied) {
                return Err(Error::UnknownWeight { pattern: pattern.to_string() });
            }
        }
        let left =
            |item: &&Item<'a>| matches!((&item.weight.stored, &item.action), (Stored::MxFp4 { .. }, Action::Decode(_)));
        if let Some(item) = plan.items.iter().find(left) {
            let module = &item.weight.module;
            return Err(Error::Refused(format!("'{module}' is MXFP4, which cannot stay beside NVFP4; do not skip it")));
        }
        plan.check_forms(target)?;
        plan.fuse(&selection.fuse)?;
        if selection.differing == Differing::Rescale {
            plan.rescale(&selection.fuse, target)?;
        }
        Ok(plan)
    }

    /// Decodes every weight that is not plain.
    pub fn decode(model: &Model<'a>) -> Self {
        let decide = |weight: &Weight<'a>| match &weight.stored {
            Stored::Plain(_) => Action::Keep("not quantized".to_string()),
            Stored::Fp8 { .. } | Stored::MxFp4 { .. } | Stored::Nvfp4(_) => Action::Decode(weight.format()),
        };
        let item =
            |weight: &Weight<'a>| Item { weight: weight.clone(), action: decide(weight), form: None, group: None };
        Plan { items: model.weights.iter().map(item).collect(), groups: Vec::new(), copied: Vec::new() }
    }

    /// Finds the groups. One that is quantized in part cannot be joined by a server.
    fn fuse(&mut self, fuse: &Fuse) -> Result<()> {
        let mut found: BTreeMap<(&str, String), Vec<usize>> = BTreeMap::new();
        for (i, item) in self.items.iter().enumerate() {
            let key = match fuse {
                Fuse::Auto => joined::fused(&item.weight.module).map(|(parent, kind)| (parent, kind.to_string())),
                Fuse::Off => None,
                Fuse::Names(lists) => joined::listed(&item.weight.module, lists),
            };
            if let Some(key) = key {
                found.entry(key).or_default().push(i);
            }
        }
        let mut groups = Vec::new();
        for ((parent, kind), mut members) in found {
            if *fuse == Fuse::Auto {
                let item = |i: &usize| &self.items[*i];
                members.retain(|i| item(i).action.is_nvfp4() || !joined::is_guest(&item(i).weight.module));
            }
            let quantized = |i: &&usize| self.items[**i].action.is_quantized();
            let (quantized, kept): (Vec<&usize>, Vec<&usize>) = members.iter().partition(quantized);
            let name = |i: usize| self.items[i].weight.module.rsplit('.').next().unwrap_or_default().to_string();
            if let (Some(yes), Some(no)) = (quantized.first(), kept.first()) {
                let reason = format!(
                    "{parent}: {} would be quantized and {} not, but servers join {kind} into one matrix; \
                     skip all of them or none, or turn joining off",
                    name(**yes),
                    name(**no)
                );
                return Err(Error::setting(Setting::Fuse, reason));
            }
            let form = |i: usize| self.items[i].written();
            if let Some(other) = quantized.iter().find(|i| form(***i) != form(*quantized[0])) {
                let [first, other] = [*quantized[0], **other].map(|i| (name(i), form(i).unwrap_or_default()));
                let reason = format!(
                    "{parent}: {} would be {} and {} {}, but servers join {kind} into one matrix; give them one form",
                    first.0, first.1, other.0, other.1
                );
                return Err(Error::setting(Setting::Rules, reason));
            }
            let block = |i: &&usize| self.items[**i].action.eight() == Some(Eight::Block);
            let uneven = |i: &&usize| !self.items[**i].weight.rows.is_multiple_of(Eight::BLOCK);
            if let (Some(i), true) = (quantized.iter().copied().find(|i| block(i) && uneven(i)), quantized.len() > 1) {
                let reason = format!(
                    "{parent}: {} has {} rows, no multiple of 128, and servers join {kind} into one matrix, in which \
                     blocks of 128 would begin inside of others; give them the form fp8, or keep them",
                    name(*i),
                    self.items[*i].weight.rows
                );
                return Err(Error::setting(Setting::Rules, reason));
            }
            // What has a scale for each tensor shares it.
            let shares = |i: &usize| {
                let action = &self.items[*i].action;
                action.is_nvfp4() || *action == Action::Eight(Eight::Tensor)
            };
            if quantized.len() > 1 && members.iter().all(shares) {
                groups.push(Group { kind, members, rescaled: None });
            }
        }
        groups.sort_by_key(|g| g.members[0]);
        for (g, group) in groups.iter().enumerate() {
            group.members.iter().for_each(|&i| self.items[i].group = Some(g));
        }
        self.groups = groups;
        Ok(())
    }

    /// Gives the groups of an NVFP4 source whose tensor scales differ the largest of them.
    fn rescale(&mut self, fuse: &Fuse, target: Target) -> Result<()> {
        if *fuse == Fuse::Off {
            let reason = "only joined weights can get one tensor scale, and joining is turned off";
            return Err(Error::setting(Setting::Differing, reason));
        }
        if target == Target::Gguf {
            let reason = "GGUF has a tensor scale for each weight, and llama.cpp uses each: there is nothing to fix";
            return Err(Error::setting(Setting::Differing, reason));
        }
        for group in &mut self.groups {
            let mut scales = Vec::new();
            for &i in &group.members {
                let weight = &self.items[i].weight;
                if let Stored::Nvfp4(parts) = &weight.stored {
                    scales.push((parts.unit, parts.globals(weight)?));
                }
            }
            let Some(shared) = largest(&scales) else { continue };
            if scales.len() < group.members.len() || scales.iter().all(|(_, own)| same(own, &shared)) {
                continue;
            }
            for (&i, (_, own)) in group.members.iter().zip(&scales) {
                let module = &self.items[i].weight.module;
                if let Some(bad) = own.iter().find(|g| !(g.is_finite() && **g > 0.0)) {
                    return Err(Error::Refused(format!(
                        "'{module}' has the tensor scale {bad}, which cannot be repaired"
                    )));
                }
                if own.len() != shared.len() {
                    let (a, b) = (own.len(), shared.len());
                    return Err(Error::Refused(format!(
                        "'{module}' holds {a} matrices, and what it is joined with holds {b}"
                    )));
                }
                if !same(own, &shared) {
                    self.items[i].action = Action::Rescale;
                }
            }
            group.rescaled = Some(shared);
        }
        Ok(())
    }

    /// Weights that will be NVFP4.
    pub fn quantized(&self) -> impl Iterator<Item = &Item<'a>> {
        self.items.iter().filter(|i| i.action.is_nvfp4())
    }

    /// The share of the source's bytes outside the weights that will be NVFP4.
    pub fn kept_share(&self, model: &Model<'_>) -> f64 {
        let quantized = self.items.iter().filter(|item| item.action.is_quantized());
        let quantized: u64 = quantized.map(|item| item.weight.byte_len()).sum();
        1.0 - quantized as f64 / model.checkpoint.byte_len().max(1) as f64
    }
}

/// The largest scale of each matrix among the weights of a group: the smallest number where it
/// divides.
fn largest(scales: &[(Unit, Vec<f32>)]) -> Option<Vec<f32>> {
    let (mut all, unit) = (scales.iter(), scales.first()?.0);
    let mut shared = all.next()?.1.clone();
    for (_, own) in all {
        let larger = |(a, b): (&mut f32, &f32)| *a = if unit == Unit::Divisor { a.min(*b) } else { a.max(*b) };
        shared.iter_mut().zip(own).for_each(larger);
    }
    Some(shared)
}

/// Whether two lists of scales have the same bits.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// What decides about a weight.
pub(super) struct Deciding<'s> {
    selection: &'s Selection,
    target: Target,
    defaults: Defaults,
    source_is_nvfp4: bool,
}

impl<'s> Deciding<'s> {
    pub fn new(checkpoint: &Checkpoint, dialect: Dialect, selection: &'s Selection, target: Target) -> Self {
        let defaults = Defaults::new(&Outline::new(checkpoint.config()));
        Deciding { selection, target, defaults, source_is_nvfp4: dialect.is_nvfp4() }
    }

    /// Why a tensor is copied that looks like a weight, with rows and columns of numbers, and is
    /// none here.
    fn copied<'a>(&self, checkpoint: &Checkpoint, tensor: &Located<'a>) -> Option<Copied<'a>> {
        let info = tensor.info;
        let float =
            matches!(info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64 | Dtype::F8_E4M3 | Dtype::F8_E5M2);
        if !float || info.shape.len() < 2 {
            return None;
        }
        let reason = match (info.shape.len(), info.dtype, info.name.as_str()) {
            _ if stacked::experts(tensor).is_some() => self.whole(checkpoint, tensor),
            (2, Dtype::F64, _) => "F64 is not quantized; store it as F32".to_string(),
            (2, Dtype::F8_E4M3 | Dtype::F8_E5M2, _) => "FP8 without scales that are read".to_string(),
            (2, _, "weight") => "its name is only 'weight', without a module".to_string(),
            (2, ..) => "its name does not end in '.weight'".to_string(),
            (dimensions, ..) => format!("{dimensions} dimensions, not a matrix"),
        };
        Some(Copied { tensor: *tensor, reason })
    }

    /// Why experts in one tensor stay there.
    fn whole(&self, checkpoint: &Checkpoint, tensor: &Located<'_>) -> String {
        let split = match stacked::matrices(checkpoint, tensor) {
            Ok(split) => split,
            Err(reason) => return reason,
        };
        let reason =
            split.iter().find_map(|info| match self.action(&stacked::weight(Located { file: tensor.file, info })) {
                Action::Keep(reason) | Action::Decode(reason) => Some(reason),
                _ => None,
            });
        reason.unwrap_or_else(|| "experts in one tensor, of which another projection stays".to_string())
    }

    /// How many columns share a scale.
    fn block(&self) -> usize {
        if self.target == Target::Gguf { gguf::BLOCK_ELEMENTS } else { BLOCK }
    }

    /// Whether rows of this many elements are quantized.
    pub fn fits(&self, cols: usize) -> bool {
        cols.is_multiple_of(self.block())
    }

    pub fn action(&self, weight: &Weight<'_>) -> Action {
        let form = self.selection.rules.form(&weight.module);
        if let Some(action) = form.and_then(|form| self.ruled(weight, form)) {
            return action;
        }
        match (&weight.stored, self.reason_to_keep(weight)) {
            (Stored::Nvfp4(_), None) => Action::Relabel,
            (Stored::Plain(_), Some(reason)) => Action::Keep(reason),
            // The plain weights of a quantized checkpoint were kept by its producer.
            (Stored::Plain(_), None) if self.source_is_nvfp4 && form.is_none() => {
                Action::Keep("kept by the source".to_string())
            }
            (_, Some(reason)) => Action::Decode(reason),
            (_, None) => Action::Quantize,
        }
    }

    /// What a rule makes of a weight. What the lists of modules leave alone comes before, and so
    /// does what is left alone by default, unless a rule has its very name.
    fn ruled(&self, weight: &Weight<'_>, form: Form) -> Option<Action> {
        let (module, selection) = (&weight.module, self.selection);
        let listed = selection.skip.iter().any(|p| p.matches(module))
            || !selection.only.is_empty() && !selection.only.iter().any(|p| p.matches(module));
        let asked = selection.default_skips == DefaultSkips::Off || selection.rules.names(module);
        let default = self.defaults.reason(module, weight.rows).filter(|_| !asked);
        let plain = matches!(weight.stored, Stored::Plain(_));
        if listed || weight.elements() == 0 || (plain && default.is_some()) {
            return None;
        }
        ruled(weight, form, self.target)
    }

    fn reason_to_keep(&self, weight: &Weight<'_>) -> Option<String> {
        let (module, selection) = (&weight.module, self.selection);
        let (block, uneven) = (self.block(), !self.fits(weight.cols));
        if let Some(pattern) = selection.skip.iter().find(|p| p.matches(module)) {
            return Some(format!("skipped by '{pattern}'"));
        }
        if !selection.only.is_empty() && !selection.only.iter().any(|p| p.matches(module)) {
            return Some("not among those chosen".to_string());
        }
        if matches!(weight.stored, Stored::Nvfp4(_)) && !uneven {
            return None;
        }
        let named = selection.rules.names(module);
        let part = self.defaults.reason(module, weight.rows).filter(|_| !named);
        if let (DefaultSkips::On, Some(part)) = (selection.default_skips, part) {
            return Some(part.to_string());
        }
        if !selection.preset.has(module) {
            return Some(format!("not in the preset {}", selection.preset));
        }
        if weight.rows == 0 || weight.cols == 0 {
            return Some("empty".to_string());
        }
        uneven.then(|| format!("{} columns, not a multiple of {block}", weight.cols))
    }
}

/// What happens to a weight that a rule gives this form; none where the form is NVFP4, which the
/// rest of the settings decide about.
fn ruled(weight: &Weight<'_>, form: Form, target: Target) -> Option<Action> {
    match (&weight.stored, form.eight(target)) {
        (Stored::Fp8 { eight: own, .. }, Some(eight)) if *own == eight => Some(Action::Retain(eight)),
        (_, Some(eight)) if !weight.cols.is_multiple_of(eight.columns()) => {
            let (columns, reason) = (eight.columns(), |n| format!("{} columns, not a multiple of {n}", weight.cols));
            Some(kept(weight, reason(columns)))
        }
        (_, Some(eight)) => Some(Action::Eight(eight)),
        (Stored::Fp8 { eight, .. }, None) if form == Form::Keep => Some(Action::Retain(*eight)),
        (Stored::Nvfp4(_), None) if form == Form::Keep => Some(Action::Relabel),
        (Stored::Plain(_) | Stored::MxFp4 { .. }, None) if form == Form::Keep => {
            Some(kept(weight, "kept by a rule".to_string()))
        }
        _ => None,
    }
}

/// A weight that cannot have its form stays as it is, or is decoded where it cannot.
fn kept(weight: &Weight<'_>, reason: String) -> Action {
    match &weight.stored {
        Stored::Plain(_) => Action::Keep(reason),
        _ => Action::Decode(reason),
    }
}
