//! How blocks are scaled under one amax, in a mode. Read [`scale`](mod@crate::scale) and
//! [`profile`](mod@crate::profile) first.

use crate::profile::Factor;
use crate::scale::Global;
use crate::{Mode, Precision, Profile, e2m1, stochastic};

/// How the blocks of a tensor or row are scaled: everything that depends on its amax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// The global scale.
    pub global: Global,
    /// The choices.
    pub mode: Mode,
    /// The type that elements came in, which one profile asks for.
    pub precision: Precision,
}

impl Scaling {
    /// The scaling of a tensor or row with this amax.
    pub fn new(amax: f32, mode: &Mode, precision: Precision) -> Self {
        Scaling { global: Global::new(amax, mode.rule.bound(), mode.specials), mode: *mode, precision }
    }

    /// The scale byte of a block with this largest magnitude, by the rule "six".
    pub fn block_scale(&self, block_amax: f32) -> u8 {
        self.mode.profile.block_scale(block_amax, &self.global, self.precision, self.mode.specials)
    }

    /// How the elements of a block with this scale byte are scaled.
    pub fn factor(&self, scale: u8) -> Factor {
        self.mode.profile.factor(scale, &self.global, self.precision, self.mode.specials)
    }

    /// The code of a scaled element, rounded to nearest or with a random byte.
    pub fn code(&self, y: f32, random: Option<u8>) -> u8 {
        if y.is_nan() && self.mode.profile == Profile::ModelOpt {
            return 7;
        }
        let specials = self.mode.profile.code_specials(self.mode.specials);
        random.map_or_else(|| e2m1::encode(y, specials), |r| stochastic::encode(y, r, specials))
    }
}
