//! Quantized tensors in safetensors files.
//!
//! A tensor `w` is stored direction by direction, `w.row.…` and `w.col.…`:
//!
//! | format | tensors |
//! |---|---|
//! | NVFP4 | `codes` (U8, [rows, ceil(cols/2)]), `scales` (F8_E4M3, [rows, ceil(cols/16)], or flat if swizzled), `global` (F32, [] or [rows]) |
//! | FP8 | `codes` (F8_E4M3 or F8_E5M2, a matrix), `scales` (F32, [], or a matrix of one per block) |
//! | MXFP8 | `codes` as above, `scales` (F8_E8M0, a matrix of one per block); of the column direction as they lie, not transposed |
//! | high precision | `values` (F32, BF16 or F16) as the tensor lies, once for both directions |
//!
//! The file's metadata holds `format = nvfp4`, a `version` and, under `tensors`, a JSON object that gives each tensor's shape and what its
//! directions are. Version 1 has NVFP4 alone, and is written where that is enough; version 2 has all formats. The format is ours;
//! checkpoints for other programs are written elsewhere.

use crate::{
    Bound, Direction, Elements, Error, Fp8Code, Fp8Description, Fp8Direction, Fp8Tile, GlobalScale, Layout,
    Nvfp4Description, Nvfp4Direction, Orientation, PlainDirection, QuantTensor, Result, Signs, Unit, Values, shape,
};
use half::{bf16, f16};
use nvfp4_files::container::{self, Checked, Container, Part, stored};
use nvfp4_spec::fp8::Scales;
use nvfp4_spec::{BLOCK, e2m1};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const TENSORS: Container = Container { format: "nvfp4", versions: &[NVFP4_ALONE, ALL_FORMATS], index: "tensors" };
const NVFP4_ALONE: &str = "1";
const ALL_FORMATS: &str = "2";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorEntry {
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<DirectionEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    col: Option<DirectionEntry>,
}

/// NVFP4 is what does not say its format.
#[derive(Serialize)]
#[serde(untagged)]
enum DirectionEntry {
    Nvfp4(Nvfp4Entry),
    Other(OtherEntry),
}

impl<'de> Deserialize<'de> for DirectionEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let entry = match value.get("format") {
            None => serde_json::from_value(value).map(DirectionEntry::Nvfp4),
            Some(_) => serde_json::from_value(value).map(DirectionEntry::Other),
        };
        entry.map_err(serde::de::Error::custom)
    }
}

/// What the types of the stored tensors do not tell.
#[derive(Serialize, Deserialize)]
#[serde(tag = "format", rename_all = "kebab-case", deny_unknown_fields)]
enum OtherEntry {
    Fp8 {},
    Fp8Block { tile: TileEntry },
    Mxfp8 {},
    HighPrecision { values: Place },
}

#[derive(Serialize, Deserialize)]
enum TileEntry {
    #[serde(rename = "1x128")]
    Row128,
    #[serde(rename = "128x128")]
    Square128,
}

/// Where the values of a direction are.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Place {
    /// With the direction, row by row.
    Upright,
    /// With the direction, column by column.
    Turned,
    /// With the row direction; of a column direction alone, which lies turned there.
    Row,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nvfp4Entry {
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
    /// `row` is the tensor's row direction, where this is its column direction.
    fn of(d: &Direction, row: Option<&Direction>) -> Self {
        DirectionEntry::Other(match d {
            Direction::Nvfp4(d) => return DirectionEntry::Nvfp4(Nvfp4Entry::of(d)),
            Direction::Fp8(d) => match d.tile() {
                Fp8Tile::Tensor => OtherEntry::Fp8 {},
                Fp8Tile::Row128 => OtherEntry::Fp8Block { tile: TileEntry::Row128 },
                Fp8Tile::Square128 => OtherEntry::Fp8Block { tile: TileEntry::Square128 },
                Fp8Tile::Row32 | Fp8Tile::Column32 => OtherEntry::Mxfp8 {},
            },
            Direction::Plain(d) => OtherEntry::HighPrecision { values: place(d, row) },
        })
    }
}

/// Where a direction's values are stored.
fn place(d: &PlainDirection, row: Option<&Direction>) -> Place {
    let in_row = |row: &Direction| match row {
        Direction::Plain(row) => {
            row.shares(d) && (row.orientation(), d.orientation()) == (Orientation::RowMajor, Orientation::ColumnMajor)
        }
        Direction::Nvfp4(_) | Direction::Fp8(_) => false,
    };
    match d.orientation() {
        _ if row.is_some_and(in_row) => Place::Row,
        Orientation::RowMajor => Place::Upright,
        Orientation::ColumnMajor => Place::Turned,
    }
}

