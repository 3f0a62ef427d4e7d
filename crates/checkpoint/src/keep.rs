//! Which weights are not quantized by default, by their names and by what `config.json` says about
//! the model.

use super::outline::Outline;
use std::fmt;

/// Why a weight is not quantized by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Head,
    Embedding,
    Router,
    Perception,
    Prediction,
    Indexer,
    StateSpace,
    ByHeads,
    Norm,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Head => "output head",
            Part::Embedding => "embedding",
            Part::Router => "router",
            Part::Perception => "vision or audio",
            Part::Prediction => "multi-token prediction",
            Part::Indexer => "indexer of sparse attention",
            Part::StateSpace => "state-space layer",
            Part::ByHeads => "sorted by heads when vLLM loads it, which a tensor scale is not",
            Part::Norm => "norm",
        })
    }
}

/// Parts of a name that only heads have, and last names that heads have outside of layers (inside,
/// `output` may be the projection of an attention, and Molmo's `ff_out` that of a feed-forward
/// layer).
const HEADS: [&str; 5] = ["lm_head", "output_layer", "embed_out", "v_head", "shared_head"];
const OUTER_HEADS: [&str; 10] = [
    "predictions",
    "proj_out",
    "output",
    "head",
    "score",
    "classifier",
    "pooler",
    "ff_out",
    "qa_outputs",
    "codec_head",
];

/// Parts of a name that vision and audio have. A part that begins with `vision`, `visual`, `audio`
/// or `speech` is one too.
const PERCEPTION: [&str; 8] = [
    "multi_modal_projector",
    "mm_projector",
    "embed_vision",
    "embed_audio",
    "patch_merger",
    "vpm",
    "apm",
    "img_processor",
];
/// The same before any layer: `mlp1` and `connector` may be anything inside of one.
const OUTER_PERCEPTION: [&str; 7] =
    ["resampler", "mlp1", "connector", "aligner", "merger", "perceiver", "modality_projection"];

/// What is left alone in a model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Defaults {
    layers: Option<u64>,
    experts: Option<u64>,
    /// Whether vLLM sorts the rows of `query_key_value` by heads, and its scales as if they were rows.
    sorts: bool,
}

impl Defaults {
    pub fn new(outline: &Outline<'_>) -> Self {
        let sorts = outline.architecture().is_some_and(|name| name.starts_with("Bloom"));
        Defaults { layers: outline.layers(), experts: outline.experts(), sorts }
    }

    /// Why a weight with this many rows (outputs) is left alone.
    pub fn reason(&self, module: &str, rows: usize) -> Option<Part> {
        let parts: Vec<&str> = module.split('.').collect();
        let last = parts[parts.len() - 1];
        let has = |names: &[&str]| parts.iter().any(|part| names.contains(part));
        let contains = |names: &[&str]| names.iter().any(|name| module.contains(name));
        // What precedes the first number: the parts of the whole model.
        let number = parts.iter().position(|part| is_number(part));
        let outer = &parts[..number.unwrap_or(parts.len())];
        if is_perception(&parts, outer) || contains(&["vision_tower", "visual", "vision_model"]) {
            return Some(Part::Perception);
        }
        if self.is_prediction(&parts) {
            return Some(Part::Prediction);
        }
        let outer_head = number.is_none() && has(&OUTER_HEADS) && !has(&["encoder", "router"]);
        if has(&HEADS) || outer_head {
            return Some(Part::Head);
        }
        let shared = number.is_none() && last == "shared";
        if contains(&["embed", "wte", "wpe", "relative_attention_bias"]) || shared {
            return Some(Part::Embedding);
        }
        if self.is_router(&parts, rows) {
            return Some(Part::Router);
        }
        if has(&["indexer"]) {
            return Some(Part::Indexer);
        }
        if contains(&["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mixer.conv1d"]) {
            return Some(Part::StateSpace);
        }
        if self.sorts && last == "query_key_value" {
            return Some(Part::ByHeads);
        }
        (last.contains("norm") || last.contains("LayerNorm")).then_some(Part::Norm)
    }

    /// A projection to one number for each expert.
    fn is_router(&self, parts: &[&str], rows: usize) -> bool {
        let last = parts[parts.len() - 1];
        let parent = parts.len().checked_sub(2).map_or("", |i| parts[i]);
        let named = |part: &&str| part.contains("router") || part.contains("shared_expert_gate");
        if parts.iter().any(named) || parent == "block_sparse_moe" && ["gate", "coefficient"].contains(&last) {
            return true;
        }
        match last {
            "gate" if parts.iter().any(|p| p.ends_with("mlp") || p.ends_with("moe")) && parent != "experts" => true,
            // Elsewhere it may be the gate of a feed-forward layer; the number of experts tells.
            "gate" | "wg" | "coefficient" => match self.experts {
                Some(experts) => rows as u64 == experts,
                None => ["mixer", "ffn", "feed_forward", "gate"].contains(&parent),
            },
            _ => false,
        }
    }

    /// Layers after the last one that the configuration counts, and everything called `mtp`.
    fn is_prediction(&self, parts: &[&str]) -> bool {
        if parts.iter().any(|part| *part == "mtp" || part.starts_with("mtp_") || *part == "eh_proj") {
            return true;
        }
        let Some(at) = parts.iter().position(|part| *part == "layers") else { return false };
        // An encoder's layers have a number of their own.
        let own = parts[..at].iter().all(|part| ["model", "language_model", "transformer", "backbone"].contains(part));
        let layer = parts.get(at + 1).and_then(|n| n.parse::<u64>().ok());
        own && matches!((layer, self.layers), (Some(layer), Some(layers)) if layer >= layers)
    }
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())
}

