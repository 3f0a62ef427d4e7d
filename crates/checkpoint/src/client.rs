//! The programs that load checkpoints.

use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The program that will load a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Client {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    SgLang,
    /// TensorRT-LLM.
    TensorRtLlm,
    /// llama.cpp, by way of its `convert_hf_to_gguf.py`.
    LlamaCpp,
    /// transformers.
    Transformers,
    /// ComfyUI.
    ComfyUi,
}

impl FromStr for Client {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "vllm" => Ok(Client::Vllm),
            "sglang" => Ok(Client::SgLang),
            "tensorrt-llm" => Ok(Client::TensorRtLlm),
            "llama.cpp" => Ok(Client::LlamaCpp),
            "transformers" => Ok(Client::Transformers),
            "comfyui" => Ok(Client::ComfyUi),
            _ => Err(Error::Refused(format!(
                "expected vllm, sglang, tensorrt-llm, llama.cpp, transformers or comfyui, got '{text}'"
            ))),
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Client::Vllm => "vLLM",
            Client::SgLang => "SGLang",
            Client::TensorRtLlm => "TensorRT-LLM",
            Client::LlamaCpp => "llama.cpp",
            Client::Transformers => "transformers",
            Client::ComfyUi => "ComfyUI",
        })
    }
}
