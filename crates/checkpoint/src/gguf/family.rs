//! The models that are written as GGUF: what their tensors are called there, and what their configuration becomes.

use super::container::Value;
use super::object::{Object, shown};
use super::rope::Rope;
use super::sizes::{self, FeedForward, Has, Sizes};
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

/// The end of an error about a setting.
const UNLIKE: &str = "llama.cpp's code for these models does not do: the file would compute something else";

/// Where a tensor goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// What GGUF calls it, with `.weight` or `.bias`.
    pub name: String,
    /// Which of the matrices behind each other it is, for experts.
    pub expert: Option<usize>,
    /// Rows of an attention head whose halves are interleaved.
    pub head: Option<usize>,
}

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

    /// llama.cpp's name for it.
    pub fn name(self) -> &'static str {
        FAMILIES.iter().find(|(family, ..)| *family == self).expect("every family is in the table").2
    }

    /// The family that a file names.
    pub fn named(name: &str) -> Option<Self> {
        FAMILIES.iter().find(|(.., own)| *own == name).map(|(family, ..)| *family)
    }

    /// Refuses what `config.json` asks for and llama.cpp's code for these models does not do.
    pub fn check(config: &Object<'_>) -> Result<()> {
        let refuse = |key: &str, value: &str| Err(config.wrong(format!("'{key}' is {value}, which {UNLIKE}")));
        match config.text("hidden_act")? {
            None | Some("silu" | "swish") => {}
            Some(other) => return refuse("hidden_act", &format!("'{other}'")),
        }
        for layer in config.list("layer_types")?.unwrap_or_default() {
            if layer != "full_attention" {
                return refuse("layer_types", &shown(layer));
            }
        }
        let layers = config.need("num_hidden_layers")?;
        let whole = config.size("max_window_layers")?.is_some_and(|whole| whole >= layers);
        if config.flag("use_sliding_window")? == Some(true) && !whole {
            return refuse("use_sliding_window", "true");
        }
        if config.size("decoder_sparse_step")?.is_some_and(|step| step != 1) {
            return refuse("decoder_sparse_step", "not 1");
        }
        match config.list("mlp_only_layers")? {
            None | Some([]) => Ok(()),
            Some(_) => refuse("mlp_only_layers", "not empty"),
        }
    }

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
        // llama.cpp rotates neighbours where transformers rotates the halves of a head; only Llama's code in it does.
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

    /// The parameters of a model, as llama.cpp's keys.
    pub(super) fn parameters(self, config: &Object<'_>, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
        let arch = self.name();
        let mut entries = Vec::new();
        let mut number = |key: &str, of: u64| -> Result<()> {
            let of = u32::try_from(of).map_err(|_| config.wrong(format!("{of} is too large for '{key}'")))?;
            entries.push((format!("{arch}.{key}"), Value::U32(of)));
            Ok(())
        };
        number("block_count", sizes.layers)?;
        number("context_length", config.need("max_position_embeddings")?)?;
        number("embedding_length", sizes.hidden)?;
        number("feed_forward_length", sizes.feed_forward)?;
        number("attention.head_count", sizes.heads)?;
        number("attention.head_count_kv", sizes.kv_heads)?;
        number("attention.key_length", sizes.head_dim)?;
        number("attention.value_length", sizes.head_dim)?;
        number("rope.dimension_count", sizes.head_dim)?;
        number("vocab_size", sizes.vocabulary)?;
        if let Some(experts) = sizes.experts {
            number("expert_count", experts.count)?;
            number("expert_used_count", experts.used)?;
            number("expert_feed_forward_length", experts.feed_forward)?;
        }
        let epsilon = config.positive("rms_norm_eps")?.ok_or_else(|| config.missing("rms_norm_eps"))?;
        entries.push((format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(epsilon as f32)));
        let rope = Rope::of(config, self)?.keys();
        entries.extend(rope.into_iter().map(|(key, value)| (format!("{arch}.{key}"), value)));
        Ok(entries)
    }
}

/// What the layers of an architecture always have, as a checkpoint calls it, with 0 for the number of an expert; `None` for
/// an architecture that is not known here.
pub(crate) fn layer_parts(architecture: &str, behind: FeedForward) -> Option<Vec<String>> {
    let family = Family::of(Some(architecture)).ok()?;
    Some(sizes::layer(family, behind).map(|(part, last)| Family::source(None, part, last)).collect())
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn other_architectures_are_refused_by_name() {
        let error = Family::of(Some("GptOssForCausalLM")).unwrap_err().to_string();
        assert!(error.starts_with("GptOssForCausalLM is not written as GGUF, only LlamaForCausalLM, "), "{error}");
    }
}
