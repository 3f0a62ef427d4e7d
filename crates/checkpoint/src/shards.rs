//! Where every written byte goes: files, headers and offsets, all known before the first weight is
//! read.

use super::Model;
use super::folder::Located;
use super::plan::Plan;
use super::target::{Extras, Target};
use super::written::{Part, Role};
use crate::{Error, Result};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// How the output is split into files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shards {
    /// Files of at most this many bytes of tensors, unless one weight alone is larger.
    AtMost(u64),
    /// As the source is split.
    AsSource,
}

/// What stays together: a weight or another tensor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unit<'a> {
    /// An index into the plan's items.
    Weight(usize),
    Other(Located<'a>),
}

/// The order that rows are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    AsStored,
    /// The halves of every attention head of this many rows, interleaved.
    Interleaved(usize),
}

/// What floats that are not quantized become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cast {
    None,
    F32,
}

/// A unit with the offsets of its parts in the file.
#[derive(Clone, Debug)]
pub(super) struct Placed<'a> {
    pub unit: Unit<'a>,
    pub offsets: BTreeMap<Role, u64>,
    pub order: RowOrder,
    pub cast: Cast,
}

/// A file to be written.
#[derive(Clone, Debug)]
pub(super) struct Shard<'a> {
    pub file: String,
    /// Its first bytes: the header's length, JSON and padding.
    pub header: Vec<u8>,
    pub len: u64,
    pub units: Vec<Placed<'a>>,
    /// Names of its tensors.
    pub names: Vec<String>,
    /// Tensors that come from no weight, at their offsets.
    pub constants: Vec<(u64, Vec<u8>)>,
}

/// Units with the tensors that they become.
type Units<'a> = Vec<(Unit<'a>, Vec<Part>)>;

/// Lays out all files. Two tensors of one name would be one entry over the bytes of both.
pub(super) fn lay_out<'a>(
    model: &Model<'a>,
    plan: &Plan<'a>,
    target: Target,
    extras: Extras,
    shards: Shards,
) -> Result<Vec<Shard<'a>>> {
    let first: BTreeMap<&str, usize> =
        plan.items.iter().enumerate().map(|(i, item)| (item.weight.stored.parts()[0].info.name.as_str(), i)).collect();
    let others: BTreeMap<&str, Located<'a>> = model.others.iter().map(|t| (t.info.name.as_str(), *t)).collect();
    let mut files: Vec<(String, Units<'a>)> = Vec::new();
    let mut names = BTreeSet::new();
    let (mut room, mut source) = (0, None);
    for tensor in model.checkpoint.tensors() {
        let name = tensor.info.name.as_str();
        let (unit, parts) = match (first.get(name), others.get(name)) {
            (Some(&i), _) => {
                let mut parts = target.parts(&plan.items[i], extras.activations);
                parts.extend(target.missing_kv_scale(&plan.items[i].weight.module, model.checkpoint, extras.kv));
                (Unit::Weight(i), parts)
            }
            (None, Some(&other)) => match target.other(&other, extras.kv) {
                Some(part) => (Unit::Other(other), vec![part]),
                None => continue,
            },
            (None, None) => continue,
        };
        if let Some(twice) = parts.iter().find(|part| !names.insert(part.name.clone())) {
            return Err(Error::Refused(format!(
                "the source already has a tensor '{}', which the conversion would write; remove or rename it there",
                twice.name
            )));
        }
        let len: u64 = parts.iter().map(Part::len).sum();
        let path = tensor.file.path();
        let new = match shards {
            Shards::AtMost(_) => files.is_empty() || len > room,
            Shards::AsSource => source != Some(path),
        };
        if new {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            files.push((name, Vec::new()));
            (room, source) = (if let Shards::AtMost(most) = shards { most } else { 0 }, Some(path));
        }
        room = room.saturating_sub(len);
        files.last_mut().expect("the first unit opens a file").1.push((unit, parts));
    }
    let count = files.len();
    let file_name = |i: usize, source: String| match (shards, count) {
        (Shards::AsSource, _) => source,
        (_, 1) => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    Ok(files.into_iter().enumerate().map(|(i, (source, units))| shard(file_name(i, source), units)).collect())
}

/// Orders tensors as the safetensors library does, widest type first and then by name, and gives
/// each its place.
fn shard(file: String, units: Units<'_>) -> Shard<'_> {
    let mut parts: Vec<(usize, &Part)> =
        units.iter().enumerate().flat_map(|(u, (_, parts))| parts.iter().map(move |p| (u, p))).collect();
    parts.sort_by(|(_, a), (_, b)| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let (header, starts, len) = header(parts.iter().map(|(_, p)| (p.name.as_str(), p.dtype, &p.shape[..], p.len())));
    let mut offsets = vec![BTreeMap::new(); units.len()];
    for ((u, part), start) in parts.iter().zip(&starts) {
        offsets[*u].insert(part.role, *start);
    }
    let names = parts.iter().map(|(_, p)| p.name.clone()).collect();
    let cast = |unit: &Unit<'_>, parts: &[Part]| match unit {
        Unit::Other(tensor) if parts[0].dtype != tensor.info.dtype => Cast::F32,
        Unit::Other(_) | Unit::Weight(_) => Cast::None,
    };
    let units = units.into_iter().zip(offsets).map(|((unit, parts), offsets)| Placed {
        unit,
        offsets,
        order: RowOrder::AsStored,
        cast: cast(&unit, &parts),
    });
    Shard { file, header, len, units: units.collect(), names, constants: Vec::new() }
}

/// The first bytes of a file of tensors in this order; where each tensor starts; and how long the
/// file is.
pub(super) fn header<'s>(
    tensors: impl Iterator<Item = (&'s str, Dtype, &'s [usize], u64)>,
) -> (Vec<u8>, Vec<u64>, u64) {
    let mut entries = Map::new();
    // ModelOpt stays the producer in the configuration, as servers ask for that name; this says who
    // wrote the file.
    let writer = concat!("nvfp4 ", env!("CARGO_PKG_VERSION"));
    entries.insert("__metadata__".to_string(), json!({ "format": "pt", "written_by": writer }));
    let (mut at, mut starts) = (0, Vec::new());
    for (name, dtype, shape, len) in tensors {
        starts.push(at);
        let entry = json!({ "dtype": format!("{dtype:?}"), "shape": shape, "data_offsets": [at, at + len] });
        let twice = entries.insert(name.to_string(), entry);
        debug_assert!(twice.is_none(), "two tensors are called '{name}'");
        at += len;
    }
    let mut json = serde_json::to_vec(&Value::Object(entries)).expect("a map of strings and numbers is JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    let front = header.len() as u64;
    (header, starts.into_iter().map(|s| s + front).collect(), front + at)
}

/// Bytes of the tensors in some files.
pub(super) fn byte_len(shards: &[Shard<'_>]) -> u64 {
    shards.iter().map(|s| s.len - s.header.len() as u64).sum()
}

/// The index of several files.
pub(super) fn index(shards: &[Shard<'_>]) -> Value {
    let total = byte_len(shards);
    let map: BTreeMap<&str, &str> =
        shards.iter().flat_map(|s| s.names.iter().map(|n| (n.as_str(), s.file.as_str()))).collect();
    json!({ "metadata": { "total_size": total }, "weight_map": map })
}

/// What the index of these files is called; one file needs none.
pub(super) fn index_name(shards: &[Shard<'_>]) -> Option<String> {
    let single = shards.len() == 1;
    let own = shards.first().map(|s| s.file.as_str()) == Some("model.safetensors");
    (!single || !own).then(|| format!("model{}", super::folder::INDEX_SUFFIX))
}
