//! A model from the `config.json` that comes with a checkpoint.

use super::model::{Model, Module};
use super::path::ModulePath;
use crate::{Error, Result};
use serde::Deserialize;
use std::path::Path;

/// The keys of a decoder's configuration that decide which layers there are.
#[derive(Deserialize)]
struct Config {
    num_hidden_layers: Option<usize>,
    #[serde(alias = "num_local_experts", alias = "n_routed_experts")]
    num_experts: Option<u32>,
    /// Every how many layers one has experts.
    decoder_sparse_step: Option<usize>,
    /// Layers before this one have no experts.
    first_k_dense_replace: Option<usize>,
    /// Layers without experts.
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    /// A model for text and something else keeps the former's keys here.
    text_config: Option<Box<Config>>,
}

impl Model {
    /// The linear layers and the attention of a decoder, under the names that Llama, Qwen, Mistral and their relatives have in
    /// checkpoints. Experts are grouped layers, attention stands at `self_attn` itself. Embeddings, norms, routers and the head
    /// are not among them: they stay in high precision.
    ///
    /// ```
    /// use nvfp4::recipe::Model;
    ///
    /// let model = Model::from_config(r#"{"num_hidden_layers": 2, "num_experts": 8}"#)?;
    /// assert_eq!(model.modules()[0].path().as_str(), "model.layers.0.self_attn.q_proj");
    /// # Ok::<(), nvfp4::Error>(())
    /// ```
    pub fn from_config(json: &str) -> Result<Self> {
        let config: Config = serde_json::from_str(json).map_err(|e| Error::Spec(format!("config.json: {e}")))?;
        let config = match (config.num_hidden_layers, config.text_config) {
            (None, Some(text)) => *text,
            (_, text) => Config { text_config: text, ..config },
        };
        let layers = config.num_hidden_layers.filter(|&layers| layers <= MAX_LAYERS).ok_or_else(|| {
            Error::Spec(format!("config.json: expected `num_hidden_layers`, a number of at most {MAX_LAYERS}"))
        })?;
        let experts = config.num_experts.unwrap_or(0);
        if layers as u64 * u64::from(experts) > MAX_EXPERTS {
            let got = format!("{layers} layers of {experts}");
            return Err(Error::Spec(format!("config.json: expected at most {MAX_EXPERTS} experts in all, got {got}")));
        }
        let mut model = Model::new();
        for layer in 0..layers {
            let path = ModulePath::from(format!("model.layers.{layer}"));
            let attention = path.child("self_attn");
            for name in ["q_proj", "k_proj", "v_proj"] {
                model.add(Module::linear(attention.child(name)));
            }
            model.add(Module::attention(&attention)).add(Module::linear(attention.child("o_proj")));
            let mlp = path.child("mlp");
            match config.sparse(layer) {
                true => {
                    for name in ["gate_up_proj", "down_proj"] {
                        model.add(Module::grouped_linear(mlp.child("experts").child(name), experts));
                    }
                }
                false => {
                    for name in ["gate_proj", "up_proj", "down_proj"] {
                        model.add(Module::linear(mlp.child(name)));
                    }
                }
            }
        }
        Ok(model)
    }

    /// The same from a file.
    pub fn from_config_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path);
        Model::from_config(&text.map_err(|source| Error::Io { path: path.to_path_buf(), source })?)
    }
}

/// Far beyond any model; a file with more is not what it claims.
const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: u64 = 1 << 18;

impl Config {
    fn sparse(&self, layer: usize) -> bool {
        let every = self.decoder_sparse_step.unwrap_or(1).max(1);
        self.num_experts.unwrap_or(0) > 0
            && !self.mlp_only_layers.contains(&layer)
            && layer >= self.first_k_dense_replace.unwrap_or(0)
            && (layer + 1).is_multiple_of(every)
    }
}
