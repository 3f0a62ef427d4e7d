//! Blocks of activations that a scale does not fit.

use crate::Result;
use crate::linear::{Activations, Watch};
use crate::source::{Source, input_scale};
use nvfp4_spec::{BLOCK, Bound, e4m3};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// Blocks of 16 activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// All of them.
    pub count: u64,
    /// Those with a value beyond the largest that the activation scale can hold.
    pub saturated: u64,
    /// Those that are not zero and whose scale is below E4M3's normal numbers, so that it is coarse.
    pub underflowed: u64,
}

/// Counts them in the inputs of modules that have an activation scale.
pub(crate) struct Saturation {
    scales: HashMap<String, f32>,
    found: Mutex<BTreeMap<String, Blocks>>,
}

impl Saturation {
    /// Of a model whose activations are multiplied so.
    pub fn new(model: &Source<'_>, activations: Activations) -> Result<Self> {
        let mut scales = HashMap::new();
        if activations == Activations::AsStored {
            for weight in &model.model().weights {
                if let Some(scale) = input_scale(weight)? {
                    scales.insert(weight.module.clone(), scale);
                }
            }
        }
        Ok(Saturation { scales, found: Mutex::default() })
    }

    /// Takes over what was counted before.
    pub fn continue_from(&self, blocks: BTreeMap<String, Blocks>) {
        *self.found.lock().expect("no holder panics") = blocks;
    }

    /// What was counted.
    pub fn blocks(&self) -> BTreeMap<String, Blocks> {
        self.found.lock().expect("no holder panics").clone()
    }
}

impl Watch for Saturation {
    fn input(&self, module: &str, x: &[f32], _cols: usize) {
        let Some(&scale) = self.scales.get(module) else { return };
        let (least, largest) = (e4m3::MIN_NORMAL * 6.0 * scale, Bound::E448.six_e() * scale);
        let mut own = Blocks::default();
        for block in x.chunks(BLOCK) {
            let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            own.count += 1;
            own.saturated += u64::from(most > largest);
            own.underflowed += u64::from(most > 0.0 && most < least);
        }
        let mut found = self.found.lock().expect("no holder panics");
        let entry = found.entry(module.to_string()).or_default();
        entry.count += own.count;
        entry.saturated += own.saturated;
        entry.underflowed += own.underflowed;
    }
}
