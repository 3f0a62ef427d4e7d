//! How much each part of a conversion has to do.

use super::conversion::lay_out;
use super::dialect::Model;
use super::plan::Plan;
use super::portion::{Extent, Portion, Slice, divide};
use super::settings::Settings;
use super::shards::{Placed, Shard, Unit};
use super::target::{Activations, Target};
use super::written;
use crate::Result;
use std::collections::BTreeSet;

/// How much a part of a conversion has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Share {
    /// Which part.
    pub part: Portion,
    /// Weights that it writes, whatever happens to them.
    pub weights: usize,
    /// Weights that it quantizes.
    pub quantized: usize,
    /// Files that it writes as a whole.
    pub files: usize,
    /// Files that it writes some bytes of, which are copied when the conversion is finished.
    pub divided: usize,
    /// Bytes of the source that become its own.
    pub read: u64,
    /// Bytes of weights that other parts write and that share a tensor scale with its own: it reads
    /// them once, for their amax.
    pub shared: u64,
    /// Bytes that it writes.
    pub written: u64,
}

/// What each of so many parts of a conversion has to do. None of them is larger than its largest
/// weight would have it, or its largest file where there are at least as many files as parts.
pub fn shares(model: &Model<'_>, plan: &Plan<'_>, settings: &Settings, parts: usize) -> Result<Vec<Share>> {
    let (files, extras) = lay_out(model, plan, settings)?;
    let divided = slices(plan, &files, parts).into_iter();
    Ok(Portion::all(parts)
        .zip(divided)
        .map(|(part, slices)| share(part, &slices, plan, &files, settings.target, extras.activations))
        .collect())
}

pub(super) fn share(
    part: Portion,
    slices: &[Slice],
    plan: &Plan<'_>,
    files: &[Shard<'_>],
    target: Target,
    activations: Activations,
) -> Share {
    let own = || slices.iter().flat_map(|slice| units(files, slice));
    let items = || own().filter_map(|placed| if let Unit::Weight(i) = placed.unit { Some(i) } else { None });
    let weights: BTreeSet<usize> = items().collect();
    let foreign = needed(plan, own()).into_iter().filter(|i| !weights.contains(i));
    let count = |extent| slices.iter().filter(|slice| slice.extent == extent).count();
    let bytes = |slice: &Slice| match slice.extent {
        Extent::Whole => files[slice.file].len,
        Extent::Some => units(files, slice).iter().map(|placed| written_len(plan, placed, target, activations)).sum(),
    };
    Share {
        part,
        weights: weights.len(),
        quantized: weights.iter().filter(|&&i| plan.items[i].action.is_made()).count(),
        files: count(Extent::Whole),
        divided: count(Extent::Some),
        read: own().map(|placed| source_len(plan, placed)).sum(),
        shared: foreign.map(|i| plan.items[i].weight.byte_len()).sum(),
        written: slices.iter().map(bytes).sum(),
    }
}

/// What each of so many parts has of each file.
pub(super) fn slices(plan: &Plan<'_>, files: &[Shard<'_>], parts: usize) -> Vec<Vec<Slice>> {
    let costs = |file: &Shard<'_>| file.units.iter().map(|placed| source_len(plan, placed)).collect();
    divide(&files.iter().map(costs).collect::<Vec<_>>(), parts)
}

/// The units of a slice.
pub(super) fn units<'f, 'p>(files: &'f [Shard<'p>], slice: &Slice) -> &'f [Placed<'p>] {
    &files[slice.file].units[slice.units.clone()]
}

/// The weights whose amax is needed to write some units: those that get a tensor scale, and those
/// that share it.
pub(super) fn needed<'f, 'p: 'f>(plan: &Plan<'p>, units: impl Iterator<Item = &'f Placed<'p>>) -> BTreeSet<usize> {
    let mut needed = BTreeSet::new();
    for placed in units {
        let Unit::Weight(i) = placed.unit else { continue };
        if plan.items[i].action.needs_amax() {
            needed.insert(i);
            needed.extend(plan.items[i].group.iter().flat_map(|&g| &plan.groups[g].members));
        }
    }
    needed.retain(|&i| plan.items[i].action.needs_amax());
    needed
}

/// Bytes of the source that become a unit.
pub(super) fn source_len(plan: &Plan<'_>, placed: &Placed<'_>) -> u64 {
    match placed.unit {
        Unit::Weight(i) => plan.items[i].weight.byte_len(),
        Unit::Other(tensor) => tensor.info.len,
    }
}

/// About how many bytes a unit becomes.
fn written_len(plan: &Plan<'_>, placed: &Placed<'_>, target: Target, activations: Activations) -> u64 {
    match placed.unit {
        Unit::Weight(i) => target.parts(&plan.items[i], activations).iter().map(written::Part::len).sum(),
        Unit::Other(tensor) => tensor.info.len,
    }
}
