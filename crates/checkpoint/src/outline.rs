//! What `config.json` says about the size of a model, by whatever name its family has for it.

use serde_json::Value;

/// Where models of several parts describe the one that writes text.
const TEXT: [&str; 5] =
    ["/text_config", "/llm_config", "/language_config", "/thinker_config/text_config", "/thinker_config"];

/// A model in numbers; what its configuration does not say is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outline<'c> {
    config: Option<&'c Value>,
    text: Option<&'c Value>,
}

impl<'c> Outline<'c> {
    pub fn new(config: Option<&'c Value>) -> Self {
        let text = TEXT.iter().find_map(|path| config?.pointer(path)).filter(|text| text.is_object());
        Outline { config, text }
    }

    /// The value of the first of these keys that is there.
    fn get(&self, keys: &[&str]) -> Option<&'c Value> {
        let parts = [self.text, self.config].into_iter().flatten();
        parts.flat_map(|part| keys.iter().filter_map(|key| part.get(*key))).find(|value| !value.is_null())
    }

    fn number(&self, keys: &[&str]) -> Option<u64> {
        let value = self.get(keys)?;
        // Hunyuan's configuration has a number for each layer.
        value.as_u64().or_else(|| value.get(0)?.as_u64())
    }

    /// Layers, without those that predict further tokens.
    pub fn layers(&self) -> Option<u64> {
        self.number(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"])
    }

    /// Experts that a router chooses from.
    pub fn experts(&self) -> Option<u64> {
        let keys = [
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_routed_experts",
            "moe_num_experts",
            "n_experts",
        ];
        self.number(&keys).filter(|experts| *experts > 1)
    }

    /// Columns of the embedding. Some families have a smaller one and a projection behind it.
    pub fn embedded(&self) -> Option<u64> {
        let own = self.get(&["embedding_size", "word_embed_proj_dim", "embedding_hidden_size"]);
        self.number(&["hidden_size", "n_embd", "d_model"]).filter(|_| own.is_none())
    }

    /// Rows of the embedding.
    pub fn vocabulary(&self) -> Option<u64> {
        self.number(&["padded_vocab_size", "vocab_size"])
    }

    /// Whether the output head is the embedding.
    pub fn tied(&self) -> Option<bool> {
        self.get(&["tie_word_embeddings"])?.as_bool()
    }

    /// What kind of layer a layer is, where the configuration says it of each.
    pub fn kind(&self, layer: usize) -> Option<String> {
        let kinds = self.get(&["layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list"])?;
        match kinds {
            Value::String(letters) => letters.get(layer..layer.checked_add(1)?).map(String::from),
            _ => kinds.get(layer).map(Value::to_string),
        }
    }

    /// Whether layers may lack parts that others have: searched architectures leave them out, and layers that take keys and
    /// values from another layer need no projections to them.
    pub fn is_irregular(&self) -> bool {
        self.get(&["block_configs"]).is_some() || self.number(&["num_kv_shared_layers"]).is_some_and(|n| n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_part_that_writes_text_comes_first() {
        let config = json!({ "vocab_size": 7, "num_hidden_layers": 3, "tie_word_embeddings": true,
            "text_config": { "num_hidden_layers": 5, "num_experts": [4, 4], "layer_types": ["a", "b"] } });
        let outline = Outline::new(Some(&config));
        assert_eq!((outline.layers(), outline.experts(), outline.vocabulary()), (Some(5), Some(4), Some(7)));
        assert_eq!((outline.tied(), outline.embedded()), (Some(true), None));
        assert_ne!(outline.kind(0), outline.kind(1));
        assert_eq!(outline.kind(2), None);
        assert_eq!(Outline::new(None).layers(), None);
        assert_eq!(Outline::new(Some(&json!([1]))).layers(), None);
    }
}
