//! Does the configuration describe the weights that a checkpoint has? A server believes it: what it says wrongly is read
//! wrongly.

use super::architecture;
use super::dialect::{Dialect, Model};
use super::keep::{Defaults, Part};
use super::outline::Outline;
use super::plan;
use super::verify::{Client, Report};
use super::weight::{Stored, Weight};
use crate::Result;
use nvfp4_spec::BLOCK;
use regex_lite::Regex;
use serde_json::Value;
use std::collections::BTreeSet;

/// Checks `config.json` and `hf_quant_config.json`.
pub(super) fn check(model: &Model<'_>, client: Client, report: &mut Report) -> Result<()> {
    let said = algorithms(model);
    if !said.is_empty() && said.iter().all(|(_, algorithm)| algorithm == "MIXED_PRECISION") {
        report.note("quant_algo", "MIXED_PRECISION: what the configuration says of each layer is not checked");
        return Ok(());
    }
    check_algorithm(model, report);
    check_inputs(model, report)?;
    check_lists(model, client, report);
    Ok(())
}

/// What both files say, with the file that says it.
fn said<'m>(model: &'m Model<'_>, config: &str, own: &str) -> Vec<(&'static str, &'m Value)> {
    let config = model.checkpoint.config().and_then(|c| c.pointer(&format!("/quantization_config/{config}")));
    let own = model.checkpoint.quantization().and_then(|q| q.pointer(&format!("/quantization/{own}")));
    [("config.json", config), ("hf_quant_config.json", own)].into_iter().filter_map(|(f, v)| Some((f, v?))).collect()
}

/// The algorithms that the files of a ModelOpt checkpoint name, as servers compare them.
fn algorithms(model: &Model<'_>) -> Vec<(&'static str, String)> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_uppercase);
    said(model, "quant_algo", "quant_algo").into_iter().map(|(file, value)| (file, text(value))).collect()
}

/// The algorithm and the size of blocks.
fn check_algorithm(model: &Model<'_>, report: &mut Report) {
    let groups = model.checkpoint.config().and_then(|c| c.pointer("/quantization_config/config_groups"));
    let groups = || groups.and_then(Value::as_object).into_iter().flat_map(|groups| groups.values());
    let mut sizes = said(model, "group_size", "group_size");
    // Groups of other formats have blocks of their own.
    let four_bits = |group: &&Value| group.pointer("/weights/num_bits").is_some_and(|bits| *bits == 4);
    let own = groups().filter(four_bits).filter_map(|group| group.pointer("/weights/group_size"));
    sizes.extend(own.map(|size| ("config.json", size)));
    for (file, size) in sizes {
        let number = size.as_u64().or_else(|| size.as_str()?.parse().ok());
        if number != Some(BLOCK as u64) && !size.is_null() {
            let text = format!(
                "blocks of {size} ('group_size'), but the scales are for blocks of {BLOCK}: a server expects other shapes"
            );
            report.problem(file, text);
        }
    }
    if model.dialect == Dialect::CompressedTensors {
        let is = |group: &Value, key: &str, value: Value| group.pointer(&format!("/weights/{key}")) == Some(&value);
        let nvfp4 = |g: &Value| {
            is(g, "num_bits", 4.into()) && is(g, "type", "float".into()) && is(g, "strategy", "tensor_group".into())
        };
        if model.checkpoint.config().is_some() && !groups().any(nvfp4) {
            let text = "no entry of 'config_groups' has weights of 4-bit floats with the strategy 'tensor_group': a server does \
                        not take the weights for NVFP4";
            report.problem("config.json", text);
        }
        return;
    }
    if model.dialect != Dialect::ModelOpt {
        return;
    }
    let algorithms = algorithms(model);
    for (file, json) in
        [("config.json", model.checkpoint.config()), ("hf_quant_config.json", model.checkpoint.quantization())]
    {
        let described = json.is_some_and(|j| j.get("quantization_config").or(j.get("quantization")).is_some());
        if described && !algorithms.iter().any(|(said, _)| *said == file) {
            report.problem(file, "no 'quant_algo': vLLM refuses the checkpoint");
        }
    }
    for (file, algorithm) in &algorithms {
        match algorithm.as_str() {
            "NVFP4" | "W4A16_NVFP4" => {}
            other => report.problem(
                file,
                format!("the algorithm is '{other}', but the weights are NVFP4: a server reads them as something else, or refuses"),
            ),
        }
    }
    if let [(_, first), (_, second)] = &algorithms[..]
        && first != second
    {
        let text = format!(
            "config.json says {first}, hf_quant_config.json says {second}: vLLM goes by config.json, and expects scales of activations \
             for NVFP4 and none for W4A16_NVFP4"
        );
        report.problem("quant_algo", text);
    }
}

/// A configuration that promises scales of activations needs one for every weight.
fn check_inputs(model: &Model<'_>, report: &mut Report) -> Result<()> {
    let config = model.checkpoint.config().and_then(|c| c.get("quantization_config"));
    let promised = match model.dialect {
        Dialect::CompressedTensors => {
            let groups = config.and_then(|c| c.get("config_groups")).and_then(Value::as_object);
            groups.is_some_and(|g| g.values().any(|g| g.get("input_activations").is_some_and(|a| !a.is_null())))
        }
        _ => algorithms(model).iter().any(|(_, algorithm)| algorithm == "NVFP4"),
    };
    let mut unused = 0;
    for weight in &model.weights {
        let Stored::Nvfp4(parts) = &weight.stored else { continue };
        match parts.input()? {
            None if promised => report.problem(
                &weight.module,
                "no scale of activations, which the configuration promises: vLLM reads uninitialised memory",
            ),
            Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                report.problem(&weight.module, format!("the scale of activations is {scale}"));
            }
            Some(_) if !promised => unused += 1,
            _ => {}
        }
    }
    if unused > 0 {
        let text = format!(
            "the configuration says weights only, so the scales of activations of {unused} weights are not used"
        );
        report.note("scales of activations", text);
    }
    Ok(())
}

