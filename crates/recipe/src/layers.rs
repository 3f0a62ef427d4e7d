//! Layers that consist of several modules, with TransformerEngine's names for the parts.

use super::model::{Edge, Model, Module, Quantizable};
use super::path::ModulePath;
use super::role::{AttentionSlot, LinearSlot, Site};

/// Two linear layers, `fc1` and `fc2`, with a norm before and an activation between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LayerNormMlp;

impl Quantizable for LayerNormMlp {
    fn declare(&self, path: &ModulePath, model: &mut Model) {
        model.add(Module::linear(path.child("fc1"))).add(Module::linear(path.child("fc2")));
    }
}

/// What the queries attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AttentionKind {
    /// Keys and values of the same sequence, from one linear layer `linear_qkv`.
    #[default]
    SelfAttention,
    /// Those of another sequence: `linear_q` and `linear_kv`.
    CrossAttention,
}

/// Which tensors between attention and the linear layers around it are handed over quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum HandOver {
    /// None.
    #[default]
    None,
    /// Those that attention reads.
    IntoAttention,
    /// Those that it makes as well.
    Both,
}

/// Attention with the linear layers around it: queries, keys and values before, `proj` after,
/// `core_attention` between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MultiheadAttention {
    /// What the queries attend to.
    pub kind: AttentionKind,
    /// What is handed over quantized.
    pub hand_over: HandOver,
}

impl Quantizable for MultiheadAttention {
    fn declare(&self, path: &ModulePath, model: &mut Model) {
        let before: Vec<ModulePath> = match self.kind {
            AttentionKind::SelfAttention => vec![path.child("linear_qkv")],
            AttentionKind::CrossAttention => vec![path.child("linear_q"), path.child("linear_kv")],
        };
        let (core, proj) = (path.child("core_attention"), path.child("proj"));
        before.iter().for_each(|path| _ = model.add(Module::linear(path)));
        model.add(Module::attention(&core)).add(Module::linear(&proj));
        if self.hand_over != HandOver::None {
            let (qkv, d_o) = (Site::new(&core, AttentionSlot::Qkv), Site::new(&core, AttentionSlot::DO));
            for path in &before {
                model.connect(Edge::new(Site::new(path, LinearSlot::Output), [qkv.clone()]));
            }
            model.connect(Edge::new(Site::new(&proj, LinearSlot::GradInput), [d_o]));
        }
        if self.hand_over == HandOver::Both {
            let gradients = before.iter().map(|path| Site::new(path, LinearSlot::GradOutput));
            model.connect(Edge::new(Site::new(&core, AttentionSlot::DQkv), gradients));
            model.connect(Edge::new(Site::new(&core, AttentionSlot::O), [Site::new(&proj, LinearSlot::Input)]));
        }
    }
}

/// Whether a layer attends to another sequence as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum LayerKind {
    /// It attends to its own sequence.
    #[default]
    Encoder,
    /// It attends to another one too.
    Decoder,
}

/// A transformer layer: `self_attention`, in a decoder `inter_attention`, and `layernorm_mlp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TransformerLayer {
    /// Whether it attends to another sequence.
    pub kind: LayerKind,
    /// What is handed over quantized around attention.
    pub hand_over: HandOver,
}

impl Quantizable for TransformerLayer {
    fn declare(&self, path: &ModulePath, model: &mut Model) {
        let attention = |kind| MultiheadAttention { kind, hand_over: self.hand_over };
        model.nest(path.child("self_attention"), &attention(AttentionKind::SelfAttention));
        if self.kind == LayerKind::Decoder {
            model.nest(path.child("inter_attention"), &attention(AttentionKind::CrossAttention));
        }
        model.nest(path.child("layernorm_mlp"), &LayerNormMlp);
    }
}
