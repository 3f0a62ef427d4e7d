//! Quantized tensors in safetensors files.
//!
//! A tensor `w` is stored as `w.row.codes` (U8, [rows, ceil(cols/2)]), `w.row.scales` (F8_E4M3, [rows, ceil(cols/16)], or flat
//! if swizzled) and `w.row.global` (F32, [] or [rows]), and likewise `w.col.…`. The file's metadata holds `format = nvfp4`,
//! `version = 1` and, under `tensors`, a JSON object that gives each tensor's shape and each direction's unit, bound,
//! rotation and layout. The format is ours; checkpoints for other programs are written elsewhere.

use crate::container::{self, Checked, Container, Part, stored};
use crate::{Bound, Direction, Error, Global, GlobalScale, Layout, QuantTensor, Result, Signs, Unit, shape};
use nvfp4_spec::{BLOCK, e2m1};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const TENSORS: Container = Container { format: "nvfp4", version: "1", index: "tensors" };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorEntry {
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<DirectionEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    col: Option<DirectionEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DirectionEntry {
    unit: UnitEntry,
    #[serde(skip_serializing_if = "Option::is_none")]
    rotation: Option<u16>,
    layout: LayoutEntry,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum UnitEntry {
    Amax448,
    Amax256,
    Multiplier,
    Divisor,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum LayoutEntry {
    Linear,
    Swizzled,
}

impl DirectionEntry {
    fn of(d: &Direction) -> Self {
        DirectionEntry {
            unit: match d.unit() {
                Unit::Amax(Bound::E448) => UnitEntry::Amax448,
                Unit::Amax(Bound::E256) => UnitEntry::Amax256,
                Unit::Multiplier => UnitEntry::Multiplier,
                Unit::Divisor => UnitEntry::Divisor,
            },
            rotation: d.rotation().map(|signs| signs.0),
            layout: match d.layout() {
                Layout::Linear => LayoutEntry::Linear,
                Layout::Swizzled => LayoutEntry::Swizzled,
            },
        }
    }

    fn unit(&self) -> Unit {
        match self.unit {
            UnitEntry::Amax448 => Unit::Amax(Bound::E448),
            UnitEntry::Amax256 => Unit::Amax(Bound::E256),
            UnitEntry::Multiplier => Unit::Multiplier,
            UnitEntry::Divisor => Unit::Divisor,
        }
    }

    fn layout(&self) -> Layout {
        match self.layout {
            LayoutEntry::Linear => Layout::Linear,
            LayoutEntry::Swizzled => Layout::Swizzled,
        }
    }
}

/// Writes named tensors to a file, which is replaced if it exists.
pub fn save<'a>(path: &Path, tensors: impl IntoIterator<Item = (&'a str, &'a QuantTensor)>) -> Result<()> {
    let (mut entries, mut parts) = (BTreeMap::new(), Vec::new());
    for (name, tensor) in tensors {
        let entry = TensorEntry {
            shape: tensor.shape.clone(),
            row: tensor.row.as_ref().map(DirectionEntry::of),
            col: tensor.col.as_ref().map(DirectionEntry::of),
        };
        if entries.insert(name, entry).is_some() {
            let reason = format!("two tensors are named '{name}'");
            return Err(Error::Format { path: path.to_path_buf(), reason });
        }
        for (side, direction) in [("row", &tensor.row), ("col", &tensor.col)] {
            if let Some(d) = direction {
                parts.extend(parts_of(d, &format!("{name}.{side}")));
            }
        }
    }
    TENSORS.write(path, &parts, &entries)
}

/// A direction as safetensors tensors.
fn parts_of(d: &Direction, prefix: &str) -> [Part; 3] {
    let part = |what: &str, dtype, shape, bytes| Part { name: format!("{prefix}.{what}"), dtype, shape, bytes };
    let [codes, scales] = shapes(d.rows(), d.cols(), d.layout(), d.scales().len());
    let global_shape = match d.global() {
        Global::PerTensor(_) => vec![],
        Global::PerRow(values) => vec![values.len()],
    };
    [
        part("codes", Dtype::U8, codes, d.codes().to_vec()),
        part("scales", Dtype::F8_E4M3, scales, d.scales().to_vec()),
        part("global", Dtype::F32, global_shape, container::bytes(d.global().values())),
    ]
}

/// The shapes that a direction's codes and scales are stored in.
fn shapes(rows: usize, cols: usize, layout: Layout, scale_len: usize) -> [Vec<usize>; 2] {
    let scales = match layout {
        Layout::Linear => vec![rows, cols.div_ceil(BLOCK)],
        Layout::Swizzled => vec![scale_len],
    };
    [vec![rows, e2m1::packed_len(cols)], scales]
}

/// Reads all tensors of a file. Nothing is taken on trust: a type, shape, scale or setting that [`save`] would not have
/// written is an error that names the file and the tensor.
pub fn load(path: &Path) -> Result<BTreeMap<String, QuantTensor>> {
    TENSORS.read(path, |file, entries: BTreeMap<String, TensorEntry>| {
        entries.into_iter().map(|(name, entry)| read_tensor(file, &name, &entry).map(|tensor| (name, tensor))).collect()
    })
}

fn read_tensor(file: &SafeTensors<'_>, name: &str, entry: &TensorEntry) -> Checked<QuantTensor> {
    let named = |e: Error| format!("tensor '{name}': {e}");
    let (rows, cols) = shape::flatten(&entry.shape).map_err(named)?;
    let read = |side, rows, cols, entry: &Option<DirectionEntry>| {
        entry.as_ref().map(|e| read_direction(file, &format!("{name}.{side}"), rows, cols, e)).transpose()
    };
    let (row, col) = (read("row", rows, cols, &entry.row)?, read("col", cols, rows, &entry.col)?);
    QuantTensor::from_parts(&entry.shape, row, col).map_err(named)
}

fn read_direction(
    file: &SafeTensors<'_>,
    prefix: &str,
    rows: usize,
    cols: usize,
    entry: &DirectionEntry,
) -> Checked<Direction> {
    let named = |e: Error| format!("tensor '{prefix}': {e}");
    let layout = entry.layout();
    let scale_len = layout.scale_len(rows, cols).map_err(|e| named(e.into()))?;
    let [code_shape, scale_shape] = shapes(rows, cols, layout, scale_len);
    let codes = stored(file, &format!("{prefix}.codes"), Dtype::U8, &[&code_shape])?;
    let scales = stored(file, &format!("{prefix}.scales"), Dtype::F8_E4M3, &[&scale_shape])?;
    let global = stored(file, &format!("{prefix}.global"), Dtype::F32, &[&[], &[rows]])?;
    let scope = if global.shape().is_empty() { GlobalScale::PerTensor } else { GlobalScale::PerRow };
    Direction::from_parts(
        rows,
        cols,
        codes.data().to_vec(),
        scales.data().to_vec(),
        Global::from_values(scope, container::floats(&global)),
        entry.unit(),
        entry.rotation.map(Signs),
        layout,
    )
    .map_err(named)
}
