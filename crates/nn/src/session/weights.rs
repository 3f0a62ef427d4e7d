//! Codes of weights: made once per step, or kept between steps.

use super::quantize::Seen;
use super::{Phase, Session};
use crate::operand::Quantized;
use crate::{Error, Parameter, Result};
use nvfp4::QuantTensor;
use nvfp4_recipe::Site;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A weight's codes, for a step.
#[derive(Clone)]
pub(super) struct Cached {
    codes: Arc<Quantized>,
    seen: Seen,
    /// Whether delayed scaling knows what was seen.
    noted: Noted,
}

#[derive(Clone, Copy, PartialEq)]
enum Noted {
    No,
    Yes,
}

impl Cached {
    /// A step is left out, and with it what delayed scaling knew.
    pub fn forget_note(&mut self) {
        self.noted = Noted::No;
    }
}

impl Session {
    /// The codes of all weights that are stored as codes ([`crate::Storage`]), by the names of
    /// their masters: [`nvfp4::save`] writes them.
    pub fn stored_weights(&self) -> Result<BTreeMap<String, QuantTensor>> {
        let stored = self.state().stored.clone();
        let codes = stored.iter().map(|(site, weight)| Ok((weight.name.clone(), self.weight(site, weight)?.codes()?)));
        codes.filter_map(|pair| pair.map(|(name, codes)| Some((name, codes?))).transpose()).collect()
    }

    /// Loads codes from a file that [`nvfp4::save`] wrote of [`Session::stored_weights`], of the
    /// same plan. They are read as they are until the end of the step, and the masters become what
    /// they stand for. All is checked before anything is changed.
    pub fn load_weights(&self, path: &Path) -> Result<()> {
        let refuse = |reason: String| Error::Checkpoint { path: path.to_path_buf(), reason };
        let mut file = nvfp4::load(path)?;
        let mut taken = Vec::new();
        let stored = self.state().stored.clone();
        for (site, weight) in stored {
            let name = &weight.name;
            let codes = file.remove(name).ok_or_else(|| refuse(format!("'{name}' is missing")))?;
            let made = self.weight(&site, &weight)?;
            let (ours, theirs) = (made.codes()?.map_or("none".to_string(), |own| own.to_string()), codes.to_string());
            if ours != theirs {
                return Err(refuse(format!(
                    "'{name}': expected {ours}, got {theirs}; apply the recipe that it was made with"
                )));
            }
            taken.push((site, weight, made.with_codes(codes)?));
        }
        for (site, weight, codes) in taken {
            weight.var.set(&codes.decoded()?)?;
            if let Some(held) = self.state().weights.get_mut(&site) {
                held.codes = Arc::new(codes);
            }
        }
        Ok(())
    }

    /// Bytes of the weights' codes that are cached for this step.
    pub fn cached_bytes(&self) -> usize {
        self.state().weights.values().map(|weight| weight.codes.code_bytes()).sum()
    }

    /// A weight's codes: made once per step. Delayed scaling takes notice when a training pass
    /// reads them, whoever had them made.
    pub(crate) fn weight(&self, site: &Site, weight: &Parameter) -> Result<Arc<Quantized>> {
        let held = self.state().weights.get(site).cloned();
        let held = match held {
            Some(held) => held,
            None => {
                let plan = self.planned()?;
                let (codes, seen) =
                    self.quantize_unnoted(&plan, site, weight.var.as_tensor(), plan.directions(site))?;
                let made = Cached { codes: Arc::new(codes), seen, noted: Noted::No };
                self.state().weights.insert(site.clone(), made.clone());
                made
            }
        };
        if held.noted == Noted::No && !self.is_evaluating() {
            self.note(site, &held.seen)?;
            if let Some(held) = self.state().weights.get_mut(site) {
                held.noted = Noted::Yes;
            }
        }
        Ok(held.codes)
    }

    /// Makes codes anew, since masters were changed other than by a step.
    pub(crate) fn forget_weights(&self) -> Result<()> {
        self.state().weights.clear();
        self.store_weights()
    }

    /// Makes the codes that are to be there between steps.
    pub(super) fn store_weights(&self) -> Result<()> {
        let stored = self.state().stored.clone();
        // No pass reads them yet.
        self.in_phase(Phase::Evaluate(self.active_generator()), || {
            stored.iter().try_for_each(|(site, weight)| self.weight(site, weight).map(|_| ()))
        })
    }
}
