//! Delayed scaling whose state lies in the memory of a GPU.

use super::{Gpu, Slice, SliceMut};
use crate::format::{AmaxRules, Delayed, Rule};
use crate::{Error, Result};
use nvfp4_kernels::fp8::cuda::{Entry, update};

impl Delayed {
    /// The scales of the next step, for as many tensors as there are scales. `history` has a row for each step, of an amax per tensor.
    /// Twin of [`Delayed::update`]; a user's own amax rule is refused. Does not wait.
    pub fn update_on(
        &self,
        gpu: &Gpu,
        history: SliceMut<'_, f32>,
        scales: SliceMut<'_, f32>,
        reduced: Slice<'_, f32>,
    ) -> Result<()> {
        let Rule::Known(algorithm) = AmaxRules::default().get(self.amax())? else {
            return Err(Error::setting(format!("{:?}: a GPU knows 'max' and 'most-recent' alone", self.amax())));
        };
        let steps = scales.len() * self.history();
        nvfp4_spec::check_len("amax history (rows of an amax per tensor)", steps, history.len())?;
        Ok(update(gpu.stream(), &self.rule(algorithm), history, scales, Entry::Bulk { reduced: Some(reduced) })?)
    }
}
