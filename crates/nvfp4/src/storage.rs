//! Quantized tensors in safetensors files.
//!
//! A tensor `w` is stored as `w.row.codes` (U8, [rows, ceil(cols/2)]), `w.row.scales` (F8_E4M3, [rows, ceil(cols/16)], or flat
//! if swizzled) and `w.row.global` (F32, [] or [rows]), and likewise `w.col.…`. The file's metadata holds `format = nvfp4`,
//! `version = 1` and, under `tensors`, a JSON object that gives each tensor's shape and each direction's unit, bound,
//! rotation and layout. The format is ours; checkpoints for other programs are written elsewhere.

use crate::{Bound, Direction, Error, Global, Layout, QuantTensor, Result, Signs, Unit, shape};
use nvfp4_spec::BLOCK;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const FORMAT: &str = "nvfp4";
const VERSION: &str = "1";

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
            return Err(Error::Format(format!("two tensors are named '{name}'")));
        }
        for (side, direction) in [("row", &tensor.row), ("col", &tensor.col)] {
            if let Some(d) = direction {
                parts.extend(Part::of(d, &format!("{name}.{side}")));
            }
        }
    }
    let views = parts
        .iter()
        .map(|p| Ok((p.name.as_str(), TensorView::new(p.dtype, p.shape.clone(), &p.bytes)?)))
        .collect::<Result<Vec<_>>>()?;
    let json = serde_json::to_string(&entries).map_err(|e| Error::Format(e.to_string()))?;
    let metadata = [("format", FORMAT.to_string()), ("version", VERSION.to_string()), ("tensors", json)];
    let metadata: HashMap<String, String> = metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
    let bytes = safetensors::serialize(views, Some(metadata))?;
    std::fs::write(path, bytes).map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

/// A piece of a direction as a safetensors tensor.
struct Part {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Part {
    fn of(d: &Direction, prefix: &str) -> [Part; 3] {
        let part = |what: &str, dtype, shape, bytes| Part { name: format!("{prefix}.{what}"), dtype, shape, bytes };
        let scale_shape = match d.layout() {
            Layout::Linear => vec![d.rows(), d.cols().div_ceil(BLOCK)],
            Layout::Swizzled => vec![d.scales().len()],
        };
        let global_shape = match d.global() {
            Global::PerTensor(_) => vec![],
            Global::PerRow(values) => vec![values.len()],
        };
        let global = d.global().values().iter().flat_map(|x| x.to_le_bytes()).collect();
        [
            part("codes", Dtype::U8, vec![d.rows(), d.cols().div_ceil(2)], d.codes().to_vec()),
            part("scales", Dtype::F8_E4M3, scale_shape, d.scales().to_vec()),
            part("global", Dtype::F32, global_shape, global),
        ]
    }
}

/// Reads all tensors of a file, every length checked.
pub fn load(path: &Path) -> Result<BTreeMap<String, QuantTensor>> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
    let (_, header) = SafeTensors::read_metadata(&bytes)?;
    let file = SafeTensors::deserialize(&bytes)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let value = |key: &str| metadata.get(key).map(String::as_str);
    match (value("format"), value("version")) {
        (Some(FORMAT), Some(VERSION)) => {}
        (Some(FORMAT), version) => {
            let version = version.unwrap_or("none");
            return Err(Error::Format(format!("expected format version {VERSION}, got {version}")));
        }
        (format, _) => {
            return Err(Error::Format(format!("expected the format '{FORMAT}', got '{}'", format.unwrap_or("none"))));
        }
    }
    let entries: BTreeMap<String, TensorEntry> = serde_json::from_str(value("tensors").unwrap_or(""))
        .map_err(|e| Error::Format(format!("metadata 'tensors': {e}")))?;
    entries.into_iter().map(|(name, entry)| read_tensor(&file, &name, &entry).map(|tensor| (name, tensor))).collect()
}

fn read_tensor(file: &SafeTensors<'_>, name: &str, entry: &TensorEntry) -> Result<QuantTensor> {
    let (rows, cols) = shape::flatten(&entry.shape).map_err(|e| Error::Format(format!("tensor '{name}': {e}")))?;
    let read = |side, rows, cols, entry: &Option<DirectionEntry>| {
        entry.as_ref().map(|e| read_direction(file, &format!("{name}.{side}"), rows, cols, e)).transpose()
    };
    let (row, col) = (read("row", rows, cols, &entry.row)?, read("col", cols, rows, &entry.col)?);
    QuantTensor::from_parts(&entry.shape, row, col)
}

fn read_direction(
    file: &SafeTensors<'_>,
    prefix: &str,
    rows: usize,
    cols: usize,
    entry: &DirectionEntry,
) -> Result<Direction> {
    let tensor = |what: &str, dtype: Dtype| -> Result<TensorView<'_>> {
        let name = format!("{prefix}.{what}");
        let view = file.tensor(&name).map_err(|_| Error::Format(format!("tensor '{name}' is missing")))?;
        if view.dtype() != dtype {
            return Err(Error::Format(format!("tensor '{name}': expected {dtype:?}, got {:?}", view.dtype())));
        }
        Ok(view)
    };
    let global = tensor("global", Dtype::F32)?;
    let values: Vec<f32> = global.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let global = match (global.shape(), &values[..]) {
        ([], &[value]) => Global::PerTensor(value),
        _ => Global::PerRow(values),
    };
    let (codes, scales) = (tensor("codes", Dtype::U8)?, tensor("scales", Dtype::F8_E4M3)?);
    Direction::from_parts(
        rows,
        cols,
        codes.data().to_vec(),
        scales.data().to_vec(),
        global,
        entry.unit(),
        entry.rotation.map(Signs),
        entry.layout(),
    )
}
