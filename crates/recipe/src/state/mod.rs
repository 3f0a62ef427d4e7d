//! The state of delayed scaling: a history of amaxes and a scale for each tensor that asks for
//! them.
//!
//! A step is: take the [`Scales`], quantize with them and [`States::record`] each amax; at the end
//! of a pass, [`States::update`]. A recomputed forward pass takes the scales of the first time
//! again, and records nothing.

mod file;
mod quantizer;

use super::plan::{Plan, Transition};
use super::problem::{Problem, Problems};
use super::role::{Pass, Site};
use crate::{Error, Result};
use nvfp4::format::{AmaxRules, Delayed, Format, QuantSpec, Reduction};
use nvfp4::{Observed, Side};
use std::collections::BTreeMap;
use std::fmt;

/// Which directions of a tensor a scale is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Part {
    Both,
    Row,
    Column,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Both => "both",
            Part::Row => "row",
            Part::Column => "column",
        })
    }
}

/// State belongs to a tensor, never to a position in a list.
type Key = (Site, Part);

/// The state of one tensor, or of one direction of it.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedState {
    config: Delayed,
    history: Vec<f32>,
    scale: f32,
}

impl DelayedState {
    fn new(config: Delayed) -> Self {
        DelayedState { history: vec![0.0; config.history()], scale: 1.0, config }
    }

    /// How the scale is made.
    pub fn config(&self) -> &Delayed {
        &self.config
    }

    /// The amaxes: that of the step under way, then those of earlier steps, oldest first.
    pub fn history(&self) -> &[f32] {
        &self.history
    }

    /// What values are multiplied by before they become codes.
    pub fn scale(&self) -> f32 {
        self.scale
    }
}

/// Amaxes that workers reduce together: those of one pass with one configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The pass.
    pub pass: Pass,
    /// All of the configuration, so that tensors with different rules never share a group.
    pub config: Delayed,
}

/// Workers that agree on amaxes.
pub trait Collective {
    /// Replaces each amax by the largest among all workers. Called once per group and update, also
    /// by a worker that saw no tensors, so that none waits for another.
    fn max(
        &self,
        group: &Group,
        amaxes: &mut [f32],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// A single worker, with nobody to agree with.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl Collective for SingleProcess {
    fn max(&self, _: &Group, _: &mut [f32]) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

/// The scales at one moment. A recomputed pass that is given them again has the same bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales(BTreeMap<Key, f32>);

impl Scales {
    /// The scale of a direction; `None` if it is not scaled by earlier steps.
    pub fn get(&self, site: &Site, side: Side) -> Option<f32> {
        keys(site, side).into_iter().find_map(|key| self.0.get(&key).copied())
    }
}

/// The delayed-scaling state of a plan. A plan without delayed scaling has none.
///
/// ```
/// use nvfp4::Side;
/// use nvfp4_recipe::{Capabilities, LinearSlot, Model, Module, Pass, Plan, Recipe, SingleProcess, Site, States};
///
/// let mut model = Model::new();
/// model.add(Module::linear("fc"));
/// let plan = Plan::build(&model, &"delayed_scaling".parse::<Recipe>()?, &Capabilities::software())?;
/// let mut states = States::new(&plan)?;
///
/// let input = Site::new("fc", LinearSlot::Input);
/// assert_eq!(states.scales().get(&input, Side::Row), Some(1.0));
/// states.record(&input, Side::Row, 7.0)?;
/// states.update(Pass::Forward, &SingleProcess)?;
/// assert_eq!(states.scales().get(&input, Side::Row), Some(448.0 / 7.0));
/// # Ok::<(), nvfp4_recipe::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct States {
    states: BTreeMap<Key, DelayedState>,
    rules: AmaxRules,
}

impl States {
    /// Fresh state: scales of 1, histories of zeros.
    pub fn new(plan: &Plan) -> Result<Self> {
        States::with_rules(plan, AmaxRules::default())
    }

    /// Fresh state for a plan that names users' amax rules.
    pub fn with_rules(plan: &Plan, rules: AmaxRules) -> Result<Self> {
        let states = configs(plan).into_iter().map(|(key, config)| {
            rules.check(config.amax())?;
            Ok((key, DelayedState::new(config)))
        });
        Ok(States { states: states.collect::<Result<_>>()?, rules })
    }

    /// How many scales there are.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// The state of a direction.
    pub fn get(&self, site: &Site, side: Side) -> Option<&DelayedState> {
        keys(site, side).iter().find_map(|key| self.states.get(key))
    }

