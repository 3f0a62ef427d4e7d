//! Transformer modules that train in NVFP4, on candle: its tensors, autograd, losses and
//! optimizers.
//!
//! A [`Session`] is a training run. Modules are made at a [`Place`] of it. A recipe then says how
//! each of their tensors is quantized ([`Session::apply`]). Every module is a
//! [`candle_core::Module`]. See [`Session`] for a whole loop, and `docs/training.md`.
//!
//! A module whose tensors the plan leaves alone is candle's own graph, bit for bit. Any other is
//! one node of that graph, which keeps the codes that its backward pass reads.
//!
//! Reading order: `linear.rs`, `projection.rs`, `operand.rs`, `session/mod.rs`, then the other
//! modules.

#![forbid(unsafe_code)]

mod activation;
mod adamw;
mod attention;
mod checkpoint;
mod codes;
mod error;
mod fault;
mod gpt;
#[cfg(feature = "nn-cuda")]
mod gpu;
mod graph;
mod grouped_linear;
mod heads;
mod layer_norm_linear;
mod layer_norm_mlp;
mod linear;
mod multihead_attention;
mod norm;
mod operand;
mod parameter;
mod place;
mod projection;
mod recompute;
mod session;
mod sums;
mod transformer_layer;
mod values;

pub use activation::Activation;
pub use adamw::AdamW;
pub use attention::{AttentionConfig, DotProductAttention, Mask};
pub use error::{Error, Result};
pub use fault::Fault;
pub use gpt::{Gpt, GptConfig};
pub use graph::graph_bytes;
pub use grouped_linear::{GroupedLinear, Routed};
pub use layer_norm_linear::LayerNormLinear;
pub use layer_norm_mlp::{LayerNormMlp, MlpConfig};
pub use linear::Linear;
pub use multihead_attention::{MultiheadAttention, MultiheadConfig};
pub use norm::{Norm, NormKind};
pub use parameter::{Init, Parameter};
pub use place::{Place, Storage};
pub use projection::Bias;
pub use recompute::Recompute;
pub use session::{Session, Watch};
pub use transformer_layer::{LayerConfig, TransformerLayer};

/// Runs the examples of the guide to training.
#[cfg(doctest)]
#[doc = include_str!("../docs/training.md")]
struct TrainingGuide;
