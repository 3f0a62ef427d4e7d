//! What `config.json` says about the size of a model, by whatever name its family has for it.

use serde_json::Value;

/// Where models of several parts describe the one that writes text.
const TEXT: [&str; 5] =
    ["/text_config", "/llm_config", "/language_config", "/thinker_config/text_config", "/thinker_config"];

/// What a server accepts as the value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A whole number of at least this.
    Whole(u64),
    /// The same, or one for each layer; or null, which stands for a default.
    Each(u64),
    /// A number greater than zero, or null.
    Positive,
    /// True, false or null.
    Flag,
    /// A text or null.
    Text,
    /// The name of a type of floats, or null.
    Dtype,
    /// An object or null.
    Object,
}

/// Keys whose values a server calculates with. Other keys may have any value.
const FORMS: [(&[&str], Form); 9] = [
    (&LAYERS, Form::Whole(1)),
    (&["hidden_size", "n_embd", "d_model", "vocab_size", "padded_vocab_size"], Form::Whole(1)),
    (&["num_attention_heads", "num_key_value_heads", "head_dim"], Form::Each(0)),
    (&["max_position_embeddings"], Form::Each(1)),
    (&["intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "num_kv_shared_layers"], Form::Each(0)),
    (&["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta"], Form::Positive),
    (&["tie_word_embeddings", "is_encoder_decoder", "attention_bias", "mlp_bias"], Form::Flag),
    (&["model_type", "hidden_act"], Form::Text),
    (&["dtype", "torch_dtype"], Form::Dtype),
];

const DTYPES: [&str; 7] = ["bfloat16", "float16", "float32", "float64", "half", "float", "auto"];
const LAYERS: [&str; 4] = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const EXPERTS: [&str; 6] =
    ["num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts", "n_experts"];

/// Keys that give the kind of each layer.
const KINDS: [&str; 4] = ["layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list"];

impl Form {
    fn fits(self, value: &Value) -> bool {
        let whole = |value: &Value, least: u64| value.as_u64().is_some_and(|number| number >= least);
        match (self, value) {
            (Form::Whole(least), _) => whole(value, least),
            (_, Value::Null) => true,
            (Form::Each(least), Value::Array(each)) => {
                !each.is_empty() && each.iter().all(|value| value.is_null() || whole(value, least))
            }
            (Form::Each(least), _) => whole(value, least),
            (Form::Positive, _) => value.as_f64().is_some_and(|number| number > 0.0),
            (Form::Flag, _) => value.is_boolean(),
            (Form::Text, _) => value.is_string(),
            (Form::Dtype, _) => {
                let name = value.as_str().map(|name| name.strip_prefix("torch.").unwrap_or(name));
                name.is_some_and(|name| DTYPES.contains(&name))
            }
            (Form::Object, _) => value.is_object(),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Form::Whole(0) | Form::Each(0) => "a whole number",
            Form::Whole(_) | Form::Each(_) => "a whole number greater than 0",
            Form::Positive => "a number greater than 0",
            Form::Flag => "true or false",
            Form::Text => "a text",
            Form::Dtype => "bfloat16, float16 or float32",
            Form::Object => "an object",
        }
    }
}

/// A value that a server does not accept at its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mistyped<'c> {
    pub key: &'static str,
    pub value: &'c Value,
    pub expected: &'static str,
}

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

    /// Values that a server does not accept at their keys. Null means absent, except where
    /// a model has no size without it.
    pub fn mistyped(&self) -> Vec<Mistyped<'c>> {
        let forms = FORMS.into_iter().chain([(&EXPERTS[..], Form::Each(0)), (&["text_config"], Form::Object)]);
        let mut found: Vec<Mistyped<'c>> = Vec::new();
        for (key, form) in forms.flat_map(|(keys, form)| keys.iter().map(move |key| (*key, form))) {
            for value in [self.text, self.config].into_iter().flatten().filter_map(|part| part.get(key)) {
                // A part may leave to another what it does not say itself.
                let said = value.is_null() && self.get(&[key]).is_some();
                if !form.fits(value) && !said && found.iter().all(|other| other.key != key) {
                    found.push(Mistyped { key, value, expected: form.words() });
                }
            }
        }
        found
    }

    /// Whether some key says how many layers there are, rightly or wrongly.
    pub fn names_layers(&self) -> bool {
        let parts = [self.text, self.config];
        parts.into_iter().flatten().any(|part| LAYERS.iter().any(|key| part.get(*key).is_some()))
    }

    /// Whether some key says how many experts there are.
    pub fn names_experts(&self) -> bool {
        self.get(&EXPERTS).is_some()
    }

    /// The text at a key.
    pub fn text(&self, key: &str) -> Option<&'c str> {
        self.get(&[key])?.as_str()
    }

    /// The architecture, which is also the name of a server's code for it.
    pub fn architecture(&self) -> Option<&'c str> {
        self.config?.pointer("/architectures/0")?.as_str()
    }

    /// Layers, without those that predict further tokens.
    pub fn layers(&self) -> Option<u64> {
        // A layer of LongCat's has two attentions, and transformers counts these in `num_hidden_layers`.
        let twice = self.text("model_type").is_some_and(|name| name.starts_with("longcat"));
        let own = self.number(&["num_layers"]).filter(|_| twice);
        own.or_else(|| self.number(&LAYERS))
    }

    /// Whether layers after the last one predict further tokens.
    pub fn predicts(&self) -> bool {
        let parts = [self.text, self.config].into_iter().flatten().filter_map(Value::as_object);
        let named = |key: &String| ["nextn", "mtp", "num_predict"].iter().any(|word| key.contains(word));
        parts.flatten().any(|(key, value)| named(key) && value.as_u64() != Some(0) && !value.is_null())
    }

    /// Experts that a router chooses from.
    pub fn experts(&self) -> Option<u64> {
        self.number(&EXPERTS).filter(|experts| *experts > 1)
    }

    /// Columns of the embedding. Some families have a smaller one and a projection after it.
    pub fn embedded(&self) -> Option<u64> {
        let own = self.get(&["embedding_size", "word_embed_proj_dim", "embedding_hidden_size"]);
        self.hidden().filter(|_| own.is_none())
    }

    /// Rows of the embedding.
    pub fn vocabulary(&self) -> Option<u64> {
        self.number(&["padded_vocab_size", "vocab_size"])
    }

    /// The hidden size: that of what goes from layer to layer.
    pub fn hidden(&self) -> Option<u64> {
        self.number(&["hidden_size", "n_embd", "d_model"])
    }

    /// The flag at a key.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(&[key])?.as_bool()
    }

    /// A number that is the same for every layer.
    pub fn constant(&self, key: &str) -> Option<u64> {
        self.get(&[key])?.as_u64()
    }

    /// Whether a list of layers names this one.
    pub fn lists(&self, key: &str, layer: usize) -> bool {
        let list = self.get(&[key]).and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|listed| listed.as_u64() == Some(layer as u64)))
    }

    /// Every size that a feed-forward layer may have; none where one differs from layer to layer.
    pub fn feed_forward(&self) -> Vec<u64> {
        let parts = [self.text, self.config].into_iter().flatten().filter_map(Value::as_object);
        let named = |key: &String| key.contains("intermediate") || key.contains("ffn") || key.contains("ff_");
        let size = |value: &&Value| value.is_u64() || value.is_array();
        let sizes = parts.flatten().filter(|(key, _)| named(key)).map(|(_, value)| value).filter(size);
        let numbers: Option<Vec<u64>> = sizes.map(Value::as_u64).collect();
        numbers.filter(|_| self.constant("intermediate_size").is_some()).unwrap_or_default()
    }

    /// Whether the configuration has a key with this word in it.
    pub fn mentions(&self, word: &str) -> bool {
        let parts = [self.text, self.config].into_iter().flatten().filter_map(Value::as_object);
        parts.flatten().any(|(key, value)| key.contains(word) && !value.is_null())
    }

    /// Whether it says something layer by layer, apart from what kind of layer each is: then sizes
    /// may differ.
    pub fn varies(&self) -> bool {
        let model = self.text.or(self.config).and_then(Value::as_object);
        model.is_some_and(|model| model.iter().any(|(key, value)| !is_the_same_for_all(key) && has_list(value)))
    }

    /// Whether the output head is the embedding.
    pub fn tied(&self) -> Option<bool> {
        self.get(&["tie_word_embeddings"])?.as_bool()
    }

    /// The kind of a layer, where the configuration gives the kind of each.
    pub fn kind(&self, layer: usize) -> Option<String> {
        let kinds = self.get(&KINDS)?;
        match kinds {
            Value::String(letters) => letters.get(layer..layer.checked_add(1)?).map(String::from),
            _ => kinds.get(layer).map(Value::to_string),
        }
    }

    /// Whether layers may lack parts that others have: searched architectures leave them out, and
    /// layers that take keys and values from another layer need no projections to them.
    pub fn is_irregular(&self) -> bool {
        self.get(&["block_configs"]).is_some() || self.number(&["num_kv_shared_layers"]).is_some_and(|n| n > 0)
    }
}

/// Keys of lists that are not about layers.
fn is_the_same_for_all(key: &str) -> bool {
    let words = ["rope", "token", "quantization_config", "vision", "audio", "architectures", "auto_map", "label"];
    KINDS.contains(&key) || words.iter().any(|word| key.contains(word))
}

fn has_list(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.len() > 1,
        Value::Object(object) => object.values().any(has_list),
        _ => false,
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
        let mut twice = json!({ "model_type": "longcat_flash", "num_hidden_layers": 4, "num_layers": 2 });
        assert_eq!(Outline::new(Some(&twice)).layers(), Some(2));
        twice["num_layers"] = Value::Null;
        assert_eq!(Outline::new(Some(&twice)).layers(), Some(4));
        assert_eq!(Outline::new(None).layers(), None);
        assert_eq!(Outline::new(Some(&json!([1]))).layers(), None);
    }
}
