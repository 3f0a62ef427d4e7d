//! From a tensor of a module to what the plan makes of it.

use super::{Phase, Session, State};
use crate::codes::{Amax, Codes};
use crate::operand::Quantized;
use crate::{Error, Result};
use candle_core::Tensor;
use nvfp4::{Directions, Quantizer, Randomness, Rounding, Side};
use nvfp4_recipe::{ColumnSource, Consumer, Family, Format, LinearSlot, Plan, QuantSpec, Site, Slot};

/// Amaxes for delayed scaling, and whose they are.
pub(super) type Seen = Vec<(Side, Amax)>;

impl Session {
    /// Quantizes a matrix as the plan says.
    pub(crate) fn quantize(&self, site: &Site, x: &Tensor) -> Result<Quantized> {
        let plan = self.planned()?;
        if plan.is_handed_over(site) {
            return self.state().handed.remove(site).ok_or_else(|| Error::NotHandedOver { site: site.to_string() });
        }
        let directions = plan.directions(site);
        // Nothing will read the other direction.
        let directions = match (self.is_evaluating(), directions) {
            (true, Some(Directions::Both)) => Some(Directions::Row),
            (_, directions) => directions,
        };
        self.quantize_in(&plan, site, x, directions)
    }

    /// Quantizes a matrix in these directions.
    pub(crate) fn quantize_in(
        &self,
        plan: &Plan,
        site: &Site,
        x: &Tensor,
        directions: Option<Directions>,
    ) -> Result<Quantized> {
        let (made, seen) = self.quantize_unnoted(plan, site, x, directions)?;
        self.note(site, &seen)?;
        Ok(made)
    }

    /// The same, without telling delayed scaling yet.
    pub(super) fn quantize_unnoted(
        &self,
        plan: &Plan,
        site: &Site,
        x: &Tensor,
        directions: Option<Directions>,
    ) -> Result<(Quantized, Seen)> {
        let spec = plan.spec(site).ok_or_else(|| self.unplanned(plan, site))?.clone();
        self.look(&site.path, &site.slot.to_string(), x)?;
        self.quantize_as(site, |side| side, spec, x, directions)
    }

    /// Lets delayed scaling remember amaxes, unless they are those of an evaluation. A pass that is
    /// run again tells nothing new, since the amaxes of a step count as one; but it may be the
    /// first to read a direction.
    pub(super) fn note(&self, site: &Site, seen: &Seen) -> Result<()> {
        let mut state = self.state();
        if matches!(state.phase, Phase::Evaluate(_)) {
            return Ok(());
        }
        for (side, amax) in seen {
            match (amax, &mut state.states) {
                (_, None) => {}
                (Amax::Cpu(amax), Some(states)) => states.record(site, *side, *amax)?,
                #[cfg(feature = "nn-cuda")]
                (Amax::Gpu(amax), Some(_)) => state.keep_amax((site.clone(), *side), amax)?,
            }
        }
        Ok(())
    }

    /// Quantizes a tensor that a module hands on, if the plan says so. Consumers of the codes find
    /// them; everything else gets the decoded values.
    pub(crate) fn hand_over(&self, site: &Site, x: &Tensor) -> Result<Tensor> {
        let plan = self.planned()?;
        let Some(entry) = plan.get(site) else { return Ok(x.clone()) };
        // Attention decodes its own codes where nobody takes them.
        let directions = plan.directions(site).or(is_coded(&entry.spec).then_some(Directions::Row));
        let made = self.quantize_in(&plan, site, x, directions)?;
        let decoded = made.decoded()?;
        if let Some(Consumer::Sites(sites)) = &entry.role.consumer {
            let mut state = self.state();
            for to in sites.iter().filter(|to| matches!(to.slot, Slot::Linear(_) | Slot::Grouped { .. })) {
                state.handed.insert(to.clone(), made.clone());
            }
        }
        Ok(decoded)
    }

