//! A model of each family that is written as GGUF.

use super::{Tensors, folder, random};
use safetensors::Dtype;
use serde_json::{Value as Json, json};
use std::path::Path;

pub const QWEN: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// A byte-level BPE of 60 tokens for a vocabulary of 64.
pub fn tokenizer() -> Json {
    let parts = ["t", "1", "2"].into_iter().map(String::from);
    let texts = (0..56).map(|i| format!("t{i}")).chain(parts).enumerate();
    let vocab: serde_json::Map<String, Json> = texts.map(|(i, text)| (text, json!(i))).collect();
    json!({
        "added_tokens": [{ "id": 59, "content": "<|end|>", "special": true }],
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": QWEN }, "behavior": "Isolated" },
            { "type": "ByteLevel", "use_regex": false },
        ]},
        "model": { "type": "BPE", "vocab": vocab, "merges": [["t", "1"], "t 2"] },
    })
}

/// A model of two layers, hidden size 64, 4 heads of 16 of which 2 for keys, feed-forward size 128.
pub fn source(path: &Path, architecture: &str, experts: usize) {
    let mut tensors = Tensors::new();
    let mut add = |name: String, shape: &[usize]| {
        let seed = tensors.len() as u64 + 1;
        tensors.insert(name, random(Dtype::BF16, shape, seed));
    };
    for l in 0..2 {
        let layer = |name: &str| format!("model.layers.{l}.{name}.weight");
        add(layer("self_attn.q_proj"), &[64, 64]);
        add(layer("self_attn.k_proj"), &[32, 64]);
        add(layer("self_attn.v_proj"), &[32, 64]);
        add(layer("self_attn.o_proj"), &[64, 64]);
        add(layer("input_layernorm"), &[64]);
        add(layer("post_attention_layernorm"), &[64]);
        if architecture.starts_with("Qwen3") {
            add(layer("self_attn.q_norm"), &[16]);
            add(layer("self_attn.k_norm"), &[16]);
        }
        if architecture.starts_with("Qwen2") {
            for (name, len) in [("q", 64), ("k", 32), ("v", 32)] {
                add(format!("model.layers.{l}.self_attn.{name}_proj.bias"), &[len]);
            }
        }
        let mlps: Vec<String> = match experts {
            0 => vec!["mlp".to_string()],
            n => (0..n).map(|e| format!("mlp.experts.{e}")).collect(),
        };
        for mlp in mlps {
            add(layer(&format!("{mlp}.gate_proj")), &[128, 64]);
            add(layer(&format!("{mlp}.up_proj")), &[128, 64]);
            add(layer(&format!("{mlp}.down_proj")), &[64, 128]);
        }
        if experts > 0 {
            add(layer("mlp.gate"), &[experts, 64]);
        }
    }
    add("model.embed_tokens.weight".to_string(), &[64, 64]);
    add("model.norm.weight".to_string(), &[64]);
    add("lm_head.weight".to_string(), &[64, 64]);
    let config = json!({
        "architectures": [architecture], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": experts.max(1),
        "num_experts_per_tok": 2, "norm_topk_prob": true, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "vocab_size": 64,
        "rope_theta": 500000.0, "eos_token_id": 59,
    });
    folder(path, &[tensors], &config);
    std::fs::write(path.join("tokenizer.json"), tokenizer().to_string()).unwrap();
}
