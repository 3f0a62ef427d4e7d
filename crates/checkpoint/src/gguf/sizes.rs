//! The sizes of a model, and the shapes that its tensors have by them: llama.cpp reads a file by
//! these.

use super::family::Family;
use super::object::Object;
use crate::Result;
use crate::dimension::Dim::{self, *};

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub family: Family,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub feed_forward: u64,
    pub vocabulary: u64,
    pub experts: Option<Mixture>,
}

/// Sizes of a layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mixture {
    pub count: u64,
    pub used: u64,
    pub feed_forward: u64,
}

/// Tensors of a layer with their dimensions, from the fastest to the slowest.
const LAYER: [(&str, &[Dim]); 15] = [
    ("attn_norm", &[Hidden]),
    ("attn_q", &[Hidden, Queries]),
    ("attn_k", &[Hidden, Keys]),
    ("attn_v", &[Hidden, Keys]),
    ("attn_output", &[Queries, Hidden]),
    ("attn_q_norm", &[Head]),
    ("attn_k_norm", &[Head]),
    ("ffn_norm", &[Hidden]),
    ("ffn_gate", &[Hidden, FeedForward]),
    ("ffn_up", &[Hidden, FeedForward]),
    ("ffn_down", &[FeedForward, Hidden]),
    ("ffn_gate_inp", &[Hidden, Experts]),
    ("ffn_gate_exps", &[Hidden, ExpertFeedForward, Experts]),
    ("ffn_up_exps", &[Hidden, ExpertFeedForward, Experts]),
    ("ffn_down_exps", &[ExpertFeedForward, Hidden, Experts]),
];

/// Tensors outside the layers.
const WHOLE: [(&str, &[Dim]); 3] =
    [("token_embd", &[Hidden, Vocabulary]), ("output_norm", &[Hidden]), ("output", &[Hidden, Vocabulary])];

/// What a layer has after its attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FeedForward {
    Dense,
    Experts,
}

/// Whether the models of a family have a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Has {
    Always,
    Maybe,
    Never,
}

impl Sizes {
    /// From `config.json`, refused where the numbers contradict each other.
    pub fn of(family: Family, config: &Object<'_>) -> Result<Self> {
        let (hidden, heads) = (config.need("hidden_size")?, config.need("num_attention_heads")?);
        let kv_heads = config.size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let text = format!("'num_attention_heads' is {heads}, not a multiple of 'num_key_value_heads', {kv_heads}");
            return Err(config.wrong(text));
        }
        let head_dim = match config.size("head_dim")? {
            Some(own) => own,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(config.wrong(format!("{heads} heads do not divide a 'hidden_size' of {hidden}"))),
        };
        if !head_dim.is_multiple_of(2) {
            return Err(
                config.wrong(format!("'head_dim' is {head_dim}, and halves of a head are rotated: it must be even"))
            );
        }
        Ok(Sizes {
            family,
            layers: config.need("num_hidden_layers")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: config.need("intermediate_size")?,
            vocabulary: config.need("vocab_size")?,
            experts: if family == Family::Qwen3Moe { Some(experts(config)?) } else { None },
        })
    }

    /// How long a dimension is.
    pub fn len(&self, dim: Dim) -> u64 {
        let of_experts = |of: fn(&Mixture) -> u64| self.experts.as_ref().map_or(0, of);
        match dim {
            Hidden => self.hidden,
            Queries => self.heads.saturating_mul(self.head_dim),
            Keys => self.kv_heads.saturating_mul(self.head_dim),
            Head => self.head_dim,
            FeedForward => self.feed_forward,
            ExpertFeedForward => of_experts(|e| e.feed_forward),
            Experts => of_experts(|e| e.count),
            Vocabulary => self.vocabulary,
        }
    }

    /// The dimensions of a tensor of a file, by its name; `None` for one that is not known here.
    pub fn dims(&self, name: &str) -> Option<&'static [Dim]> {
        let (part, last) = name.rsplit_once('.')?;
        let (table, part) = match part.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((_, part)) => (&LAYER[..], part),
            None => (&WHOLE[..], part),
        };
        let dims = table.iter().find(|(name, _)| *name == part)?.1;
        match last {
            "weight" => Some(dims),
            // One for each row.
            "bias" if dims.len() == 2 => Some(&dims[1..]),
            _ => None,
        }
    }

    /// Whether such a model has a tensor, in a layer or outside.
    pub fn has(&self, part: &str, last: &str) -> Has {
        let feed_forward = if self.experts.is_some() { FeedForward::Experts } else { FeedForward::Dense };
        has(self.family, feed_forward, part, last)
    }

    /// The first dimension of a tensor that is not as long as the model's sizes say; the first one
    /// if the number of dimensions differs.
    pub fn misfit(&self, name: &str, dims: &[u64]) -> Option<Dim> {
        let expected = self.dims(name)?;
        let differs = |(dim, len): (&Dim, &u64)| (self.len(*dim) != *len).then_some(*dim);
        match expected.len() == dims.len() {
            true => expected.iter().zip(dims).find_map(differs),
            false => expected.first().copied(),
        }
    }

    /// The tensors that such a model always has: layer, part and whether it is a weight or a bias.
    pub fn needed(&self) -> impl Iterator<Item = (Option<u64>, &'static str, &'static str)> {
        let always =
            |table| parts(table).filter(|(part, last)| self.has(part, last) == Has::Always).collect::<Vec<_>>();
        let (whole, layer) = (always(&WHOLE), always(&LAYER));
        let whole = whole.into_iter().map(|(part, last)| (None, part, last));
        let layers = (0..self.layers).flat_map(move |i| {
            let parts: Vec<_> = layer.iter().map(|(part, last)| (Some(i), *part, *last)).collect();
            parts
        });
        whole.chain(layers)
    }
}

