//! Would a program load this checkpoint, and load it correctly? Every check is about something that
//! a server gets wrong without an error. `described` compares the configuration with the weights,
//! `complete` looks for what is missing.

use super::client::Client;
use super::dialect::{Dialect, Model};
use super::finding::{Finding, Fix, Report};
use super::names::KvScale;
use super::statistics::{Statistics, statistics};
use super::target::Target;
use super::weight::{Stored, Weight};
use super::{architecture, comfyui, complete, described, finite, joined};
use crate::Result;
use std::collections::BTreeMap;

/// Checks a checkpoint for a program. An empty list means that nothing was found.
///
/// ```
/// use nvfp4_checkpoint::{Checkpoint, Client, Model, verify};
///
/// # use safetensors::{Dtype, tensor::TensorView};
/// # let folder = std::env::temp_dir().join(format!("nvfp4-verify-{}", std::process::id()));
/// # let source = folder.join("model");
/// # std::fs::create_dir_all(&source).unwrap();
/// # let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#;
/// # std::fs::write(source.join("config.json"), config).unwrap();
/// # let bytes = [0x80, 0x3F].repeat(32 * 64); // 1.0 in BF16
/// # let weight = TensorView::new(Dtype::BF16, vec![32, 64], &bytes).unwrap();
/// # let file = source.join("model.safetensors");
/// # safetensors::serialize_to_file([("model.layers.0.mlp.down_proj.weight", weight)], None, &file).unwrap();
/// // `source` is a folder with one BF16 weight.
/// let checkpoint = Checkpoint::open(&source)?;
/// let findings = verify(&Model::new(&checkpoint)?, Client::Vllm, 1)?;
/// assert!(findings[0].text.ends_with("not NVFP4; convert it first"));
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
pub fn verify(model: &Model<'_>, client: Client, threads: usize) -> Result<Vec<Finding>> {
    let mut report = Report::default();
    if !model.dialect.is_nvfp4() {
        report.problem("checkpoint", format!("{}, not NVFP4; convert it first", model.dialect));
        return Ok(report.findings);
    }
    check_dialect(model, client, &mut report);
    if client == Client::ComfyUi {
        // It joins no weights and reads no configuration.
        comfyui::verify(model, &mut report);
    } else {
        check_groups(model, &mut report)?;
        described::check(model, client, &mut report)?;
        complete::check(model, &mut report);
        report.findings.extend(architecture::loading(model, client));
        check_keys_and_values(model, client, &mut report);
    }
    finite::check(model, threads, &mut report)?;
    finite::check_tied(model, &mut report)?;
    let counts = statistics(model, threads)?;
    for (weight, counts) in model.weights.iter().zip(&counts) {
        if let (Stored::Nvfp4(_), Some(counts)) = (&weight.stored, counts) {
            check_weight(weight, counts, client, &mut report)?;
        }
    }
    report.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(report.findings)
}

fn check_dialect(model: &Model<'_>, client: Client, report: &mut Report) {
    let loads = match client {
        Client::Vllm if model.dialect == Dialect::DeepSeekV4Nvfp4 => true,
        Client::Vllm | Client::SgLang | Client::LlamaCpp => {
            matches!(model.dialect, Dialect::ModelOpt | Dialect::CompressedTensors)
        }
        Client::TensorRtLlm => model.dialect == Dialect::ModelOpt,
        Client::Transformers => model.dialect == Dialect::CompressedTensors,
        Client::ComfyUi => model.dialect == Dialect::ComfyUi,
    };
    if !loads {
        let target = match client {
            Client::Transformers => Target::CompressedTensors,
            Client::ComfyUi => Target::ComfyUi,
            Client::Vllm | Client::SgLang | Client::TensorRtLlm | Client::LlamaCpp => Target::ModelOpt,
        };
        let text = format!("{client} does not load the {} dialect", model.dialect);
        report.fixable("checkpoint", text, Fix::Convert(target));
    }
    // transformers joins experts as it loads them. With compressed-tensors, that goes wrong without
    // an error.
    let expert = |w: &&Weight<'_>| w.module.contains(".experts.");
    if let (Client::Transformers, Some(expert)) = (client, model.weights.iter().find(expert)) {
        let text = "transformers (5.17) does not load separate experts of a compressed-tensors \
                    checkpoint: quantized ones lose their tensor scales, others are made anew; use \
                    vLLM, or llama.cpp and GGUF";
        report.problem(&expert.module, text);
    }
    if client == Client::Transformers && architecture::sets_weights_of_codes(model) {
        let text = "transformers (5.17) gives weights of this architecture their initial values while \
                    it loads, and fails where it finds codes; use vLLM";
        report.problem("architecture", text);
    }
    // The marker says high nibble first. With a configuration that says ModelOpt, the low nibble is
    // read first.
    let method = model.checkpoint.config().and_then(|c| c.pointer("/quantization_config/quant_method"));
    if model.dialect == Dialect::ComfyUi && (method.is_some() || model.checkpoint.quantization().is_some()) {
        let text = "ComfyUI's marker (high nibble first, swizzled scales) beside a configuration \
                    for servers, which read the low nibble first: every weight would be noise";
        report.problem("nibble order", text);
    }
}

