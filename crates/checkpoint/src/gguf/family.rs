//! The families of models that are written as GGUF.

use crate::{Error, Result};

/// A family of models that llama.cpp runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

/// Families with the architecture that `config.json` names and llama.cpp's name.
const FAMILIES: [(Family, &str, &str); 4] = [
    (Family::Llama, "LlamaForCausalLM", "llama"),
    (Family::Qwen2, "Qwen2ForCausalLM", "qwen2"),
    (Family::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    (Family::Qwen3Moe, "Qwen3MoeForCausalLM", "qwen3moe"),
];

impl Family {
    /// The family of an architecture.
    pub fn of(architecture: Option<&str>) -> Result<Self> {
        let found = FAMILIES.iter().find(|(_, name, _)| Some(*name) == architecture);
        found.map(|(family, ..)| *family).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|(_, name, _)| *name).collect();
            Error::Refused(format!(
                "{} is not written as GGUF, only {}; convert it to modelopt, which llama.cpp's own converter reads",
                architecture.unwrap_or("a checkpoint without an architecture in config.json"),
                known.join(", ")
            ))
        })
    }

    /// Whether llama.cpp has a product with this weight, by its name there or in the source, that it
    /// does not multiply by the tensor scale: the calls of `build_ffn` in its `qwen2.cpp` (August
    /// 2026) have none. Those in `llama.cpp`, `qwen3.cpp` and `qwen3moe.cpp` do.
    pub fn loses_scale(self, name: &str) -> bool {
        self == Family::Qwen2 && (name.contains(".mlp.") || name.contains(".ffn_"))
    }

    /// llama.cpp's name for it.
    pub fn name(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).expect("every family is in the table").2
    }

    /// The family that a file names.
    pub fn named(name: &str) -> Option<Self> {
        FAMILIES.iter().find(|(.., own)| *own == name).map(|(family, ..)| *family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_architectures_are_refused_by_name() {
        let error = Family::of(Some("GptOssForCausalLM")).unwrap_err().to_string();
        assert!(error.starts_with("GptOssForCausalLM is not written as GGUF, only LlamaForCausalLM, "), "{error}");
    }
}
