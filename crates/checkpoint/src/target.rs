//! What is written: the tensors that a weight becomes, and the configuration that tells a server about them.

use super::architecture;
use super::dialect::Model;
use super::folder::{Checkpoint, Kind, Located};
use super::names::KvScale;
use super::plan::{self, Action, Item, Plan};
use super::weight::{Stored, Weight};
use crate::{Error, Result};
use nvfp4::Precision;
use nvfp4_spec::{BLOCK, gguf};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::fmt;
use std::str::FromStr;

/// Whose checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Target {
    /// NVIDIA ModelOpt's, which vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read.
    #[default]
    ModelOpt,
    /// compressed-tensors', which vLLM and transformers read.
    CompressedTensors,
    /// One GGUF file, which llama.cpp reads, of the Llama and Qwen families.
    Gguf,
    /// Not quantized: every weight decoded to this type.
    Plain(Precision),
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "modelopt" => Ok(Target::ModelOpt),
            "compressed-tensors" => Ok(Target::CompressedTensors),
            "gguf" => Ok(Target::Gguf),
            _ => Err(Error::Refused(format!("expected modelopt, compressed-tensors or gguf, got '{text}'"))),
        }
    }
}

impl Target {
    /// Whether it is a folder or a file.
    pub(super) fn kind(self) -> Kind {
        match self {
            Target::Gguf => Kind::File,
            Target::ModelOpt | Target::CompressedTensors | Target::Plain(_) => Kind::Folder,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Target::ModelOpt => "modelopt",
            Target::CompressedTensors => "compressed-tensors",
            Target::Gguf => "gguf",
            Target::Plain(Precision::Bf16) => "bf16",
            Target::Plain(Precision::F16) => "f16",
            Target::Plain(Precision::F32) => "f32",
        })
    }
}

/// Whether a checkpoint says how activations are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activations {
    #[default]
    /// It does not: weights only (W4A16).
    Plain,
    /// It has a scale for each weight's activations (W4A4).
    Nvfp4,
}

/// What a checkpoint says about the key-value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) enum Kv {
    /// Nothing.
    #[default]
    Unsaid,
    /// The source says another type than FP8, which is not passed on.
    Other,
    /// FP8, with the scales that the source has, and 1 for those that it lacks.
    Fp8,
}

/// What a checkpoint says beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Extras {
    pub activations: Activations,
    pub kv: Kv,
}

