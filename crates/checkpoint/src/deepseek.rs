//! DeepSeek-V4 with experts in NVFP4: what a source must have for it, and what vLLM reads wrongly.
//!
//! The configuration stays DeepSeek's own, FP8 in blocks, with one more key: `moe_quant_algo`. It
//! holds for all experts of the model. vLLM then reads them as ModelOpt's W4A4, so each has an
//! activation scale; and it reads the scales of FP8 in E8M0 alone beside experts of 4 bits.

use super::dialect::{Dialect, Model};
use super::finding::Report;
use super::form::{Eight, Form};
use super::plan::Plan;
use super::stacked::is_expert;
use super::weight::{Stored, Weight};
use crate::{Error, Result, Setting};
use safetensors::Dtype;
use serde_json::Value;

/// The key of `quantization_config`.
pub(super) const KEY: &str = "moe_quant_algo";
/// What it says.
pub(super) const ALGORITHM: &str = "NVFP4";

/// An error where a source, or what rules make of it, is nothing that vLLM reads.
pub(super) fn check_plan(model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    if !matches!(model.dialect, Dialect::DeepSeekV4 | Dialect::DeepSeekV4Nvfp4) {
        let reason = format!(
            "DeepSeek-V4's form keeps FP8 as DeepSeek published it ('scale' beside each weight), and the source is {}",
            model.dialect
        );
        return Err(Error::setting(Setting::Target, reason));
    }
    if let Some(reason) = said_wrongly(model).or_else(|| model.weights.iter().find_map(wide_scale)) {
        return Err(Error::setting(Setting::Target, reason));
    }
    for item in &plan.items {
        let (module, expert) = (&item.weight.module, is_expert(&item.weight.module));
        let left = matches!(item.form, None | Some(Form::Keep)) || item.action.eight() == item.form.and_then(eight);
        let made = matches!(item.form, None | Some(Form::Nvfp4 | Form::W4A4));
        let fits = if expert { item.action.is_nvfp4() && made } else { left };
        if !fits {
            let reason = format!(
                "'{module}': in DeepSeek-V4's form all experts are NVFP4, with NVFP4 for activations, and everything \
                 else stays as it is"
            );
            return Err(Error::setting(Setting::Rules, reason));
        }
    }
    Ok(())
}

/// The kind of FP8 that a rule names.
fn eight(form: Form) -> Option<Eight> {
    if let Form::Eight(eight) = form { Some(eight) } else { None }
}

/// What `config.json` says otherwise than vLLM's code for this form needs it.
fn said_wrongly(model: &Model<'_>) -> Option<String> {
    let config = model.checkpoint.config();
    let text = |at: &str| config.and_then(|c| c.pointer(at)).and_then(Value::as_str);
    if text("/model_type") != Some("deepseek_v4") {
        return Some("'model_type' in config.json is not 'deepseek_v4', the only one that vLLM reads so".to_string());
    }
    if !matches!(text("/quantization_config/quant_method"), Some("fp8" | "deepseek_v4_fp8")) {
        return Some(
            "'quant_method' in 'quantization_config' is not 'fp8': vLLM reads the weights otherwise".to_string(),
        );
    }
    match config.and_then(|c| c.get("expert_dtype")) {
        None => None,
        Some(said) if said == "fp4" => None,
        Some(said) => {
            Some(format!("'expert_dtype' in config.json is {said}, and vLLM looks at '{KEY}' beside 'fp4' alone"))
        }
    }
}

/// Why the scales of an FP8 weight are lost: vLLM's are powers of two.
fn wide_scale(weight: &Weight<'_>) -> Option<String> {
    let Stored::Fp8 { scale, .. } = &weight.stored else { return None };
    let (module, dtype) = (&weight.module, scale.info.dtype);
    (dtype != Dtype::F8_E8M0).then(|| {
        format!("the scales of '{module}' are {dtype:?}, and vLLM reads those beside experts of 4 bits as F8_E8M0")
    })
}

/// Checks a checkpoint in this form.
pub(super) fn check(model: &Model<'_>, report: &mut Report) -> Result<()> {
    let algorithm = model.checkpoint.config().and_then(|c| c.pointer(&format!("/quantization_config/{KEY}")));
    if !algorithm.and_then(Value::as_str).is_some_and(|said| said.eq_ignore_ascii_case(ALGORITHM)) {
        let said = algorithm.map_or("missing".to_string(), Value::to_string);
        let text = format!("'{KEY}' in 'quantization_config' is {said}, expected \"{ALGORITHM}\": vLLM reads MXFP4");
        report.problem("config.json", text);
    }
    if let Some(text) = said_wrongly(model) {
        report.problem("config.json", text);
    }
    for weight in &model.weights {
        let (module, form) = (&weight.module, weight.format());
        if let Some(text) = wide_scale(weight) {
            report.problem(module, text);
        }
        match (&weight.stored, is_expert(module)) {
            (Stored::Nvfp4(parts), true) => match parts.input()? {
                None => {
                    report.problem(module, "no activation scale, which vLLM expects: it reads uninitialised memory")
                }
                Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                    report.problem(module, format!("the activation scale is {scale}"));
                }
                Some(_) => {}
            },
            (Stored::Nvfp4(_), false) => report.problem(module, "NVFP4, but vLLM reads only experts so"),
            (_, true) => report.problem(module, format!("{form}, but '{KEY}' says that all experts are NVFP4")),
            (_, false) => {}
        }
    }
    Ok(())
}