/// The configuration must name exactly the modules that are not quantized.
fn check_lists(model: &Model<'_>, client: Client, report: &mut Report) {
    let config = model.checkpoint.config();
    if config.is_none() {
        report.problem("config.json", "missing");
    }
    let mut lists = Vec::new();
    if let Some(list) = config.and_then(|c| c.pointer("/quantization_config/ignore")) {
        lists.push(("config.json", list));
    } else if config.is_some() && !(model.dialect == Dialect::ModelOpt && model.checkpoint.quantization().is_some()) {
        // Servers read hf_quant_config.json where config.json says nothing, as older checkpoints of ModelOpt do.
        report.problem("config.json", "no 'quantization_config' with an 'ignore' list");
    }
    if model.dialect == Dialect::ModelOpt
        && let Some(quantization) = model.checkpoint.quantization()
    {
        for key in ["group_size", "kv_cache_quant_algo", "exclude_modules"] {
            match quantization.pointer(&format!("/quantization/{key}")) {
                None => {
                    report.problem("hf_quant_config.json", format!("'{key}' is missing; vLLM refuses the checkpoint"))
                }
                Some(list) if key == "exclude_modules" => lists.push(("hf_quant_config.json", list)),
                Some(_) => {}
            }
        }
    }
    let names = |list: &Value| -> BTreeSet<String> {
        list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
    };
    if let [(_, first), (_, second)] = lists[..] {
        let (first, second) = (names(first), names(second));
        if let Some(name) = first.symmetric_difference(&second).next() {
            let text = format!(
                "'{name}' is in one of 'ignore' (config.json) and 'exclude_modules' (hf_quant_config.json) only"
            );
            report.note("lists of modules", text);
        }
    }
    let defaults = Defaults::new(&Outline::new(config));
    // A table that no matrix product is made with: no server takes it for a layer. Vision and audio have such too.
    let is_embedding = |weight: &Weight<'_>| {
        weight.module.contains("embed") || defaults.reason(&weight.module, weight.rows) == Some(Part::Embedding)
    };
    for (file, list) in lists {
        let patterns: Vec<Ignored> = names(list).iter().map(|name| Ignored::new(name)).collect();
        check_unnamed(model, client, file, &patterns, report);
        for weight in &model.weights {
            let by = patterns.iter().find(|p| p.matches(&weight.module, client, model.dialect));
            match (&weight.stored, by) {
                (Stored::Nvfp4(_), Some(by)) => {
                    report.problem(&weight.module, format!("NVFP4, but '{}' in {file} says that it is not", by.text))
                }
                (Stored::Plain(_), None) if !is_embedding(weight) => report.problem(
                    &weight.module,
                    format!("not quantized, but not in the list of {file}: a server expects NVFP4"),
                ),
                _ => {}
            }
        }
    }
}

/// What vLLM builds although the checkpoint has no matrix of that name: experts that lie in one tensor, and heads that are tied
/// to the embedding. It builds them quantized unless the list says otherwise, and finds nothing to fill them with.
fn check_unnamed(model: &Model<'_>, client: Client, file: &str, patterns: &[Ignored], report: &mut Report) {
    if client != Client::Vllm {
        return;
    }
    let listed = |module: &str| patterns.iter().any(|p| p.matches(module, client, model.dialect));
    let mut experts: Vec<String> = model.others.iter().filter_map(plan::experts).collect();
    experts.dedup();
    for module in experts {
        let asked = match model.dialect {
            Dialect::CompressedTensors => format!("{module}.0.gate_proj"),
            _ => module.clone(),
        };
        if !listed(&asked) {
            let text = format!(
                "experts in one tensor, not quantized, and '{asked}' is not in the list of {file}: vLLM expects NVFP4"
            );
            report.problem(&module, text);
        }
    }
    let writes = |name: &str| name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration");
    if model.dialect == Dialect::ModelOpt && model.architecture().is_some_and(writes) {
        let heads = architecture::heads(model.architecture()).iter();
        for head in heads.filter(|head| model.weight(head).is_none() && !listed(head)) {
            let text = format!(
                "tied to the embedding, and not in the list of {file}: vLLM makes a quantized one and never fills it"
            );
            report.problem(head, text);
        }
    }
}

/// An entry of an ignore list.
struct Ignored {
    text: String,
    regex: Option<Regex>,
}

impl Ignored {
    fn new(text: &str) -> Self {
        let body = match text.strip_prefix("re:") {
            Some(regex) => format!("^(?:{regex})"),
            None => format!("^(?:{})$", text.split('*').map(regex_lite::escape).collect::<Vec<_>>().join(".*")),
        };
        Ignored { text: text.to_string(), regex: Regex::new(&body).ok() }
    }

    /// vLLM takes an entry of ModelOpt's list for a part of a name too: `mlp.gate` also excludes `mlp.gate_proj`.
    fn matches(&self, module: &str, client: Client, dialect: Dialect) -> bool {
        let part = client == Client::Vllm && dialect == Dialect::ModelOpt && !self.text.contains('*');
        (part && module.contains(&self.text)) || self.regex.as_ref().is_some_and(|r| r.is_match(module))
    }
}
