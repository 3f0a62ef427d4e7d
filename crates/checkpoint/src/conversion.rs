//! A conversion under way: what it was asked for, what it will write, and what it found so far.

use super::beside::Beside;
use super::dialect::Model;
use super::plan::{Item, Plan};
use super::settings::{Observer, Settings};
use super::shards::Shard;
use super::stamp::Stamp;
use super::work::Work;
use nvfp4_spec::Mode;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// A conversion under way.
pub(super) struct Conversion<'a, 'p> {
    pub settings: &'a Settings,
    pub mode: Mode,
    pub model: &'p Model<'p>,
    pub plan: &'a Plan<'p>,
    pub files: Vec<Shard<'p>>,
    /// The activation scale of every weight.
    pub inputs: BTreeMap<String, f32>,
    pub beside: Beside,
    /// The files of the source, as they were at the beginning.
    pub stamps: Vec<(PathBuf, Stamp)>,
    pub work: Work,
    pub observer: &'a dyn Observer,
    pub stop: &'a AtomicBool,
}

impl Conversion<'_, '_> {
    /// The tensor scales that a weight shares with the weights that it is joined with, if its
    /// source has others.
    pub fn rescaled(&self, item: &Item<'_>) -> Option<&[f32]> {
        self.plan.groups[item.group?].rescaled.as_deref()
    }

    /// What the first pass found: the bits of an amax, or the largest exponent of MXFP4.
    pub fn found(&self, item: &Item<'_>, matrix: usize) -> u32 {
        self.work.journal.amaxes.as_ref().expect("the first pass is over")[&item.weight.module][matrix]
    }

    pub fn amax(&self, item: &Item<'_>) -> f32 {
        f32::from_bits(self.found(item, 0))
    }
}
