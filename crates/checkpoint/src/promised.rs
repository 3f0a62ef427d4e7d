//! Does the configuration of a checkpoint in several forms, or in FP8, say of every weight what it
//! is? A server builds each layer by it, and reads what it finds as that.

use super::architecture;
use super::client::Client;
use super::dialect::{Dialect, Model};
use super::finding::Report;
use super::form::Eight;
use super::ignored::Ignored;
use super::joined;
use super::weight::{Stored, Weight, number};
use crate::Result;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The form of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    Nvfp4,
    MxFp4,
    Fp8(Eight),
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Plain => f.write_str("not quantized"),
            Form::Nvfp4 => f.write_str("NVFP4"),
            Form::MxFp4 => f.write_str("MXFP4"),
            Form::Fp8(eight) => eight.fmt(f),
        }
    }
}

/// Whether a scale of activations must be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inputs {
    Stored,
    Absent,
}

/// What the configuration says about a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promise {
    form: Form,
    inputs: Inputs,
}

const PLAIN: Promise = Promise { form: Form::Plain, inputs: Inputs::Absent };

/// Whether a checkpoint has, or says that it has, other forms than NVFP4.
pub(super) fn has_forms(model: &Model<'_>) -> bool {
    model.names_all()
        || model.weights.iter().any(|weight| matches!(weight.stored, Stored::Fp8 { .. } | Stored::MxFp4 { .. }))
}

/// Checks what is said of every weight.
pub(super) fn check(model: &Model<'_>, client: Client, report: &mut Report) -> Result<()> {
    let Some(description) = model.description() else { return Ok(()) };
    let promises = match model.dialect {
        Dialect::CompressedTensors => groups(model, description, client, report),
        _ => layers(model, description, client, report),
    };
    let Some(promises) = promises else { return Ok(()) };
    for (weight, promise) in model.weights.iter().zip(&promises) {
        let actual = form(weight);
        // What is not quantized is checked against the list of such modules.
        if actual == Form::Plain && (*promise == PLAIN || is_embedding(weight)) {
            continue;
        }
        if actual != promise.form {
            let said = promise.form;
            let text = format!("{actual}, but the configuration says {said}: a server reads it as that, or refuses");
            report.problem(&weight.module, text);
            continue;
        }
        check_input(weight, *promise, report)?;
    }
    check_joined(model, report);
    Ok(())
}

fn form(weight: &Weight<'_>) -> Form {
    match &weight.stored {
        Stored::Fp8 { eight, .. } => Form::Fp8(*eight),
        Stored::Nvfp4(_) => Form::Nvfp4,
        Stored::MxFp4 { .. } => Form::MxFp4,
        Stored::Plain(_) => Form::Plain,
    }
}

fn is_embedding(weight: &Weight<'_>) -> bool {
    weight.module.contains("embed") || weight.module.ends_with("wte")
}

fn check_input(weight: &Weight<'_>, promise: Promise, report: &mut Report) -> Result<()> {
    let scale = match &weight.stored {
        Stored::Fp8 { input, .. } => input.map(|input| number(&input)).transpose()?,
        Stored::Nvfp4(parts) => parts.input()?,
        Stored::Plain(_) | Stored::MxFp4 { .. } => return Ok(()),
    };
    match scale {
        None if promise.inputs == Inputs::Stored => report.problem(
            &weight.module,
            "no activation scale, which the configuration promises: vLLM reads uninitialised memory",
        ),
        Some(scale) if !(scale.is_finite() && scale > 0.0) => {
            report.problem(&weight.module, format!("the activation scale is {scale}"));
        }
        _ => {}
    }
    Ok(())
}

/// Weights that servers join have one form.
fn check_joined(model: &Model<'_>, report: &mut Report) {
    let mut first: BTreeMap<(&str, &str), &Weight<'_>> = BTreeMap::new();
    for weight in &model.weights {
        let apart = joined::is_guest(&weight.module) && form(weight) == Form::Plain;
        let Some((parent, kind)) = joined::fused(&weight.module).filter(|_| !apart) else { continue };
        let one = first.entry((parent, kind)).or_insert(weight);
        let (a, b) = (form(one), form(weight));
        // Those of which one is NVFP4 are counted elsewhere.
        if a != b && a != Form::Nvfp4 && b != Form::Nvfp4 {
            let text = format!("{kind}: '{}' is {a} and '{}' {b}, but servers join them", one.module, weight.module);
            report.problem(parent, text);
        }
    }
}

