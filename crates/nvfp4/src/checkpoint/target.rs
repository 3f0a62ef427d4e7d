//! What is written: the tensors that a weight becomes, and the configuration that tells a server about them.

use super::dialect::Model;
use super::folder::Located;
use super::plan::{Action, Item, Plan};
use super::weight::{Stored, Weight};
use crate::{Error, Result};
use nvfp4_spec::BLOCK;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::fmt;
use std::str::FromStr;

/// Whose checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Target {
    /// NVIDIA ModelOpt's, which vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read.
    #[default]
    ModelOpt,
    /// compressed-tensors', which vLLM and transformers read.
    CompressedTensors,
    /// Not quantized: every weight decoded to BF16.
    Bf16,
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "modelopt" => Ok(Target::ModelOpt),
            "compressed-tensors" => Ok(Target::CompressedTensors),
            "gguf" => Err(Error::Refused(
                "GGUF is not written; convert to modelopt, which llama.cpp's convert_hf_to_gguf.py reads".to_string(),
            )),
            _ => Err(Error::Refused(format!("expected modelopt or compressed-tensors, got '{text}'"))),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Target::ModelOpt => "modelopt",
            Target::CompressedTensors => "compressed-tensors",
            Target::Bf16 => "bf16",
        })
    }
}

/// Whether a checkpoint says how activations are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// It does not: weights only (W4A16).
    Plain,
    /// It has a scale for each weight's activations (W4A4).
    Nvfp4,
}

/// What a written tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Role {
    /// The weight itself, copied or decoded.
    Whole,
    Codes,
    Scales,
    Global,
    Input,
}

/// A tensor that will be written.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub role: Role,
}

impl Part {
    pub fn len(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product::<u64>() * self.dtype.bitsize() as u64 / 8
    }
}

impl Target {
    /// The tensors that a weight becomes.
    pub(super) fn parts(self, item: &Item<'_>, activations: Activations) -> Vec<Part> {
        let Weight { module, rows, cols, stored } = &item.weight;
        let part = |name: String, dtype, shape, role| Part { name, dtype, shape, role };
        let whole = |dtype| vec![part(format!("{module}.weight"), dtype, vec![*rows, *cols], Role::Whole)];
        match (&item.action, stored) {
            (Action::Keep(_), Stored::Plain(tensor)) => whole(tensor.info.dtype),
            (Action::Keep(_) | Action::Decode(_), _) => whole(Dtype::BF16),
            // ModelOpt keeps the experts of such models in one tensor each, inputs before outputs.
            (Action::Quantize | Action::Relabel, Stored::MxFp4 { experts, .. }) => {
                let outputs = rows / experts;
                let mut parts = vec![
                    part(module.clone(), Dtype::U8, vec![*experts, cols / 2, outputs], Role::Codes),
                    part(
                        format!("{module}_weight_scale"),
                        Dtype::F8_E4M3,
                        vec![*experts, cols / BLOCK, outputs],
                        Role::Scales,
                    ),
                    part(format!("{module}_weight_scale_2"), Dtype::F32, vec![*experts], Role::Global),
                ];
                if activations == Activations::Nvfp4 {
                    parts.push(part(format!("{module}_input_scale"), Dtype::F32, vec![], Role::Input));
                }
                parts
            }
            (Action::Quantize | Action::Relabel, _) => {
                let (codes, global, input, scalar) = match self {
                    // A plan to decode quantizes nothing.
                    Target::ModelOpt | Target::Bf16 => ("weight", "weight_scale_2", "input_scale", vec![]),
                    Target::CompressedTensors => {
                        ("weight_packed", "weight_global_scale", "input_global_scale", vec![1])
                    }
                };
                let mut parts = vec![
                    part(format!("{module}.{codes}"), Dtype::U8, vec![*rows, cols / 2], Role::Codes),
                    part(format!("{module}.weight_scale"), Dtype::F8_E4M3, vec![*rows, cols / BLOCK], Role::Scales),
                    part(format!("{module}.{global}"), Dtype::F32, scalar.clone(), Role::Global),
                ];
                if activations == Activations::Nvfp4 {
                    parts.push(part(format!("{module}.{input}"), Dtype::F32, scalar, Role::Input));
                }
                parts
            }
        }
    }

