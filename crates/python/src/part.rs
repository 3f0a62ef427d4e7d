//! One array of a direction: what it holds, its shape and type, and the array itself, lent out.
//!
//! | direction | arrays |
//! |---|---|
//! | NVFP4 | codes, two to a byte; scale bytes; the 32-bit scale, one or one per row |
//! | FP8, MXFP8 | codes; scales |
//! | high precision | the numbers; none in the column direction where it is the row direction's memory |

use crate::dlpack::{DataType, Lent, Numbers};
use crate::error::OrRaise;
use nvfp4::{Direction, Layout, Orientation, QuantTensor, Side, Values};
use nvfp4_spec::fp8::ScaleRef;
use nvfp4_spec::{BLOCK, e2m1};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use std::sync::Arc;

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

/// The shape and type of an array of a direction like `like`, of `rows` × `cols`.
pub fn shape(like: &Direction, part: Part, (rows, cols): (usize, usize)) -> Option<(DataType, Vec<usize>)> {
    match (like, part) {
        (Direction::Nvfp4(_), Part::Codes) => Some((DataType::U8, vec![rows, e2m1::packed_len(cols)])),
        (Direction::Nvfp4(d), Part::Scales) => Some((DataType::U8, scale_shape(d.layout(), rows, cols).to_vec())),
        (Direction::Nvfp4(d), Part::Global) => Some((DataType::F32, vec![d.global().count(rows)])),
        (Direction::Fp8(d), Part::Codes) => {
            let (down, across) = d.tile().along_k((rows, cols));
            Some((DataType::U8, vec![down, across]))
        }
        (Direction::Fp8(d), Part::Scales) => {
            let (down, across) = d.tile().along_k((rows, cols));
            let (high, wide) = d.tile().grid(down, across);
            let dtype = match d.scales() {
                ScaleRef::F32(_) => DataType::F32,
                ScaleRef::E8m0(_) => DataType::U8,
            };
            Some((dtype, vec![high, wide]))
        }
        (Direction::Plain(d), Part::Values) => {
            let shape = match d.orientation() {
                Orientation::RowMajor => vec![rows, cols],
                Orientation::ColumnMajor => vec![cols, rows],
            };
            Some((d.values().precision().into(), shape))
        }
        (Direction::Fp8(_), Part::Global | Part::Values)
        | (Direction::Nvfp4(_), Part::Values)
        | (Direction::Plain(_), Part::Codes | Part::Scales | Part::Global) => None,
    }
}

/// Scale bytes as a matrix: a row of blocks for each row, in whole tiles of 128 × 4 where they are
/// swizzled.
pub fn scale_shape(layout: Layout, rows: usize, cols: usize) -> [usize; 2] {
    let blocks = cols.div_ceil(BLOCK);
    match layout {
        Layout::Linear => [rows, blocks],
        Layout::Swizzled => [rows.next_multiple_of(128), blocks.next_multiple_of(4)],
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
