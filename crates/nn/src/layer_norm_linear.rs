//! `y = norm(x)·wᵀ + b` as one node: the normalized tensor exists only as codes once the forward
//! pass is over.

use crate::projection::Projection;
use crate::{Bias, Norm, NormKind, Place, Result};
use candle_core::{Module, Tensor};
use nvfp4_recipe::KeepInput;

/// A norm and a linear layer.
#[derive(Clone, Debug)]
pub struct LayerNormLinear {
    norm: Norm,
    linear: Projection,
}

impl LayerNormLinear {
    /// A layer at a place; the norm's parameters are `layer_norm_weight` and `layer_norm_bias`.
    pub fn new(place: &Place, norm: NormKind, inputs: usize, outputs: usize, bias: Bias) -> Result<Self> {
        Ok(LayerNormLinear {
            norm: Norm::named(place, "layer_norm_", norm, inputs)?,
            linear: Projection::new(place, (inputs, outputs), bias, KeepInput::Quantized)?,
        })
    }

    /// The weight's master copy, [outputs, inputs].
    pub fn weight(&self) -> &Tensor {
        self.linear.weight()
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let LayerNormLinear { norm, linear } = self.clone();
        linear.check(x)?;
        if linear.is_plain()? {
            return linear.plain(&norm.forward(x)?);
        }
        let input = linear.matrix(x)?;
        let (y, kept) = linear.forward(&norm.detached(&input)?)?;
        let (y, bytes) = (linear.shaped_like(&y, x)?, kept.byte_len());
        let shape = x.shape().clone();
        let backward = move |dy: &Tensor| {
            let dh = linear.backward(&kept, &linear.matrix(dy)?)?;
            let dx = norm.backward(&input, &dh)?;
            Ok(vec![Some(dx.reshape(&shape)?), None])
        };
        let Projection { session, path, .. } = &self.linear;
        session.attach(("layer-norm-linear", path), &[x, self.weight()], y, bytes, Box::new(backward))
    }
}

impl Module for LayerNormLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}