fn is_perception(parts: &[&str], outer: &[&str]) -> bool {
    let begins = |part: &str| ["vision", "visual", "audio", "speech"].iter().any(|word| part.starts_with(word));
    parts.iter().any(|part| PERCEPTION.contains(part))
        || outer.iter().any(|p| OUTER_PERCEPTION.contains(p) || begins(p))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn reason(config: serde_json::Value, module: &str, rows: usize) -> Option<Part> {
        Defaults::new(&Outline::new(Some(&config))).reason(module, rows)
    }

    #[test]
    fn each_family_has_its_names() {
        let cases = [
            ("lm_head", Some(Part::Head)),
            ("output", Some(Part::Head)),
            ("head", Some(Part::Head)),
            ("proj_out", Some(Part::Head)),
            ("score", Some(Part::Head)),
            ("v_head.summary", Some(Part::Head)),
            ("classifier.dense", Some(Part::Head)),
            ("bert.pooler.dense", Some(Part::Head)),
            ("cls.predictions.transform.dense", Some(Part::Head)),
            ("model.transformer.ff_out", Some(Part::Head)),
            ("model.transformer.blocks.3.ff_out", None),
            ("encoder.layer.0.attention.output.dense", None),
            ("embed_out", Some(Part::Head)),
            ("model.embed_tokens", Some(Part::Embedding)),
            ("model.tok_embeddings", Some(Part::Embedding)),
            ("shared", Some(Part::Embedding)),
            ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", Some(Part::Embedding)),
            ("encoder.block.0.layer.0.SelfAttention.q", None),
            ("model.layers.0.mlp.gate", Some(Part::Router)),
            ("model.layers.0.mlp.gate_proj", None),
            ("model.layers.0.mlp.experts.1.gate_proj", None),
            ("model.layers.0.mlp.shared_expert_gate", Some(Part::Router)),
            ("model.layers.0.block_sparse_moe.gate", Some(Part::Router)),
            ("model.layers.0.block_sparse_moe.coefficient", Some(Part::Router)),
            ("model.layers.0.mlp.gate.wg", Some(Part::Router)),
            ("backbone.layers.1.mixer.gate", Some(Part::Router)),
            ("layers.4.ffn.gate", Some(Part::Router)),
            ("model.layers.0.mlp.router.classifier", Some(Part::Router)),
            ("model.layers.0.eh_proj", Some(Part::Prediction)),
            ("model.layers.0.shared_head.head", Some(Part::Head)),
            ("mtp.layers.0.mlp.up_proj", Some(Part::Prediction)),
            ("model.mtp_layers.0.mlp.up_proj", Some(Part::Prediction)),
            ("model.layers.0.self_attn.indexer.wk", Some(Part::Indexer)),
            ("model.layers.0.self_attn.indexer.weights_proj", Some(Part::Indexer)),
            ("model.layers.0.linear_attn.in_proj_a", Some(Part::StateSpace)),
            ("model.layers.0.linear_attn.in_proj_qkv", None),
            ("model.layers.0.mlp.up_proj", None),
        ];
        for (module, expected) in cases {
            assert_eq!(reason(json!({}), module, 64), expected, "{module}");
        }
    }

    #[test]
    fn vision_and_audio_are_kept_by_every_name() {
        let modules = [
            "audio_tower.layers.0.fc1",
            "vpm.encoder.layers.0.mlp.fc1",
            "apm.layers.0.fc1",
            "resampler.kv_proj",
            "mlp1.1",
            "model.mm_projector.0",
            "model.connector.modality_projection.proj",
            "vision_encoder.transformer.layers.0.attention.wq",
            "model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq",
            "patch_merger.merging_layer",
            "visual.blocks.0.attn.qkv",
            "model.visual.merger.mlp.0",
            "vision_tower.encoder.layers.0.mlp.fc1",
            "model.multi_modal_projector.linear_1",
            "thinker.audio_tower.layers.0.fc1",
            "model.embed_vision.embedding_projection",
        ];
        for module in modules {
            assert_eq!(reason(json!({}), module, 64), Some(Part::Perception), "{module}");
        }
        assert_eq!(reason(json!({}), "model.layers.0.connector", 64), None);
    }

    #[test]
    fn the_configuration_tells_routers_and_layers_that_predict() {
        let config = || json!({ "num_hidden_layers": 2, "n_routed_experts": 8 });
        assert_eq!(reason(config(), "layers.0.ffn.gate", 8), Some(Part::Router));
        assert_eq!(reason(config(), "layers.0.ffn.gate", 96), None);
        assert_eq!(reason(config(), "model.layers.1.mlp.up_proj", 96), None);
        assert_eq!(reason(config(), "model.layers.2.mlp.up_proj", 96), Some(Part::Prediction));
        assert_eq!(reason(config(), "model.language_model.layers.2.mlp.up_proj", 96), Some(Part::Prediction));
        assert_eq!(reason(config(), "model.decoder.layers.2.fc1", 96), None);
    }
}
