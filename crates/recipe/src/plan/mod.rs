//! Plans: what every tensor of a model resolves to, checked as a whole before the first step.

mod check;
mod diff;
mod table;

pub use diff::{Change, PlanDiff, Transition};

use super::accumulators::Accumulators;
use super::attention::AttentionMode;
use super::decision::{Decision, Reason};
use super::device::{Capabilities, Execution};
use super::factory::Recipe;
use super::model::{Model, Module, Purpose};
use super::path::ModulePath;
use super::problem::{Problem, Problems};
use super::role::{Consumer, Pass, Role, Site, Slot};
use crate::{Error, Result};
use nvfp4::format::{ColumnSource, Family, Format, QuantSpec};
use nvfp4::{Directions, Finite, Side};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What every tensor of a model resolves to. Made once, checked, and never changed.
///
/// ```
/// use nvfp4_recipe::{Capabilities, LinearSlot, Model, Module, Plan, Recipe, Site};
///
/// let mut model = Model::new();
/// model.add(Module::linear("fc"));
/// let plan = Plan::build(&model, &"nvfp4".parse::<Recipe>()?, &Capabilities::software())?;
/// assert_eq!(plan.spec(&Site::new("fc", LinearSlot::Weight)).unwrap().to_string(), "nvfp4(16x16)");
/// # Ok::<(), nvfp4_recipe::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    recipe: String,
    finite: Finite,
    accumulators: Accumulators,
    purpose: Purpose,
    modules: Vec<Module>,
    /// Where each module is in the list.
    places: BTreeMap<ModulePath, usize>,
    entries: Vec<Entry>,
    index: BTreeMap<Site, usize>,
    handed: BTreeSet<Site>,
    attention: BTreeMap<ModulePath, AttentionMode>,
    saved: BTreeMap<ModulePath, Saved>,
    runs: BTreeMap<Family, Execution>,
    warnings: Vec<Warning>,
}

/// One tensor of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which tensor.
    pub role: Role,
    /// How it is quantized.
    pub spec: QuantSpec,
    /// What that follows from.
    pub reason: Reason,
}

/// What a linear layer keeps of its input for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Saved {
    /// The input itself.
    Original,
    /// The codes of the row direction, to be decoded.
    Row,
    /// The codes of the column direction.
    Column,
}

/// A warning: something that is allowed, but probably not meant.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A rule that no tensor of the model fits, or that an earlier rule always precedes.
    UnusedRule {
        /// Which rule, from 1.
        number: usize,
        /// Where it begins.
        line: usize,
        /// Its paths.
        rule: String,
    },
    /// An input that is kept quantized, although the module prefers the original.
    InputKeptQuantized {
        /// The input.
        site: Site,
        /// Its spec.
        spec: QuantSpec,
    },
    /// A note of the recipe itself.
    Note(String),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::UnusedRule { number, line, rule } => {
                write!(
                    f,
                    "rule {number} (line {line}, {rule}) decides nothing in this model: check its spelling and its place"
                )
            }
            Warning::InputKeptQuantized { site, spec } => {
                write!(f, "{site}: kept quantized, since {spec} would not give the same bytes again")
            }
            Warning::Note(text) => f.write_str(text),
        }
    }
}

impl Plan {
    /// Asks the recipe once for every tensor that the model quantizes, then checks everything. The
    /// error lists all problems.
    pub fn build(model: &Model, recipe: &Recipe, device: &Capabilities) -> Result<Plan> {
        let mut problems = check::model(model);
        let (mut entries, mut index) = (Vec::new(), BTreeMap::new());
        for role in model.roles() {
            if index.contains_key(&role.owner) {
                continue; // a path that stands twice, which was reported
            }
            match recipe.decide(&role) {
                Ok(Decision { spec, reason }) => {
                    index.insert(role.owner.clone(), entries.len());
                    entries.push(Entry { role, spec, reason });
                }
                Err(error) => problems.push(Problem::NoSpec { site: role.owner, reason: error.to_string() }),
            }
        }
        let consumers = entries.iter().filter_map(|entry: &Entry| match &entry.role.consumer {
            Some(Consumer::Sites(sites)) => Some(sites),
            None | Some(Consumer::Unknown | Consumer::HighPrecision) => None,
        });
        let handed = consumers.flatten().cloned().collect();
        let plan = Plan {
            recipe: recipe.name(),
            finite: recipe.finite(),
            accumulators: recipe.accumulators(),
            purpose: model.purpose,
            modules: model.modules.clone(),
            // Backwards: of a path that stands twice, which was reported, the first counts.
            places: model.modules.iter().enumerate().rev().map(|(i, module)| (module.path().clone(), i)).collect(),
            entries,
            index,
            handed,
            attention: BTreeMap::new(),
            saved: BTreeMap::new(),
            runs: BTreeMap::new(),
            warnings: Vec::new(),
        };
        let checked = check::plan(plan, model, recipe, device, &mut problems);
        if problems.is_empty() { Ok(checked) } else { Err(Error::Problems(Problems(problems))) }
    }

    /// The recipe's name.
    pub fn recipe(&self) -> &str {
        &self.recipe
    }

    /// What the quantizers of this plan do about NaN and infinities.
    pub fn finite(&self) -> Finite {
        self.finite
    }

    /// How precisely a GPU adds the products of FP8 operands.
    pub fn accumulators(&self) -> Accumulators {
        self.accumulators
    }

