//! From a plan and its state to quantizers.

use super::Scales;
use crate::plan::Plan;
use crate::role::Site;
use crate::{Error, Result};
use nvfp4::{Directions, Quantizer};

impl Plan {
    /// The quantizer of a tensor, for the directions that something reads. `scales` are those of
    /// delayed scaling at this step, which may be empty where the plan has none:
    /// `States::new(&plan)?.scales()`.
    ///
    /// ```
    /// use nvfp4::TensorRef;
    /// use nvfp4_recipe::{Capabilities, LinearSlot, Model, Module, Pass, Plan, Recipe, SingleProcess, Site, States};
    ///
    /// let mut model = Model::new();
    /// model.add(Module::linear("fc"));
    /// let plan = Plan::build(&model, &"delayed_scaling".parse::<Recipe>()?, &Capabilities::software())?;
    /// let mut states = States::new(&plan)?;
    ///
    /// let (input, x) = (Site::new("fc", LinearSlot::Input), vec![7.0f32; 64 * 32]);
    /// let x = TensorRef::new(&x[..], &[64, 32])?;
    /// let observed = plan.quantizer(&input, &states.scales())?.observe(&x, &Default::default())?;
    /// states.observe(&input, &observed)?;
    /// states.update(Pass::Forward, &SingleProcess)?;
    /// assert_eq!(states.scales().get(&input, nvfp4::Side::Row), Some(64.0));
    /// # Ok::<(), nvfp4_recipe::Error>(())
    /// ```
    pub fn quantizer(&self, site: &Site, scales: &Scales) -> Result<Quantizer> {
        let absent = |what: &str| Error::Setting(format!("{site}: {what}"));
        let spec = self.spec(site).ok_or_else(|| absent("the plan has no such tensor"))?;
        let (row, col) = self.needed(site).unwrap_or((false, false));
        let directions = Directions::of(row, col).ok_or_else(|| absent("nothing reads this tensor quantized"))?;
        Ok(Quantizer::with_scales(spec, directions, |side| scales.get(site, side))?.with_finite(self.finite()))
    }
}
