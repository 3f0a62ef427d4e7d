//! The checks of a plan. Each finds all that it can; none stops the others.

use super::{Entry, Plan, Saved, Warning};
use crate::attention::{self, AttentionConflict};
use crate::consumers::{Support, support};
use crate::decision::Reason;
use crate::device::{Capabilities, Execution};
use crate::factory::Recipe;
use crate::model::{KeepInput, Kind, Model, Module, Purpose};
use crate::path::ModulePath;
use crate::problem::{Found, Problem};
use crate::products::Operand;
use crate::role::{AttentionSlot, Consumer, LinearSlot, Site, Slot};
use nvfp4::Side;
use nvfp4::format::{ColumnSource, Family, Format, QuantSpec, Replay, multiply};
use std::collections::{BTreeSet, HashSet};

/// What is wrong with a model by itself.
pub(super) fn model(model: &Model) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut paths = BTreeSet::new();
    for module in &model.modules {
        let path = module.path().clone();
        if !path.is_valid() {
            problems.push(Problem::Path { path: path.clone() });
        }
        if !paths.insert(path.clone()) {
            problems.push(Problem::DuplicatePath { path: path.clone() });
        }
        let (slots, mut seen) = (module.slots(), BTreeSet::new());
        for slot in &slots {
            // Two passes of one name would print alike.
            if !seen.insert(slot.to_string()) {
                problems.push(Problem::DuplicateSlot { site: Site::new(&path, slot.clone()) });
            }
        }
        let unknown = |slot: &Slot, what, fix| Problem::UnknownSite { site: Site::new(&path, slot.clone()), what, fix };
        for (slot, _) in module.uses.iter().filter(|(slot, _)| !slots.contains(slot)) {
            problems.push(unknown(slot, "a use", "name a slot of this module"));
        }
        for product in &module.products {
            for slot in [&product.left.slot, &product.right.slot].into_iter().filter(|slot| !slots.contains(slot)) {
                problems.push(unknown(slot, "a product", "add the slot to the module"));
            }
        }
    }
    for edge in &model.edges {
        let find = |path: &ModulePath| model.modules.iter().find(|module| module.path() == path);
        if !find(&edge.from.path).is_some_and(|module| module.hands_on(&edge.from.slot)) {
            let fix =
                "start at the output or the input gradient of a linear layer, the output of attention or its gradients";
            problems.push(Problem::UnknownSite { site: edge.from.clone(), what: "the start of an edge", fix });
        }
        for site in &edge.to {
            if !find(&site.path).is_some_and(|module| module.slots().contains(&site.slot)) {
                let fix = "end at a tensor that its module reads";
                problems.push(Problem::UnknownSite { site: site.clone(), what: "the end of an edge", fix });
            }
        }
    }
    problems
}

/// What is wrong with the specs together; returns the plan with what follows from them.
pub(super) fn plan(
    mut plan: Plan,
    model: &Model,
    recipe: &Recipe,
    device: &Capabilities,
    problems: &mut Vec<Problem>,
) -> Plan {
    for module in &model.modules {
        products(&plan, module, problems);
        grouped(&plan, module, problems);
        uses(&plan, module, problems);
        attention_mode(&mut plan, module, recipe, problems);
        saved_input(&mut plan, module, problems);
    }
    hand_overs(&plan, problems);
    devices(&mut plan, device, problems);
    plan.warnings.extend(unused_rules(&plan, recipe));
    plan.warnings.extend(recipe.notes().iter().cloned().map(Warning::Note));
    plan
}

/// The formats of each product go together.
fn products(plan: &Plan, module: &Module, problems: &mut Vec<Problem>) {
    for product in module.products(plan.purpose) {
        let found = |operand: &Operand| -> Option<Found> {
            let entry = plan.get(&Site::new(module.path(), operand.slot.clone()))?;
            let (spec, reason) = (entry.spec.clone(), entry.reason.clone());
            Some(Found { slot: operand.slot.clone(), side: operand.side, spec, reason })
        };
        let (Some(left), Some(right)) = (found(&product.left), found(&product.right)) else { continue };
        let formats = (left.spec.format(left.side), right.spec.format(right.side));
        if let Err(conflict) = multiply((&formats.0, left.side), (&formats.1, right.side)) {
            let (left, right) = (Box::new(left), Box::new(right));
            problems.push(Problem::Product {
                path: module.path().clone(),
                product: product.name,
                left,
                right,
                conflict,
            });
        }
    }
}

