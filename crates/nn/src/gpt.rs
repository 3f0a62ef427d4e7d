//! `logits = norm(layers(tokens + positions))·headᵀ`: a small language model of
//! [`TransformerLayer`]s.
//!
//! Embeddings, the last norm and the head stay in high precision, as recipes for training in few
//! bits have it; everything in between is what the recipe says.

use crate::transformer_layer::LayerConfig;
use crate::{Error, Init, Norm, NormKind, Parameter, Place, Result, Session, TransformerLayer};
use candle_core::{Module, Tensor};
use nvfp4_recipe::ModulePath;

/// A language model: from token ids, [batch, sequence], to scores of the next ones, [batch,
/// sequence, vocabulary].
#[derive(Clone, Debug)]
pub struct Gpt {
    session: Session,
    path: ModulePath,
    tokens: Parameter,
    positions: Parameter,
    layers: Vec<TransformerLayer>,
    norm: Norm,
    head: Parameter,
}

/// Sizes of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// How many tokens there are.
    pub vocabulary: usize,
    /// The longest sequence.
    pub context: usize,
    /// How many layers there are.
    pub layers: usize,
    /// Features of a token.
    pub width: usize,
    /// Heads of attention, which divide the features.
    pub heads: usize,
}

impl Gpt {
    /// A model at a place: `tokens`, `positions`, `layers.N`, `norm`, `head`.
    ///
    /// Weights begin normally distributed with a deviation of 0.02.
    pub fn new(place: &Place, config: GptConfig) -> Result<Self> {
        let GptConfig { vocabulary, context, layers, width, heads } = config;
        let init = Init::Normal(0.02);
        let inside = place.child("layers").with_weights(init);
        let layer = |i: usize| TransformerLayer::new(&inside.child(&i.to_string()), LayerConfig::gpt(width, heads));
        Ok(Gpt {
            session: place.session().clone(),
            path: place.path().clone(),
            tokens: place.child("tokens").parameter("weight", (vocabulary, width), init)?,
            positions: place.child("positions").parameter("weight", (context, width), init)?,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            norm: Norm::new(&place.child("norm"), NormKind::LayerNorm, width)?,
            head: place.child("head").parameter("weight", (vocabulary, width), init)?,
        })
    }

    /// The mean over all positions of −log p(next token), in nats; `next` is [batch, sequence] like
    /// `tokens`.
    pub fn loss(&self, tokens: &Tensor, next: &Tensor) -> Result<Tensor> {
        let scores = self.run(tokens)?.flatten_to(1)?;
        Ok(candle_nn::loss::cross_entropy(&scores, &next.flatten_all()?)?)
    }

    fn run(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, sequence) = tokens.dims2()?;
        let (context, width) = self.positions.var.dims2()?;
        if sequence > context {
            return Err(Error::Size {
                module: self.path.to_string(),
                expected: format!("sequences of at most {context} tokens"),
                got: sequence.to_string(),
                fix: "make the model with a longer context, or cut the sequences",
            });
        }
        let embedded = self.tokens.var.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, sequence, width))?;
        let mut x = embedded.broadcast_add(&self.positions.var.narrow(0, 0, sequence)?)?;
        self.session.look(&self.path.child("tokens"), "output", &x)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        let head = candle_nn::Linear::new(self.head.var.as_tensor().clone(), None);
        let scores = head.forward(&self.norm.forward(&x)?)?;
        self.session.look(&self.path.child("head"), "output", &scores)?;
        Ok(scores)
    }
}

impl Module for Gpt {
    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(tokens)?)
    }
}
