//! One array of a direction: what it holds, its shape and type, and the array itself, lent out.
//!
//! | direction | arrays |
//! |---|---|
//! | NVFP4 | codes, two to a byte; scale bytes; the 32-bit scale, one or one per row |
//! | FP8, MXFP8 | codes; scales |
//! | high precision | the numbers; none in the column direction where it is the row direction's memory |

use crate::dlpack::{DataType, Lent, Numbers};
use crate::error::OrRaise;
use nvfp4::{Direction, Fp8Tile, GlobalScale, Layout, Orientation, QuantTensor, Side, Values};
use nvfp4_spec::BLOCK;
use nvfp4_spec::fp8::ScaleRef;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use std::sync::Arc;

/// NVFP4 codes in a byte.
const CODES_PER_BYTE: usize = 2;

/// What an array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Codes.
    Codes,
    /// Scales of blocks, or of the whole tensor in FP8.
    Scales,
    /// The 32-bit scale of NVFP4.
    Global,
    /// Numbers as they are.
    Values,
}

impl Part {
    /// Those of a direction.
    pub fn of(direction: &Direction) -> &'static [Part] {
        match direction {
            Direction::Nvfp4(_) => &[Part::Codes, Part::Scales, Part::Global],
            Direction::Fp8(_) => &[Part::Codes, Part::Scales],
            Direction::Plain(_) => &[Part::Values],
        }
    }
}

/// What an array's length along a dimension follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Nothing: the length is 1.
    One,
    /// The rows of the direction.
    Rows,
    /// The columns of the direction.
    Cols,
}

/// The length of an array along a dimension, for directions of every size: the steps that an axis
/// has, the last one begun, in whole multiples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub axis: Axis,
    pub step: usize,
    pub multiple: usize,
}

impl Axis {
    /// Its word in Python.
    pub fn word(self) -> &'static str {
        match self {
            Axis::One => "one",
            Axis::Rows => "rows",
            Axis::Cols => "cols",
        }
    }
}

impl Extent {
    const ONE: Extent = Extent { axis: Axis::One, step: 1, multiple: 1 };

    fn of(axis: Axis, step: usize) -> Self {
        Extent { axis, step, multiple: 1 }
    }

    fn len(self, (rows, cols): (usize, usize)) -> usize {
        let along = match self.axis {
            Axis::One => 1,
            Axis::Rows => rows,
            Axis::Cols => cols,
        };
        along.div_ceil(self.step).next_multiple_of(self.multiple)
    }
}

/// The extents and the type of an array of a direction like `like`.
pub fn extents(like: &Direction, part: Part) -> Option<(DataType, Vec<Extent>)> {
    let (rows, cols) = (Extent::of(Axis::Rows, 1), Extent::of(Axis::Cols, 1));
    match (like, part) {
        (Direction::Nvfp4(_), Part::Codes) => Some((DataType::U8, vec![rows, Extent::of(Axis::Cols, CODES_PER_BYTE)])),
        (Direction::Nvfp4(d), Part::Scales) => Some((DataType::U8, scale_extents(d.layout()).to_vec())),
        (Direction::Nvfp4(d), Part::Global) => Some((
            DataType::F32,
            vec![match d.global() {
                GlobalScale::PerTensor => Extent::ONE,
                GlobalScale::PerRow => rows,
            }],
        )),
        (Direction::Fp8(d), Part::Codes) => Some((DataType::U8, along_k(d.tile(), [rows, cols]).to_vec())),
        (Direction::Fp8(d), Part::Scales) => {
            let [down, across] = along_k(d.tile(), [Axis::Rows, Axis::Cols]);
            let grid = match d.tile() {
                Fp8Tile::Tensor => vec![Extent::ONE, Extent::ONE],
                tile => {
                    let (height, width) = tile.size(1, 1);
                    vec![Extent::of(down, height), Extent::of(across, width)]
                }
            };
            let dtype = match d.scales() {
                ScaleRef::F32(_) => DataType::F32,
                ScaleRef::E8m0(_) => DataType::U8,
            };
            Some((dtype, grid))
        }
        (Direction::Plain(d), Part::Values) => {
            let extents = match d.orientation() {
                Orientation::RowMajor => vec![rows, cols],
                Orientation::ColumnMajor => vec![cols, rows],
            };
            Some((d.values().precision().into(), extents))
        }
        (Direction::Fp8(_), Part::Global | Part::Values)
        | (Direction::Nvfp4(_), Part::Values)
        | (Direction::Plain(_), Part::Codes | Part::Scales | Part::Global) => None,
    }
}

/// The shape and type of an array of a direction like `like`, of `rows` × `cols`.
pub fn shape(like: &Direction, part: Part, size: (usize, usize)) -> Option<(DataType, Vec<usize>)> {
    let (dtype, extents) = extents(like, part)?;
    Some((dtype, extents.into_iter().map(|extent| extent.len(size)).collect()))
}

/// Scale bytes as a matrix: a row of blocks for each row, in whole tiles of 128 × 4 where they are
/// swizzled.
pub fn scale_shape(layout: Layout, rows: usize, cols: usize) -> [usize; 2] {
    scale_extents(layout).map(|extent| extent.len((rows, cols)))
}

fn scale_extents(layout: Layout) -> [Extent; 2] {
    let [high, wide] = match layout {
        Layout::Linear => [1, 1],
        Layout::Swizzled => [128, 4],
    };
    [Extent { axis: Axis::Rows, step: 1, multiple: high }, Extent { axis: Axis::Cols, step: BLOCK, multiple: wide }]
}

/// What is said of rows and of columns, in the order in which a product takes them.
fn along_k<T>(tile: Fp8Tile, [rows, cols]: [T; 2]) -> [T; 2] {
    match tile.along_k((0, 1)) {
        (0, _) => [rows, cols],
        _ => [cols, rows],
    }
}

/// An array of a direction, lent out.
pub fn lend(tensor: &Arc<QuantTensor>, side: Side, part: Part) -> PyResult<Lent> {
    Lent::new(Arc::clone(tensor), |tensor| {
        let direction = tensor.direction(side).or_raise()?;
        let size = (direction.rows(), direction.cols());
        let (_, shape) = shape(direction, part, size).ok_or_else(|| absent(direction, side, part))?;
        let numbers = match (direction, part) {
            (Direction::Nvfp4(d), Part::Codes) => Numbers::Bytes(d.codes()),
            (Direction::Nvfp4(d), Part::Scales) => Numbers::Bytes(d.scales()),
            (Direction::Nvfp4(d), _) => Numbers::Values(Values::F32(d.stored())),
            (Direction::Fp8(d), Part::Codes) => Numbers::Bytes(d.codes()),
            (Direction::Fp8(d), _) => match d.scales() {
                ScaleRef::F32(scales) => Numbers::Values(Values::F32(scales)),
                ScaleRef::E8m0(scales) => Numbers::Bytes(scales),
            },
            (Direction::Plain(d), _) => Numbers::Values(d.values()),
        };
        Ok((numbers, shape))
    })
}

/// The exception about an array that a direction does not have.
pub fn absent(direction: &Direction, side: Side, part: Part) -> PyErr {
    let part = match part {
        Part::Codes => "codes",
        Part::Scales => "scales",
        Part::Global => "32-bit scale",
        Part::Values => "plain numbers",
    };
    PyAttributeError::new_err(format!("the {side} direction is {direction}, which has no {part}"))
}
