//! Gradients of a step: those of all its micro-batches, added up.

use super::Session;
use crate::{Error, Parameter, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use nvfp4_recipe::ModulePath;

impl Session {
    /// Runs the backward pass of a loss and adds the gradients of all parameters to those of the
    /// step: call it once per micro-batch.
    ///
    /// A loss that is not finite is an error that names the step, the module and the first tensor
    /// that was not finite. So is any other such tensor, since codes may hide it from the loss.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        let value = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        self.check_finite(value)?;
        self.collect(&loss.backward()?)?;
        self.check_finite(value)
    }

    /// The gradients of the step so far, for any optimizer of candle's.
    pub fn gradients(&self) -> Result<GradStore> {
        let state = self.state();
        let mut all = GradStore::default();
        for (name, gradient) in &state.gradients {
            all.insert(&state.parameters[name], gradient.clone());
        }
        Ok(all)
    }

    /// Forgets the gradients of the step, and what delayed scaling has seen in it: a step that is
    /// left out.
    pub fn drop_gradients(&self) -> Result<()> {
        let mut state = self.state();
        state.gradients.clear();
        state.weights.values_mut().for_each(|weight| weight.forget_note());
        state.forget_amaxes()?;
        drop(state);
        self.begin_looking(None)
    }

    /// Adds the gradients of parameters that candle's own graph found to those of the step.
    pub(crate) fn collect(&self, found: &GradStore) -> Result<()> {
        for (name, var) in self.parameters() {
            if let Some(gradient) = found.get(&var) {
                self.add_to_gradient(&Parameter { name, var }, gradient)?;
            }
        }
        Ok(())
    }

    /// Changes the sum of a parameter's gradients; `None` is a sum of nothing yet.
    pub(crate) fn add_gradient(
        &self,
        parameter: &Parameter,
        add: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<()> {
        let before = self.state().gradients.get(&parameter.name).cloned();
        let sum = add(before.as_ref())?.detach();
        self.look(&ModulePath::from(parameter.name.as_str()), "gradient", &sum)?;
        self.state().gradients.insert(parameter.name.clone(), sum);
        Ok(())
    }

    /// Adds to the sum of a parameter's gradients.
    pub(crate) fn add_to_gradient(&self, parameter: &Parameter, gradient: &Tensor) -> Result<()> {
        self.add_gradient(parameter, |sum| match sum {
            None => Ok(gradient.clone()),
            Some(sum) => Ok(sum.add(gradient)?),
        })
    }

    fn check_finite(&self, loss: f64) -> Result<()> {
        let mut state = self.state();
        state.settle()?;
        match (&state.fault, loss.is_finite()) {
            (None, true) => Ok(()),
            (first, _) => Err(Error::NotFinite { step: state.step, loss, first: first.clone().map(Box::new) }),
        }
    }
}
