//! The tensors that a weight becomes in a target.

use super::action::Action;
use super::comfyui;
use super::eight::Arithmetic;
use super::folder::{Checkpoint, Located};
use super::form::Eight;
use super::names::KvScale;
use super::plan::Item;
use super::target::{Activations, Kv, Target};
use super::weight::{MX_BLOCK, Stored, Weight};
use nvfp4::Precision;
use nvfp4_spec::{BLOCK, gguf};
use safetensors::Dtype;

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
    /// What tells ComfyUI that a weight is NVFP4.
    Marker,
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
    /// The tensors that a weight becomes. `gguf` gives GGUF's names; here only its sizes count.
    pub(super) fn parts(self, item: &Item<'_>, activations: Activations) -> Vec<Part> {
        let weight = &item.weight;
        let mut parts = match &item.action {
            Action::Keep(_) | Action::Decode(_) => vec![whole(weight, self.decoded())],
            Action::Retain(_) | Action::RetainMxFp4 if self == Target::DeepSeekV4 => as_stored(weight),
            Action::Eight(eight) | Action::Retain(eight) => fp8(self, weight, *eight),
            Action::RetainMxFp4 => mxfp4(weight),
            Action::Quantize | Action::Relabel | Action::Rescale if weight.is_transposed() => experts(weight),
            Action::Quantize | Action::Relabel | Action::Rescale => self.matrix(weight),
        };
        let part = |name: String, shape: &[usize], role| Part { name, dtype: Dtype::F32, shape: shape.to_vec(), role };
        let module = &weight.module;
        if let Action::Eight(eight) | Action::Retain(eight) = item.action {
            parts.extend(fp8_input(self, weight, eight));
        }
        if item.has_fp4_inputs(activations) {
            parts.push(match (weight.is_transposed(), self) {
                (true, _) => part(format!("{module}_input_scale"), &[], Role::Input),
                (_, Target::CompressedTensors) => part(format!("{module}.input_global_scale"), &[1], Role::Input),
                _ => part(format!("{module}.input_scale"), &[], Role::Input),
            });
        }
        parts
    }

    /// The scale 1 that is written beside a projection to keys or values whose scale the source
    /// lacks: servers use 1 then, but transformers reads uninitialised memory.
    pub(super) fn missing_kv_scale(self, module: &str, source: &Checkpoint, kv: Kv) -> Option<Part> {
        let scale = KvScale::of_projection(module).filter(|_| matches!(kv, Kv::Fp8 | Kv::Nvfp4))?;
        let has = |name: String| source.get(&name).is_some();
        let missing = !has(scale.modelopt()) && !has(scale.compressed_tensors());
        missing.then(|| self.kv_scale(scale, Role::KvScale))?
    }

    /// The tensor that another tensor becomes: itself, except for scales of keys and values. Where
    /// the source says that those are quantized, the target has its own names for their scales, or
    /// drops them if it is not quantized.
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
            Target::DeepSeekV4 | Target::Gguf | Target::ComfyUi | Target::Plain(_) => return None,
        };
        Some(Part { name, dtype: Dtype::F32, shape, role })
    }

    /// The tensors of a quantized matrix.
    fn matrix(self, weight: &Weight<'_>) -> Vec<Part> {
        let Weight { module, rows, cols, .. } = weight;
        let part = |name: String, dtype, shape, role| Part { name, dtype, shape, role };
        let (codes, global, scalar) = match self {
            // A plan to decode quantizes nothing.
            Target::ModelOpt | Target::DeepSeekV4 | Target::Plain(_) => ("weight", "weight_scale_2", vec![]),
            Target::ComfyUi => {
                let marker = vec![comfyui::MARKER.len()];
                return vec![
                    part(format!("{module}.weight"), Dtype::U8, vec![*rows, cols / 2], Role::Codes),
                    part(
                        format!("{module}.weight_scale"),
                        Dtype::F8_E4M3,
                        comfyui::scales(*rows, *cols).to_vec(),
                        Role::Scales,
                    ),
                    part(format!("{module}.weight_scale_2"), Dtype::F32, vec![], Role::Global),
                    part(format!("{module}.{}", comfyui::NAME), Dtype::U8, marker, Role::Marker),
                ];
            }
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
}

/// The tensor of a weight that is not quantized. Experts in one tensor keep inputs before outputs
/// when they are decoded.
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

/// The tensors of a weight that keeps its names too.
fn as_stored(weight: &Weight<'_>) -> Vec<Part> {
    let roles = [Role::Codes, Role::Scales];
    let part = |(tensor, role): (Located<'_>, Role)| Part {
        name: tensor.info.name.clone(),
        dtype: tensor.info.dtype,
        shape: tensor.info.shape.clone(),
        role,
    };
    weight.stored.parts().into_iter().zip(roles).map(part).collect()
}

/// The tensors of a matrix in MXFP4, as compressed-tensors has them.
fn mxfp4(weight: &Weight<'_>) -> Vec<Part> {
    let Weight { module, rows, cols, .. } = weight;
    let part = |name: &str, cols, role| Part {
        name: format!("{module}.{name}"),
        dtype: Dtype::U8,
        shape: vec![*rows, cols],
        role,
    };
    vec![part("weight_packed", cols / 2, Role::Codes), part("weight_scale", cols / MX_BLOCK, Role::Scales)]
}

/// The tensors of a weight in FP8.
fn fp8(target: Target, weight: &Weight<'_>, eight: Eight) -> Vec<Part> {
    let Weight { module, rows, cols, .. } = weight;
    let dtype = match &weight.stored {
        Stored::Fp8 { scale, eight: own, .. } if *own == eight => scale.info.dtype,
        _ => Arithmetic::new(target, weight, eight).dtype(),
    };
    let [tall, wide] = eight.scales(*rows, *cols);
    let shape = match (target, eight) {
        (Target::CompressedTensors, Eight::Tensor) => vec![1],
        (_, Eight::Tensor) => vec![],
        (Target::CompressedTensors, Eight::Channel) => vec![tall, 1],
        (_, Eight::Channel) => vec![tall],
        (Target::CompressedTensors, Eight::Block) | (_, Eight::Mx) => vec![tall, wide],
        (_, Eight::Block) => vec![tall, 1, wide, 1],
    };
    let part = |name: &str, dtype, shape, role| Part { name: format!("{module}.{name}"), dtype, shape, role };
    vec![
        part("weight", Dtype::F8_E4M3, vec![*rows, *cols], Role::Codes),
        part("weight_scale", dtype, shape, Role::Scales),
    ]
}

/// The scale of its activations, where the target's readers ask for one or the source has it. vLLM
/// reads uninitialised memory where ModelOpt's FP8 per tensor lacks it; with compressed-tensors,
/// activations have scales when they come.
fn fp8_input(target: Target, weight: &Weight<'_>, eight: Eight) -> Option<Part> {
    let own =
        if let Stored::Fp8 { input, eight: own, .. } = &weight.stored { input.filter(|_| *own == eight) } else { None };
    let (name, role) = (format!("{}.input_scale", weight.module), Role::Input);
    match (target, eight) {
        (Target::ModelOpt, Eight::Tensor) => Some(Part { name, dtype: Dtype::F32, shape: vec![], role }),
        (Target::CompressedTensors, _) => {
            own.map(|own| Part { name, dtype: own.info.dtype, shape: own.info.shape.clone(), role })
        }
        _ => None,
    }
}