/// What ModelOpt says: one algorithm, or one for each module.
fn layers(model: &Model<'_>, description: &Value, client: Client, report: &mut Report) -> Option<Vec<Promise>> {
    let algorithm = description.get("quant_algo").and_then(Value::as_str).unwrap_or_default().to_uppercase();
    let names = description.get("ignore").or_else(|| description.get("exclude_modules"));
    let names = names.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let ignored = Ignored::new(names, client, Dialect::ModelOpt);
    let listed = |weight: &Weight<'_>| ignored.matching(&weight.module).is_some();
    if algorithm != "MIXED_PRECISION" {
        let Some(promise) = promise(&algorithm) else {
            let text = format!("'quant_algo' is '{algorithm}', which vLLM does not know: it refuses the checkpoint");
            report.problem("quant_algo", text);
            return None;
        };
        return Some(model.weights.iter().map(|w| if listed(w) { PLAIN } else { promise }).collect());
    }
    let layers = description.get("quantized_layers").and_then(Value::as_object).filter(|layers| !layers.is_empty());
    let Some(layers) = layers else {
        report.problem("quantized_layers", "missing or empty beside 'MIXED_PRECISION': vLLM refuses the checkpoint");
        return None;
    };
    check_layers(model, layers, report);
    let said = |weight: &Weight<'_>| {
        let layer = layers.get(&weight.module).filter(|_| !listed(weight));
        let algorithm = layer.and_then(|layer| layer.get("quant_algo")).and_then(Value::as_str);
        algorithm.and_then(|algorithm| promise(&algorithm.to_uppercase())).unwrap_or(PLAIN)
    };
    Some(model.weights.iter().map(said).collect())
}

/// Entries of `quantized_layers` that no server reads.
fn check_layers(model: &Model<'_>, layers: &Map<String, Value>, report: &mut Report) {
    let own = model.checkpoint.quantization().and_then(|q| q.pointer("/quantization/quantized_layers"));
    if own.is_some_and(|own| own.as_object() != Some(layers)) {
        report.note("quantized_layers", "config.json and hf_quant_config.json differ; vLLM goes by config.json");
    }
    for (module, layer) in layers {
        let algorithm = layer.get("quant_algo").and_then(Value::as_str).unwrap_or_default().to_uppercase();
        let expert = module.contains(".experts.");
        let problem = match (algorithm.as_str(), promise(&algorithm)) {
            (_, None) => Some("no algorithm that vLLM knows"),
            ("FP8_PER_CHANNEL_PER_TOKEN", _) => Some("vLLM reads it as not quantized in a mixed checkpoint"),
            ("FP8_PB_WO", _) if expert => Some("vLLM has no experts in it"),
            _ => None,
        };
        if let Some(problem) = problem {
            report.problem(module, format!("'{algorithm}' in 'quantized_layers': {problem}"));
        }
        let size = layer.get("group_size").and_then(Value::as_u64);
        if let (Some(size), "NVFP4" | "W4A16_NVFP4") = (size.filter(|size| *size != 16), algorithm.as_str()) {
            report.problem(
                module,
                format!("blocks of {size} in 'quantized_layers', but the scales are for blocks of 16"),
            );
        }
    }
    let config = model.checkpoint.config();
    let modules = || model.weights.iter().map(|weight| weight.module.as_str());
    let mut known: BTreeSet<String> = modules().map(str::to_string).collect();
    known.extend(modules().flat_map(|module| architecture::called_by_vllm(config, module)));
    let unknown = || layers.keys().filter(|module| !known.contains(*module));
    if let Some(first) = unknown().next() {
        let count = unknown().count();
        report.note("quantized_layers", format!("{count} names that no weight has, such as '{first}'"));
    }
}

