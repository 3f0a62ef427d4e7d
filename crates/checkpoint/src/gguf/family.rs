//! The models that are written as GGUF: what their tensors are called there, and what their configuration becomes.

use super::container::Value;
use crate::{Error, Result};
use serde_json::Value as Json;

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
const PARTS: [(&str, &str); 14] = [
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
];

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

    /// Where a tensor of the checkpoint goes; `None` for one that GGUF has no place for.
    pub(super) fn place(self, tensor: &str, config: &Config<'_>) -> Result<Option<Place>> {
        let Some((module, last)) = tensor.rsplit_once('.').filter(|(_, last)| ["weight", "bias"].contains(last)) else {
            return Ok(None);
        };
        let call = |part: &str| PARTS.iter().find(|(theirs, _)| *theirs == part).map(|(_, ours)| *ours);
        let plain = |name: &str| Place { name: format!("{name}.{last}"), expert: None, head: None };
        if module == "lm_head" {
            return Ok(Some(plain("output")));
        }
        let Some((layer, part)) = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
            return Ok(call(module).filter(|_| module.starts_with("model.")).map(plain));
        };
        let Ok(layer) = layer.parse::<u64>() else { return Ok(None) };
        if layer >= config.number("num_hidden_layers")? {
            return Err(config.wrong(format!("'{tensor}' is beyond the 'num_hidden_layers' that it gives")));
        }
        if let Some((expert, projection)) = part.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.')) {
            let expert = expert.parse::<usize>().ok().filter(|_| self == Family::Qwen3Moe && last == "weight");
            let name = call(&format!("mlp.{projection}"));
            return Ok(expert.zip(name).map(|(expert, name)| Place {
                name: format!("blk.{layer}.{name}_exps.weight"),
                expert: Some(expert),
                head: None,
            }));
        }
        // llama.cpp rotates neighbours where transformers rotates the halves of a head; only Llama's code in it does.
        let rotated = self == Family::Llama && matches!(part, "self_attn.q_proj" | "self_attn.k_proj");
        let head = if rotated { Some(config.head_dim()? as usize) } else { None };
        Ok(call(part)
            .filter(|_| !part.starts_with("model."))
            .map(|name| Place { head, ..plain(&format!("blk.{layer}.{name}")) }))
    }

    /// The parameters of a model, as llama.cpp's keys.
    pub(super) fn parameters(self, config: &Config<'_>) -> Result<Vec<(String, Value)>> {
        let arch = self.name();
        let mut entries = Vec::new();
        let mut number = |key: &str, of: u64| -> Result<()> {
            let of = u32::try_from(of).map_err(|_| config.wrong(format!("{of} is too large for '{key}'")))?;
            entries.push((format!("{arch}.{key}"), Value::U32(of)));
            Ok(())
        };
        number("block_count", config.number("num_hidden_layers")?)?;
        number("context_length", config.number("max_position_embeddings")?)?;
        number("embedding_length", config.number("hidden_size")?)?;
        number("feed_forward_length", config.number("intermediate_size")?)?;
        let heads = config.number("num_attention_heads")?;
        number("attention.head_count", heads)?;
        number("attention.head_count_kv", config.optional("num_key_value_heads")?.unwrap_or(heads))?;
        number("attention.key_length", config.head_dim()?)?;
        number("attention.value_length", config.head_dim()?)?;
        number("rope.dimension_count", config.head_dim()?)?;
        number("vocab_size", config.number("vocab_size")?)?;
        if self == Family::Qwen3Moe {
            number("expert_count", config.experts()?)?;
            number("expert_used_count", config.number("num_experts_per_tok")?)?;
            number("expert_feed_forward_length", config.number("moe_intermediate_size")?)?;
        }
        let mut float = |key: &str, of: f64| entries.push((format!("{arch}.{key}"), Value::F32(of as f32)));
        float("attention.layer_norm_rms_epsilon", config.float("rms_norm_eps")?);
        let rope = Rope::of(config)?;
        float("rope.freq_base", rope.base);
        match rope.scaling {
            Scaling::None | Scaling::Llama3 { .. } => {}
            Scaling::Linear { factor } => {
                float("rope.scaling.factor", factor);
                entries.push((format!("{arch}.rope.scaling.type"), Value::Text("linear".to_string())));
            }
            Scaling::Yarn { factor, original } => {
                float("rope.scaling.factor", factor);
                entries.push((format!("{arch}.rope.scaling.type"), Value::Text("yarn".to_string())));
                let original = Value::U32(original as u32);
                entries.push((format!("{arch}.rope.scaling.original_context_length"), original));
            }
        }
        Ok(entries)
    }
}

/// `config.json`, with errors that name it.
pub(super) struct Config<'a> {
    json: &'a Json,
}

impl<'a> Config<'a> {
    pub fn new(json: Option<&'a Json>) -> Result<Self> {
        let json =
            json.ok_or_else(|| Error::Refused("GGUF needs the model's config.json beside its weights".into()))?;
        Ok(Config { json })
    }

    pub fn wrong(&self, reason: String) -> Error {
        Error::Refused(format!("config.json: {reason}"))
    }