impl Nvfp4Entry {
    fn of(d: &Nvfp4Direction) -> Self {
        Nvfp4Entry {
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
///
/// ```
/// use nvfp4::{Quantizer, TensorRef, load, save};
///
/// let q = Quantizer::default().quantize(&TensorRef::new(&[0.5f32; 32][..], &[2, 16])?)?;
/// let path = std::env::temp_dir().join(format!("nvfp4-example-{}.safetensors", std::process::id()));
/// save(&path, [("fc.weight", &q)])?;
/// assert_eq!(load(&path)?["fc.weight"], q);
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), nvfp4::Error>(())
/// ```
pub fn save<'a>(path: &Path, tensors: impl IntoIterator<Item = (&'a str, &'a QuantTensor)>) -> Result<()> {
    let Content { version, parts, entries } = Content::of(path, tensors)?;
    Ok(TENSORS.write(path, version, &parts, &entries)?)
}

/// The bytes of a file with this tensor alone, for what is sent and not stored. [`from_bytes`] reads them.
///
/// ```
/// use nvfp4::{Quantizer, TensorRef, from_bytes, to_bytes};
///
/// let q = Quantizer::default().quantize(&TensorRef::new(&[0.5f32; 32][..], &[2, 16])?)?;
/// assert_eq!(from_bytes(&to_bytes(&q)?)?, q);
/// # Ok::<(), nvfp4::Error>(())
/// ```
pub fn to_bytes(tensor: &QuantTensor) -> Result<Vec<u8>> {
    let path = Path::new(MEMORY);
    let Content { version, parts, entries } = Content::of(path, [(ALONE, tensor)])?;
    Ok(TENSORS.encode(path, version, &parts, &entries)?)
}

/// What errors call bytes that are in no file.
const MEMORY: &str = "the bytes of a tensor";
/// The name of a tensor that is alone.
const ALONE: &str = "tensor";

/// What a file holds.
struct Content<'a> {
    version: &'static str,
    parts: Vec<Part>,
    entries: BTreeMap<&'a str, TensorEntry>,
}

impl<'a> Content<'a> {
    /// `path` is what errors call it.
    fn of(path: &Path, tensors: impl IntoIterator<Item = (&'a str, &'a QuantTensor)>) -> Result<Self> {
        let (mut entries, mut parts) = (BTreeMap::new(), Vec::new());
        let mut version = NVFP4_ALONE;
        for (name, tensor) in tensors {
            let entry = TensorEntry {
                shape: tensor.shape.clone(),
                row: tensor.row.as_ref().map(|d| DirectionEntry::of(d, None)),
                col: tensor.col.as_ref().map(|d| DirectionEntry::of(d, tensor.row.as_ref())),
            };
            if entries.insert(name, entry).is_some() {
                let reason = format!("two tensors are named '{name}'");
                return Err(nvfp4_files::Error::content(path, reason).into());
            }
            for (side, direction, row) in [("row", &tensor.row, None), ("col", &tensor.col, tensor.row.as_ref())] {
                let prefix = format!("{name}.{side}");
                match direction {
                    None => {}
                    Some(Direction::Nvfp4(d)) => parts.extend(nvfp4_parts(d, &prefix)),
                    Some(Direction::Fp8(d)) => {
                        version = ALL_FORMATS;
                        parts.extend(fp8_parts(d, &prefix));
                    }
                    Some(Direction::Plain(d)) => {
                        version = ALL_FORMATS;
                        parts.extend((place(d, row) != Place::Row).then(|| plain_part(d, &prefix)));
                    }
                }
            }
        }
        Ok(Content { version, parts, entries })
    }
}

