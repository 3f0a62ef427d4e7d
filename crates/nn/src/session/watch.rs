//! The first tensor of a step that is not finite.

use super::Session;
use crate::{Result, values};
use candle_core::Tensor;
use nvfp4::recipe::ModulePath;
use std::fmt;

/// Whether modules look for numbers that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Watch {
    /// In every tensor that they quantize or hand on: one more read of each.
    #[default]
    On,
    /// Only the loss and the gradients of parameters are looked at.
    Off,
}

/// The first tensor of a step that was not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The step, from 0.
    pub step: u64,
    /// The module, or the parameter.
    pub module: String,
    /// Which of its tensors: `input`, `weight`, `output`, `grad_output`, …
    pub statistic: String,
    /// Where in that tensor, as a matrix.
    pub index: Vec<usize>,
    /// NaN or an infinity.
    pub value: f32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { step, module, statistic, index, value } = self;
        write!(f, "{statistic} of {module} at step {step}: {value} at index {index:?}")
    }
}

impl Session {
    /// Whether modules look for numbers that are not finite.
    pub fn set_watch(&self, watch: Watch) {
        self.state().watch = watch;
    }

    /// The first tensor of this step that was not finite.
    pub fn fault(&self) -> Option<Fault> {
        self.state().fault.clone()
    }

    /// Notes the first tensor that is not finite.
    pub(crate) fn look(&self, module: &ModulePath, statistic: &str, x: &Tensor) -> Result<()> {
        let (watch, seen, step) = {
            let state = self.state();
            (state.watch, state.fault.is_some(), state.step)
        };
        if seen || (watch == Watch::Off && statistic != "gradient") {
            return Ok(());
        }
        if let Some((index, value)) = values::first_not_finite(x)? {
            let (module, statistic) = (module.to_string(), statistic.to_string());
            self.state().fault = Some(Fault { step, module, statistic, index, value });
        }
        Ok(())
    }
}
