//! What a conversion will do to each weight, and why.

use super::dialect::Model;
use super::names::{self, Pattern, Preset};
use super::target::Target;
use super::weight::{Stored, Weight};
use crate::{Error, Result, Unit};
use nvfp4_spec::{BLOCK, gguf};
use std::collections::BTreeMap;

/// Whether the weights that are better left alone (embeddings, output head, routers, vision) stay as they are.
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
    /// q/k/v, gate/up and w1/w3 do, inside every expert too.
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
    /// They keep their bytes, and `verify` finds fault with them.
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
}

/// What happens to a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Quantized to NVFP4.
    Quantize,
    /// NVFP4 already: the same codes and scales under the target's names.
    Relabel,
    /// NVFP4 already, with another tensor scale than the weights that it is joined with: expressed with theirs.
    Rescale,
    /// Decoded, because the target has no name for how it is stored, or nothing is quantized there.
    Decode(String),
    /// Copied as it is.
    Keep(String),
}

impl Action {
    /// Whether its numbers are not those of the source, so that it has an error.
    pub(super) fn is_measured(&self) -> bool {
        matches!(self, Action::Quantize | Action::Rescale | Action::Decode(_))
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
    /// The group that shares its tensor scale: an index into [`Plan::groups`].
    pub group: Option<usize>,
}

/// Weights that share a tensor scale.
#[derive(Clone, Debug)]
pub struct Group {
    /// What they are, as `q/k/v`.
    pub kind: String,
    /// Indices into [`Plan::items`].
    pub members: Vec<usize>,
    /// The tensor scales of a group that is rescaled, one for each matrix, as the source stores them.
    pub rescaled: Option<Vec<f32>>,
}

/// What a conversion will do.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Every weight, in the order of the source's files.
    pub items: Vec<Item<'a>>,
    /// Weights that share a tensor scale.
    pub groups: Vec<Group>,
}

impl<'a> Plan<'a> {
    /// Decides about every weight of a model.
    pub fn new(model: &Model<'a>, selection: &Selection, target: Target) -> Result<Self> {
        let decide = |weight: &Weight<'a>| Item {
            weight: weight.clone(),
            action: action(weight, model.dialect.is_nvfp4(), selection, target),
            group: None,
        };
        let mut plan = Plan { items: model.weights.iter().map(decide).collect(), groups: Vec::new() };
        for pattern in selection.skip.iter().chain(&selection.only) {
            if !plan.items.iter().any(|item| pattern.matches(&item.weight.module)) {
                return Err(Error::Refused(format!(
                    "the pattern '{pattern}' matches no weight; `nvfp4 plan` lists them"
                )));
            }
        }
        let left =
            |item: &&Item<'a>| matches!((&item.weight.stored, &item.action), (Stored::MxFp4 { .. }, Action::Decode(_)));
        if let Some(item) = plan.items.iter().find(left) {
            let module = &item.weight.module;
            return Err(Error::Refused(format!("'{module}' is MXFP4, which cannot stay beside NVFP4; do not skip it")));
        }
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
        let item = |weight: &Weight<'a>| Item { weight: weight.clone(), action: decide(weight), group: None };
        Plan { items: model.weights.iter().map(item).collect(), groups: Vec::new() }
    }

    /// Finds the groups. One that is quantized in part cannot be joined by a server.
    fn fuse(&mut self, fuse: &Fuse) -> Result<()> {
        let mut found: BTreeMap<(&str, String), Vec<usize>> = BTreeMap::new();
        for (i, item) in self.items.iter().enumerate() {
            let key = match fuse {
                Fuse::Auto => names::fused(&item.weight.module).map(|(parent, kind)| (parent, kind.to_string())),
                Fuse::Off => None,
                Fuse::Names(lists) => names::listed(&item.weight.module, lists),
            };
            if let Some(key) = key {
                found.entry(key).or_default().push(i);
            }
        }
        let mut groups = Vec::new();
        for ((parent, kind), members) in found {
            let nvfp4 = |i: &&usize| self.items[**i].action.is_nvfp4();
            let (quantized, kept): (Vec<&usize>, Vec<&usize>) = members.iter().partition(nvfp4);
            if let (Some(yes), Some(no)) = (quantized.first(), kept.first()) {
                let name = |i: usize| self.items[i].weight.module.rsplit('.').next().unwrap_or_default().to_string();
                return Err(Error::Refused(format!(
                    "{parent}: {} would be quantized and {} not, but servers join {kind} into one matrix; \
                     skip all of them or none, or turn joining off (--fuse off)",
                    name(**yes),
                    name(**no)
                )));
            }
            if quantized.len() > 1 {
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
            let reason = "--fix-scales is for weights that share a tensor scale, and --fuse off says that none do";
            return Err(Error::Refused(reason.to_string()));
        }
        if target == Target::Gguf {
            let reason = "GGUF has a tensor scale for each weight, and llama.cpp uses each; leave out --fix-scales";
            return Err(Error::Refused(reason.to_string()));
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
                        "'{module}' has the tensor scale {bad}, which nothing can mend"
                    )));
                }
                if own.len() != shared.len() {
                    let (a, b) = (own.len(), shared.len());
                    return Err(Error::Refused(format!("'{module}' holds {a} matrices, what it is joined with {b}")));
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
}

/// The largest scale of each matrix among the weights of a group: the smallest number where it divides.
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

fn action(weight: &Weight<'_>, source_is_nvfp4: bool, selection: &Selection, target: Target) -> Action {
    let kept = reason_to_keep(weight, selection, target);
    match (&weight.stored, kept) {
        (Stored::Nvfp4(_), None) => Action::Relabel,
        (Stored::Plain(_), Some(reason)) => Action::Keep(reason),
        // A quantized checkpoint's plain weights were kept by whoever made it.
        (Stored::Plain(_), None) if source_is_nvfp4 => Action::Keep("kept by the source".to_string()),
        (_, Some(reason)) => Action::Decode(reason),
        (_, None) => Action::Quantize,
    }
}

fn reason_to_keep(weight: &Weight<'_>, selection: &Selection, target: Target) -> Option<String> {
    let module = &weight.module;
    let block = if target == Target::Gguf { gguf::BLOCK_ELEMENTS } else { BLOCK };
    let uneven = !weight.cols.is_multiple_of(block);
    if let Some(pattern) = selection.skip.iter().find(|p| p.matches(module)) {
        return Some(format!("--skip {pattern}"));
    }
    if !selection.only.is_empty() && !selection.only.iter().any(|p| p.matches(module)) {
        return Some("not in --only".to_string());
    }
    if matches!(weight.stored, Stored::Nvfp4(_)) && !uneven {
        return None;
    }
    if let (DefaultSkips::On, Some(reason)) = (selection.default_skips, names::default_keep(module)) {
        return Some(reason.to_string());
    }
    if !selection.preset.has(module) {
        return Some(format!("not in --preset {}", selection.preset));
    }
    if weight.rows == 0 || weight.cols == 0 {
        return Some("empty".to_string());
    }
    uneven.then(|| format!("{} columns, not a multiple of {block}", weight.cols))
}
