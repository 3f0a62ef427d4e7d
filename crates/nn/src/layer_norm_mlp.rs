//! `y = f(norm(x)·w₁ᵀ + b₁)·w₂ᵀ + b₂` as one node: of what lies between, codes are kept and what
//! `f` needs for its gradient.

use crate::projection::Projection;
use crate::{Activation, Bias, Norm, NormKind, Place, Result};
use candle_core::{Module, Tensor};
use nvfp4_recipe::{KeepInput, ModulePath};

/// A norm and two linear layers, `fc1` and `fc2`, with an activation between them.
#[derive(Clone, Debug)]
pub struct LayerNormMlp {
    path: ModulePath,
    norm: Norm,
    fc1: Projection,
    activation: Activation,
    fc2: Projection,
}

/// Sizes and choices of a [`LayerNormMlp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpConfig {
    /// Features of input and output.
    pub hidden: usize,
    /// Features between the layers, after the activation.
    pub inner: usize,
    /// The norm.
    pub norm: NormKind,
    /// The activation.
    pub activation: Activation,
    /// Whether both layers add a bias.
    pub bias: Bias,
}

impl LayerNormMlp {
    /// A layer at a place; the norm's parameters are `layer_norm_weight` and `layer_norm_bias`.
    pub fn new(place: &Place, config: MlpConfig) -> Result<Self> {
        let MlpConfig { hidden, inner, norm, activation, bias } = config;
        let linear = |name, sizes| Projection::new(&place.child(name), sizes, bias, KeepInput::Quantized);
        Ok(LayerNormMlp {
            path: place.path().clone(),
            norm: Norm::named(place, "layer_norm_", norm, hidden)?,
            fc1: linear("fc1", (hidden, inner * activation.gates()))?,
            activation,
            fc2: linear("fc2", (inner, hidden))?,
        })
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let LayerNormMlp { path, norm, fc1, activation, fc2 } = self.clone();
        fc1.check(x)?;
        if fc1.is_plain()? && fc2.is_plain()? {
            return fc2.plain(&activation.forward(&fc1.plain(&norm.forward(x)?)?)?);
        }
        let input = fc1.matrix(x)?;
        let (h, kept1) = fc1.forward(&norm.detached(&input)?)?;
        let (y, kept2) = fc2.forward(&activation.forward(&h)?)?;
        let y = fc2.shaped_like(&y, x)?;
        let bytes = kept1.byte_len() + h.elem_count() * h.dtype().size_in_bytes() + kept2.byte_len();
        let shape = x.shape().clone();
        let backward = move |dy: &Tensor| {
            let da = fc2.backward(&kept2, &fc2.matrix(dy)?)?;
            let dh = activation.backward(&h, &da)?;
            let dn = fc1.backward(&kept1, &dh)?;
            let dx = norm.backward(&input, &dn)?;
            Ok(vec![Some(dx.reshape(&shape)?), None])
        };
        let arguments = [x, self.fc1.weight()];
        self.fc1.session.attach(("layer-norm-mlp", &path), &arguments, y, bytes, Box::new(backward))
    }
}

impl Module for LayerNormMlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}