    /// Whether a tensor arrives quantized.
    pub(crate) fn is_handed_over(&self, site: &Site) -> Result<bool> {
        Ok(self.planned()?.is_handed_over(site))
    }

    /// What a matrix stands for in the format of one direction, with blocks along its rows.
    pub(crate) fn decoded(&self, site: &Site, side: Side, x: &Tensor) -> Result<Tensor> {
        let plan = self.planned()?;
        let spec = plan.spec(site).ok_or_else(|| self.unplanned(&plan, site))?;
        let from_row = side == Side::Column && spec.source() == ColumnSource::RowDequantized;
        let x = if from_row { self.decoded(site, Side::Row, x)? } else { x.clone() };
        self.along_rows(site, side, spec.format(side), &x)?.decoded()
    }

    fn along_rows(&self, site: &Site, side: Side, format: Format, x: &Tensor) -> Result<Quantized> {
        let spec = QuantSpec::from(format);
        let directions = is_coded(&spec).then_some(Directions::Row);
        let (made, seen) = self.quantize_as(site, |_| side, spec, x, directions)?;
        self.note(site, &seen)?;
        Ok(made)
    }

    /// Quantizes by a spec; `of` says which direction's delayed scale a direction has.
    fn quantize_as(
        &self,
        site: &Site,
        of: impl Fn(Side) -> Side,
        spec: QuantSpec,
        x: &Tensor,
        directions: Option<Directions>,
    ) -> Result<(Quantized, Seen)> {
        let Some(directions) = directions else { return Ok((Quantized::plain(spec, x.detach()), Seen::new())) };
        let scales = self.state().scales.clone().ok_or(Error::NoPlan)?;
        let quantizer = Quantizer::with_scales(&spec, directions, |side| scales.get(site, of(side)))?;
        let randomness = match quantizer.rounding() {
            Rounding::NearestEven => None,
            Rounding::Stochastic => Some(self.draw(site)?),
        };
        let (rows, cols) = x.dims2()?;
        let observed = Codes::make(&quantizer, x, randomness).map_err(|error| match error {
            Error::Nvfp4(source) => {
                Error::Tensor { site: site.to_string(), rows, cols, spec: spec.to_string(), source: Box::new(source) }
            }
            other => other,
        })?;
        let seen = [(Side::Row, observed.row_amax), (Side::Column, observed.col_amax)];
        let seen = seen.into_iter().filter_map(|(side, amax)| Some((of(side), amax?))).collect();
        Ok((Quantized::new(spec, x.detach(), observed.codes), seen))
    }

    /// Random numbers for one quantization.
    ///
    /// A weight's codes are made when somebody first reads them, which may be an evaluation; so its
    /// random numbers do not come in turn, but from the step and its place in the plan, in the half
    /// of the offsets that the generator does not reach.
    fn draw(&self, site: &Site) -> Result<Randomness<'static>> {
        if let Slot::Linear(LinearSlot::Weight) | Slot::Grouped { slot: LinearSlot::Weight, .. } = site.slot {
            let plan = self.planned()?;
            // Without a place of its own it would draw what another weight draws.
            let index = plan.position(site).ok_or_else(|| self.unplanned(&plan, site))? as u64;
            let state = self.state();
            return Ok(Randomness::At { seed: state.seed, offset: 1 << 63 | state.step << 21 | index << 1 });
        }
        let mut state = self.state();
        let State { phase, generator, .. } = &mut *state;
        Ok(match phase {
            Phase::Train => generator.draw()?,
            Phase::Evaluate(generator) | Phase::Again(generator) => generator.draw()?,
        })
    }

    fn unplanned(&self, plan: &Plan, site: &Site) -> Error {
        Error::OtherModel {
            recipe: plan.recipe().to_string(),
            model: site.to_string(),
            plan: plan.entries().last().map_or("no tensors".to_string(), |entry| entry.role.owner.to_string()),
        }
    }
}

fn is_coded(spec: &QuantSpec) -> bool {
    spec.format(Side::Row).family() != Family::HighPrecision
}
