//! What a checkpoint says beside its weights: activation scales, and how keys and values are
//! kept.

use super::dialect::Model;
use super::form::{Eight, Form};
use super::names::KvScale;
use super::plan::{Item, Plan};
use super::selection::Differing;
use super::settings::{Acts, KvCache, Settings};
use super::target::{Activations, Extras, Kv, Scale, Target};
use super::weight::{Stored, number};
use crate::{Error, Result, Setting};
use nvfp4::Bound;
use nvfp4_spec::e4m3;
use nvfp4_spec::scale::Unit as ScaleUnit;
use serde_json::Value;
use std::collections::BTreeMap;

/// What is written beside weights.
pub(super) fn extras(settings: &Settings, model: &Model<'_>, plan: &Plan<'_>) -> Result<Extras> {
    if settings.kv == KvCache::Nvfp4Cast && settings.target == Target::CompressedTensors {
        let reason = "compressed-tensors' format has no keys and values in NVFP4 that a server reads; use FP8, or \
                      ModelOpt's format";
        return Err(Error::setting(Setting::Kv, reason));
    }
    if settings.kv != KvCache::Unsaid && matches!(settings.target, Target::Gguf | Target::ComfyUi) {
        let reason = match settings.target {
            Target::Gguf => {
                "GGUF does not record how keys and values are kept; leave the setting out, and use llama.cpp's own options"
            }
            _ => "ComfyUI's form does not record how keys and values are kept; leave the setting out",
        };
        return Err(Error::setting(Setting::Kv, reason));
    }
    if let KvCache::Fp8(scales) = &settings.kv {
        check_kv_scales(scales, model, plan)?;
    }
    let activations = activations(settings, plan)?;
    if settings.target == Target::DeepSeekV4 {
        if settings.kv != KvCache::Unsaid {
            let reason = "DeepSeek-V4's form does not say how keys and values are kept; leave the setting out";
            return Err(Error::setting(Setting::Kv, reason));
        }
        if activations == Activations::Plain {
            let reason = "vLLM reads the experts of DeepSeek-V4's form with scales of their activations; give them";
            return Err(Error::setting(Setting::Acts, reason));
        }
    }
    Ok(Extras { activations, kv: kv(settings, model) })
}

/// Every attention needs a scale of its keys and of its values, and all that are missing are named
/// at once.
fn check_kv_scales(scales: &BTreeMap<String, f32>, model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    let wrong = |reason: String| Error::setting(Setting::Kv, format!("scales of keys and values: {reason}"));
    if let Some(own) = model.others.iter().find(|tensor| KvScale::named(&tensor.info.name).is_some()) {
        let name = &own.info.name;
        return Err(wrong(format!("the source has them already ('{name}'); leave the setting out to keep them")));
    }
    let names = plan.items.iter().filter_map(|item| KvScale::of_projection(&item.weight.module));
    let names: Vec<String> = names.map(|scale| scale.compressed_tensors()).collect();
    if names.is_empty() {
        let reason = "no layer has a 'self_attn.k_proj' and 'v_proj', beside which they are written; use a cast to FP8";
        return Err(wrong(reason.to_string()));
    }
    let missing: Vec<&str> = names.iter().map(String::as_str).filter(|name| !scales.contains_key(*name)).collect();
    if !missing.is_empty() {
        return Err(wrong(format!("there is none called '{}'; calibrate this very model", missing.join("', '"))));
    }
    match names.iter().map(|name| (name, scales[name])).find(|(_, scale)| !is_scale(*scale)) {
        Some((name, scale)) => Err(wrong(format!("'{name}' is {scale}; expected a positive number"))),
        None => Ok(()),
    }
}

/// Whether activation scales are written. An NVFP4 source that has them for all of its weights
/// keeps them.
fn activations(settings: &Settings, plan: &Plan<'_>) -> Result<Activations> {
    if settings.acts != Acts::None {
        return Ok(Activations::Nvfp4);
    }
    let has = |item: &Item<'_>| matches!(&item.weight.stored, Stored::Nvfp4(n) if n.input.is_some());
    let asked = |item: &&Item<'_>| item.form == Some(Form::W4A4) && !has(item);
    if let Some(item) = plan.quantized().find(asked) {
        let module = &item.weight.module;
        let reason =
            format!("a rule gives '{module}' NVFP4 for activations too, whose scales are not given; give them");
        return Err(Error::setting(Setting::Acts, reason));
    }
    let wants = |item: &&Item<'_>| item.form != Some(Form::W4A16);
    let (with, without): (Vec<_>, Vec<_>) = plan.quantized().filter(wants).partition(|item| has(item));
    match (with.first(), without.first()) {
        (None, _) => Ok(Activations::Plain),
        (Some(_), None) => Ok(Activations::Nvfp4),
        (Some(_), Some(missing)) => Err(Error::setting(
            Setting::Acts,
            format!("the source has activation scales, but none for '{}'; give all of them", missing.weight.module),
        )),
    }
}

