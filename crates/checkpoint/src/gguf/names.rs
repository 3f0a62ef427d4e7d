//! What a tensor of a checkpoint is called in GGUF, and the other way round.

use super::family::Family;
use super::sizes::{self, FeedForward, Has, Sizes};
use crate::{Error, Result};

/// Parts of a layer, and what GGUF calls them.
const PARTS: [(&str, &str); 15] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
];

/// Where a tensor goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// What GGUF calls it, with `.weight` or `.bias`.
    pub name: String,
    /// Which of several matrices it is, for experts.
    pub expert: Option<usize>,
    /// Rows of an attention head whose halves are interleaved.
    pub head: Option<usize>,
}

impl Family {
    /// Where a tensor of the checkpoint goes; `None` for one that GGUF has no place for.
    pub(super) fn place(self, tensor: &str, sizes: &Sizes) -> Result<Option<Place>> {
        let Some((module, last)) = tensor.rsplit_once('.').filter(|(_, last)| ["weight", "bias"].contains(last)) else {
            return Ok(None);
        };
        let call = |part: &str| PARTS.iter().find(|(theirs, _)| *theirs == part).map(|(_, ours)| *ours);
        let known = |name: &str, last: &str| sizes.has(name, last) != Has::Never;
        let plain = |name: &str| Place { name: format!("{name}.{last}"), expert: None, head: None };
        let Some((layer, part)) = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
            let alone = module.starts_with("model.") || module == "lm_head";
            return Ok(call(module).filter(|name| alone && known(name, last)).map(plain));
        };
        let Ok(layer) = layer.parse::<u64>() else { return Ok(None) };
        if layer >= sizes.layers {
            return Err(Error::Refused(format!(
                "config.json: '{tensor}' is beyond the 'num_hidden_layers' that it gives"
            )));
        }
        if let Some((expert, projection)) = part.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.')) {
            let expert = expert.parse::<usize>().ok().filter(|_| last == "weight");
            let name = call(&format!("mlp.{projection}")).map(|name| format!("{name}_exps"));
            let name = name.filter(|name| known(name, last));
            return Ok(expert.zip(name).map(|(expert, name)| Place {
                name: format!("blk.{layer}.{name}.weight"),
                expert: Some(expert),
                head: None,
            }));
        }
        // llama.cpp's code for Llama rotates neighbours where transformers rotates the halves of a
        // head; its code for others does not.
        let rotated = self == Family::Llama && matches!(part, "self_attn.q_proj" | "self_attn.k_proj");
        let head = rotated.then_some(sizes.head_dim as usize);
        Ok(call(part)
            .filter(|name| !part.starts_with("model.") && part != "lm_head" && known(name, last))
            .map(|name| Place { head, ..plain(&format!("blk.{layer}.{name}")) }))
    }

    /// What the checkpoint calls a tensor of a file.
    pub(super) fn source(layer: Option<u64>, part: &str, last: &str) -> String {
        let (part, expert) = part.strip_suffix("_exps").map_or((part, false), |part| (part, true));
        let theirs = PARTS.iter().find(|(_, ours)| *ours == part).map_or(part, |(theirs, _)| *theirs);
        let theirs = if expert { theirs.replace("mlp.", "mlp.experts.0.") } else { theirs.to_string() };
        layer.map_or_else(|| format!("{theirs}.{last}"), |i| format!("model.layers.{i}.{theirs}.{last}"))
    }
}

/// What the layers of an architecture always have, as a checkpoint calls it, with 0 for the number
/// of an expert; `None` for an architecture that is not known here.
pub(crate) fn layer_parts(architecture: &str, feed_forward: FeedForward) -> Option<Vec<String>> {
    let family = Family::of(Some(architecture)).ok()?;
    Some(sizes::layer(family, feed_forward).map(|(part, last)| Family::source(None, part, last)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::object::Object;
    use super::*;
    use serde_json::json;

    fn sizes(family: Family) -> Sizes {
        let json = json!({ "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
            "vocab_size": 10, "num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 32 });
        Sizes::of(family, &Object::new("config.json", &json).unwrap()).unwrap()
    }

    #[test]
    fn tensors_have_llama_cpps_names() {
        let place = |family: Family, name: &str| {
            family.place(name, &sizes(family)).unwrap().map(|p| (p.name, p.expert, p.head))
        };
        let named = |name: &str| Some((name.to_string(), None, None));
        assert_eq!(place(Family::Llama, "model.embed_tokens.weight"), named("token_embd.weight"));
        assert_eq!(place(Family::Llama, "lm_head.weight"), named("output.weight"));
        assert_eq!(place(Family::Qwen3, "model.layers.1.self_attn.q_proj.weight"), named("blk.1.attn_q.weight"));
        assert_eq!(place(Family::Qwen2, "model.layers.0.self_attn.k_proj.bias"), named("blk.0.attn_k.bias"));
        let rotated = Some(("blk.1.attn_q.weight".to_string(), None, Some(16)));
        assert_eq!(place(Family::Llama, "model.layers.1.self_attn.q_proj.weight"), rotated);
        let expert = Some(("blk.0.ffn_up_exps.weight".to_string(), Some(7), None));
        assert_eq!(place(Family::Qwen3Moe, "model.layers.0.mlp.experts.7.up_proj.weight"), expert);
        for (family, stranger) in [
            (Family::Qwen3, "model.layers.0.mlp.router.weight"),
            (Family::Qwen3, "visual.merger.weight"),
            (Family::Qwen3, "model.layers.0.model.norm.weight"),
            (Family::Qwen3, "model.layers.0.lm_head.weight"),
            (Family::Qwen3, "model.layers.0.mlp.experts.7.up_proj.weight"),
            (Family::Qwen3, "model.layers.0.self_attn.o_proj.bias"),
            (Family::Llama, "model.layers.0.self_attn.q_norm.weight"),
            (Family::Llama, "model.layers.0.mlp.gate.weight"),
            (Family::Llama, "model.layers.0.input_layernorm.bias"),
            (Family::Llama, "lm_head.bias"),
            (Family::Qwen3Moe, "model.layers.0.mlp.up_proj.weight"),
        ] {
            assert_eq!(place(family, stranger), None, "{stranger}");
        }
        assert!(Family::Llama.place("model.layers.2.mlp.up_proj.weight", &sizes(Family::Llama)).is_err());
    }
}