/// What a written tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Role {
    /// The weight itself, copied or decoded.
    Whole,
    Codes,
    Scales,
    /// Codes and scales in GGUF's blocks.
    Blocks,
    Global,
    Input,
    /// The scale of keys or values.
    KvScale,
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
    /// The type that a weight gets which is decoded and not quantized again.
    pub(super) fn decoded(self) -> Precision {
        match self {
            Target::Plain(precision) => precision,
            Target::ModelOpt | Target::CompressedTensors | Target::Gguf => Precision::Bf16,
        }
    }

    /// The tensors that a weight becomes. GGUF's names are the business of `gguf`; here it has only sizes.
    pub(super) fn parts(self, item: &Item<'_>, activations: Activations) -> Vec<Part> {
        let weight = &item.weight;
        let mut parts = match &item.action {
            Action::Keep(_) | Action::Decode(_) => vec![whole(weight, self.decoded())],
            Action::Quantize | Action::Relabel | Action::Rescale if weight.is_transposed() => experts(weight),
            Action::Quantize | Action::Relabel | Action::Rescale => self.matrix(weight),
        };
        let part = |name: String, shape: &[usize], role| Part { name, dtype: Dtype::F32, shape: shape.to_vec(), role };
        let (module, quantized) = (&weight.module, item.action.is_nvfp4());
        if quantized && activations == Activations::Nvfp4 {
            parts.push(match (weight.is_transposed(), self) {
                (true, _) => part(format!("{module}_input_scale"), &[], Role::Input),
                (_, Target::CompressedTensors) => part(format!("{module}.input_global_scale"), &[1], Role::Input),
                _ => part(format!("{module}.input_scale"), &[], Role::Input),
            });
        }
        parts
    }

    /// The scale 1 that is written beside a projection to keys or values whose scale the source lacks: servers take 1 for it,
    /// but transformers has uninitialised memory there.
    pub(super) fn missing_kv_scale(self, module: &str, source: &Checkpoint, kv: Kv) -> Option<Part> {
        let scale = KvScale::of_projection(module).filter(|_| kv == Kv::Fp8)?;
        let has = |name: String| source.get(&name).is_some();
        let missing = !has(scale.modelopt()) && !has(scale.compressed_tensors());
        missing.then(|| self.kv_scale(scale, Role::KvScale))?
    }

    /// The tensor that another tensor becomes: itself, but for scales of keys and values. Where the source says that those are
    /// quantized, they have names of their own, and none where nothing is quantized.
    pub(super) fn other(self, tensor: &Located<'_>, kv: Kv) -> Option<Part> {
        let info = tensor.info;
        let number = info.shape.iter().product::<usize>() == 1;
        let float = matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        match KvScale::named(&info.name).filter(|_| number && float && kv != Kv::Unsaid) {
            Some(scale) => self.kv_scale(scale, Role::Whole),
            None => {
                Some(Part { name: info.name.clone(), dtype: info.dtype, shape: info.shape.clone(), role: Role::Whole })
            }
        }
    }

    fn kv_scale(self, scale: KvScale<'_>, role: Role) -> Option<Part> {
        let (name, shape) = match self {
            Target::ModelOpt => (scale.modelopt(), vec![]),
            Target::CompressedTensors => (scale.compressed_tensors(), vec![1]),
            Target::Gguf | Target::Plain(_) => return None,
        };
        Some(Part { name, dtype: Dtype::F32, shape, role })
    }

    /// The tensors of a quantized matrix.
    fn matrix(self, weight: &Weight<'_>) -> Vec<Part> {
        let Weight { module, rows, cols, .. } = weight;
        let part = |name: String, dtype, shape, role| Part { name, dtype, shape, role };
        let (codes, global, scalar) = match self {
            // A plan to decode quantizes nothing.
            Target::ModelOpt | Target::Plain(_) => ("weight", "weight_scale_2", vec![]),
            Target::CompressedTensors => ("weight_packed", "weight_global_scale", vec![1]),
            Target::Gguf => {
                let blocks = vec![*rows, cols / gguf::BLOCK_ELEMENTS * gguf::BLOCK_BYTES];
                return vec![
                    part(format!("{module}.weight"), Dtype::U8, blocks, Role::Blocks),
                    part(format!("{module}.scale"), Dtype::F32, vec![1], Role::Global),
                ];
            }
        };
        vec![
            part(format!("{module}.{codes}"), Dtype::U8, vec![*rows, cols / 2], Role::Codes),
            part(format!("{module}.weight_scale"), Dtype::F8_E4M3, vec![*rows, cols / BLOCK], Role::Scales),
            part(format!("{module}.{global}"), Dtype::F32, scalar, Role::Global),
        ]
    }

    /// What a tensor scale is called when it multiplies, in the target's own sense.
    pub(super) fn stored(self, multiplier_or_divisor: Scale) -> f32 {
        match (self, multiplier_or_divisor) {
            (Target::CompressedTensors, Scale::Divisor(g)) => g,
            (Target::CompressedTensors, Scale::Multiplier(g)) => (1.0 / g).min(f32::MAX),
            (Target::ModelOpt | Target::Gguf | Target::Plain(_), Scale::Multiplier(g)) => g,
            (Target::ModelOpt | Target::Gguf | Target::Plain(_), Scale::Divisor(g)) => (1.0 / g).min(f32::MAX),
        }
    }

    /// `config.json`: the source's, in its order, with the description of the quantization put in.
    pub(super) fn config(self, source: Option<&Value>, ignore: &[String], extras: Extras) -> Value {
        let mut config = source.and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
        let description = match self {
            Target::ModelOpt => modelopt(ignore, extras),
            Target::CompressedTensors => compressed_tensors(ignore, extras),
            Target::Plain(_) | Target::Gguf => {
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
                    "kv_cache_quant_algo": if extras.kv == Kv::Fp8 { json!("FP8") } else { Value::Null },
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

/// The tensor of a weight that is not quantized. Experts in one tensor keep inputs before outputs when they are decoded.
fn whole(weight: &Weight<'_>, decoded: Precision) -> Part {
    let (module, cols) = (&weight.module, weight.cols);
    let dtype = if let Stored::Plain(tensor) = &weight.stored { tensor.info.dtype } else { dtype(decoded) };
    let (name, shape) = match weight.is_transposed() {
        true => (module.clone(), vec![weight.matrices(), cols, weight.matrix_rows()]),
        false => (format!("{module}.weight"), vec![weight.rows, cols]),
    };
    Part { name, dtype, shape, role: Role::Whole }
}

fn dtype(precision: Precision) -> Dtype {
    match precision {
        Precision::F32 => Dtype::F32,
        Precision::Bf16 => Dtype::BF16,
        Precision::F16 => Dtype::F16,
    }
}

/// Names the type that weights were decoded to where a configuration names one: by it, transformers casts what it loads.
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

/// The tensors of quantized experts in one tensor, inputs before outputs, as ModelOpt has them.
fn experts(weight: &Weight<'_>) -> Vec<Part> {
    let (module, cols, count, outputs) = (&weight.module, weight.cols, weight.matrices(), weight.matrix_rows());
    let part = |name: String, dtype, shape, role| Part { name, dtype, shape, role };
    let scales = vec![count, cols / BLOCK, outputs];
    vec![
        part(module.clone(), Dtype::U8, vec![count, cols / 2, outputs], Role::Codes),
        part(format!("{module}_weight_scale"), Dtype::F8_E4M3, scales, Role::Scales),
        part(format!("{module}_weight_scale_2"), Dtype::F32, vec![count], Role::Global),
    ]
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
    if extras.kv == Kv::Fp8 {
        description["kv_cache_scheme"] = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
    }
    description["producer"] = producer();
    description["quant_method"] = json!("modelopt");
    description
}

fn compressed_tensors(ignore: &[String], extras: Extras) -> Value {
    let numbers = |dynamic: Value, observer: &str| {
        json!({
            "num_bits": 4, "type": "float", "symmetric": true, "group_size": BLOCK, "strategy": "tensor_group",
            "block_structure": null, "dynamic": dynamic, "actorder": null, "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": null, "observer": observer, "observer_kwargs": {},
        })
    };
    let input = match extras.activations {
        Activations::Plain => Value::Null,
        Activations::Nvfp4 => numbers(json!("local"), "static_minmax"),
    };
    let kv = match extras.kv {
        Kv::Unsaid | Kv::Other => Value::Null,
        Kv::Fp8 => json!({
            "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false,
        }),
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
        "kv_cache_scheme": kv,
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "ignore": ignore,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    })
}

/// The modules that a server must not expect in NVFP4. Output heads are named even where they are tied to the embedding.
/// Experts that lie in one tensor are not quantized, and are named as servers call them.
pub(super) fn ignored(plan: &Plan<'_>, model: &Model<'_>, target: Target) -> Vec<String> {
    let kept = |item: &&Item<'_>| matches!(item.action, Action::Keep(_) | Action::Decode(_));
    let mut names: Vec<String> = plan.items.iter().filter(kept).map(|i| i.weight.module.clone()).collect();
    for head in architecture::heads(model.architecture()) {
        if !plan.items.iter().any(|i| i.weight.module == *head) {
            names.push(head.to_string());
        }
    }
    for experts in model.others.iter().filter_map(plan::experts) {
        // vLLM asks compressed-tensors' list about the projections of the first expert, by these names in every family.
        if target == Target::CompressedTensors {
            names.extend(["gate_proj", "up_proj", "down_proj"].map(|name| format!("{experts}.0.{name}")));
        }
        names.push(experts);
    }
    names.sort();
    names.dedup();
    names
}
