//! `y = proj(attention(linear_qkv(x)))`, with or without a norm before.

use crate::attention::{AttentionConfig, Mask};
use crate::{Bias, DotProductAttention, LayerNormLinear, Linear, NormKind, Place, Result};
use candle_core::{Module, Tensor};
use nvfp4_recipe::{AttentionSlot, Edge, HandOver, LinearSlot, Site};

/// Attention to the own sequence, with the linear layers around it: `linear_qkv`, `core_attention`,
/// `proj`.
#[derive(Clone, Debug)]
pub struct MultiheadAttention {
    qkv: Qkv,
    core: DotProductAttention,
    proj: Linear,
}

#[derive(Clone, Debug)]
enum Qkv {
    Linear(Linear),
    LayerNormLinear(LayerNormLinear),
}

/// Sizes and choices of [`MultiheadAttention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiheadConfig {
    /// Features of input and output; heads divide them.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub groups: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// The norm before, if there is one.
    pub norm: Option<NormKind>,
    /// Whether the linear layers add a bias.
    pub bias: Bias,
    /// What is handed over quantized between the layers and attention.
    pub hand_over: HandOver,
}

impl MultiheadAttention {
    /// Attention at a place.
    pub fn new(place: &Place, config: MultiheadConfig) -> Result<Self> {
        let MultiheadConfig { hidden, heads, groups, mask, norm, bias, hand_over } = config;
        if heads == 0 || !hidden.is_multiple_of(heads) {
            return Err(crate::Error::Size {
                module: place.path().to_string(),
                expected: format!("heads that divide {hidden} features"),
                got: heads.to_string(),
                fix: "each head has the same number of features",
            });
        }
        let head_size = hidden / heads;
        let packed = (heads + 2 * groups) * head_size;
        let (before, core, after) = (place.child("linear_qkv"), place.child("core_attention"), place.child("proj"));
        let qkv = match norm {
            None => Qkv::Linear(Linear::new(&before, hidden, packed, bias)?),
            Some(norm) => Qkv::LayerNormLinear(LayerNormLinear::new(&before, norm, hidden, packed, bias)?),
        };
        edges(place, hand_over);
        Ok(MultiheadAttention {
            qkv,
            core: DotProductAttention::new(&core, AttentionConfig { heads, groups, head_size, mask })?,
            proj: Linear::new(&after, hidden, hidden, bias)?,
        })
    }
}

/// The tensors that are handed over quantized.
fn edges(place: &Place, hand_over: HandOver) {
    let (qkv, core, proj) = (place.child("linear_qkv"), place.child("core_attention"), place.child("proj"));
    let linear = |of: &Place, slot: LinearSlot| Site::new(of.path(), slot);
    let attention = |slot: AttentionSlot| Site::new(core.path(), slot);
    let into = [
        Edge::new(linear(&qkv, LinearSlot::Output), [attention(AttentionSlot::Qkv)]),
        Edge::new(linear(&proj, LinearSlot::GradInput), [attention(AttentionSlot::DO)]),
    ];
    let out_of = [
        Edge::new(attention(AttentionSlot::DQkv), [linear(&qkv, LinearSlot::GradOutput)]),
        Edge::new(attention(AttentionSlot::O), [linear(&proj, LinearSlot::Input)]),
    ];
    match hand_over {
        HandOver::None => {}
        HandOver::IntoAttention => into.into_iter().for_each(|edge| place.connect(edge)),
        HandOver::Both => into.into_iter().chain(out_of).for_each(|edge| place.connect(edge)),
    }
}

impl Module for MultiheadAttention {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let qkv = match &self.qkv {
            Qkv::Linear(linear) => linear.forward(x)?,
            Qkv::LayerNormLinear(linear) => linear.forward(x)?,
        };
        self.proj.forward(&self.core.forward(&qkv)?)
    }
}
