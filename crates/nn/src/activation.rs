//! Activations between the two layers of an MLP.

use crate::{Result, graph};
use candle_core::{D, Module, Tensor};

/// An activation. Gated ones take twice as many features as they give: `f(first half) · second
/// half`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// GELU, by its approximation with tanh.
    #[default]
    Gelu,
    /// GELU, by the error function.
    GeluErf,
    /// max(x, 0).
    Relu,
    /// max(x, 0)².
    SquaredRelu,
    /// x / (1 + e⁻ˣ).
    Silu,
    /// Gated GELU.
    GeGlu,
    /// Gated ReLU.
    ReGlu,
    /// Gated SiLU.
    SwiGlu,
}

impl Activation {
    /// How many features it takes for each that it gives.
    pub fn gates(self) -> usize {
        match self {
            Activation::GeGlu | Activation::ReGlu | Activation::SwiGlu => 2,
            _ => 1,
        }
    }

    /// The gradient of `x`.
    pub(crate) fn backward(self, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let mut gradients = graph::pull_back(&[x], |inputs| self.forward(&inputs[0]), gradient)?;
        Ok(gradients.remove(0))
    }
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gated = |f: Activation| {
            let halves = x.chunk(2, D::Minus1)?;
            f.forward(&halves[0])?.mul(&halves[1])
        };
        match self {
            Activation::Gelu => x.gelu(),
            Activation::GeluErf => x.gelu_erf(),
            Activation::Relu => x.relu(),
            Activation::SquaredRelu => x.relu()?.sqr(),
            Activation::Silu => x.silu(),
            Activation::GeGlu => gated(Activation::Gelu),
            Activation::ReGlu => gated(Activation::Relu),
            Activation::SwiGlu => gated(Activation::Silu),
        }
    }
}
