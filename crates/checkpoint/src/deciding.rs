//! What decides about a weight: the selection, its rules, and what is left alone by default.

use super::action::Action;
use super::dialect::Dialect;
use super::folder::{Checkpoint, Located};
use super::form::Form;
use super::keep::Defaults;
use super::outline::Outline;
use super::selection::{DefaultSkips, Selection};
use super::stacked;
use super::target::Target;
use super::weight::{Stored, Weight};
use nvfp4_spec::{BLOCK, gguf};
use safetensors::Dtype;

/// A tensor that is copied although it looks like a weight.
#[derive(Clone, Debug)]
pub struct Copied<'a> {
    /// The tensor.
    pub tensor: Located<'a>,
    /// Why it is not quantized.
    pub reason: String,
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
    pub fn copied<'a>(&self, checkpoint: &Checkpoint, tensor: &Located<'a>) -> Option<Copied<'a>> {
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
        if self.target == Target::DeepSeekV4 {
            return self.deepseek_v4(weight);
        }
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

    /// DeepSeek-V4's form has experts in NVFP4, those of its prediction layers too, and leaves the
    /// rest as it is.
    fn deepseek_v4(&self, weight: &Weight<'_>) -> Action {
        let (module, selection) = (&weight.module, self.selection);
        let left = selection.skip.iter().any(|p| p.matches(module))
            || !selection.only.is_empty() && !selection.only.iter().any(|p| p.matches(module))
            || selection.rules.form(module) == Some(Form::Keep);
        match &weight.stored {
            Stored::Nvfp4(_) => Action::Relabel,
            _ if stacked::is_expert(module) && !left && self.fits(weight.cols) => Action::Quantize,
            Stored::Plain(_) => Action::Keep("stays in DeepSeek-V4's form".to_string()),
            Stored::Fp8 { eight, .. } => Action::Retain(*eight),
            Stored::MxFp4 { .. } => Action::RetainMxFp4,
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
        (Stored::MxFp4 { .. }, None) if matches!(form, Form::Keep | Form::MxFp4) => Some(Action::RetainMxFp4),
        (Stored::Plain(_), None) if form == Form::Keep => Some(Action::Keep("kept by a rule".to_string())),
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
