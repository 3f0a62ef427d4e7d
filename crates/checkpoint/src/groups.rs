//! Weights that servers join: one form for all of them, and one tensor scale where it has to be one.

use super::action::Action;
use super::form::Eight;
use super::joined;
use super::plan::{Group, Plan};
use super::selection::Fuse;
use super::target::Target;
use super::weight::Stored;
use crate::{Error, Result, Setting};
use nvfp4::Unit;
use std::collections::BTreeMap;

impl Plan<'_> {
    /// Finds the groups. One that is quantized in part cannot be joined by a server.
    pub(super) fn fuse(&mut self, fuse: &Fuse) -> Result<()> {
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
            // MXFP4 keeps its codes, with a tensor scale from its exponents; others have an amax.
            let cast = |i: &&usize| matches!(self.items[**i].weight.stored, Stored::MxFp4 { .. });
            let made = |i: &&usize| self.items[**i].action == Action::Quantize;
            let casts = quantized.iter().copied().filter(|i| made(i)).filter(|i| cast(i)).count();
            if casts > 0 && casts < quantized.len() {
                let reason = format!("{parent}: servers join {kind} into one matrix, and not all of them are MXFP4");
                return Err(Error::setting(Setting::Fuse, reason));
            }
            // FP8 per tensor keeps a scale for each, as ModelOpt and llm-compressor do: servers take
            // the largest, and express the others with it.
            let shares = |i: &usize| self.items[*i].action.is_nvfp4();
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
    pub(super) fn rescale(&mut self, fuse: &Fuse, target: Target) -> Result<()> {
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
