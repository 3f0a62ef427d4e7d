//! Does the configuration describe the weights that a checkpoint has? A server believes it: what it
//! says wrongly is read wrongly.

use super::architecture;
use super::client::Client;
use super::deepseek;
use super::dialect::{Dialect, Model};
use super::finding::Report;
use super::ignored::Ignored;
use super::keep::{Defaults, Part};
use super::outline::Outline;
use super::promised;
use super::stacked;
use super::weight::{Stored, Weight};
use crate::Result;
use nvfp4_spec::BLOCK;
use serde_json::Value;
use std::collections::BTreeSet;

/// Checks `config.json` and `hf_quant_config.json`.
pub(super) fn check(model: &Model<'_>, client: Client, report: &mut Report) -> Result<()> {
    if model.dialect == Dialect::DeepSeekV4Nvfp4 {
        return deepseek::check(model, report);
    }
    check_method(model, report);
    if promised::has_forms(model) {
        promised::check(model, client, report)?;
        check_lists(model, client, report);
        return Ok(());
    }
    check_algorithm(model, report);
    if model.dialect == Dialect::CompressedTensors {
        check_compressed_tensors(model, client, report);
    }
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

/// The names that decide who reads the weights.
fn check_method(model: &Model<'_>, report: &mut Report) {
    let config = model.checkpoint.config().and_then(|c| c.get("quantization_config")).filter(|c| !c.is_null());
    let Some(config) = config else { return };
    let known: &[&str] = match model.dialect {
        Dialect::ModelOpt => &["modelopt", "modelopt_fp4", "modelopt_mixed"],
        Dialect::CompressedTensors => &["compressed-tensors", "compressed_tensors"],
        _ => return,
    };
    if !config.is_object() {
        report.problem("config.json", format!("'quantization_config' is {config}, expected an object"));
        return;
    }
    check_name("'quant_method'", config.get("quant_method"), known, report);
    if let Some(own) = model.checkpoint.quantization().filter(|_| model.dialect == Dialect::ModelOpt) {
        let kv = own.pointer("/quantization/kv_cache_quant_algo").filter(|kv| !kv.is_null());
        let text = |kv: &Value| kv.as_str().is_some_and(|kv| ["FP8", "NVFP4"].contains(&kv.to_uppercase().as_str()));
        if let Some(kv) = kv.filter(|kv| !text(kv)) {
            let text = format!("'kv_cache_quant_algo' is {kv}, expected null, FP8 or NVFP4: vLLM refuses it");
            report.problem("hf_quant_config.json", text);
        }
    }
}

/// A name that must be one of a few.
fn check_name(key: &str, value: Option<&Value>, known: &[&str], report: &mut Report) {
    if value.and_then(Value::as_str).is_some_and(|name| known.contains(&name.to_lowercase().as_str())) {
        return;
    }
    let known = format!("expected '{}'", known[0]);
    match value {
        None => report.problem("config.json", format!("no {key} in 'quantization_config', {known}")),
        Some(value) => report.problem(
            "config.json",
            format!(
                "{key} in 'quantization_config' is {value}, {known}: a server reads the weights as \
                 something else, or refuses"
            ),
        ),
    }
}

/// What compressed-tensors says about its groups: the format of each, its modules, and how
/// activations are quantized.
fn check_compressed_tensors(model: &Model<'_>, client: Client, report: &mut Report) {
    const FORMAT: &str = "nvfp4-pack-quantized";
    let Some(config) = model.checkpoint.config().and_then(|c| c.get("quantization_config")) else { return };
    check_name("'format'", config.get("format"), &[FORMAT, "mixed-precision"], report);
    if let Some(kv) = config.get("kv_cache_scheme").filter(|kv| !kv.is_null() && kv.get("num_bits").is_none()) {
        report.problem("config.json", format!("'kv_cache_scheme' is {kv}, expected null or an object with 'num_bits'"));
    }
    let groups = config.get("config_groups").and_then(Value::as_object);
    let groups = groups.into_iter().flatten().filter(|(_, group)| is_nvfp4(group.get("weights")));
    let mut targets = Vec::new();
    for (name, group) in groups {
        let format = group.get("format").filter(|format| !format.is_null());
        if format.is_some() || config.get("format").is_some_and(|f| *f == "mixed-precision") {
            check_name(&format!("'config_groups.{name}.format'"), format, &[FORMAT], report);
        }
        let input = group.get("input_activations").filter(|input| !input.is_null());
        if input.is_some() && !is_nvfp4(input) {
            let text = format!(
                "'config_groups.{name}.input_activations' are not 4-bit floats in blocks of \
                 {BLOCK} ('tensor_group') as the weights are: a server has no such layers"
            );
            report.problem("config.json", text);
        }
        let own = group.get("targets").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
        targets.extend(own);
    }
    // A target is a part of the name of a class, or the name of a module.
    let classes = ["linear", "parallellinear", "fusedmoe", "parallellmhead", "embedding"];
    let is_class = |target: &&str| {
        let target = target.to_lowercase();
        !target.is_empty() && classes.iter().any(|class| class.contains(&target) || target.ends_with(class))
    };
    let modules = Ignored::new(targets.iter().copied(), client, Dialect::CompressedTensors);
    if targets.iter().any(is_class) {
        return;
    }
    let nvfp4 = || model.weights.iter().filter(|w| matches!(w.stored, Stored::Nvfp4(_)));
    let lost = || nvfp4().filter(|w| modules.matching(&w.module).is_none());
    if let Some(first) = lost().next() {
        let text = format!(
            "'{}' and {} more NVFP4 weights are not among the 'targets' of any group of \
             'config_groups' ({targets:?}), expected [\"Linear\"] or names of modules: a server \
             does not read them as NVFP4",
            first.module,
            lost().count() - 1
        );
        report.problem("config.json", text);
    }
}

/// Whether weights or activations are described as NVFP4.
fn is_nvfp4(described: Option<&Value>) -> bool {
    let Some(described) = described else { return false };
    let is = |key: &str, value: Value| described.get(key) == Some(&value);
    is("num_bits", 4.into())
        && is("type", "float".into())
        && is("strategy", "tensor_group".into())
        && described.get("group_size").is_some()
        && described.get("symmetric").is_none_or(|symmetric| *symmetric == true)
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
        // vLLM takes 16 for ModelOpt's null.
        let unsaid = size.is_null() && model.dialect == Dialect::ModelOpt;
        if number != Some(BLOCK as u64) && !unsaid {
            let text = format!(
                "blocks of {size} ('group_size'), but the scales are for blocks of {BLOCK}: a \
                 server expects other shapes"
            );
            report.problem(file, text);
        }
    }
    if model.dialect == Dialect::CompressedTensors {
        if model.checkpoint.config().is_some() && !groups().any(|group| is_nvfp4(group.get("weights"))) {
            let text = "no entry of 'config_groups' has weights of symmetric 4-bit floats with the \
                        strategy 'tensor_group': a server does not read the weights as NVFP4";
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
                format!(
                    "the algorithm is '{other}', but the weights are NVFP4 ('quant_algo', expected \
                     NVFP4 or W4A16_NVFP4): a server reads them as something else, or refuses"
                ),
            ),
        }
    }
    if let [(_, first), (_, second)] = &algorithms[..]
        && first != second
    {
        let text = format!(
            "config.json says {first}, hf_quant_config.json says {second}: vLLM goes by \
             config.json, and expects activation scales for NVFP4 and none for W4A16_NVFP4"
        );
        report.problem("quant_algo", text);
    }
}