    /// The scales of this moment.
    pub fn scales(&self) -> Scales {
        Scales(self.states.iter().map(|(key, state)| (key.clone(), state.scale)).collect())
    }

    /// Takes note of a tensor's amax. Several tensors of one step count as one; NaN does not count.
    pub fn record(&mut self, site: &Site, side: Side, amax: f32) -> Result<()> {
        if amax < 0.0 {
            let rule = nvfp4_spec::Error::NegativeAmax { index: 0, value: amax };
            return Err(nvfp4::Error::from(rule).into());
        }
        let state = keys(site, side).into_iter().find(|key| self.states.contains_key(key));
        let state = state.and_then(|key| self.states.get_mut(&key));
        let state =
            state.ok_or_else(|| Error::Setting(format!("{site}: its {side} direction has no delayed scaling")))?;
        nvfp4_spec::fp8::delayed::record(&mut state.history, amax);
        Ok(())
    }

    /// Takes note of the amaxes that a quantizer of this tensor saw.
    pub fn observe(&mut self, site: &Site, observed: &Observed) -> Result<()> {
        for (side, amax) in [(Side::Row, observed.row_amax), (Side::Column, observed.col_amax)] {
            if let Some(amax) = amax {
                self.record(site, side, amax)?;
            }
        }
        Ok(())
    }

    /// Forgets the amaxes of the step under way: a step that is left out.
    pub fn forget(&mut self) {
        self.states.values_mut().for_each(|state| state.history[0] = 0.0);
    }

    /// Ends a pass: workers agree on the amaxes, histories roll, scales move on. On an error
    /// nothing is changed.
    pub fn update(&mut self, pass: Pass, workers: &dyn Collective) -> Result<()> {
        let mut groups: BTreeMap<Group, Vec<Key>> = BTreeMap::new();
        for (key, state) in self.states.iter().filter(|(key, _)| key.0.slot.pass() == pass) {
            groups.entry(Group { pass, config: state.config.clone() }).or_default().push(key.clone());
        }
        let mut next = Vec::new();
        for (group, keys) in groups {
            let mut amaxes: Vec<f32> = keys.iter().map(|key| self.states[key].history[0]).collect();
            if group.config.reduction() == Reduction::Max {
                workers.max(&group, &mut amaxes).map_err(Error::Collective)?;
            }
            next.extend(keys.into_iter().zip(amaxes));
        }
        for (key, amax) in next {
            let state = self.states.get_mut(&key).expect("taken from these states");
            let next = state.config.update(&mut state.history, state.scale, amax, &self.rules);
            state.scale =
                next.expect("its rule was checked when the state was made, and a history has a step at least");
        }
        Ok(())
    }

    /// Goes over to another plan: tensors whose delayed scaling is the same keep their state,
    /// others begin anew. On an error nothing is changed.
    pub fn apply(&mut self, transition: &Transition) -> Result<()> {
        let mut fresh = States::with_rules(&transition.to, self.rules.clone())?.states;
        let mut problems = Vec::new();
        for (key, state) in &self.states {
            match fresh.get_mut(key) {
                Some(new) if new.config == state.config => *new = state.clone(),
                _ if state.history[0] != 0.0 => problems.push(Problem::UnfinishedStep { site: key.0.clone() }),
                _ => {}
            }
        }
        if !problems.is_empty() {
            return Err(Error::Problems(Problems(problems)));
        }
        self.states = fresh;
        Ok(())
    }
}

/// Where the state of a direction can stand.
fn keys(site: &Site, side: Side) -> [Key; 2] {
    let part = match side {
        Side::Row => Part::Row,
        Side::Column => Part::Column,
    };
    [(site.clone(), Part::Both), (site.clone(), part)]
}

/// What a plan asks state for: one scale for both directions of a uniform spec, one per direction
/// of a split one.
fn configs(plan: &Plan) -> BTreeMap<Key, Delayed> {
    let mut configs = BTreeMap::new();
    for entry in plan.entries() {
        let formats: Vec<(Part, &Format)> = match &entry.spec {
            QuantSpec::Uniform(format) => vec![(Part::Both, format)],
            QuantSpec::Split(split) => vec![(Part::Row, split.row()), (Part::Column, split.col())],
        };
        for (part, format) in formats {
            if let Format::Delayed(config) = format {
                configs.insert((entry.role.owner.clone(), part), config.clone());
            }
        }
    }
    configs
}
