//! What delayed scaling is told. Amaxes of the CPU's tensors are recorded at once; those of a GPU's
//! stay there until somebody asks for the state, so that no tensor makes the host wait.

use super::State;
use crate::Result;
#[cfg(feature = "nn-cuda")]
use crate::gpu;
#[cfg(feature = "nn-cuda")]
use nvfp4::Side;
#[cfg(feature = "nn-cuda")]
use nvfp4_recipe::Site;

/// Whose amax it is.
#[cfg(feature = "nn-cuda")]
pub(super) type Whose = (Site, Side);

impl State {
    /// Records the amaxes that lie on a GPU. Waits for it if there are any.
    pub fn record_amaxes(&mut self) -> Result<()> {
        #[cfg(feature = "nn-cuda")]
        if let (Some(amaxes), Some(states)) = (&mut self.amaxes, &mut self.states) {
            for ((site, side), amax) in amaxes.settle()? {
                states.record(&site, side, amax)?;
            }
        }
        Ok(())
    }

    /// Forgets the amaxes of the step: it is left out.
    pub fn forget_amaxes(&mut self) -> Result<()> {
        self.states.iter_mut().for_each(|states| states.forget());
        #[cfg(feature = "nn-cuda")]
        self.amaxes.iter_mut().try_for_each(gpu::Amaxes::forget)?;
        Ok(())
    }

    /// Keeps an amax that lies on a GPU until [`State::record_amaxes`].
    #[cfg(feature = "nn-cuda")]
    pub fn keep_amax(&mut self, whose: Whose, amax: &gpu::Amax) -> Result<()> {
        if self.amaxes.as_ref().is_some_and(gpu::Amaxes::is_full) {
            self.record_amaxes()?;
        }
        match &mut self.amaxes {
            Some(amaxes) => amaxes.copy(amax, whose),
            none => none.insert(gpu::Amaxes::beside(amax)?).copy(amax, whose),
        }
    }
}
