//! `(x − mean) / √(variance + ε) · w + b` over the last dimension, or without the mean: `x / √(mean
//! of squares + ε) · w`.

use crate::{Init, Parameter, Place, Result, Session, graph, sums};
use candle_core::{Module, Tensor};

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum NormKind {
    /// LayerNorm, with weight and bias.
    #[default]
    LayerNorm,
    /// RMSNorm, with a weight.
    RmsNorm,
}

/// A norm. It is never quantized; modules that begin with one compute it inside.
#[derive(Clone, Debug)]
pub struct Norm {
    session: Session,
    weight: Parameter,
    bias: Option<Parameter>,
    epsilon: f32,
}

impl Norm {
    /// A norm over `size` features at a place, with ε = 10⁻⁵.
    pub fn new(place: &Place, kind: NormKind, size: usize) -> Result<Self> {
        Norm::named(place, "", kind, size)
    }

    /// A norm whose parameters have a prefix, inside another module.
    pub(crate) fn named(place: &Place, prefix: &str, kind: NormKind, size: usize) -> Result<Self> {
        let parameter = |name: &str, value| place.parameter(&format!("{prefix}{name}"), size, Init::Constant(value));
        let bias = match kind {
            NormKind::LayerNorm => Some(parameter("bias", 0.0)?),
            NormKind::RmsNorm => None,
        };
        Ok(Norm { session: place.session().clone(), weight: parameter("weight", 1.0)?, bias, epsilon: 1e-5 })
    }

    /// The result, outside the graph.
    pub(crate) fn detached(&self, x: &Tensor) -> Result<Tensor> {
        let inputs: Vec<Tensor> = self.inputs(x).iter().map(|x| x.detach()).collect();
        Ok(self.formula(&inputs)?)
    }

    /// Adds the gradients of weight and bias, and gives that of `x`.
    pub(crate) fn backward(&self, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        // The gradients of the parameters are sums over all tokens.
        let inputs = self.inputs(x).into_iter().map(sums::wide).collect::<candle_core::Result<Vec<_>>>()?;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let gradients = graph::pull_back(&inputs, |inputs| self.formula(inputs), &sums::wide(gradient)?)?;
        let narrow = |gradient: Tensor| gradient.to_dtype(x.dtype());
        let gradients = gradients.into_iter().map(narrow).collect::<candle_core::Result<Vec<_>>>()?;
        let parameters = [Some(&self.weight), self.bias.as_ref()].into_iter().flatten();
        for (parameter, gradient) in parameters.zip(&gradients[1..]) {
            self.session.add_to_gradient(parameter, gradient)?;
        }
        Ok(gradients[0].clone())
    }

    fn inputs<'a>(&'a self, x: &'a Tensor) -> Vec<&'a Tensor> {
        let parameters = [Some(&self.weight), self.bias.as_ref()].into_iter().flatten();
        std::iter::once(x).chain(parameters.map(|parameter| parameter.var.as_tensor())).collect()
    }

    fn formula(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        // candle's faster versions have no backward pass.
        match inputs {
            [x, weight, bias] => candle_nn::ops::layer_norm_slow(x, weight, bias, self.epsilon),
            [x, weight] => candle_nn::ops::rms_norm_slow(x, weight, self.epsilon),
            _ => unreachable!("a norm has one or two parameters"),
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let inputs: Vec<Tensor> = self.inputs(x).into_iter().cloned().collect();
        self.formula(&inputs)
    }
}