    fn present(&self, key: &str) -> Option<&'a Json> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    fn optional(&self, key: &str) -> Result<Option<u64>> {
        let whole = |v: &Json| v.as_u64().filter(|n| (1..=1 << 31).contains(n));
        let wrong = |v: &Json| self.wrong(format!("'{key}': expected a positive whole number, got {v}"));
        self.present(key).map(|v| whole(v).ok_or_else(|| wrong(v))).transpose()
    }

    pub fn number(&self, key: &str) -> Result<u64> {
        self.optional(key)?.ok_or_else(|| self.wrong(format!("'{key}' is missing, which GGUF needs")))
    }

    /// Number of experts: newer configurations call it local.
    pub fn experts(&self) -> Result<u64> {
        self.optional("num_local_experts")?.map_or_else(|| self.number("num_experts"), Ok)
    }

    fn float(&self, key: &str) -> Result<f64> {
        let value = self.present(key).and_then(Json::as_f64);
        value.ok_or_else(|| self.wrong(format!("'{key}' is missing or not a number, and GGUF needs it")))
    }

    pub fn head_dim(&self) -> Result<u64> {
        if let Some(own) = self.optional("head_dim")? {
            return Ok(own);
        }
        let (hidden, heads) = (self.number("hidden_size")?, self.number("num_attention_heads")?);
        match hidden.is_multiple_of(heads) {
            true => Ok(hidden / heads),
            false => Err(self.wrong(format!("{heads} heads do not divide a 'hidden_size' of {hidden}"))),
        }
    }
}

/// How positions are encoded.
pub(super) struct Rope {
    base: f64,
    scaling: Scaling,
}

enum Scaling {
    None,
    Linear { factor: f64 },
    Yarn { factor: f64, original: u64 },
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
}

impl Rope {
    /// From `rope_theta` and `rope_scaling`, or `rope_parameters`, which newer configurations have for both.
    pub fn of(config: &Config<'_>) -> Result<Self> {
        let own = config.present("rope_parameters").or(config.present("rope_scaling"));
        let number = |key: &str| own.and_then(|r| r.get(key)).and_then(Json::as_f64);
        let base = number("rope_theta").or(config.present("rope_theta").and_then(Json::as_f64)).unwrap_or(10_000.0);
        let kind = own.and_then(|r| r.get("rope_type").or(r.get("type"))).and_then(Json::as_str).unwrap_or("default");
        let need =
            |key: &str| number(key).ok_or_else(|| config.wrong(format!("no '{key}' for the rope type '{kind}'")));
        let scaling = match kind {
            "default" => Scaling::None,
            "linear" => Scaling::Linear { factor: need("factor")? },
            "yarn" => {
                Scaling::Yarn { factor: need("factor")?, original: need("original_max_position_embeddings")? as u64 }
            }
            "llama3" => Scaling::Llama3 {
                factor: need("factor")?,
                low: need("low_freq_factor")?,
                high: need("high_freq_factor")?,
                original: need("original_max_position_embeddings")?,
            },
            other => return Err(config.wrong(format!("the rope type '{other}' is not written as GGUF"))),
        };
        Ok(Rope { base, scaling })
    }

    /// What each frequency is divided by, where that is not one number: Llama 3's rule, which leaves short waves, divides
    /// long ones by the factor, and goes from one to the other between.
    pub fn divisors(&self, head_dim: u64) -> Option<Vec<f32>> {
        let Scaling::Llama3 { factor, low, high, original } = self.scaling else { return None };
        let divisor = |i: u64| {
            let wavelength = 2.0 * std::f64::consts::PI * self.base.powf(2.0 * i as f64 / head_dim as f64);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        Some((0..head_dim / 2).map(|i| divisor(i) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> Json {
        json!({ "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128, "intermediate_size": 96, "vocab_size": 10 })
    }

    #[test]
    fn tensors_have_llama_cpps_names() {
        let json = config();
        let config = Config::new(Some(&json)).unwrap();
        let place =
            |family: Family, name: &str| family.place(name, &config).unwrap().map(|p| (p.name, p.expert, p.head));
        let named = |name: &str| Some((name.to_string(), None, None));
        assert_eq!(place(Family::Llama, "model.embed_tokens.weight"), named("token_embd.weight"));
        assert_eq!(place(Family::Llama, "lm_head.weight"), named("output.weight"));
        assert_eq!(place(Family::Qwen3, "model.layers.1.self_attn.q_proj.weight"), named("blk.1.attn_q.weight"));
        assert_eq!(place(Family::Qwen2, "model.layers.0.self_attn.k_proj.bias"), named("blk.0.attn_k.bias"));
        let rotated = Some(("blk.1.attn_q.weight".to_string(), None, Some(16)));
        assert_eq!(place(Family::Llama, "model.layers.1.self_attn.q_proj.weight"), rotated);
        let expert = Some(("blk.0.ffn_up_exps.weight".to_string(), Some(7), None));
        assert_eq!(place(Family::Qwen3Moe, "model.layers.0.mlp.experts.7.up_proj.weight"), expert);
        for stranger in ["model.layers.0.mlp.router.weight", "visual.merger.weight", "model.layers.0.model.norm.weight"]
        {
            assert_eq!(place(Family::Qwen3, stranger), None, "{stranger}");
        }
        assert!(Family::Llama.place("model.layers.2.mlp.up_proj.weight", &config).is_err());
    }

    #[test]
    fn other_architectures_are_refused_by_name() {
        let error = Family::of(Some("GptOssForCausalLM")).unwrap_err().to_string();
        assert!(error.starts_with("GptOssForCausalLM is not written as GGUF, only LlamaForCausalLM, "), "{error}");
    }

    #[test]
    fn llama_3s_divisors_go_from_one_to_the_factor() {
        let mut json = config();
        json["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
        json["rope_theta"] = json!(500_000.0);
        let divisors = Rope::of(&Config::new(Some(&json)).unwrap()).unwrap().divisors(128).unwrap();
        assert_eq!((divisors.len(), divisors[0], divisors[63]), (64, 1.0, 8.0));
        assert!(divisors.is_sorted() && divisors.iter().any(|d| (1.5..7.5).contains(d)));
        json["rope_scaling"] = json!({ "rope_type": "longrope" });
        assert!(Rope::of(&Config::new(Some(&json)).unwrap()).is_err());
    }
}
