//! The configuration that tells a server about the tensors of a target.

use super::action::Action;
use super::architecture;
use super::deepseek;
use super::dialect::Model;
use super::plan::{Item, Plan};
use super::stacked;
use super::target::{Activations, Extras, Kv, Target};
use nvfp4::Precision;
use nvfp4_spec::BLOCK;
use serde_json::{Map, Value, json};

impl Target {
    /// `config.json`: the source's, in its order, with the description of the quantization put in.
    pub(super) fn config(self, source: Option<&Value>, ignore: &[String], extras: Extras) -> Value {
        let mut config = source.and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
        let description = match self {
            Target::ModelOpt => modelopt(ignore, extras),
            Target::CompressedTensors => compressed_tensors(ignore, extras),
            Target::DeepSeekV4 => {
                if let Some(own) = config.get_mut("quantization_config").and_then(Value::as_object_mut) {
                    own.insert(deepseek::KEY.to_string(), json!(deepseek::ALGORITHM));
                }
                return Value::Object(config);
            }
            Target::Plain(_) | Target::Gguf | Target::ComfyUi => {
                config.shift_remove("quantization_config");
                return Value::Object(config);
            }
        };
        config.insert("quantization_config".to_string(), description);
        Value::Object(config)
    }

    /// `hf_quant_config.json`, where the target has one.
    pub(super) fn quantization(self, ignore: &[String], extras: Extras) -> Option<Value> {
        (self == Target::ModelOpt).then(|| {
            json!({
                "producer": producer(),
                "quantization": {
                    "quant_algo": algorithm(extras.activations),
                    "kv_cache_quant_algo": extras.kv.algorithm(),
                    "group_size": BLOCK,
                    "exclude_modules": ignore,
                }
            })
        })
    }
}

/// vLLM recognizes a ModelOpt checkpoint by this name. The version is the one that has this format.
pub(super) fn producer() -> Value {
    json!({ "name": "modelopt", "version": "0.47.0" })
}

fn algorithm(activations: Activations) -> &'static str {
    match activations {
        Activations::Plain => "W4A16_NVFP4",
        Activations::Nvfp4 => "NVFP4",
    }
}

/// Replaces the type that a configuration names by the one that weights were decoded to:
/// transformers casts what it loads to it.
pub(super) fn name_type(config: &mut Value, precision: Precision) {
    let name = match precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
        Precision::F16 => "float16",
    };
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(key) {
            *value = json!(name);
        }
    }
}

/// What ModelOpt says about keys and values in `config.json`.
pub(super) fn kv_scheme(kv: Kv) -> Option<Value> {
    match kv {
        Kv::Unsaid | Kv::Other => None,
        Kv::Fp8 => Some(json!({ "dynamic": false, "num_bits": 8, "type": "float" })),
        Kv::Nvfp4 => Some(json!("NVFP4")),
    }
}

impl Kv {
    /// What `hf_quant_config.json` calls it.
    pub(super) fn algorithm(self) -> Option<&'static str> {
        match self {
            Kv::Unsaid | Kv::Other => None,
            Kv::Fp8 => Some("FP8"),
            Kv::Nvfp4 => Some("NVFP4"),
        }
    }
}

fn modelopt(ignore: &[String], extras: Extras) -> Value {
    let numbers = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": BLOCK });
    let mut group = Map::new();
    if extras.activations == Activations::Nvfp4 {
        group.insert("input_activations".to_string(), numbers.clone());
    }
    group.insert("weights".to_string(), numbers);
    group.insert("targets".to_string(), json!(["Linear"]));
    let mut description = json!({
        "config_groups": { "group_0": group },
        "ignore": ignore,
        "quant_algo": algorithm(extras.activations),
    });
    if let Some(scheme) = kv_scheme(extras.kv) {
        description["kv_cache_scheme"] = scheme;
    }
    description["producer"] = producer();
    description["quant_method"] = json!("modelopt");
    description
}

