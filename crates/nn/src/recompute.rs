//! A module whose forward pass is run again in the backward pass, instead of keeping what that
//! needs.

use crate::{Place, Result, Session};
use candle_core::{DType, Module, Tensor, Var};
use nvfp4_recipe::ModulePath;

/// A module that keeps nothing but its input.
///
/// Gradients are the same bytes as without it: the second forward pass takes the random numbers and
/// the delayed scales of the first, and the weights' codes are those of the step.
#[derive(Clone, Debug)]
pub struct Recompute<M> {
    session: Session,
    path: ModulePath,
    module: M,
    /// Makes the node depend on something even where the input does not.
    anchor: Var,
}

impl<M> Recompute<M> {
    /// Wraps a module; the place is for messages.
    pub fn new(place: &Place, module: M) -> Result<Self> {
        let (session, path) = (place.session().clone(), place.path().clone());
        Ok(Recompute { session, path, module, anchor: Var::zeros(1, DType::F32, place.device())? })
    }
}

impl<M: Module + Clone + Send + Sync + 'static> Recompute<M> {
    fn run(&self, x: &Tensor) -> Result<Tensor> {
        if self.session.is_evaluating() {
            return Ok(self.module.forward(x)?);
        }
        let (before, input) = (self.session.active_generator(), x.detach());
        let y = self.module.forward(&input)?.detach();
        let Recompute { session, module, .. } = self.clone();
        let backward = move |dy: &Tensor| {
            let x = Var::from_tensor(&input)?;
            let y = session.again(before.clone(), || module.forward(&x))?;
            let gradients = y.mul(dy)?.backward()?;
            session.collect(&gradients)?;
            Ok(vec![gradients.get(&x).cloned(), None])
        };
        let arguments = [x, self.anchor.as_tensor()];
        self.session.attach(("recompute", &self.path), &arguments, y, 0, Box::new(backward))
    }
}

impl<M: Module + Clone + Send + Sync + 'static> Module for Recompute<M> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}