fn part(prefix: &str, what: &str, dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Part {
    Part { name: format!("{prefix}.{what}"), dtype, shape, bytes }
}

/// A direction in NVFP4 as safetensors tensors.
fn nvfp4_parts(d: &Nvfp4Direction, prefix: &str) -> [Part; 3] {
    let [codes, scales] = shapes(d.rows(), d.cols(), d.layout(), d.scales().len());
    let global_shape = match d.global() {
        GlobalScale::PerTensor => vec![],
        GlobalScale::PerRow => vec![d.stored().len()],
    };
    [
        part(prefix, "codes", Dtype::U8, codes, d.codes().to_vec()),
        part(prefix, "scales", Dtype::F8_E4M3, scales, d.scales().to_vec()),
        part(prefix, "global", Dtype::F32, global_shape, container::bytes(d.stored())),
    ]
}

/// A direction in FP8 or MXFP8.
fn fp8_parts(d: &Fp8Direction, prefix: &str) -> [Part; 2] {
    let (codes, scales) = fp8_shapes(d.rows(), d.cols(), d.tile());
    let code = match d.code() {
        Fp8Code::E4m3 => Dtype::F8_E4M3,
        Fp8Code::E5m2 => Dtype::F8_E5M2,
    };
    let (scale, bytes) = match d.scales() {
        Scales::F32(scales) => (Dtype::F32, container::bytes(scales)),
        Scales::E8m0(scales) => (Dtype::F8_E8M0, scales.to_vec()),
    };
    [part(prefix, "codes", code, codes, d.codes().to_vec()), part(prefix, "scales", scale, scales, bytes)]
}

/// The shapes that FP8 codes and scales are stored in: as they lie.
fn fp8_shapes(rows: usize, cols: usize, tile: Fp8Tile) -> (Vec<usize>, Vec<usize>) {
    let (rows, cols) = tile.along_k((rows, cols));
    let (down, across) = tile.grid(rows, cols);
    let scales = match tile {
        Fp8Tile::Tensor => vec![],
        Fp8Tile::Row128 | Fp8Tile::Square128 | Fp8Tile::Row32 | Fp8Tile::Column32 => vec![down, across],
    };
    (vec![rows, cols], scales)
}

/// A direction that is not quantized.
fn plain_part(d: &PlainDirection, prefix: &str) -> Part {
    let (dtype, bytes) = match d.values() {
        Values::F32(x) => (Dtype::F32, container::bytes(x)),
        Values::Bf16(x) => (Dtype::BF16, x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()),
        Values::F16(x) => (Dtype::F16, x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()),
    };
    part(prefix, "values", dtype, plain_shape(d.rows(), d.cols(), d.orientation()), bytes)
}

fn plain_shape(rows: usize, cols: usize, orientation: Orientation) -> Vec<usize> {
    match orientation {
        Orientation::RowMajor => vec![rows, cols],
        Orientation::ColumnMajor => vec![cols, rows],
    }
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
    Ok(TENSORS.read(path, read_tensors)?)
}

/// Reads the tensor of [`to_bytes`], or of a file that has one alone, as warily as [`load`] reads a file.
pub fn from_bytes(bytes: &[u8]) -> Result<QuantTensor> {
    let path = Path::new(MEMORY);
    let mut tensors = TENSORS.decode(path, bytes, read_tensors)?;
    let count = tensors.len();
    match tensors.pop_first() {
        Some((_, tensor)) if count == 1 => Ok(tensor),
        _ => Err(nvfp4_files::Error::content(path, format!("expected one tensor, got {count}")).into()),
    }
}

fn read_tensors(
    file: &SafeTensors<'_>,
    version: &str,
    entries: BTreeMap<String, TensorEntry>,
) -> Checked<BTreeMap<String, QuantTensor>> {
    let read = |(name, entry): (String, TensorEntry)| {
        let tensor = read_tensor(file, version, &name, &entry)?;
        Ok((name, tensor))
    };
    entries.into_iter().map(read).collect()
}

/// Where a direction is read from.
struct Source<'a> {
    file: &'a SafeTensors<'a>,
    version: &'a str,
    prefix: String,
    side: &'a str,
    rows: usize,
    cols: usize,
}

fn read_tensor(file: &SafeTensors<'_>, version: &str, name: &str, entry: &TensorEntry) -> Checked<QuantTensor> {
    let named = |e: Error| format!("tensor '{name}': {e}");
    let (rows, cols) = shape::flatten(&entry.shape).map_err(named)?;
    let source = |side, rows, cols| Source { file, version, prefix: format!("{name}.{side}"), side, rows, cols };
    let row = entry.row.as_ref().map(|e| source("row", rows, cols).read(e, None)).transpose()?;
    let col = entry.col.as_ref().map(|e| source("col", cols, rows).read(e, row.as_ref())).transpose()?;
    QuantTensor::from_parts(&entry.shape, row, col).map_err(named)
}

