//! A model from the `config.json` that comes with a checkpoint.

use super::model::{Model, Module};
use super::path::ModulePath;
use crate::{Error, Result};
use nvfp4_files::container::Checked;
use serde::Deserialize;
use std::path::Path;

/// The keys of a decoder's configuration that decide which layers there are.
#[derive(Deserialize)]
struct Config {
    num_hidden_layers: Option<usize>,
    num_experts: Option<u32>,
    num_local_experts: Option<u32>,
    n_routed_experts: Option<u32>,
    /// Experts beside those, which see every token; they are computed as one layer.
    n_shared_experts: Option<u32>,
    /// Qwen's name for it.
    shared_expert_intermediate_size: Option<u64>,
    /// Queries through a narrow layer, as in DeepSeek's latent attention.
    q_lora_rank: Option<u64>,
    /// The same for keys and values.
    kv_lora_rank: Option<u64>,
    /// Every n-th layer has experts.
    decoder_sparse_step: Option<usize>,
    /// DeepSeek's name for it.
    moe_layer_freq: Option<Frequency>,
    /// Layers before this one have no experts.
    first_k_dense_replace: Option<usize>,
    /// Layers without experts.
    mlp_only_layers: Option<Vec<usize>>,
    /// A multimodal model keeps the keys of its language model here.
    text_config: Option<Box<Config>>,
}

/// Which layers have something.
#[derive(Deserialize)]
#[serde(untagged)]
enum Frequency {
    /// Every n-th layer, beginning with the first.
    Every(usize),
    /// One entry per layer, 0 or 1.
    Each(Vec<u8>),
}

impl Frequency {
    fn has(&self, layer: usize) -> bool {
        match self {
            Frequency::Every(layers) => layer.is_multiple_of((*layers).max(1)),
            Frequency::Each(layers) => layers.get(layer).is_some_and(|&has| has != 0),
        }
    }
}

/// The largest `config.json` that is read.
const MAX_FILE: u64 = 64 << 20;

impl Model {
    /// The linear layers and the attention of a decoder, under the names that Llama, Qwen, Mistral,
    /// DeepSeek and their relatives have. Experts are grouped layers, `mlp.experts.gate_up_proj`
    /// and `mlp.experts.down_proj`; attention stands at `self_attn` itself. Embeddings, norms,
    /// routers and the head are not among them: they stay in high precision.
    ///
    /// ```
    /// use nvfp4_recipe::Model;
    ///
    /// let model = Model::from_config(r#"{"num_hidden_layers": 2, "num_experts": 8}"#)?;
    /// assert_eq!(model.modules()[0].path().as_str(), "model.layers.0.self_attn.q_proj");
    /// # Ok::<(), nvfp4_recipe::Error>(())
    /// ```
    pub fn from_config(json: &str) -> Result<Self> {
        Model::read_config(json).map_err(|reason| Error::Setting(format!("config.json: {reason}")))
    }

    /// The same from a file.
    pub fn from_config_file(path: &Path) -> Result<Self> {
        let text = nvfp4_files::regular::read_text(path, MAX_FILE)?;
        Model::read_config(&text).map_err(|reason| nvfp4_files::Error::content(path, reason).into())
    }

    fn read_config(json: &str) -> Checked<Self> {
        let config: Config = serde_json::from_str(json).map_err(|error| error.to_string())?;
        let config = match (config.num_hidden_layers, config.text_config) {
            (None, Some(text)) => *text,
            (_, text) => Config { text_config: text, ..config },
        };
        let layers = config.num_hidden_layers.filter(|&layers| layers <= MAX_LAYERS);
        let layers = layers.ok_or_else(|| format!("expected `num_hidden_layers`, a number of at most {MAX_LAYERS}"))?;
        let experts = config.experts();
        if layers as u64 * u64::from(experts) > MAX_EXPERTS {
            return Err(format!("expected at most {MAX_EXPERTS} experts in all, got {layers} layers of {experts}"));
        }
        let mut model = Model::new();
        for layer in 0..layers {
            let path = ModulePath::from(format!("model.layers.{layer}"));
            let attention = path.child("self_attn");
            for name in config.projections() {
                model.add(Module::linear(attention.child(name)));
            }
            model.add(Module::attention(&attention)).add(Module::linear(attention.child("o_proj")));
            let mlp = path.child("mlp");
            match config.sparse(layer) {
                true => {
                    for name in ["gate_up_proj", "down_proj"] {
                        model.add(Module::grouped_linear(mlp.child("experts").child(name), experts));
                    }
                    if let Some(name) = config.shared_experts() {
                        gated(&mut model, &mlp.child(name));
                    }
                }
                false => gated(&mut model, &mlp),
            }
        }
        Ok(model)
    }
}

/// Far beyond any model; a file with more is not what it claims.
const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: u64 = 1 << 16;

/// The three linear layers of a gated MLP.
fn gated(model: &mut Model, path: &ModulePath) {
    for name in ["gate_proj", "up_proj", "down_proj"] {
        model.add(Module::linear(path.child(name)));
    }
}

impl Config {
    fn experts(&self) -> u32 {
        self.num_experts.or(self.num_local_experts).or(self.n_routed_experts).unwrap_or(0)
    }

    fn shared_experts(&self) -> Option<&'static str> {
        let deepseek = self.n_shared_experts.filter(|&n| n > 0).map(|_| "shared_experts");
        let qwen = self.shared_expert_intermediate_size.filter(|&n| n > 0).map(|_| "shared_expert");
        deepseek.or(qwen)
    }

    /// The linear layers before attention.
    fn projections(&self) -> &'static [&'static str] {
        match (self.q_lora_rank, self.kv_lora_rank) {
            (_, None) => &["q_proj", "k_proj", "v_proj"],
            (None, Some(_)) => &["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
            (Some(_), Some(_)) => &["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
        }
    }

    fn sparse(&self, layer: usize) -> bool {
        let every = self.decoder_sparse_step.unwrap_or(1).max(1);
        self.experts() > 0
            && !self.mlp_only_layers.iter().flatten().any(|&dense| dense == layer)
            && layer >= self.first_k_dense_replace.unwrap_or(0)
            && self.moe_layer_freq.as_ref().is_none_or(|frequency| frequency.has(layer))
            && (layer + 1).is_multiple_of(every)
    }
}
