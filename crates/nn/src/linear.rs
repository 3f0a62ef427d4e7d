//! `y = x·wᵀ + b`, where x is [.., inputs], w [outputs, inputs], b [outputs].
//!
//! | product | left | right |
//! |---|---|---|
//! | `y = x·wᵀ` | input, row | weight, row |
//! | `dx = dy·w` | output gradient, row | weight, column |
//! | `dw = dyᵀ·x` | output gradient, column | input, column |

use crate::projection::{Bias, Projection};
use crate::{Place, Result};
use candle_core::{Module, Tensor};
use nvfp4_recipe::KeepInput;

/// A linear layer.
///
/// Leading dimensions are flattened; how many tokens there are must fit the plan's tiles.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::Optimizer;
/// use nvfp4_nn::{AdamW, Bias, Linear, Session};
///
/// let session = Session::new(42);
/// let layer = Linear::new(&session.place(DType::F32, &Device::Cpu).child("fc"), 32, 16, Bias::Without)?;
/// session.apply(&"nvfp4".parse()?)?;
/// let mut optimizer = AdamW::new(session.parameters(), Default::default())?;
///
/// let x = Tensor::ones((16, 32), DType::F32, &Device::Cpu)?;
/// let loss = || layer.forward(&x)?.sqr()?.mean_all();
/// let before = loss()?;
/// session.backward(&before)?;
/// optimizer.step(&session.gradients()?)?;
/// session.next_step()?;
/// assert!(loss()?.to_scalar::<f32>()? < before.to_scalar::<f32>()?);
/// # Ok::<(), nvfp4_nn::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    projection: Projection,
}

impl Linear {
    /// A layer at a place.
    pub fn new(place: &Place, inputs: usize, outputs: usize, bias: Bias) -> Result<Self> {
        Linear::keeping(place, inputs, outputs, bias, KeepInput::Quantized)
    }

    /// A layer that says what it keeps of its input for the backward pass.
    pub fn keeping(place: &Place, inputs: usize, outputs: usize, bias: Bias, keep: KeepInput) -> Result<Self> {
        Ok(Linear { projection: Projection::new(place, (inputs, outputs), bias, keep)? })
    }

    /// The weight's master copy, [outputs, inputs].
    pub fn weight(&self) -> &Tensor {
        self.projection.weight()
    }

    /// The bias, one number per output.
    pub fn bias(&self) -> Option<&Tensor> {
        self.projection.bias()
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let linear = self.projection.clone();
        linear.check(x)?;
        if linear.is_plain()? {
            return linear.plain(x);
        }
        let (y, kept) = linear.forward(&linear.matrix(x)?)?;
        let (y, bytes) = (linear.shaped_like(&y, x)?, kept.byte_len());
        let shape = x.shape().clone();
        let backward = move |dy: &Tensor| {
            let dx = linear.backward(&kept, &linear.matrix(dy)?)?;
            Ok(vec![Some(dx.reshape(&shape)?), None])
        };
        let Projection { session, path, .. } = &self.projection;
        session.attach(("linear", path), &[x, self.weight()], y, bytes, Box::new(backward))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}
