//! Do the tensors have the sizes that the configuration gives, and that others of their kind have?
//! A server allocates memory by the configuration, and refuses a tensor that does not fit.
//!
//! Families differ, so only what every server does is checked. A size is compared with the
//! configuration where the name of the tensor says which size it is, and with other layers where
//! the configuration says nothing layer by layer.

use super::architecture::writes;
use super::dialect::{Dialect, Model};
use super::dimension::Dim;
use super::finding::Report;
use super::outline::Outline;
use super::place::{beside_layers, kind_of, layer_below, layer_of};
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Which size of a tensor a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Rows,
    Columns,
    Length,
}

/// A size that the configuration gives, as one of several numbers.
struct Expected {
    side: Side,
    sizes: Vec<u64>,
    dim: Dim,
}

/// What has one shape: a kind of tensor, in layers of one kind, or in one layer where layers
/// differ.
type Alike = (String, Option<String>, Option<usize>);

/// The tensors of a model by what they are, and the sizes that its configuration gives.
pub(super) struct Sizes<'m> {
    model: &'m Model<'m>,
    outline: Outline<'m>,
    /// The shape of each module's weight: outputs, inputs.
    shapes: Vec<(&'m str, Vec<usize>)>,
}

/// Architectures whose attention has `num_attention_heads` heads of `head_dim`, and nothing else in
/// its projections.
const PLAIN_ATTENTION: [&str; 26] = [
    "LlamaFor",
    "MistralFor",
    "MixtralFor",
    "Qwen2For",
    "Qwen2MoeFor",
    "Qwen3For",
    "Qwen3MoeFor",
    "GemmaFor",
    "Gemma2For",
    "Gemma3For",
    "OlmoFor",
    "Olmo2For",
    "Olmo3For",
    "OlmoeFor",
    "GraniteFor",
    "GraniteMoeFor",
    "SmolLM3For",
    "SeedOssFor",
    "CohereFor",
    "Cohere2For",
    "InternLM3For",
    "ArceeFor",
    "ApertusFor",
    "Phi3For",
    "Starcoder2For",
    "Glm4MoeFor",
];

/// Those whose heads divide `hidden_size` where `head_dim` is absent; others have a default of
/// their own.
const DIVIDED: [&str; 5] = ["LlamaFor", "MistralFor", "MixtralFor", "Qwen2For", "Qwen2MoeFor"];

impl<'m> Sizes<'m> {
    pub fn new(model: &'m Model<'m>, outline: &Outline<'m>) -> Self {
        let weights = model.weights.iter().filter(|w| !w.is_transposed());
        let mut shapes: Vec<(&str, Vec<usize>)> = weights.map(|w| (w.module.as_str(), vec![w.rows, w.cols])).collect();
        // Codes that lack their scales are another finding.
        let others = model.others.iter().filter(|t| t.info.dtype != Dtype::U8);
        let named = others.filter_map(|t| Some((t.info.name.strip_suffix(".weight")?, t.info.shape.clone())));
        shapes.extend(named);
        Sizes { model, outline: *outline, shapes }
    }

    /// Whether the family's layers are all alike, but for their feed-forward parts.
    pub fn is_uniform(&self) -> bool {
        let architecture = self.model.architecture().unwrap_or_default();
        PLAIN_ATTENTION.iter().any(|name| architecture.starts_with(name)) && !self.outline.varies()
    }

    /// Biases that are promised and missing stay uninitialised; those that are there and not
    /// promised are ignored.
    fn check_flags(&self, prefix: &str, report: &mut Report) {
        let architecture = self.model.architecture().unwrap_or_default();
        if !["LlamaFor", "Qwen3For", "Qwen3MoeFor", "GraniteFor"].iter().any(|name| architecture.starts_with(name)) {
            return;
        }
        for (key, module) in [("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")] {
            let module = format!("{prefix}.0.{module}");
            let weight = self.shapes.iter().any(|(name, _)| *name == module);
            let bias = self.model.checkpoint.get(&format!("{module}.bias")).is_some();
            match self.outline.flag(key).filter(|said| weight && *said != bias) {
                Some(true) => report
                    .problem(&module, format!("no bias, but '{key}' in config.json is true: a server makes one up")),
                Some(false) => report
                    .problem(&module, format!("a bias, but '{key}' in config.json is false: a server leaves it out")),
                None => {}
            }
        }
    }