impl Source<'_> {
    /// `row` is the tensor's row direction, where this is its column direction.
    fn read(&self, entry: &DirectionEntry, row: Option<&Direction>) -> Checked<Direction> {
        let entry = match entry {
            DirectionEntry::Nvfp4(entry) => return self.nvfp4(entry).map(Direction::Nvfp4),
            DirectionEntry::Other(_) if self.version == NVFP4_ALONE => {
                return Err(self.wrong(format!("format version {NVFP4_ALONE} has nvfp4 alone")));
            }
            DirectionEntry::Other(entry) => entry,
        };
        match entry {
            OtherEntry::Fp8 {} => self.fp8(Fp8Tile::Tensor),
            OtherEntry::Fp8Block { tile: TileEntry::Row128 } => self.fp8(Fp8Tile::Row128),
            OtherEntry::Fp8Block { tile: TileEntry::Square128 } => self.fp8(Fp8Tile::Square128),
            OtherEntry::Mxfp8 {} if self.side == "row" => self.fp8(Fp8Tile::Row32),
            OtherEntry::Mxfp8 {} => self.fp8(Fp8Tile::Column32),
            OtherEntry::HighPrecision { values: Place::Upright } => self.plain(Orientation::RowMajor),
            OtherEntry::HighPrecision { values: Place::Turned } => self.plain(Orientation::ColumnMajor),
            OtherEntry::HighPrecision { values: Place::Row } => match row {
                Some(Direction::Plain(row)) if row.orientation() == Orientation::RowMajor => Ok(row.turned().into()),
                _ => Err(self.wrong("its values are the row direction's, which has none")),
            },
        }
    }

    /// What is wrong with the direction.
    fn wrong(&self, reason: impl std::fmt::Display) -> String {
        format!("tensor '{}': {reason}", self.prefix)
    }

    fn stored(&self, what: &str, dtypes: &[Dtype], shapes: &[&[usize]]) -> Checked<TensorView<'_>> {
        stored(self.file, &format!("{}.{what}", self.prefix), dtypes, shapes)
    }

    fn nvfp4(&self, entry: &Nvfp4Entry) -> Checked<Nvfp4Direction> {
        let (rows, cols, layout) = (self.rows, self.cols, entry.layout());
        let scale_len = layout.scale_len(rows, cols).map_err(|e| self.wrong(e))?;
        let [code_shape, scale_shape] = shapes(rows, cols, layout, scale_len);
        let codes = self.stored("codes", &[Dtype::U8], &[&code_shape])?;
        let scales = self.stored("scales", &[Dtype::F8_E4M3], &[&scale_shape])?;
        let global = self.stored("global", &[Dtype::F32], &[&[], &[rows]])?;
        let scope = if global.shape().is_empty() { GlobalScale::PerTensor } else { GlobalScale::PerRow };
        let (unit, rotation) = (entry.unit(), entry.rotation.map(Signs));
        let about = Nvfp4Description { rows, cols, global: scope, unit, rotation, layout };
        let (codes, scales) = (codes.data().to_vec(), scales.data().to_vec());
        Nvfp4Direction::from_parts(about, codes, scales, container::floats(&global)).map_err(|e| self.wrong(e))
    }

    fn fp8(&self, tile: Fp8Tile) -> Checked<Direction> {
        let (code_shape, scale_shape) = fp8_shapes(self.rows, self.cols, tile);
        let codes = self.stored("codes", &[Dtype::F8_E4M3, Dtype::F8_E5M2], &[&code_shape])?;
        let code = if codes.dtype() == Dtype::F8_E5M2 { Fp8Code::E5m2 } else { Fp8Code::E4m3 };
        let scales = match tile {
            Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128 => {
                Scales::F32(container::floats(&self.stored("scales", &[Dtype::F32], &[&scale_shape])?))
            }
            Fp8Tile::Row32 | Fp8Tile::Column32 => {
                Scales::E8m0(self.stored("scales", &[Dtype::F8_E8M0], &[&scale_shape])?.data().to_vec())
            }
        };
        let about = Fp8Description { rows: self.rows, cols: self.cols, code, tile };
        let direction = Fp8Direction::from_parts(about, codes.data().to_vec(), scales);
        direction.map(Direction::Fp8).map_err(|e| self.wrong(e))
    }

    fn plain(&self, orientation: Orientation) -> Checked<Direction> {
        let shape = plain_shape(self.rows, self.cols, orientation);
        let values = self.stored("values", &[Dtype::F32, Dtype::BF16, Dtype::F16], &[&shape])?;
        let halves = || values.data().as_chunks::<2>().0.iter().map(|&bytes| u16::from_le_bytes(bytes));
        let elements = match values.dtype() {
            Dtype::BF16 => Elements::Bf16(halves().map(bf16::from_bits).collect()),
            Dtype::F16 => Elements::F16(halves().map(f16::from_bits).collect()),
            _ => Elements::F32(container::floats(&values)),
        };
        let direction = PlainDirection::from_parts(self.rows, self.cols, elements, orientation);
        direction.map(Direction::Plain).map_err(|e| self.wrong(e))
    }
}