/// A configuration that promises activation scales needs one for every weight.
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
                "no activation scale, which the configuration promises: vLLM reads uninitialised memory",
            ),
            Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                report.problem(&weight.module, format!("the activation scale is {scale}"));
            }
            Some(_) if !promised => unused += 1,
            _ => {}
        }
    }
    if unused > 0 {
        let text =
            format!("the configuration says weights only, so the activation scales of {unused} weights are not used");
        report.note("activation scales", text);
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
    } else if model.dialect == Dialect::ModelOpt && config.is_some_and(is_read) {
        report.problem(
            "config.json",
            "no 'ignore' in 'quantization_config', which vLLM goes by: it expects every weight in NVFP4",
        );
    } else if config.is_some() && !(model.dialect == Dialect::ModelOpt && model.checkpoint.quantization().is_some()) {
        // Servers read hf_quant_config.json where config.json says nothing, as older checkpoints of
        // ModelOpt do.
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
    for (file, list) in &lists {
        let texts = list.as_array().is_some_and(|list| list.iter().all(Value::is_string));
        if !texts {
            let key = if *file == "config.json" { "ignore" } else { "exclude_modules" };
            report.problem(file, format!("'{key}' is not a list of names of modules: a server refuses it"));
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
    // No product is made with an embedding, so no server treats it as a layer. Vision and audio
    // have them too.
    let is_embedding = |weight: &Weight<'_>| {
        weight.module.contains("embed") || defaults.reason(&weight.module, weight.rows) == Some(Part::Embedding)
    };
    let is_fp4 = |weight: &Weight<'_>| matches!(weight.stored, Stored::Nvfp4(_));
    // Where every quantized module is named, the others are not expected to be.
    let named = model.names_all();
    for (file, list) in lists {
        let names = names(list);
        let patterns = Ignored::new(names.iter().map(String::as_str), client, model.dialect);
        check_unnamed(model, client, file, &patterns, report);
        for weight in &model.weights {
            let by = patterns.matching(&weight.module);
            match (&weight.stored, by) {
                (Stored::Nvfp4(_) | Stored::Fp8 { .. } | Stored::MxFp4 { .. }, Some(by)) => {
                    let form = weight.format();
                    report.problem(&weight.module, format!("{form}, but '{by}' in {file} says that it is not"))
                }
                (Stored::Plain(_), None) if !is_embedding(weight) && !named => {
                    let form = if model.weights.iter().any(is_fp4) { "NVFP4" } else { "FP8" };
                    let text = format!("not quantized, but not in the list of {file}: a server expects {form}");
                    report.problem(&weight.module, text)
                }
                _ => {}
            }
        }
    }
}

/// Whether vLLM reads the quantization of ModelOpt from `config.json`, and in the newer form.
fn is_read(config: &Value) -> bool {
    let own = config.get("quantization_config");
    let has = |key: &str| own.is_some_and(|own| own.get(key).is_some());
    has("quant_method") && !has("quantization") && !has("exclude_modules")
}

/// What vLLM builds although the checkpoint has no matrix of that name: experts in one tensor, and
/// heads that are tied to the embedding. It builds them quantized unless the list says otherwise,
/// and finds nothing to fill them with.
fn check_unnamed(model: &Model<'_>, client: Client, file: &str, patterns: &Ignored<'_>, report: &mut Report) {
    if client != Client::Vllm {
        return;
    }
    let listed = |module: &str| patterns.matching(module).is_some();
    let mut experts: Vec<String> = model.others.iter().filter_map(stacked::experts).collect();
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
    if model.dialect == Dialect::ModelOpt && architecture::writes(model) {
        let heads = architecture::heads(model.architecture()).iter();
        for head in heads.filter(|head| model.weight(head).is_none() && !listed(head)) {
            let text = format!(
                "tied to the embedding, and not in the list of {file}: vLLM makes a quantized one and never fills it"
            );
            report.problem(head, text);
        }
    }
}
