//! The first tensor of a step that is not finite.

use super::{Session, State};
#[cfg(feature = "nn-cuda")]
use crate::gpu;
use crate::{Fault, Result, values};
use candle_core::Tensor;
use nvfp4_recipe::ModulePath;

/// Whether modules look for numbers that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Watch {
    /// In every tensor that they quantize or hand on: one more read of each.
    #[default]
    On,
    /// Only the loss and the gradients of parameters are looked at.
    Off,
}

impl Session {
    /// Whether modules look for numbers that are not finite.
    pub fn set_watch(&self, watch: Watch) {
        self.state().watch = watch;
    }

    /// The first tensor of this step that was not finite. Waits for a GPU.
    pub fn fault(&self) -> Result<Option<Fault>> {
        let mut state = self.state();
        state.settle()?;
        Ok(state.fault.clone())
    }

    /// Begins to look again, with a fault that is known already. Cached codes of weights go if
    /// there was another fault: it may be a weight's, and weights are looked at when their codes
    /// are made.
    pub(super) fn begin_looking(&self, known: Option<Fault>) -> Result<()> {
        let mut state = self.state();
        state.settle()?;
        let doubtful = state.fault.is_some() && state.fault != known;
        state.look_anew()?;
        state.fault = known;
        drop(state);
        if doubtful { self.forget_weights() } else { Ok(()) }
    }

    /// Notes the first tensor that is not finite.
    pub(crate) fn look(&self, module: &ModulePath, statistic: &str, x: &Tensor) -> Result<()> {
        let mut state = self.state();
        if state.fault.is_some() || (state.watch == Watch::Off && statistic != "gradient") {
            return Ok(());
        }
        #[cfg(feature = "nn-cuda")]
        if x.device().is_cuda() && x.dtype() != candle_core::DType::F64 {
            return state.look_there((module, statistic), x);
        }
        if let Some((index, value)) = values::first_not_finite(x)? {
            let (module, statistic, step) = (module.to_string(), statistic.to_string(), state.step);
            state.fault = Some(Fault { step, module, statistic, index, value });
        }
        Ok(())
    }
}

impl State {
    /// Learns what looks at tensors of a GPU have found.
    pub fn settle(&mut self) -> Result<()> {
        #[cfg(feature = "nn-cuda")]
        if let Some(looks) = &mut self.looks
            && let Some((Look { module, statistic, shape }, at, value)) = looks.first_not_finite()?
            && self.fault.is_none()
        {
            let index = nvfp4::index_of(&shape, at);
            self.fault = Some(Fault { step: self.step, module: module.to_string(), statistic, index, value });
        }
        Ok(())
    }

    /// Forgets what was seen: a step begins.
    pub fn look_anew(&mut self) -> Result<()> {
        self.fault = None;
        #[cfg(feature = "nn-cuda")]
        self.looks.iter_mut().try_for_each(gpu::Looks::forget)?;
        Ok(())
    }

    /// A look at a tensor of a GPU, whose answer waits there.
    #[cfg(feature = "nn-cuda")]
    fn look_there(&mut self, (module, statistic): (&ModulePath, &str), x: &Tensor) -> Result<()> {
        if self.looks.as_ref().is_some_and(gpu::Looks::is_full) {
            self.settle()?;
        }
        let looks = match &mut self.looks {
            Some(looks) => looks,
            none => none.insert(gpu::Looks::on(x.device())?),
        };
        let shape = x.dims().to_vec();
        looks.look(x, Look { module: module.clone(), statistic: statistic.to_string(), shape })
    }
}

/// Which tensor was looked at.
#[cfg(feature = "nn-cuda")]
pub(crate) struct Look {
    module: ModulePath,
    statistic: String,
    shape: Vec<usize>,
}