    /// Norms, biases and weights that are not floats. A server casts them without a warning, or
    /// refuses.
    pub fn check_types(&self, report: &mut Report) {
        let float = |dtype: Dtype| matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        for tensor in &self.model.others {
            let (name, dtype) = (&tensor.info.name, tensor.info.dtype);
            let Some((module, "weight" | "bias")) = name.rsplit_once('.') else { continue };
            // Other formats keep bytes beside their scales, and ModelOpt's codes without scales are
            // another finding.
            let quantized = self.model.checkpoint.get(&format!("{module}.weight_scale")).is_some();
            let codes =
                dtype == Dtype::U8 && self.model.dialect != Dialect::CompressedTensors && name.ends_with("weight");
            if !float(dtype) && !quantized && !codes {
                report.problem(name, format!("{dtype:?}, where a server expects floats: it casts or refuses them"));
            }
        }
    }

    /// A bias has a number for each output of its weight, or for each number of its norm.
    pub fn check_biases(&self, report: &mut Report) {
        let outputs: BTreeMap<&str, usize> = self.shapes.iter().filter_map(|(m, s)| Some((*m, *s.first()?))).collect();
        for tensor in &self.model.others {
            let (Some(module), [len]) = (tensor.info.name.strip_suffix(".bias"), &tensor.info.shape[..]) else {
                continue;
            };
            if let Some(outputs) = outputs.get(module).filter(|outputs| *outputs != len) {
                let text =
                    format!("{len} numbers, but the weight beside it has {outputs} outputs: a server refuses it");
                report.problem(&tensor.info.name, text);
            }
        }
    }

    /// Weights and norms of layers, against the configuration and each other.
    pub fn check_layers(&self, prefix: &str, layers: u64, report: &mut Report) {
        self.check_flags(prefix, report);
        let varies = self.outline.varies() || self.outline.is_irregular();
        // The first wrong one of each kind, and how many there are.
        let mut wrong: BTreeMap<(String, String), (&str, usize)> = BTreeMap::new();
        let mut alike: BTreeMap<Alike, Vec<(&str, &[usize])>> = BTreeMap::new();
        for (module, shape) in &self.shapes {
            let Some((layer, rest)) = layer_below(prefix, module) else { continue };
            let Some(kind) = kind_of(rest).filter(|_| (layer as u64) < layers) else { continue };
            match self.contradiction(&self.expected(&kind), shape) {
                Some(text) => wrong.entry((kind, text)).or_insert((module, 0)).1 += 1,
                None if varies && !kind.contains("experts.#.") => {}
                None => {
                    let key = (kind, self.outline.kind(layer), varies.then_some(layer));
                    alike.entry(key).or_default().push((module, shape));
                }
            }
        }
        for ((_, text), (module, count)) in wrong {
            let more = if count > 1 { format!("; {} more are like it", count - 1) } else { String::new() };
            report.problem(module, format!("{text}{more}"));
        }
        for same in alike.values() {
            check_alike(same, report);
        }
    }

    /// The embedding, the last norm and the head.
    pub fn check_ends(&self, report: &mut Report) {
        for (module, shape) in &self.shapes {
            let last = beside_layers(module).filter(|_| layer_of(module).is_none()).unwrap_or_default();
            let expected = match last {
                "embed_tokens" | "wte" | "tok_embeddings" | "word_embeddings" | "embed_in" => self.table(),
                // A head that is the embedding is not read.
                "lm_head" | "embed_out" | "output_layer" if writes(self.model) && self.outline.tied() != Some(true) => {
                    self.table()
                }
                "norm" | "ln_f" | "final_layernorm" | "norm_f" | "final_norm" if writes(self.model) => {
                    vec![said(Side::Length, self.outline.hidden(), Dim::Hidden)]
                }
                _ => continue,
            };
            if let Some(text) = self.contradiction(&expected, shape) {
                report.problem(module, text);
            }
        }
    }

    /// A row of numbers for each token. vLLM asks for exactly as many rows as the configuration
    /// says, padded or not.
    fn table(&self) -> Vec<Expected> {
        vec![
            said(Side::Columns, self.outline.embedded(), Dim::Hidden),
            said(Side::Rows, self.outline.vocabulary(), Dim::Vocabulary),
        ]
    }

