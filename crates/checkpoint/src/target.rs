//! What is written: the format, and what it says beside its weights.

use super::folder::Kind;
use crate::{Error, Result};
use nvfp4::Precision;
use std::fmt;
use std::str::FromStr;

/// The format that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Target {
    /// NVIDIA ModelOpt's, which vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read.
    #[default]
    ModelOpt,
    /// compressed-tensors', which vLLM and transformers read.
    CompressedTensors,
    /// DeepSeek-V4's own, which vLLM reads: experts in NVFP4, the rest as DeepSeek published it.
    DeepSeekV4,
    /// One GGUF file, which llama.cpp reads, of the Llama and Qwen families.
    Gguf,
    /// One safetensors file, which ComfyUI reads.
    ComfyUi,
    /// Not quantized: every weight decoded to this type.
    Plain(Precision),
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "modelopt" => Ok(Target::ModelOpt),
            "compressed-tensors" => Ok(Target::CompressedTensors),
            "deepseek-v4" => Ok(Target::DeepSeekV4),
            "gguf" => Ok(Target::Gguf),
            "comfyui" => Ok(Target::ComfyUi),
            _ => {
                let known = "modelopt, compressed-tensors, deepseek-v4, gguf or comfyui";
                Err(Error::Refused(format!("expected {known}, got '{text}'")))
            }
        }
    }
}

impl Target {
    /// Whether it is a folder or a file.
    pub(super) fn kind(self) -> Kind {
        match self {
            Target::Gguf | Target::ComfyUi => Kind::File,
            Target::ModelOpt | Target::CompressedTensors | Target::DeepSeekV4 | Target::Plain(_) => Kind::Folder,
        }
    }

    /// How the name of a target that is a file ends.
    pub(super) fn extension(self) -> Option<&'static str> {
        match self {
            Target::Gguf => Some("gguf"),
            Target::ComfyUi => Some("safetensors"),
            Target::ModelOpt | Target::CompressedTensors | Target::DeepSeekV4 | Target::Plain(_) => None,
        }
    }

    /// The type of a weight that is decoded and not quantized again.
    pub(super) fn decoded(self) -> Precision {
        match self {
            Target::Plain(precision) => precision,
            _ => Precision::Bf16,
        }
    }

    /// A tensor scale as the target stores it.
    pub(super) fn stored(self, multiplier_or_divisor: Scale) -> f32 {
        match (self, multiplier_or_divisor) {
            (Target::CompressedTensors, Scale::Divisor(g)) => g,
            (Target::CompressedTensors, Scale::Multiplier(g)) => (1.0 / g).min(f32::MAX),
            (_, Scale::Multiplier(g)) => g,
            (_, Scale::Divisor(g)) => (1.0 / g).min(f32::MAX),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Target::ModelOpt => "modelopt",
            Target::CompressedTensors => "compressed-tensors",
            Target::DeepSeekV4 => "deepseek-v4",
            Target::Gguf => "gguf",
            Target::ComfyUi => "comfyui",
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
    /// A type in the source that is not passed on.
    Other,
    /// FP8, with the scales that the source has, and 1 for those that it lacks.
    Fp8,
    /// NVFP4, with the same scales.
    Nvfp4,
}

/// What a checkpoint says beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Extras {
    pub activations: Activations,
    pub kv: Kv,
}

/// A tensor scale with its meaning.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scale {
    Multiplier(f32),
    Divisor(f32),
}
