//! What `config.json` says about a decoder, family by family.

use crate::fields::Fields;
use crate::rope::Rope;
use crate::{Result, refused};
use serde_json::Value;

/// The families that are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen 2.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// Mixtral.
    Mixtral,
    /// Phi-3.
    Phi3,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, its text part.
    Gemma3,
    /// GPT-OSS.
    GptOss,
}

/// Their names in `config.json`, as `model_type`.
const FAMILIES: [(&str, Family); 11] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("qwen3_moe", Family::Qwen3Moe),
    ("mixtral", Family::Mixtral),
    ("phi3", Family::Phi3),
    ("gemma2", Family::Gemma2),
    ("gemma3_text", Family::Gemma3),
    ("gemma3", Family::Gemma3),
    ("gpt_oss", Family::GptOss),
];

/// What an MLP applies to its gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// GPT-OSS's: `(up + 1) · gate · sigmoid(1.702 · gate)`, both clamped.
    Clamped {
        /// The bound of both.
        limit: f32,
    },
}

/// How a router turns its logits into weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// A softmax over all experts, of which the largest are taken as they are.
    Softmax,
    /// The same, divided by their sum.
    Normalized,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a token goes to.
    pub chosen: usize,
    /// How they are weighted.
    pub routing: Routing,
    /// The width of one.
    pub width: usize,
}

/// What follows attention in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// A gated MLP of this width.
    Dense(usize),
    /// A choice of several.
    Experts(Experts),
}

/// Where norms stand in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the MLP.
    Before,
    /// Gemma's: before and after both.
    Around,
}

/// Settings of a decoder.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its family.
    pub family: Family,
    /// The width of the hidden state.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_dim: usize,
    /// Number of tokens that it knows.
    pub vocabulary: usize,
    /// What norms add to the mean square.
    pub epsilon: f32,
    /// What is added to a norm's weight: 1 in Gemma.
    pub norm_offset: f32,
    /// Where norms stand.
    pub norms: Norms,
    /// What embeddings are multiplied by.
    pub embedding_scale: f32,
    /// What scores are multiplied by.
    pub attention_scale: f32,
    /// The soft cap of scores.
    pub attention_cap: Option<f32>,
    /// The soft cap of logits.
    pub logit_cap: Option<f32>,
    /// The activation of MLPs.
    pub activation: Activation,
    /// The longest context.
    pub positions: usize,
    /// The window of each layer that has one.
    pub windows: Vec<Option<usize>>,
    /// Positions of layers that see the whole context, or all that there are.
    pub rope: Rope,
    /// Positions of layers with a window, where they differ.
    pub local_rope: Option<Rope>,
    /// What follows attention, by layer.
    pub feed_forward: Vec<FeedForward>,
    /// Whether the output reads the embeddings.
    pub tied: bool,
}

impl Config {
    /// Reads a configuration. What is not run is refused by its name.
    pub fn new(json: &Value) -> Result<Self> {
        let kind = json.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let known = FAMILIES.iter().find(|(name, _)| *name == kind);
        let Some(&(_, family)) = known else {
            let named = if kind.is_empty() { "config.json names no 'model_type'".into() } else { format!("'{kind}'") };
            return Err(refused(format!(
                "{named} is not run; these are: llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, phi3, gemma2, \
                 gemma3, gpt_oss"
            )));
        };
        // Gemma 3 with images has the decoder's settings inside.
        let fields = Fields(json.get("text_config").filter(|text| text.is_object()).unwrap_or(json));
        fields.read(family)
    }

    /// The window of a layer and the rotation of its positions.
    pub fn positions_of(&self, layer: usize) -> (Option<usize>, &Rope) {
        let window = self.windows[layer];
        (window, self.local_rope.as_ref().filter(|_| window.is_some()).unwrap_or(&self.rope))
    }
}