    /// The sizes that a weight or norm of a layer must have.
    fn expected(&self, kind: &str) -> Vec<Expected> {
        let outline = &self.outline;
        let architecture = self.model.architecture().unwrap_or_default();
        // Models that draft further tokens, and shared layers, read more than one state at once.
        let plain = !["Eagle", "Zamba", "Medusa"].iter().any(|name| architecture.contains(name));
        let hidden = |side| said(side, outline.hidden().filter(|_| plain), Dim::Hidden);
        let inner = |side| Expected { side, sizes: outline.feed_forward(), dim: Dim::FeedForward };
        // Experts may work on something smaller than what goes from layer to layer.
        let latent = outline.mentions("latent");
        let routed = |side| said(side, outline.hidden().filter(|_| !latent), Dim::Hidden);
        let attention = self.is_uniform();
        let heads = outline.constant("num_attention_heads").filter(|_| attention);
        let own = outline.constant("head_dim");
        let divided = DIVIDED.iter().any(|name| architecture.starts_with(name)) && !outline.mentions("head_dim");
        let quotient = || outline.hidden()?.checked_div(heads?).filter(|_| divided);
        let head = own.or_else(quotient).filter(|_| attention);
        // Llama has as many heads of keys as of queries by default; others have a default of their
        // own.
        let same =
            || heads.filter(|_| architecture.starts_with("LlamaFor") && !outline.mentions("num_key_value_heads"));
        let pairs = outline.constant("num_key_value_heads").or_else(same);
        let product = |count: Option<u64>| count?.checked_mul(head?);
        let queries = |side| said(side, product(heads), Dim::Queries);
        let keys = |side| said(side, product(pairs), Dim::Keys);
        match kind {
            "input_layernorm"
            | "post_attention_layernorm"
            | "pre_feedforward_layernorm"
            | "post_feedforward_layernorm" => vec![hidden(Side::Length)],
            "self_attn.q_proj" => vec![hidden(Side::Columns), queries(Side::Rows)],
            "self_attn.k_proj" | "self_attn.v_proj" => vec![hidden(Side::Columns), keys(Side::Rows)],
            "self_attn.o_proj" => vec![hidden(Side::Rows), queries(Side::Columns)],
            "self_attn.q_norm" | "self_attn.k_norm" if architecture.starts_with("Qwen3") => {
                vec![said(Side::Length, own, Dim::Head)]
            }
            "self_attn.qkv_proj" | "mlp.gate_up_proj" => vec![hidden(Side::Columns)],
            "mlp.gate_proj" | "mlp.up_proj" => vec![hidden(Side::Columns), inner(Side::Rows)],
            "mlp.down_proj" => vec![hidden(Side::Rows), inner(Side::Columns)],
            "mlp.gate" | "block_sparse_moe.gate" => {
                vec![
                    hidden(Side::Columns),
                    said(Side::Rows, outline.experts().filter(|_| !outline.varies()), Dim::Experts),
                ]
            }
            "mlp.experts.#.gate_proj"
            | "mlp.experts.#.up_proj"
            | "block_sparse_moe.experts.#.w1"
            | "block_sparse_moe.experts.#.w3" => vec![routed(Side::Columns), inner(Side::Rows)],
            "mlp.experts.#.down_proj" | "block_sparse_moe.experts.#.w2" => {
                vec![routed(Side::Rows), inner(Side::Columns)]
            }
            _ => Vec::new(),
        }
    }

    /// What is wrong with a shape.
    fn contradiction(&self, expected: &[Expected], shape: &[usize]) -> Option<String> {
        let dimensions = match expected.first()?.side {
            Side::Length => 1,
            Side::Rows | Side::Columns => 2,
        };
        if shape.len() != dimensions {
            return Some(format!("the shape {shape:?}, where a server expects {dimensions} dimensions: it refuses it"));
        }
        expected.iter().find_map(|Expected { side, sizes, dim }| {
            let (found, word) = match side {
                Side::Rows => (shape[0], "rows"),
                Side::Columns => (shape[1], "columns"),
                Side::Length => (shape[0], "numbers"),
            };
            let said = sizes.first().filter(|_| !sizes.contains(&(found as u64)))?;
            let keys = dim.in_config();
            Some(format!("{found} {word}, but {keys} in config.json is {said}: a server refuses it"))
        })
    }
}

fn said(side: Side, size: Option<u64>, dim: Dim) -> Expected {
    Expected { side, sizes: size.into_iter().collect(), dim }
}

/// Tensors of one kind: those that differ from most of the others.
fn check_alike(same: &[(&str, &[usize])], report: &mut Report) {
    // How many have a shape, and which is the first of them.
    let mut counts: BTreeMap<&[usize], (usize, usize)> = BTreeMap::new();
    for (i, (_, shape)) in same.iter().enumerate() {
        counts.entry(shape).or_insert((0, i)).0 += 1;
    }
    let usual = counts.iter().max_by_key(|(_, (count, first))| (*count, std::cmp::Reverse(*first)));
    let Some((usual, (most, example))) = usual else { return };
    let example = same[*example].0;
    for (shape, (count, first)) in counts.iter().filter(|(shape, _)| *shape != usual) {
        let text = format!(
            "the shape {shape:?} (of {count}), but '{example}' has {usual:?} (of {most}), and \
             nothing in config.json says that layers differ: a server refuses it"
        );
        report.problem(same[*first].0, text);
    }
}