/// The weights and biases of a table.
fn parts(table: &'static [(&'static str, &'static [Dim])]) -> impl Iterator<Item = (&'static str, &'static str)> {
    table.iter().flat_map(|(part, _)| ["weight", "bias"].map(|last| (*part, last)))
}

/// The tensors that a layer of a family always has.
pub(super) fn layer(family: Family, feed_forward: FeedForward) -> impl Iterator<Item = (&'static str, &'static str)> {
    parts(&LAYER).filter(move |(part, last)| has(family, feed_forward, part, last) == Has::Always)
}

/// Whether a model of a family has a tensor, in a layer or outside.
fn has(family: Family, feed_forward: FeedForward, part: &str, last: &str) -> Has {
    let when = |always: bool| if always { Has::Always } else { Has::Never };
    match (part, last) {
        ("attn_q_norm" | "attn_k_norm", "weight") => when(matches!(family, Family::Qwen3 | Family::Qwen3Moe)),
        ("ffn_gate" | "ffn_up" | "ffn_down", "weight") => when(feed_forward == FeedForward::Dense),
        ("ffn_gate_inp" | "ffn_gate_exps" | "ffn_up_exps" | "ffn_down_exps", "weight") => {
            when(feed_forward == FeedForward::Experts)
        }
        ("output", "weight") => Has::Maybe,
        (_, "weight") => Has::Always,
        ("attn_q" | "attn_k" | "attn_v", "bias") if family == Family::Qwen2 => Has::Always,
        ("attn_q" | "attn_k" | "attn_v", "bias") => Has::Maybe,
        ("attn_output" | "ffn_gate" | "ffn_up" | "ffn_down", "bias") if family == Family::Llama => Has::Maybe,
        _ => Has::Never,
    }
}

/// The name of a tensor of a file.
pub(super) fn name(layer: Option<u64>, part: &str, last: &str) -> String {
    layer.map_or_else(|| format!("{part}.{last}"), |i| format!("blk.{i}.{part}.{last}"))
}

/// Experts: newer configurations call them local.
fn experts(config: &Object<'_>) -> Result<Mixture> {
    let count = match (config.size("num_local_experts")?, config.size("num_experts")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(config.wrong(format!("'num_local_experts' is {a} and 'num_experts' is {b}; remove one")));
        }
        (a, b) => a.or(b).ok_or_else(|| config.missing("num_experts"))?,
    };
    let used = config.need("num_experts_per_tok")?;
    if used > count {
        return Err(config.wrong(format!("'num_experts_per_tok' is {used}, more than the {count} experts")));
    }
    // The weights of all experts add up to 1 by themselves.
    if used < count {
        let because = "llama.cpp divides the weights of a token's experts by their sum";
        config.must_be("norm_topk_prob", true, false, because)?;
    }
    Ok(Mixture { count, used, feed_forward: config.need("moe_intermediate_size")? })
}