    /// All tensors, in the order of the model.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// One tensor.
    pub fn get(&self, site: &Site) -> Option<&Entry> {
        self.position(site).map(|i| &self.entries[i])
    }

    /// The place of a tensor among [`Plan::entries`].
    pub fn position(&self, site: &Site) -> Option<usize> {
        self.index.get(site).copied()
    }

    /// Whether some module hands this tensor over quantized.
    pub fn is_handed_over(&self, site: &Site) -> bool {
        self.handed.contains(site)
    }

    /// How a tensor is quantized.
    pub fn spec(&self, site: &Site) -> Option<&QuantSpec> {
        self.get(site).map(|entry| &entry.spec)
    }

    /// What an attention module computes in.
    pub fn attention(&self, path: &ModulePath) -> Option<AttentionMode> {
        self.attention.get(path).copied()
    }

    /// What a linear layer keeps of its input for the backward pass.
    pub fn saved_input(&self, path: &ModulePath) -> Option<Saved> {
        self.saved.get(path).copied()
    }

    /// How each format of the plan runs on the device.
    pub fn execution(&self) -> &BTreeMap<Family, Execution> {
        &self.runs
    }

    /// The warnings.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The directions of a tensor that are quantized: those that something reads, and the row
    /// direction where the column direction is made from it. `None` if no codes are made.
    pub fn directions(&self, site: &Site) -> Option<Directions> {
        let (row, col) = self.needed(site)?;
        let coded = |side| self.spec(site).is_some_and(|spec| spec.format(side).family() != Family::HighPrecision);
        Directions::of(row && coded(Side::Row), col && coded(Side::Column))
    }

    /// The directions of a tensor that something reads, or that the column direction is made from.
    pub(crate) fn needed(&self, site: &Site) -> Option<(bool, bool)> {
        let Entry { role, spec, .. } = self.get(site)?;
        let mut sides = self.read_sides(site);
        match &role.consumer {
            None | Some(Consumer::HighPrecision) => {}
            Some(Consumer::Sites(sites)) => sites.iter().for_each(|site| sides.extend(self.read_sides(site))),
            Some(Consumer::Unknown) => sides.extend([Side::Row, Side::Column]),
        }
        let (row, col) = (sides.contains(&Side::Row), sides.contains(&Side::Column));
        let source = col && spec.source() == ColumnSource::RowDequantized;
        Some((row || source, col))
    }

    /// The directions of a tensor that its own module reads.
    fn read_sides(&self, site: &Site) -> Vec<Side> {
        let Some(module) = self.module(&site.path) else { return Vec::new() };
        let slot = match &site.slot {
            // Attention reads the row direction of what a pass makes, and the column direction in a
            // later pass.
            Slot::Attention(slot) => match (slot.pass(), self.purpose) {
                (Pass::Forward, Purpose::Training) => return vec![Side::Row, Side::Column],
                _ => return vec![Side::Row],
            },
            // The specs of expert 0 stand for all.
            Slot::Grouped { slot, .. } => Slot::Grouped { slot: *slot, expert: 0 },
            other => other.clone(),
        };
        let products = module.products(self.purpose);
        let operands = products.iter().flat_map(|product| [&product.left, &product.right]);
        let sides: Vec<Side> = operands.filter(|operand| operand.slot == slot).map(|operand| operand.side).collect();
        match slot {
            // What a user's module does with a tensor is not known unless it says so.
            Slot::Extension(_) if sides.is_empty() => vec![Side::Row, Side::Column],
            _ => sides,
        }
    }

    /// How many tokens a module's input is padded to a multiple of: what the module says, else
    /// whole blocks in every format that it uses. The recipe is not asked again.
    pub fn alignment(&self, path: &ModulePath) -> Option<usize> {
        let module = self.module(path)?;
        let entries = self.entries.iter().filter(|entry| entry.role.path() == path);
        let formats = entries.flat_map(|entry| [Side::Row, Side::Column].map(|side| entry.spec.format(side)));
        let derived = formats.map(|format: Format| format.alignment()).max().unwrap_or(1);
        Some(module.alignment.map_or(derived, |tokens| tokens.get()))
    }

    /// Numbers of tokens, each padded for a module.
    pub fn pad(&self, path: &ModulePath, tokens: &[usize]) -> Option<Vec<usize>> {
        let alignment = self.alignment(path)?;
        tokens.iter().map(|tokens| tokens.checked_next_multiple_of(alignment)).collect()
    }

    /// A number that is the same for plans with the same tensors and specs, in every version and on
    /// every machine.
    pub fn fingerprint(&self) -> u64 {
        let lines = self.entries.iter().map(|entry| format!("{} = {}\n", entry.role, entry.spec));
        nvfp4_files::fingerprint(lines.flat_map(String::into_bytes))
    }

    fn module(&self, path: &ModulePath) -> Option<&Module> {
        self.places.get(path).map(|&i| &self.modules[i])
    }
}

/// Plans are equal if they quantize the same tensors in the same way, whatever recipe that follows
/// from.
impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let pairs = |plan: &Plan| -> Vec<(Role, QuantSpec)> {
            plan.entries.iter().map(|entry| (entry.role.clone(), entry.spec.clone())).collect()
        };
        pairs(self) == pairs(other)
    }
}
