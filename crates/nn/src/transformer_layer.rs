//! `h = x + self_attention(norm(x))`, `y = h + mlp(norm(h))`.

use crate::layer_norm_mlp::MlpConfig;
use crate::multihead_attention::MultiheadConfig;
use crate::{Activation, Bias, LayerNormMlp, Mask, MultiheadAttention, NormKind, Place, Result};
use candle_core::{Module, Tensor};
use nvfp4_recipe::HandOver;

/// A transformer layer, with norms before its parts: `self_attention` and `layernorm_mlp`.
#[derive(Clone, Debug)]
pub struct TransformerLayer {
    self_attention: MultiheadAttention,
    mlp: LayerNormMlp,
}

/// Sizes and choices of a [`TransformerLayer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Features of input and output.
    pub hidden: usize,
    /// Heads of queries, which divide the features.
    pub heads: usize,
    /// Heads of keys and values, which divide those of queries.
    pub groups: usize,
    /// Features inside the MLP.
    pub inner: usize,
    /// Both norms.
    pub norm: NormKind,
    /// The activation of the MLP.
    pub activation: Activation,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Whether linear layers add a bias.
    pub bias: Bias,
    /// What is handed over quantized around attention.
    pub hand_over: HandOver,
}

impl LayerConfig {
    /// A layer of GPT's kind: LayerNorm, GELU, causal, biases, an MLP of four times the features.
    pub fn gpt(hidden: usize, heads: usize) -> Self {
        LayerConfig {
            hidden,
            heads,
            groups: heads,
            inner: 4 * hidden,
            norm: NormKind::LayerNorm,
            activation: Activation::Gelu,
            mask: Mask::Causal,
            bias: Bias::With,
            hand_over: HandOver::None,
        }
    }

    /// A layer of Llama's kind, without rotary embeddings: RMSNorm, SwiGLU, causal, no biases.
    pub fn llama(hidden: usize, heads: usize, groups: usize, inner: usize) -> Self {
        LayerConfig {
            groups,
            inner,
            norm: NormKind::RmsNorm,
            activation: Activation::SwiGlu,
            bias: Bias::Without,
            ..LayerConfig::gpt(hidden, heads)
        }
    }
}

impl TransformerLayer {
    /// A layer at a place.
    pub fn new(place: &Place, config: LayerConfig) -> Result<Self> {
        let LayerConfig { hidden, heads, groups, inner, norm, activation, mask, bias, hand_over } = config;
        let attention = MultiheadConfig { hidden, heads, groups, mask, norm: Some(norm), bias, hand_over };
        let mlp = MlpConfig { hidden, inner, norm, activation, bias };
        Ok(TransformerLayer {
            self_attention: MultiheadAttention::new(&place.child("self_attention"), attention)?,
            mlp: LayerNormMlp::new(&place.child("layernorm_mlp"), mlp)?,
        })
    }
}

impl Module for TransformerLayer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = x.add(&self.self_attention.forward(x)?)?;
        h.add(&self.mlp.forward(&h)?)
    }
}