impl Fields<'_> {
    fn activation(&self, family: Family) -> Result<Activation> {
        if family == Family::GptOss {
            return Ok(Activation::Clamped { limit: self.number("swiglu_limit")?.unwrap_or(7.0) as f32 });
        }
        let name = self.get("hidden_activation").or(self.get("hidden_act")).and_then(Value::as_str);
        match name.unwrap_or(if matches!(family, Family::Gemma2 | Family::Gemma3) {
            "gelu_pytorch_tanh"
        } else {
            "silu"
        }) {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            "gelu" => Ok(Activation::Gelu),
            other => Err(refused(format!("config.json: the activation '{other}' is not run"))),
        }
    }

    /// The window of each layer.
    fn windows(&self, family: Family, layers: usize) -> Result<Vec<Option<usize>>> {
        let Some(window) = self.optional_size("sliding_window")? else { return Ok(vec![None; layers]) };
        let asks = matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe);
        if asks && self.flag("use_sliding_window") != Some(true) {
            return Ok(vec![None; layers]);
        }
        if let Some(types) = self.get("layer_types").and_then(Value::as_array) {
            if types.len() != layers {
                let count = types.len();
                return Err(refused(format!("config.json: 'layer_types' has {count} entries for {layers} layers")));
            }
            let kind = |kind: &Value| match kind.as_str() {
                Some("sliding_attention") => Ok(Some(window)),
                Some("full_attention") => Ok(None),
                _ => Err(refused(format!("config.json: a layer of type {kind} is not run"))),
            };
            return types.iter().map(kind).collect();
        }
        let is_local: Box<dyn Fn(usize) -> bool> = match family {
            Family::Gemma2 | Family::GptOss => Box::new(|layer| layer % 2 == 0),
            Family::Gemma3 => {
                let every = self.optional_size("sliding_window_pattern")?.unwrap_or(6);
                Box::new(move |layer| (layer + 1) % every != 0)
            }
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
                let first = self.number("max_window_layers")?.unwrap_or(28.0) as usize;
                Box::new(move |layer| layer >= first)
            }
            _ => Box::new(|_| true),
        };
        Ok((0..layers).map(|layer| is_local(layer).then_some(window)).collect())
    }

    fn feed_forward(&self, family: Family, layers: usize) -> Result<Vec<FeedForward>> {
        let dense = || Ok(FeedForward::Dense(self.size("intermediate_size")?));
        let experts = |count: &str, width: &str, routing| -> Result<FeedForward> {
            let experts = Experts {
                count: self.size(count)?,
                chosen: self.size("num_experts_per_tok")?,
                routing,
                width: self.size(width)?,
            };
            if experts.chosen > experts.count {
                let Experts { count, chosen, .. } = experts;
                return Err(refused(format!("config.json: {chosen} of {count} experts cannot be chosen")));
            }
            Ok(FeedForward::Experts(experts))
        };
        match family {
            Family::Mixtral => {
                Ok(vec![experts("num_local_experts", "intermediate_size", Routing::Normalized)?; layers])
            }
            Family::GptOss => Ok(vec![experts("num_local_experts", "intermediate_size", Routing::Normalized)?; layers]),
            Family::Qwen3Moe => {
                let routing =
                    if self.flag("norm_topk_prob") == Some(true) { Routing::Normalized } else { Routing::Softmax };
                let step = self.optional_size("decoder_sparse_step")?.unwrap_or(1);
                let dense_only: Vec<u64> = self
                    .get("mlp_only_layers")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_u64)
                    .collect();
                let name = if self.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
                let sparse = experts(name, "moe_intermediate_size", routing)?;
                let layer = |i: usize| {
                    let is_sparse = !dense_only.contains(&(i as u64)) && (i + 1).is_multiple_of(step);
                    if is_sparse { Ok(sparse) } else { dense() }
                };
                (0..layers).map(layer).collect()
            }
            _ => Ok(vec![dense()?; layers]),
        }
    }

    fn read(&self, family: Family) -> Result<Config> {
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let layers = self.small_size("num_hidden_layers")?;
        let layers = layers.ok_or_else(|| refused("config.json has no 'num_hidden_layers'"))?;
        let kv_heads = self.optional_size("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match (self.small_size("head_dim")?, family) {
            (Some(dim), _) => dim,
            (None, Family::Gemma2 | Family::Gemma3) => 256,
            (None, Family::GptOss) => 64,
            (None, _) => hidden / heads,
        };
        if head_dim == 0 || head_dim > 1 << 16 {
            return Err(refused(format!(
                "config.json: {heads} heads of a width of {hidden} have {head_dim} elements each"
            )));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(refused(format!("config.json: {heads} heads cannot share {kv_heads} keys")));
        }
        let positions = self.optional_size("max_position_embeddings")?.unwrap_or(131_072);
        let gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
        let scalar = if gemma { self.positive("query_pre_attn_scalar")?.unwrap_or(256.0) } else { head_dim as f64 };
        let windows = self.windows(family, layers)?;
        let (rope, local_rope) = Rope::of(self, family == Family::Gemma3, head_dim, positions)?;
        let default_epsilon = if gemma { 1e-6 } else { 1e-5 };
        let cap = |name: &str| Ok::<_, crate::Error>(self.positive(name)?.map(|cap| cap as f32));
        let (attention_cap, logit_cap) = match gemma {
            true => (cap("attn_logit_softcapping")?, cap("final_logit_softcapping")?),
            false => (None, None),
        };
        Ok(Config {
            family,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocabulary: self.size("vocab_size")?,
            epsilon: self.positive("rms_norm_eps")?.unwrap_or(default_epsilon) as f32,
            norm_offset: if gemma { 1.0 } else { 0.0 },
            norms: if gemma { Norms::Around } else { Norms::Before },
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            attention_scale: scalar.powf(-0.5) as f32,
            attention_cap,
            logit_cap,
            activation: self.activation(family)?,
            positions,
            windows,
            rope,
            local_rope,
            feed_forward: self.feed_forward(family, layers)?,
            tied: self.flag("tie_word_embeddings").unwrap_or(gemma),
        })
    }
}
