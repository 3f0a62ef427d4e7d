//! The settings of delayed scaling. The rule itself is [`nvfp4_spec::fp8::delayed`].

use super::Fp8Code;
use super::error::{Error, Result};
use super::name::Name;
use nvfp4_spec::fp8::delayed::{self, Algorithm, Entry};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// FP8 with one scale per tensor, made from the amaxes of earlier steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Delayed {
    code: Fp8Code,
    history: NonZeroU32,
    margin: u8,
    amax: AmaxRule,
    reduction: Reduction,
}

/// How the amax of a scale is taken from a history.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AmaxRule {
    /// The largest of the window.
    Max,
    /// That of the last step.
    MostRecent,
    /// A user's own rule, known by its name.
    Named(Name),
}

/// Whether workers agree on an amax before they make a scale of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduction {
    /// The largest among all workers.
    Max,
    /// Each worker's own.
    Local,
}

impl Delayed {
    /// The longest history.
    pub const MAX_HISTORY: u32 = 1 << 20;
    /// The largest margin: even for the largest binary32 amax the scale is above 0.
    pub const MAX_MARGIN: u8 = 29;

    /// A history of 1024 steps, its maximum, no margin, amaxes shared by all workers.
    pub fn new(code: Fp8Code) -> Self {
        let history = NonZeroU32::new(1024).expect("1024 is not 0");
        Delayed { code, history, margin: 0, amax: AmaxRule::Max, reduction: Reduction::Max }
    }

    /// How many steps are remembered, the one under way included.
    pub fn with_history(self, steps: u32) -> Result<Self> {
        match NonZeroU32::new(steps).filter(|_| steps <= Self::MAX_HISTORY) {
            Some(history) => Ok(Delayed { history, ..self }),
            None => Err(Error::Setting(format!("history: expected 1 to {} steps, got {steps}", Self::MAX_HISTORY))),
        }
    }

    /// Scales aim at the code's maximum divided by 2 to this power.
    pub fn with_margin(self, margin: u32) -> Result<Self> {
        match u8::try_from(margin).ok().filter(|&margin| margin <= Self::MAX_MARGIN) {
            Some(margin) => Ok(Delayed { margin, ..self }),
            None => Err(Error::Setting(format!("margin: expected at most {}, got {margin}", Self::MAX_MARGIN))),
        }
    }

    /// How the amax is taken from the history.
    pub fn with_amax(self, amax: AmaxRule) -> Self {
        Delayed { amax, ..self }
    }

    /// Whether workers agree on the amax.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        Delayed { reduction, ..self }
    }

    /// The code.
    pub fn code(&self) -> Fp8Code {
        self.code
    }

    /// How many steps are remembered.
    pub fn history(&self) -> usize {
        self.history.get() as usize
    }

    /// The power of two that the code's maximum is divided by.
    pub fn margin(&self) -> u8 {
        self.margin
    }

    /// How the amax is taken from the history.
    pub fn amax(&self) -> &AmaxRule {
        &self.amax
    }

    /// Whether workers agree on the amax.
    pub fn reduction(&self) -> Reduction {
        self.reduction
    }
}

/// How a user's rule takes an amax from a window: the last step's first, then those of older steps, oldest first.
pub type AmaxFn = fn(&[f32]) -> f32;

/// Users' rules by name.
#[derive(Clone, Debug, Default)]
pub struct AmaxRules(BTreeMap<Name, AmaxFn>);

impl AmaxRules {
    /// Adds a rule.
    pub fn with(mut self, name: Name, rule: AmaxFn) -> Self {
        self.0.insert(name, rule);
        self
    }

    /// An error if a rule is not known.
    pub fn check(&self, rule: &AmaxRule) -> Result<()> {
        self.get(rule).map(drop)
    }

    pub(crate) fn get(&self, rule: &AmaxRule) -> Result<Rule> {
        match rule {
            AmaxRule::Max => Ok(Rule::Known(Algorithm::Max)),
            AmaxRule::MostRecent => Ok(Rule::Known(Algorithm::MostRecent)),
            AmaxRule::Named(name) => self.0.get(name).copied().map(Rule::Users).ok_or_else(|| {
                Error::Setting(format!("the amax rule '{name}' is not known: pass it with `AmaxRules::with`"))
            }),
        }
    }
}

/// How an amax is taken from a window.
pub(crate) enum Rule {
    Known(Algorithm),
    Users(AmaxFn),
}

impl Delayed {
    /// The scale of the next step, and the history moved on to it. `reduced` is the amax of this step among all workers (numerics §14.4).
    ///
    /// For programs that keep histories and scales in memory of their own.
    pub fn update(&self, history: &mut [f32], scale: f32, reduced: f32, rules: &AmaxRules) -> Result<f32> {
        // A worker's own amax stands where the others saw nothing, or where the reduction says nothing.
        let entry = Entry::Bulk { reduced: Some(reduced) };
        Ok(match rules.get(self.amax())? {
            Rule::Known(algorithm) => self.rule(algorithm).update(history, scale, entry)?,
            Rule::Users(amax) => self.rule(Algorithm::Max).update_by(history, scale, entry, amax)?,
        })
    }

    pub(crate) fn rule(&self, algorithm: Algorithm) -> delayed::Delayed {
        delayed::Delayed { format: self.code(), margin: i32::from(self.margin()), algorithm }
    }
}