    /// What a tensor scale is called when it multiplies, in the target's own sense.
    pub(super) fn stored(self, multiplier_or_divisor: Scale) -> f32 {
        match (self, multiplier_or_divisor) {
            (Target::CompressedTensors, Scale::Divisor(g)) => g,
            (Target::CompressedTensors, Scale::Multiplier(g)) => (1.0 / g).min(f32::MAX),
            (Target::ModelOpt | Target::Bf16, Scale::Multiplier(g)) => g,
            (Target::ModelOpt | Target::Bf16, Scale::Divisor(g)) => (1.0 / g).min(f32::MAX),
        }
    }

    /// `config.json`: the source's, in its order, with the description of the quantization put in.
    pub(super) fn config(self, source: Option<&Value>, ignore: &[String], activations: Activations) -> Value {
        let mut config = source.and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
        let description = match self {
            Target::ModelOpt => modelopt(ignore, activations),
            Target::CompressedTensors => compressed_tensors(ignore, activations),
            Target::Bf16 => {
                config.shift_remove("quantization_config");
                return Value::Object(config);
            }
        };
        config.insert("quantization_config".to_string(), description);
        Value::Object(config)
    }

    /// `hf_quant_config.json`, where the target has one.
    pub(super) fn quantization(self, ignore: &[String], activations: Activations) -> Option<Value> {
        (self == Target::ModelOpt).then(|| {
            json!({
                "producer": producer(),
                "quantization": {
                    "quant_algo": algorithm(activations),
                    "kv_cache_quant_algo": null,
                    "group_size": BLOCK,
                    "exclude_modules": ignore,
                }
            })
        })
    }
}

/// A tensor scale with its meaning.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scale {
    Multiplier(f32),
    Divisor(f32),
}

/// vLLM knows a ModelOpt checkpoint by this name; the version is the one whose format this is.
fn producer() -> Value {
    json!({ "name": "modelopt", "version": "0.47.0" })
}

fn algorithm(activations: Activations) -> &'static str {
    match activations {
        Activations::Plain => "W4A16_NVFP4",
        Activations::Nvfp4 => "NVFP4",
    }
}

fn modelopt(ignore: &[String], activations: Activations) -> Value {
    let numbers = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": BLOCK });
    let mut group = Map::new();
    if activations == Activations::Nvfp4 {
        group.insert("input_activations".to_string(), numbers.clone());
    }
    group.insert("weights".to_string(), numbers);
    group.insert("targets".to_string(), json!(["Linear"]));
    json!({
        "config_groups": { "group_0": group },
        "ignore": ignore,
        "quant_algo": algorithm(activations),
        "producer": producer(),
        "quant_method": "modelopt",
    })
}

fn compressed_tensors(ignore: &[String], activations: Activations) -> Value {
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
        "config_groups": { "group_0": {
            "targets": ["Linear"],
            "weights": numbers(json!(false), "memoryless_minmax"),
            "input_activations": input,
            "output_activations": null,
            "format": "nvfp4-pack-quantized",
        }},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": null,
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "ignore": ignore,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    })
}

/// The modules that a server must not expect in NVFP4. The output head is named even where it is tied to the embedding.
/// Experts that lie in one tensor are not quantized, and are named by their parent.
pub(super) fn ignored(plan: &Plan<'_>, model: &Model<'_>) -> Vec<String> {
    let kept = |item: &&Item<'_>| matches!(item.action, Action::Keep(_) | Action::Decode(_));
    let mut names: Vec<String> = plan.items.iter().filter(kept).map(|i| i.weight.module.clone()).collect();
    if !plan.items.iter().any(|i| i.weight.module == "lm_head") {
        names.push("lm_head".to_string());
    }
    let experts = |t: &&Located<'_>| t.info.shape.len() == 3 && t.info.name.contains(".experts.");
    let floats = |t: &&Located<'_>| matches!(t.info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32);
    let parents = model.others.iter().filter(experts).filter(floats).filter_map(|t| t.info.name.rsplit_once('.'));
    names.extend(parents.map(|(parent, _)| parent.to_string()));
    names.sort();
    names.dedup();
    names
}
