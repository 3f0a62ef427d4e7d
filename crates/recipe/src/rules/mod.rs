//! Recipes as TOML files. `Recipe::from_toml` documents what they hold.

mod read;

use super::accumulators::Accumulators;
use super::attention::AttentionPrecision;
use super::backward::BackwardOverride;
use super::decision::{Decision, Reason};
use super::path::Glob;
use super::presets::Preset;
use super::role::{AttentionSlot, LinearSlot, Pass, Role, Slot};
use crate::Result;
use nvfp4::Finite;
use nvfp4::format::QuantSpec;
use std::fmt;

/// A rule file that was read without an error.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rules {
    pub name: String,
    pub backward: BackwardOverride,
    pub attention: Option<AttentionPrecision>,
    pub finite: Finite,
    pub accumulators: Accumulators,
    pub rules: Vec<Rule>,
    default: Action,
}

/// A rule: everything that it names must fit; what it does not name always does.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub line: usize,
    paths: Vec<Glob>,
    modules: Vec<ModuleWord>,
    slots: Vec<SlotWord>,
    pass: Option<Pass>,
    action: Action,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Spec(QuantSpec),
    Preset(Preset),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ModuleWord {
    Linear,
    Grouped,
    Attention,
    Extension,
}

#[derive(Clone, Debug, PartialEq)]
enum SlotWord {
    Linear(LinearSlot),
    Attention(AttentionSlot),
    Extension(String),
}

impl Rules {
    /// The first rule that fits decides, else the default.
    pub fn decide(&self, role: &Role) -> Result<Decision> {
        let (action, reason) = match self.rules.iter().position(|rule| rule.fits(role)) {
            Some(index) => {
                let rule = &self.rules[index];
                (&rule.action, Reason::Rule { number: index + 1, line: rule.line })
            }
            None => (&self.default, Reason::Default),
        };
        let spec = match action {
            Action::Spec(spec) => spec.clone(),
            Action::Preset(preset) => preset.spec(role)?,
        };
        Ok(Decision { spec, reason })
    }
}

impl Action {
    /// The accumulators of what it gives.
    fn accumulators(&self) -> Accumulators {
        match self {
            Action::Spec(_) => Accumulators::default(),
            Action::Preset(preset) => preset.accumulators(),
        }
    }
}

impl Rule {
    fn fits(&self, role: &Role) -> bool {
        fn one<T>(choices: &[T], fits: impl Fn(&T) -> bool) -> bool {
            choices.is_empty() || choices.iter().any(fits)
        }
        one(&self.paths, |glob| glob.matches(role.path()))
            && one(&self.modules, |module| module.fits(role.slot()))
            && one(&self.slots, |slot| slot.fits(role.slot()))
            && self.pass.is_none_or(|pass| pass == role.pass())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self.paths.iter().map(Glob::to_string).collect();
        match paths.is_empty() {
            true => f.write_str("any path"),
            false => f.write_str(&paths.join(", ")),
        }
    }
}

impl ModuleWord {
    fn fits(self, slot: &Slot) -> bool {
        matches!(
            (self, slot),
            (ModuleWord::Linear, Slot::Linear(_))
                | (ModuleWord::Grouped, Slot::Grouped { .. })
                | (ModuleWord::Attention, Slot::Attention(_))
                | (ModuleWord::Extension, Slot::Extension(_))
        )
    }
}

impl SlotWord {
    fn fits(&self, slot: &Slot) -> bool {
        match (self, slot) {
            (SlotWord::Linear(word), Slot::Linear(slot) | Slot::Grouped { slot, .. }) => word == slot,
            (SlotWord::Attention(word), Slot::Attention(slot)) => word == slot,
            (SlotWord::Extension(word), Slot::Extension(_)) => *word == slot.to_string(),
            _ => false,
        }
    }
}