/// All experts of a layer have one spec per operand.
fn grouped(plan: &Plan, module: &Module, problems: &mut Vec<Problem>) {
    let Kind::Grouped { experts } = module.kind else { return };
    for slot in LinearSlot::ALL {
        let of = |expert| plan.get(&Site::new(module.path(), Slot::Grouped { slot, expert }));
        let Some(first) = of(0) else { continue };
        if let Some(other) = (1..experts).filter_map(of).find(|entry| entry.spec != first.spec) {
            problems.push(Problem::Grouped {
                site: other.role.owner.clone(),
                spec: other.spec.clone(),
                first: first.spec.clone(),
                reason: other.reason.clone(),
            });
        }
    }
}

/// What is done with a tensor goes with its scales.
fn uses(plan: &Plan, module: &Module, problems: &mut Vec<Problem>) {
    for (slot, usage) in &module.uses {
        let Some(entry) = plan.get(&Site::new(module.path(), slot.clone())) else { continue };
        for side in [Side::Row, Side::Column] {
            let Format::Nvfp4(format) = entry.spec.format(side) else { continue };
            if let Support::No(fix) = support(*usage, format.global_scale(), side) {
                let (site, spec, usage) = (entry.role.owner.clone(), entry.spec.clone(), *usage);
                problems.push(Problem::Use { site, spec, usage, side, fix });
            }
        }
    }
}

/// The precision of attention follows from its tensors.
fn attention_mode(plan: &mut Plan, module: &Module, recipe: &Recipe, problems: &mut Vec<Problem>) {
    if module.kind != Kind::Attention {
        return;
    }
    let path = module.path().clone();
    let entry = |slot: AttentionSlot| plan.get(&Site::new(&path, slot));
    let specs: Vec<(AttentionSlot, &QuantSpec)> =
        AttentionSlot::ALL.into_iter().filter_map(|slot| entry(slot).map(|entry| (slot, &entry.spec))).collect();
    // The specs of these slots, and what they follow from, each once.
    let found = |slots: &[AttentionSlot]| {
        let entries: Vec<(AttentionSlot, &Entry)> =
            slots.iter().filter_map(|&slot| Some((slot, entry(slot)?))).collect();
        let reason = each_once(entries.iter().map(|(_, entry)| &entry.reason));
        (entries.into_iter().map(|(slot, entry)| (slot, entry.spec.clone())).collect::<Vec<_>>(), reason)
    };
    match attention::derive(&specs) {
        Ok(mode) => {
            if let Some(required) = recipe.required_attention()
                && required != mode.forward
            {
                let (tensors, reason) = found(&[AttentionSlot::Qkv, AttentionSlot::S, AttentionSlot::O]);
                let (path, found) = (path.clone(), mode);
                problems.push(Problem::AttentionRequired { path, required, found, tensors, reason });
            }
            plan.attention.insert(path, mode);
        }
        Err(AttentionConflict::Formats(slots)) => {
            let (tensors, reason) = found(&slots);
            problems.push(Problem::AttentionFormat { path, tensors, reason });
        }
        Err(AttentionConflict::Mixed(a, b)) => {
            let [left, right] = [a, b].map(|slot| (slot, plan.spec(&Site::new(&path, slot)).cloned()));
            if let ((a, Some(left)), (b, Some(right))) = (left, right) {
                let reason = found(&[a, b]).1;
                problems.push(Problem::AttentionMixed { path, left: (a, left), right: (b, right), reason });
            }
        }
        Err(AttentionConflict::OnlyBackward(slot)) => {
            if let Some(Entry { spec, reason, .. }) = entry(slot) {
                let (spec, reason) = (spec.clone(), reason.clone());
                problems.push(Problem::AttentionOnlyBackward { path, slot, spec, reason });
            }
        }
    }
}

