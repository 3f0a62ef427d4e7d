//! Which forms weights are written in, and which of them a target has.

use super::action::Action;
use super::deepseek;
use super::dialect::Model;
use super::form::{Eight, Form};
use super::plan::{Item, Plan};
use super::stacked::is_expert;
use super::target::{Activations, Target};
use crate::{Error, Result, Setting};
use std::collections::BTreeMap;

impl Item<'_> {
    /// The form that it is written in, in words; none where it is not quantized.
    pub(super) fn written(&self) -> Option<String> {
        match (&self.action, self.form) {
            (action, Some(Form::W4A16)) if action.is_nvfp4() => Some("NVFP4 W4A16".to_string()),
            (action, _) if action.is_nvfp4() => Some("NVFP4".to_string()),
            (Action::RetainMxFp4, _) => Some("MXFP4".to_string()),
            (action, _) => action.eight().map(|eight| eight.to_string()),
        }
    }

    /// Whether it has a scale of activations in NVFP4.
    pub(super) fn has_fp4_inputs(&self, activations: Activations) -> bool {
        self.action.is_nvfp4() && activations == Activations::Nvfp4 && self.form != Some(Form::W4A16)
    }

    /// Whether it is an expert of a mixture, and of which.
    pub(super) fn experts(&self) -> Option<&str> {
        is_expert(&self.weight.module).then(|| self.weight.module.split_once(".experts.").map(|(parent, _)| parent))?
    }
}

impl Plan<'_> {
    /// Whether there are other forms than NVFP4, or two of it.
    pub fn is_mixed(&self) -> bool {
        let other = |item: &Item<'_>| item.action.eight().is_some() || item.action == Action::RetainMxFp4;
        self.items.iter().any(other) || self.quantized().any(|item| item.form == Some(Form::W4A16))
    }

    /// An error where the target, or every server that reads it, lacks a form.
    pub(super) fn check_forms(&self, model: &Model<'_>, target: Target) -> Result<()> {
        if target == Target::DeepSeekV4 {
            return deepseek::check_plan(model, self);
        }
        let refuse = |reason: String| Err(Error::setting(Setting::Rules, reason));
        let forms: Vec<String> = {
            let mut forms: Vec<String> = self.items.iter().filter_map(Item::written).collect();
            forms.sort();
            forms.dedup();
            forms
        };
        let architecture = model.architecture().unwrap_or_default();
        let misnamed = ["FalconH1", "ModernBert", "Zamba2", "Aria"].iter().any(|name| architecture.starts_with(name));
        if forms.len() > 1 && misnamed && matches!(target, Target::ModelOpt | Target::CompressedTensors) {
            return refuse(format!(
                "{architecture}: vLLM 0.32 asks for the forms of its layers by names that they do not have, so it has \
                 one form for all; give them one"
            ));
        }
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
            check_mxfp4(item, target)?;
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

/// MXFP4 that stays, or that a rule asks for.
fn check_mxfp4(item: &Item<'_>, target: Target) -> Result<()> {
    let (module, kept) = (&item.weight.module, item.action == Action::RetainMxFp4);
    let refuse = |reason: String| Err(Error::setting(Setting::Rules, reason));
    if item.form == Some(Form::MxFp4) && !kept && !matches!(item.action, Action::Keep(_)) {
        let format = item.weight.format();
        return refuse(format!("'{module}' is {format}, and MXFP4 is kept, not made; use NVFP4 or MXFP8"));
    }
    match target {
        _ if !kept => Ok(()),
        _ if item.weight.is_transposed() => refuse(format!(
            "'{module}' holds several experts, whose MXFP4 vLLM reads in GPT-OSS's own form alone, with nothing else \
             quantized; use NVFP4, or leave the source as it is"
        )),
        Target::ModelOpt | Target::Gguf => refuse(format!(
            "'{module}': no server reads MXFP4 in the format {target}; use compressed-tensors', or NVFP4"
        )),
        _ => Ok(()),
    }
}
