//! What the configuration of a model becomes in GGUF: its parameters, as llama.cpp's keys.

use super::container::Value;
use super::family::Family;
use super::object::{Object, shown};
use super::rope::Rope;
use super::sizes::Sizes;
use crate::Result;

/// The end of an error about a setting.
const UNLIKE: &str = "llama.cpp's code for these models does not support: the file would compute something else";

impl Family {
    /// Refuses what `config.json` asks for and llama.cpp's code for these models does not support.
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