/// A group of compressed-tensors' NVFP4.
pub(super) fn nvfp4_group(targets: &[String], activations: Activations) -> Value {
    let numbers = |dynamic: Value, observer: &str| {
        json!({
            "num_bits": 4, "type": "float", "symmetric": true, "group_size": BLOCK, "strategy": "tensor_group",
            "block_structure": null, "dynamic": dynamic, "actorder": null, "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": null, "observer": observer, "observer_kwargs": {},
        })
    };
    let input = match activations {
        Activations::Plain => Value::Null,
        Activations::Nvfp4 => numbers(json!("local"), "static_minmax"),
    };
    json!({
        "targets": targets,
        "weights": numbers(json!(false), "memoryless_minmax"),
        "input_activations": input,
        "output_activations": null,
        "format": NVFP4_FORMAT,
    })
}

/// What compressed-tensors calls NVFP4.
const NVFP4_FORMAT: &str = "nvfp4-pack-quantized";

fn compressed_tensors(ignore: &[String], extras: Extras) -> Value {
    let group = nvfp4_group(&["Linear".to_string()], extras.activations);
    compressed_tensors_of(json!({ "group_0": group }), NVFP4_FORMAT, ignore, extras.kv)
}

/// The description of some groups in compressed-tensors' format.
pub(super) fn compressed_tensors_of(groups: Value, format: &str, ignore: &[String], kv: Kv) -> Value {
    let kv = match kv {
        Kv::Unsaid | Kv::Other | Kv::Nvfp4 => Value::Null,
        Kv::Fp8 => json!({
            "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false,
        }),
    };
    json!({
        "config_groups": groups,
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": kv,
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "ignore": ignore,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    })
}

/// The modules that a server must not expect in NVFP4. Output heads are named even where they are
/// tied to the embedding. Experts in one tensor are not quantized, and have the names that servers
/// use.
pub(super) fn ignored(plan: &Plan<'_>, model: &Model<'_>, target: Target) -> Vec<String> {
    let kept = |item: &&Item<'_>| matches!(item.action, Action::Keep(_) | Action::Decode(_));
    let mut names: Vec<String> = plan.items.iter().filter(kept).map(|i| i.weight.module.clone()).collect();
    let config = model.checkpoint.config();
    let mut others: Vec<String> = names.iter().flat_map(|name| architecture::called_by_vllm(config, name)).collect();
    if target == Target::CompressedTensors {
        others.extend(names.iter().filter_map(|name| architecture::called_by_transformers(config, name)));
    }
    names.extend(others);
    for head in architecture::heads(model.architecture()) {
        if !plan.items.iter().any(|i| i.weight.module == *head) {
            names.push(head.to_string());
        }
    }
    for experts in model.others.iter().filter_map(stacked::experts) {
        // vLLM looks for the projections of the first expert in compressed-tensors' list, by these
        // names in every family.
        if target == Target::CompressedTensors {
            names.extend(["gate_proj", "up_proj", "down_proj"].map(|name| format!("{experts}.0.{name}")));
        }
        names.extend(pattern(model.architecture().unwrap_or_default(), &experts, target));
        names.push(experts);
    }
    names.sort();
    names.dedup();
    names
}

/// A pattern for the experts of architectures for which vLLM gives entries of the list other names,
/// but no pattern: GPT-OSS's that end in `.down_proj`, and Aria's that begin with `language_model`.
fn pattern(architecture: &str, experts: &str, target: Target) -> Option<String> {
    let inner = experts.find("layers.").map_or(experts, |at| &experts[at..]);
    match target {
        Target::CompressedTensors if ["GptOss", "Aria"].iter().any(|name| architecture.starts_with(name)) => {
            Some(format!("re:.*{}[.].*", inner.replace('.', "[.]")))
        }
        Target::ModelOpt if architecture.starts_with("Aria") => Some(format!("*.{inner}*")),
        _ => None,
    }
}
