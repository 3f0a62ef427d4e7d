//! What a conversion will do to each weight, and why.

use super::action::Action;
use super::architecture::{self, Architectures};
use super::deciding::{Copied, Deciding};
use super::dialect::Model;
use super::form::Form;
use super::selection::{Differing, Selection};
use super::stacked;
use super::target::Target;
use super::weight::{Stored, Weight};
use crate::{Error, Result, Setting};

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
            let reason = format!("'{module}' is MXFP4, which stays only where a rule says so; do not skip it");
            return Err(Error::Refused(reason));
        }
        plan.check_forms(model, target)?;
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