/// How keys and values are kept: as asked for, or as the source says.
fn kv(settings: &Settings, model: &Model<'_>) -> Kv {
    let algorithm = model.checkpoint.quantization().and_then(|q| q.pointer("/quantization/kv_cache_quant_algo"));
    let scheme = model.checkpoint.config().and_then(|c| c.pointer("/quantization_config/kv_cache_scheme"));
    let fp8 = algorithm.and_then(Value::as_str) == Some("FP8") || scheme.is_some_and(|s| s["num_bits"] == 8);
    let nvfp4 = |said: &Value| said.as_str() == Some("NVFP4") || said["num_bits"] == 4;
    let nvfp4 = [algorithm, scheme].into_iter().flatten().any(nvfp4) && settings.target == Target::ModelOpt;
    let says = [algorithm, scheme].into_iter().flatten().any(|said| !said.is_null());
    match settings.kv {
        KvCache::Fp8Cast | KvCache::Fp8(_) => Kv::Fp8,
        KvCache::Nvfp4Cast => Kv::Nvfp4,
        KvCache::Unsaid if fp8 => Kv::Fp8,
        KvCache::Unsaid if nvfp4 => Kv::Nvfp4,
        KvCache::Unsaid if says => Kv::Other,
        KvCache::Unsaid => Kv::Unsaid,
    }
}

/// The activation scale of every weight, as the target stores it. Weights that are joined
/// share the largest.
pub(super) fn scales(settings: &Settings, plan: &Plan<'_>, activations: Activations) -> Result<BTreeMap<String, f32>> {
    match &settings.acts {
        Acts::Amaxes(amaxes) => check_amaxes(amaxes, plan, activations)?,
        Acts::Constant(scale) if !is_scale(*scale) => {
            return Err(wrong(format!("the scale {scale} or its inverse is not a normal float32")));
        }
        Acts::Constant(_) | Acts::None => {}
    }
    let six_e = Bound::E448.six_e();
    let own = |item: &Item<'_>| -> Result<f32> {
        match (&settings.acts, &item.weight.stored) {
            (Acts::Constant(scale), _) => Ok(*scale),
            (Acts::Amaxes(amaxes), _) if item.action.is_nvfp4() => Ok(amaxes[&item.weight.module] / six_e),
            (Acts::Amaxes(amaxes), _) => Ok(amaxes[&item.weight.module] / e4m3::MAX),
            (Acts::None, Stored::Fp8 { input: Some(input), .. }) => number(input),
            (Acts::None, Stored::Nvfp4(source)) => {
                let stored = source.input()?.unwrap_or(1.0);
                Ok(if source.unit == ScaleUnit::Divisor { 1.0 / stored } else { stored })
            }
            (Acts::None, _) => Ok(1.0),
        }
    };
    let mut multipliers = vec![0f32; plan.items.len()];
    for (i, item) in plan.items.iter().enumerate() {
        if has_input(item, activations) {
            multipliers[i] = own(item)?;
        }
    }
    // Activations are quantized when a model runs, with the largest scale of those that are joined.
    if settings.acts != Acts::None || settings.selection.differing == Differing::Rescale {
        for group in &plan.groups {
            let shared = group.members.iter().map(|&i| multipliers[i]).fold(0.0, f32::max);
            group.members.iter().for_each(|&i| multipliers[i] = shared);
        }
    }
    let stored = |(i, item): (usize, &Item<'_>)| {
        let scale = match item.action.is_nvfp4() {
            true => settings.target.stored(Scale::Multiplier(multipliers[i])),
            false => multipliers[i],
        };
        (item.weight.module.clone(), scale)
    };
    let with = plan.items.iter().enumerate().filter(|(_, item)| has_input(item, activations));
    Ok(with.map(stored).collect())
}

/// Whether a scale of activations is written beside a weight: for NVFP4 where there are any, and
/// for FP8 per tensor.
fn has_input(item: &Item<'_>, activations: Activations) -> bool {
    item.has_fp4_inputs(activations) || item.action.eight() == Some(Eight::Tensor)
}

/// Activation scales that cannot be used.
fn wrong(reason: String) -> Error {
    Error::setting(Setting::Acts, format!("activation scales: {reason}"))
}

/// Every weight needs an amax, and all that are missing are named at once.
fn check_amaxes(amaxes: &BTreeMap<String, f32>, plan: &Plan<'_>, activations: Activations) -> Result<()> {
    let with = || plan.items.iter().filter(|item| has_input(item, activations));
    let modules = || with().map(|item| item.weight.module.as_str());
    let missing: Vec<&str> = modules().filter(|module| !amaxes.contains_key(*module)).collect();
    if !missing.is_empty() {
        return Err(wrong(format!("no amax for '{}'", missing.join("', '"))));
    }
    for module in modules() {
        let amax = amaxes[module];
        if !(amax.is_finite() && amax > 0.0) {
            return Err(wrong(format!("'{module}' has the amax {amax}; expected a positive number")));
        }
        if !is_scale(amax / Bound::E448.six_e()) {
            let reason = format!("'{module}' has the amax {amax}, whose scale is too small or too large for a float32");
            return Err(wrong(reason));
        }
    }
    Ok(())
}

/// Whether a scale can be stored by every target: some store the scale itself, others its inverse.
fn is_scale(scale: f32) -> bool {
    scale > 0.0 && scale.is_normal() && scale.recip().is_normal()
}