/// Weights that are joined must have one tensor scale and one activation scale.
fn check_groups(model: &Model<'_>, report: &mut Report) -> Result<()> {
    let mut groups: BTreeMap<(&str, &str), Vec<&Weight<'_>>> = BTreeMap::new();
    for weight in &model.weights {
        let apart = joined::is_guest(&weight.module) && !matches!(weight.stored, Stored::Nvfp4(_));
        if let Some(key) = joined::fused(&weight.module).filter(|_| !apart) {
            groups.entry(key).or_default().push(weight);
        }
    }
    for ((parent, kind), members) in groups {
        let mut scales = Vec::new();
        let mut inputs = Vec::new();
        for weight in &members {
            if let Stored::Nvfp4(parts) = &weight.stored {
                scales.push(parts.globals(weight)?);
                inputs.push(parts.input()?);
            }
        }
        if !scales.is_empty() && scales.len() < members.len() {
            report.problem(
                parent,
                format!("{kind}: only {} of {} are NVFP4, but servers join them", scales.len(), members.len()),
            );
        }
        let differ = |values: &[f32]| values.iter().any(|v| v.to_bits() != values[0].to_bits());
        // One number for each matrix, of all members.
        let of_matrix = |m: usize| scales.iter().filter_map(|own| own.get(m).copied()).collect::<Vec<f32>>();
        let matrices = scales.iter().map(Vec::len).max().unwrap_or(0);
        let differing: Vec<f32> = (0..matrices).map(of_matrix).filter(|s| differ(s)).map(|s| spread(&s)).collect();
        if let Some(ratio) = differing.iter().copied().reduce(f32::max) {
            let text = format!("{kind}: tensor scales differ (ratio {ratio:.4}); a server uses one of them for all");
            let target = match model.dialect {
                Dialect::CompressedTensors => Target::CompressedTensors,
                _ => Target::ModelOpt,
            };
            report.fixable(parent, text, Fix::ConvertWithOneScale(target));
        }
        let inputs: Vec<f32> = inputs.into_iter().flatten().collect();
        if inputs.len() > 1 && differ(&inputs) {
            let ratio = spread(&inputs);
            report.note(
                parent,
                format!("{kind}: activation scales differ (ratio {ratio:.4}); a server uses the largest"),
            );
        }
    }
    Ok(())
}

fn spread(values: &[f32]) -> f32 {
    let (least, most) = values.iter().fold((f32::MAX, 0f32), |(a, b), v| (a.min(v.abs()), b.max(v.abs())));
    most / least
}

/// transformers makes a scale of keys and values wherever the configuration says that they are
/// quantized, and fills it from the checkpoint or not at all. vLLM uses 1 for a missing one. Every
/// attention needs both.
fn check_keys_and_values(model: &Model<'_>, client: Client, report: &mut Report) {
    let scheme = model.checkpoint.config().and_then(|c| c.pointer("/quantization_config/kv_cache_scheme"));
    let promised = model.dialect == Dialect::CompressedTensors && scheme.is_some_and(|scheme| !scheme.is_null());
    if client != Client::Transformers || !promised {
        return;
    }
    let text = "the configuration says how keys and values are quantized, and their scale is \
                missing: transformers reads uninitialised memory";
    let named = model.others.iter().filter_map(|t| KvScale::named(&t.info.name));
    let mut attentions: BTreeMap<&str, Option<Fix>> = named.map(|scale| (scale.attention, None)).collect();
    for (attention, last) in model.weights.iter().filter_map(|w| w.module.rsplit_once('.')) {
        if attention.ends_with("self_attn") && ["k_proj", "v_proj", "qkv_proj", "kv_b_proj"].contains(&last) {
            let fix = attentions.entry(attention).or_default();
            // The projections that a conversion writes scales beside.
            if ["k_proj", "v_proj"].contains(&last) {
                *fix = Some(Fix::Convert(Target::CompressedTensors));
            }
        }
    }
    if attentions.is_empty() {
        report.problem("self_attn.k_scale", text);
    }
    for (attention, fix) in attentions {
        let names = ["k", "v"].map(|letter| KvScale { attention, letter }.compressed_tensors());
        for name in names.iter().filter(|name| model.checkpoint.get(name).is_none()) {
            report.fixable(name, text, fix);
        }
    }
}

fn check_weight(weight: &Weight<'_>, counts: &Statistics, client: Client, report: &mut Report) -> Result<()> {
    let Stored::Nvfp4(parts) = &weight.stored else { return Ok(()) };
    let module = &weight.module;
    // One finding for a weight, however many matrices it holds.
    if let Some(global) = parts.globals(weight)?.iter().find(|g| !(g.is_finite() && **g > 0.0)) {
        report.problem(module, format!("the tensor scale is {global}"));
    }
    if counts.nan_scales() > 0 {
        report.problem(module, format!("{} block scales are NaN", counts.nan_scales()));
    }
    if counts.negative_scales() > 0 {
        report.problem(module, format!("{} block scales are negative", counts.negative_scales()));
    }
    if counts.vanished > 0 {
        report.note(
            module,
            format!("{} blocks have the scale 0 and codes that are not: they decode to zeros", counts.vanished),
        );
    }
    if client == Client::LlamaCpp && !weight.cols.is_multiple_of(nvfp4_spec::gguf::BLOCK_ELEMENTS) {
        report.problem(module, format!("{} columns; GGUF needs a multiple of 64", weight.cols));
    }
    Ok(())
}