/// What an algorithm of ModelOpt's means.
fn promise(algorithm: &str) -> Option<Promise> {
    let (form, inputs) = match algorithm {
        "NVFP4" => (Form::Nvfp4, Inputs::Stored),
        "W4A16_NVFP4" => (Form::Nvfp4, Inputs::Absent),
        "FP8" => (Form::Fp8(Eight::Tensor), Inputs::Stored),
        "FP8_PER_CHANNEL_PER_TOKEN" => (Form::Fp8(Eight::Channel), Inputs::Absent),
        "FP8_PB_WO" => (Form::Fp8(Eight::Block), Inputs::Absent),
        "MXFP8" => (Form::Fp8(Eight::Mx), Inputs::Absent),
        _ => return None,
    };
    Some(Promise { form, inputs })
}

/// What compressed-tensors says: groups with the modules of each.
fn groups(model: &Model<'_>, description: &Value, client: Client, report: &mut Report) -> Option<Vec<Promise>> {
    let Some(groups) = description.get("config_groups").and_then(Value::as_object) else {
        report
            .problem("config.json", "no 'config_groups' in 'quantization_config': a server reads nothing as quantized");
        return None;
    };
    let strings = |value: Option<&'_ Value>| -> Vec<String> {
        value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
    };
    let ignore = strings(description.get("ignore"));
    let ignored = Ignored::new(ignore.iter().map(String::as_str), client, Dialect::CompressedTensors);
    let whole = description.get("format").and_then(Value::as_str).unwrap_or_default();
    let mut found = Vec::new();
    for (name, group) in groups {
        let Some(promise) = group_promise(group) else {
            let text = format!("'config_groups.{name}' describes weights in a form that is not known here");
            report.note("config.json", text);
            continue;
        };
        let format = group.get("format").and_then(Value::as_str).unwrap_or(whole);
        let expected = match promise.form {
            Form::Nvfp4 => "nvfp4-pack-quantized",
            Form::MxFp4 => "mxfp4-pack-quantized",
            Form::Fp8(Eight::Mx) => "mxfp8-quantized",
            _ => "float-quantized",
        };
        let naive = format == "naive-quantized" && expected == "float-quantized";
        if format != expected && !naive {
            let text =
                format!("'config_groups.{name}.format' is '{format}', expected '{expected}' for {}", promise.form);
            report.problem("config.json", text);
        }
        found.push((strings(group.get("targets")), promise));
    }
    let lists: Vec<(Ignored<'_>, bool, Promise)> = found
        .iter()
        .map(|(targets, promise)| {
            let list = Ignored::new(targets.iter().map(String::as_str), client, Dialect::CompressedTensors);
            (list, targets.iter().any(|target| target == "Linear"), *promise)
        })
        .collect();
    let said = |weight: &Weight<'_>| {
        if ignored.matching(&weight.module).is_some() {
            return PLAIN;
        }
        let named = lists.iter().find(|(list, ..)| list.matching(&weight.module).is_some());
        named.or_else(|| lists.iter().find(|(_, class, _)| *class)).map_or(PLAIN, |(.., promise)| *promise)
    };
    Some(model.weights.iter().map(said).collect())
}

/// What a group says about its weights and their activations.
fn group_promise(group: &Value) -> Option<Promise> {
    let weights = group.get("weights")?;
    let text = |key: &str| weights.get(key).and_then(Value::as_str).unwrap_or_default();
    let number = |key: &str| weights.get(key).and_then(Value::as_u64);
    let form = match (number("num_bits")?, text("type"), text("strategy"), number("group_size")) {
        (4, "float", "tensor_group", Some(16)) => Form::Nvfp4,
        (4, "float", "group", Some(32)) => Form::MxFp4,
        (8, "float", "tensor", _) => Form::Fp8(Eight::Tensor),
        (8, "float", "channel", _) => Form::Fp8(Eight::Channel),
        (8, "float", "block", _) if weights.get("block_structure") == Some(&Value::from(vec![128, 128])) => {
            Form::Fp8(Eight::Block)
        }
        (8, "float", "group", Some(32)) => Form::Fp8(Eight::Mx),
        _ => return None,
    };
    let input = group.get("input_activations").filter(|input| !input.is_null());
    let dynamic = |input: &&Value| input.get("dynamic") == Some(&Value::Bool(true));
    let inputs = if input.filter(|input| !dynamic(input)).is_some() { Inputs::Stored } else { Inputs::Absent };
    Some(Promise { form, inputs })
}
