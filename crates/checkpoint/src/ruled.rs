//! Which forms weights are written in, and which of them a target has.

use super::form::{Eight, Form};
use super::plan::{Item, Plan};
use super::target::{Activations, Target};
use crate::{Error, Result, Setting};
use std::collections::BTreeMap;

impl Item<'_> {
    /// The form that it is written in, in words; none where it is not quantized.
    pub(super) fn written(&self) -> Option<String> {
        match (&self.action, self.form) {
            (action, Some(Form::W4A16)) if action.is_nvfp4() => Some("NVFP4 W4A16".to_string()),
            (action, _) if action.is_nvfp4() => Some("NVFP4".to_string()),
            (action, _) => action.eight().map(|eight| eight.to_string()),
        }
    }

    /// Whether it has a scale of activations in NVFP4.
    pub(super) fn has_fp4_inputs(&self, activations: Activations) -> bool {
        self.action.is_nvfp4() && activations == Activations::Nvfp4 && self.form != Some(Form::W4A16)
    }

    /// Whether it is an expert of a mixture, and of which.
    pub(super) fn experts(&self) -> Option<&str> {
        let (parent, rest) = self.weight.module.split_once(".experts.")?;
        let number = rest.split('.').next().is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        number.then_some(parent)
    }
}

impl Plan<'_> {
    /// Whether there are other forms than NVFP4, or two of it.
    pub fn is_mixed(&self) -> bool {
        let eight = self.items.iter().any(|item| item.action.eight().is_some());
        eight || self.quantized().any(|item| item.form == Some(Form::W4A16))
    }

    /// An error where the target, or every server that reads it, lacks a form.
    pub(super) fn check_forms(&self, target: Target) -> Result<()> {
        let refuse = |reason: String| Err(Error::setting(Setting::Rules, reason));
        let forms: Vec<String> = {
            let mut forms: Vec<String> = self.items.iter().filter_map(Item::written).collect();
            forms.sort();
            forms.dedup();
            forms
        };
        let mut experts: BTreeMap<&str, (&str, Option<String>)> = BTreeMap::new();
        for item in &self.items {
            let (module, eight) = (&item.weight.module, item.action.eight());
            if let Some(parent) = item.experts() {
                let (first, form) = experts.entry(parent).or_insert((module, item.written()));
                if *form != item.written() {
                    let word = |form: &Option<String>| form.clone().unwrap_or("not quantized".to_string());
                    let (a, b) = (word(form), word(&item.written()));
                    return refuse(format!(
                        "'{first}' would be {a} and '{module}' {b}, but servers run the experts of a layer in one form"
                    ));
                }
            }
            let Some(eight) = eight else { continue };
            if item.weight.is_transposed() {
                return refuse(format!("'{module}' holds several experts, for which no server has {eight}"));
            }
            match (target, eight) {
                (Target::Gguf, _) => return refuse(format!("'{module}': GGUF has no {eight}; use NVFP4, or keep it")),
                (Target::ComfyUi, _) => {
                    return refuse(format!("'{module}': {eight} is not written for ComfyUI; use NVFP4, or keep it"));
                }
                (Target::ModelOpt, Eight::Channel) if forms.len() > 1 => {
                    return refuse(format!(
                        "'{module}': vLLM reads {eight} in no mixed checkpoint of ModelOpt's; use fp8-tensor, or \
                         compressed-tensors' format"
                    ));
                }
                (Target::ModelOpt, Eight::Block | Eight::Channel) if item.experts().is_some() => {
                    return refuse(format!(
                        "'{module}': vLLM has no experts in {eight} in ModelOpt's format; use fp8-tensor or mxfp8, or \
                         compressed-tensors' format"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