/// What specs follow from, without repetition.
fn each_once<'a>(reason: impl Iterator<Item = &'a Reason>) -> Vec<Reason> {
    let mut seen = HashSet::new();
    reason.filter(|reason| seen.insert(*reason)).cloned().collect()
}

/// What is kept of a linear layer's input, and whether that is enough.
fn saved_input(plan: &mut Plan, module: &Module, problems: &mut Vec<Problem>) {
    let slot = match module.kind {
        Kind::Linear => Slot::Linear(LinearSlot::Input),
        Kind::Grouped { .. } => Slot::Grouped { slot: LinearSlot::Input, expert: 0 },
        Kind::Attention | Kind::Extension => return,
    };
    let site = Site::new(module.path(), slot);
    let (Purpose::Training, Some(Entry { spec, .. })) = (plan.purpose, plan.get(&site)) else { return };
    let spec = spec.clone();
    let saved = match (spec.format(Side::Column).family(), spec.source(), module.input, spec.replay()) {
        (Family::HighPrecision, ColumnSource::Original, ..) => Saved::Original,
        (Family::HighPrecision, ColumnSource::RowDequantized, ..) => match spec.format(Side::Row).family() {
            Family::HighPrecision => Saved::Original,
            _ => Saved::Row,
        },
        (_, _, KeepInput::Quantized, _) => Saved::Column,
        (_, _, KeepInput::Original | KeepInput::PreferOriginal, Replay::Same) => Saved::Original,
        (_, _, KeepInput::Original, Replay::Differs) => {
            problems.push(Problem::Replay { site, spec });
            return;
        }
        (_, _, KeepInput::PreferOriginal, Replay::Differs) => {
            plan.warnings.push(Warning::InputKeptQuantized { site, spec });
            Saved::Column
        }
    };
    plan.saved.insert(module.path().clone(), saved);
}

/// What is handed over is what the consumer reads.
fn hand_overs(plan: &Plan, problems: &mut Vec<Problem>) {
    for entry in &plan.entries {
        let Some(Consumer::Sites(sites)) = &entry.role.consumer else { continue };
        for to in sites {
            if let Some(reader) = plan.get(to).filter(|reader| reader.spec != entry.spec) {
                let (from, to) = (entry.role.owner.clone(), to.clone());
                let (given, read) = (entry.spec.clone(), reader.spec.clone());
                let reason = each_once([&entry.reason, &reader.reason].into_iter());
                problems.push(Problem::HandOver { from, to, given, read, reason });
            }
        }
    }
}

/// The device runs every format that is used; it is not asked about others.
fn devices(plan: &mut Plan, device: &Capabilities, problems: &mut Vec<Problem>) {
    let mut runs = std::mem::take(&mut plan.runs);
    // All experts have the specs of the first.
    let further = |entry: &&Entry| matches!(entry.role.slot(), Slot::Grouped { expert: 1.., .. });
    for entry in plan.entries.iter().filter(|entry| !further(entry)) {
        let formats = [Side::Row, Side::Column].map(|side| entry.spec.format(side));
        let families: BTreeSet<Family> = formats.iter().map(Format::family).collect();
        for family in families.into_iter().filter(|family| *family != Family::HighPrecision) {
            let how = device.execution(&family, plan.accumulators.reduced());
            if how == Execution::Missing {
                problems.push(Problem::Device {
                    site: entry.role.owner.clone(),
                    spec: entry.spec.clone(),
                    family: family.clone(),
                    reason: entry.reason.clone(),
                });
            }
            runs.insert(family, how);
        }
    }
    plan.runs = runs;
}

/// Rules that decided nothing: most often a typing error.
fn unused_rules(plan: &Plan, recipe: &Recipe) -> Vec<Warning> {
    let used = |number: usize| {
        plan.entries.iter().any(|entry| matches!(entry.reason, Reason::Rule { number: n, .. } if n == number))
    };
    let rules = recipe.rules().map_or(&[][..], |rules| &rules.rules);
    let numbered = rules.iter().enumerate().map(|(index, rule)| (index + 1, rule));
    numbered
        .filter(|(number, _)| !used(*number))
        .map(|(number, rule)| Warning::UnusedRule { number, line: rule.line, rule: rule.to_string() })
        .collect()
}
