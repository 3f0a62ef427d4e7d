//! Splits experts in one tensor into the matrices that servers read, where they are quantized.

use super::action::Action;
use super::deciding::Deciding;
use super::dialect::{Dialect, detect};
use super::file::TensorInfo;
use super::folder::{Checkpoint, Located};
use super::selection::Selection;
use super::stacked::{experts, matrices, weight};
use super::target::Target;
use crate::Result;
use std::collections::BTreeMap;

/// The checkpoint as a conversion sees it: experts that lie in one tensor are matrices of their
/// own, `experts.N.up_proj` and so on, where they are quantized. Experts that stay as they are, and
/// those that no server reads in NVFP4, stay in one tensor.
///
/// `dialect` is that of the checkpoint where it cannot be detected.
pub fn split_experts(
    checkpoint: Checkpoint,
    selection: &Selection,
    target: Target,
    dialect: Option<Dialect>,
) -> Result<Checkpoint> {
    let Some(dialect) = dialect.or_else(|| detect(&checkpoint).ok()) else { return Ok(checkpoint) };
    let rules = Deciding::new(&checkpoint, dialect, selection, target);
    let mut modules: BTreeMap<String, Vec<(String, Vec<TensorInfo>)>> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let Some(module) = experts(&tensor) else { continue };
        let split = matrices(&checkpoint, &tensor).unwrap_or_default();
        modules.entry(module).or_default().push((tensor.info.name.clone(), split));
    }
    // A server reads all projections of an expert in the same way.
    modules.retain(|_, tensors| {
        let action = |info: &TensorInfo, of: &str| {
            let tensor = checkpoint.get(of).expect("it was found there");
            rules.action(&weight(Located { file: tensor.file, info }))
        };
        let mut actions = tensors.iter().flat_map(|(of, split)| split.iter().map(|info| action(info, of)));
        let fits = |info: &TensorInfo| rules.fits(info.shape[1]);
        tensors.iter().all(|(_, split)| !split.is_empty() && split.iter().all(fits))
            && actions.any(|action| matches!(action, Action::Quantize | Action::Eight(_)))
    });
    match modules.is_empty() {
        true => Ok(checkpoint),
        false => checkpoint.replace(modules.into_values().flatten().collect()),
    }
}

/// The first checkpoint with experts split that the second has split.
pub fn split_like(first: Checkpoint, second: &Checkpoint) -> Result<Checkpoint> {
    split_where(first, |tensor| second.get(&tensor.info.name).is_none())
}

/// The checkpoint with all experts split whose order is known; GPT-OSS's, with biases, are not.
pub fn split_all(checkpoint: Checkpoint) -> Result<Checkpoint> {
    split_where(checkpoint, |_| true)
}

fn split_where(checkpoint: Checkpoint, wanted: impl Fn(&Located<'_>) -> bool) -> Result<Checkpoint> {
    let stacked = checkpoint.tensors().filter(|tensor| experts(tensor).is_some() && wanted(tensor));
    let split = |tensor: Located<'_>| Some((tensor.info.name.clone(), matrices(&checkpoint, &tensor).ok()?));
    let parts: BTreeMap<_, _> = stacked.filter_map(split).collect();
    if parts.is_empty() { Ok(checkpoint) } else { checkpoint.replace(parts) }
}
