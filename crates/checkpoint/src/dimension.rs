//! What a dimension of a tensor is, and which keys say how long it is.

/// A dimension of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Hidden,
    Queries,
    Keys,
    Head,
    FeedForward,
    ExpertFeedForward,
    Experts,
    Vocabulary,
}

impl Dim {
    /// The keys of `config.json`.
    pub fn in_config(self) -> &'static str {
        match self {
            Dim::Hidden => "'hidden_size'",
            Dim::Queries => "'num_attention_heads' x 'head_dim'",
            Dim::Keys => "'num_key_value_heads' x 'head_dim'",
            Dim::Head => "'head_dim'",
            Dim::FeedForward => "'intermediate_size'",
            Dim::ExpertFeedForward => "'moe_intermediate_size'",
            Dim::Experts => "'num_experts'",
            Dim::Vocabulary => "'vocab_size'",
        }
    }

    /// The keys of a GGUF file.
    pub fn in_gguf(self) -> &'static str {
        match self {
            Dim::Hidden => "embedding_length",
            Dim::Queries => "attention.head_count x attention.key_length",
            Dim::Keys => "attention.head_count_kv x attention.key_length",
            Dim::Head => "attention.key_length",
            Dim::FeedForward => "feed_forward_length",
            Dim::ExpertFeedForward => "expert_feed_forward_length",
            Dim::Experts => "expert_count",
            Dim::Vocabulary => "vocab_size",
        }
    }
}
