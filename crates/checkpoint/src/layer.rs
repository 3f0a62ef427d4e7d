//! What every layer of a model has, in the families whose parts are known.

use super::gguf::{FeedForward, layer_parts};
use super::outline::Outline;
use std::collections::BTreeSet;

/// Tensors that hold several parts in one.
const JOINED: [(&str, &[&str]); 4] = [
    ("self_attn.qkv_proj", &["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]),
    ("mlp.gate_up_proj", &["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    ("mlp.experts.gate_up_proj", &["mlp.experts.#.gate_proj.weight", "mlp.experts.#.up_proj.weight"]),
    ("mlp.experts.down_proj", &["mlp.experts.#.down_proj.weight"]),
];

/// What Mixtral calls the parts of its experts.
const MIXTRAL: [(&str, &str); 4] =
    [("mlp.", "block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")];

/// The parts of a family's layers: names of tensors after the layer's number, with `#` for the
/// number of an expert.
pub(super) struct Parts {
    dense: Vec<String>,
    experts: Vec<String>,
}

impl Parts {
    /// The parts of an architecture's layers; `None` where they are not known.
    pub fn of(architecture: &str) -> Option<Self> {
        let like = match architecture {
            "MistralForCausalLM" | "MixtralForCausalLM" => "LlamaForCausalLM",
            other => other,
        };
        let call = |part: String| {
            let part = part.replace(".experts.0.", ".experts.#.");
            let renamed = MIXTRAL.iter().filter(|_| architecture == "MixtralForCausalLM");
            renamed.fold(part, |part, (theirs, own)| part.replace(theirs, own))
        };
        let parts = |feed_forward| {
            let mut parts: Vec<String> = layer_parts(like, feed_forward)?.into_iter().map(call).collect();
            parts.sort();
            Some(parts)
        };
        Some(Parts { dense: parts(FeedForward::Dense)?, experts: parts(FeedForward::Experts)? })
    }

    /// Those that a layer lacks.
    pub fn missing(&self, feed_forward: FeedForward, kinds: &BTreeSet<String>) -> Vec<&str> {
        let begins = |kind: &String, joined: &str| {
            kind.strip_prefix(joined).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let joined = |part: &str| {
            let mut tensors = JOINED.iter().filter(|(_, parts)| parts.contains(&part));
            tensors.any(|(joined, _)| kinds.iter().any(|kind| begins(kind, joined)))
        };
        let parts = match feed_forward {
            FeedForward::Dense => &self.dense,
            FeedForward::Experts => &self.experts,
        };
        parts.iter().map(String::as_str).filter(|part| !kinds.contains(*part) && !joined(part)).collect()
    }

    /// Whether some layer of the family has it.
    pub fn has(&self, kind: &str) -> bool {
        self.dense.iter().chain(&self.experts).any(|part| part == kind)
    }
}

/// What a layer has after its attention, by the rule of transformers.
pub(super) fn feed_forward(architecture: &str, outline: &Outline<'_>, layer: usize) -> FeedForward {
    let step = outline.constant("decoder_sparse_step").unwrap_or(1).max(1);
    let dense = || {
        let skipped = outline.lists("mlp_only_layers", layer) || !(layer as u64 + 1).is_multiple_of(step);
        skipped || outline.constant("num_experts") == Some(0)
    };
    match architecture {
        "MixtralForCausalLM" => FeedForward::Experts,
        "Qwen3MoeForCausalLM" if !dense() => FeedForward::Experts,
        _ => FeedForward::Dense,
    }
}
