//! What differs between two plans, and what a change from one to the other means.

use super::Plan;
use crate::fold::fold;
use crate::model::WeightStorage;
use crate::path::ModulePath;
use crate::problem::{Problem, Problems};
use crate::role::{LinearSlot, Site, Slot};
use crate::{Error, Result};
use nvfp4::Side;
use nvfp4::format::{Family, QuantSpec};
use std::collections::BTreeSet;
use std::fmt;

/// A tensor whose spec differs. `None` stands for a tensor that one plan does not quantize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The tensor.
    pub site: Site,
    /// Its spec in the old plan.
    pub from: Option<QuantSpec>,
    /// Its spec in the new plan.
    pub to: Option<QuantSpec>,
}

/// What differs between two plans, in the order of the new one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PlanDiff {
    /// The tensors whose specs differ.
    pub changes: Vec<Change>,
}

impl PlanDiff {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// One line per change; layers, and experts, that change alike share one.
impl fmt::Display for PlanDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |Change { site, from, to }: &Change| match (from, to) {
            (Some(from), Some(to)) => Some(format!("~ {site}: {from} → {to}")),
            (None, Some(to)) => Some(format!("+ {site}: {to}")),
            (Some(from), None) => Some(format!("- {site}: {from}")),
            (None, None) => None,
        };
        fold(self.changes.iter().filter_map(line)).iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// A change of plan that was found to be safe.
#[derive(Clone, Debug, PartialEq)]
pub struct Transition {
    pub(crate) to: Plan,
    diff: PlanDiff,
}

impl Transition {
    /// What changes.
    pub fn diff(&self) -> &PlanDiff {
        &self.diff
    }

    /// The weights whose cached codes are stale from now on.
    pub fn stale_weights(&self) -> impl Iterator<Item = &Site> {
        self.diff.changes.iter().map(|change| &change.site).filter(|site| is_weight(site))
    }
}

fn is_weight(site: &Site) -> bool {
    matches!(site.slot, Slot::Linear(LinearSlot::Weight) | Slot::Grouped { slot: LinearSlot::Weight, .. })
}

impl Plan {
    /// What differs in another plan.
    pub fn diff(&self, to: &Plan) -> PlanDiff {
        let changed = to.entries.iter().filter_map(|entry| {
            let site = entry.role.owner.clone();
            let from = self.spec(&site).cloned();
            (from.as_ref() != Some(&entry.spec)).then(|| Change { site, from, to: Some(entry.spec.clone()) })
        });
        let gone = self.entries.iter().filter(|entry| to.get(&entry.role.owner).is_none());
        let gone =
            gone.map(|entry| Change { site: entry.role.owner.clone(), from: Some(entry.spec.clone()), to: None });
        PlanDiff { changes: changed.chain(gone).collect() }
    }

    /// Checks that training can go on with another plan of the same model. Nothing is changed yet;
    /// all problems are listed.
    pub fn transition(&self, to: &Plan) -> Result<Transition> {
        let paths = |plan: &Plan| -> BTreeSet<ModulePath> { plan.modules.iter().map(|m| m.path().clone()).collect() };
        let (old, new) = (paths(self), paths(to));
        let mut problems: Vec<Problem> =
            old.symmetric_difference(&new).map(|path| Problem::OtherModel { path: path.clone() }).collect();
        let diff = self.diff(to);
        for change in &diff.changes {
            let stored = |plan: &Plan| plan.module(&change.site.path).map(|module| module.weight);
            if let (true, Some(from), Some(spec)) = (is_weight(&change.site), &change.from, &change.to)
                && stored(self) == Some(WeightStorage::Quantized)
                && from.format(Side::Row).family() != Family::HighPrecision
            {
                let (site, from, to) = (change.site.clone(), from.clone(), spec.clone());
                problems.push(Problem::StoredWeight { site, from, to });
            }
        }
        match problems.is_empty() {
            true => Ok(Transition { to: to.clone(), diff }),
            false => Err(Error::Problems(Problems(problems))),
        }
    }
}
