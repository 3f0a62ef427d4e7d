//! All arrays of a quantized tensor: what they are, taken apart and put together again.

use crate::array::{Array, Framework, bytes, contiguous, floats};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::dlpack::DataType;
use crate::error::OrRaise;
use crate::held::Held;
use crate::part::{self, Part};
#[cfg(feature = "cuda")]
use crate::place::Place;
use crate::words::{self, DIRECTIONS, choose};
use half::{bf16, f16};
use nvfp4::{
    Direction, Directions, Elements, Fp8Description, Fp8Direction, Fp8Scales, Fp8Tile, Nvfp4Description,
    Nvfp4Direction, Options, Orientation, PlainDirection, Precision, QuantTensor, Randomness, Side, TensorRef, Values,
};
use nvfp4_recipe::QuantSpec;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// A tensor without elements, quantized by a spec: it has everything but the bytes.
pub fn prototype(spec: &QuantSpec, directions: Directions, precision: Precision) -> PyResult<QuantTensor> {
    let values = match precision {
        Precision::F32 => Values::F32(&[]),
        Precision::Bf16 => Values::Bf16(&[] as &[bf16]),
        Precision::F16 => Values::F16(&[] as &[f16]),
    };
    let quantizer = nvfp4::Quantizer::with_scales(spec, directions, |_| Some(1.0)).or_raise()?;
    let randomness = match quantizer.rounding() {
        nvfp4::Rounding::NearestEven => None,
        nvfp4::Rounding::Stochastic => Some(Randomness::At { seed: 0, offset: 0 }),
    };
    let empty = TensorRef::new(values, &[0, 0]).or_raise()?;
    quantizer.quantize_with(&empty, &Options { randomness, ..Options::default() }).or_raise()
}

/// Rows and columns of a shape.
pub fn flat(shape: &[usize]) -> (usize, usize) {
    let (&cols, leading) = shape.split_last().unwrap_or((&1, &[]));
    (leading.iter().product(), cols)
}

/// Whether both directions are one buffer.
fn shares(tensor: &QuantTensor) -> bool {
    match (tensor.row(), tensor.col()) {
        (Some(Direction::Plain(row)), Some(Direction::Plain(col))) => {
            row.orientation() != col.orientation() && {
                let address = |values: Values<'_>| match values {
                    Values::F32(x) => x.as_ptr().addr(),
                    Values::Bf16(x) => x.as_ptr().addr(),
                    Values::F16(x) => x.as_ptr().addr(),
                };
                address(row.values()) == address(col.values())
            }
        }
        _ => false,
    }
}

/// The arrays of the row direction and those of the column direction: the type of each, and what
/// else is said of it.
type Arrays<T> = (Vec<(&'static str, T)>, Vec<(&'static str, T)>);

/// The arrays that quantizing a tensor gives, as (dtype, shape), for the row direction and for the
/// column direction.
#[pyfunction]
pub fn layout(
    spec: &str,
    directions: &str,
    shape: Vec<usize>,
    dtype: &Bound<'_, PyAny>,
) -> PyResult<Arrays<Vec<usize>>> {
    let (rows, cols) = flat(&shape);
    arrays(spec, directions, dtype, |like, part, side| {
        let size = match side {
            Side::Row => (rows, cols),
            Side::Column => (cols, rows),
        };
        part::shape(like, part, size)
    })
}

/// The axis that a length follows, its step, and the multiple that steps are rounded up to.
type Extent = (&'static str, usize, usize);

/// What [`layout`] says, for tensors of every size. The rows of the column direction are the
/// columns of the tensor.
#[pyfunction]
#[pyo3(name = "_extents")]
pub fn extents(spec: &str, directions: &str, dtype: &Bound<'_, PyAny>) -> PyResult<Arrays<Vec<Extent>>> {
    arrays(spec, directions, dtype, |like, part, _| {
        let (dtype, extents) = part::extents(like, part)?;
        Some((dtype, extents.iter().map(|of| (of.axis.word(), of.step, of.multiple)).collect()))
    })
}

/// The arrays of each direction, with what is said of one.
fn arrays<T>(
    spec: &str,
    directions: &str,
    dtype: &Bound<'_, PyAny>,
    said: impl Fn(&Direction, Part, Side) -> Option<(DataType, T)>,
) -> PyResult<Arrays<T>> {
    let spec: QuantSpec = spec.parse().or_raise()?;
    let like = prototype(&spec, choose("directions", DIRECTIONS, directions)?, words::precision(dtype)?)?;
    let of = |direction: Option<&Direction>, side| {
        let Some(like) = direction else { return Vec::new() };
        let named = |part| said(like, part, side).map(|(dtype, said)| (dtype.name(), said));
        Part::of(like).iter().filter_map(|&part| named(part)).collect()
    };
    let col = like.col().filter(|_| !shares(&like));
    Ok((of(like.row(), Side::Row), of(col, Side::Column)))
}

/// Puts a tensor together from arrays as [`take_apart`] gives them.
pub fn put_together(
    spec: &str,
    shape: &[usize],
    row: Option<Vec<Bound<'_, PyAny>>>,
    column: Option<Vec<Bound<'_, PyAny>>>,
) -> PyResult<Held> {
    let spec: QuantSpec = spec.parse().or_raise()?;
    let directions = match (&row, &column) {
        (Some(_), Some(_)) => Directions::Both,
        (Some(_), None) => Directions::Row,
        (None, Some(_)) => Directions::Column,
        (None, None) => return Err(PyValueError::new_err("expected the arrays of a direction: row, column or both")),
    };
    let like = prototype(&spec, directions, Precision::F32)?;
    let (rows, cols) = flat(shape);
    let (like_row, like_col) = (like.row(), like.col());
    #[cfg(feature = "cuda")]
    if let Some(Place::Cuda(id)) = row.iter().chain(&column).flatten().next().map(place).transpose()? {
        let made = |like: Option<&Direction>, size, arrays: Option<Vec<_>>| match (like, arrays) {
            (Some(like), Some(arrays)) => cuda::direction(like, size, &arrays, id).map(Some),
            _ => Ok(None),
        };
        let (row, col) = (made(like_row, (rows, cols), row)?, made(like_col, (cols, rows), column)?);
        let tensor = nvfp4::cuda::QuantTensor::from_parts(shape, row, col).or_raise()?;
        return Ok(Held::Cuda(Arc::new(cuda::Held { tensor, id })));
    }
    let (row, col) = match (row, column, shares(&like)) {
        (Some(row), Some(column), true) if column.is_empty() => {
            let elements = Arc::new(elements(&row)?);
            let turned =
                PlainDirection::from_parts(cols, rows, Arc::clone(&elements), Orientation::ColumnMajor).or_raise()?;
            let row = PlainDirection::from_parts(rows, cols, elements, Orientation::RowMajor).or_raise()?;
            (Some(row.into()), Some(turned.into()))
        }
        (row, column, _) => {
            let made = |like: Option<&Direction>, size, arrays: Option<Vec<_>>| match (like, arrays) {
                (Some(like), Some(arrays)) => direction(like, size, &arrays).map(Some),
                _ => Ok(None),
            };
            (made(like_row, (rows, cols), row)?, made(like_col, (cols, rows), column)?)
        }
    };
    Ok(Held::Host(Arc::new(QuantTensor::from_parts(shape, row, col).or_raise()?)))
}

/// Where an array lies.
#[cfg(feature = "cuda")]
fn place(x: &Bound<'_, PyAny>) -> PyResult<Place> {
    // Not every library lends elements of a byte or less under their own type, and their device is
    // all that is asked for.
    match x.getattr("device").and_then(|device| device.getattr("type")?.extract::<String>()) {
        Ok(kind) if kind == "cuda" => Ok(Place::Cuda(x.getattr("device")?.getattr("index")?.extract()?)),
        _ => Ok(Place::Host),
    }
}

/// The numbers of a direction that is not quantized.
fn elements(arrays: &[Bound<'_, PyAny>]) -> PyResult<Elements> {
    match arrays {
        [values] => Array::of(&contiguous(values)?)?.to_elements(),
        _ => Err(PyValueError::new_err(format!("expected one array of numbers, got {}", arrays.len()))),
    }
}

fn direction(like: &Direction, (rows, cols): (usize, usize), arrays: &[Bound<'_, PyAny>]) -> PyResult<Direction> {
    match (like, arrays) {
        (Direction::Nvfp4(like), [codes, scales, stored]) => {
            let about = Nvfp4Description { rows, cols, ..*like.description() };
            let (codes, scales, stored) = (bytes(codes)?, bytes(scales)?, floats(stored)?);
            Ok(Nvfp4Direction::from_parts(about, codes, scales, stored).or_raise()?.into())
        }
        (Direction::Fp8(like), [codes, scales]) => {
            let scales = match like.tile() {
                Fp8Tile::Row32 | Fp8Tile::Column32 => Fp8Scales::E8m0(bytes(scales)?),
                Fp8Tile::Tensor | Fp8Tile::Row128 | Fp8Tile::Square128 => Fp8Scales::F32(floats(scales)?),
            };
            let about = Fp8Description { rows, cols, ..*like.description() };
            Ok(Fp8Direction::from_parts(about, bytes(codes)?, scales).or_raise()?.into())
        }
        (Direction::Plain(like), arrays) => {
            Ok(PlainDirection::from_parts(rows, cols, elements(arrays)?, like.orientation()).or_raise()?.into())
        }
        (like, arrays) => {
            let (expected, got) = (Part::of(like).len(), arrays.len());
            Err(PyValueError::new_err(format!("{like} has {expected} arrays, got {got}")))
        }
    }
}

/// The arrays of a direction, without a copy.
pub fn take_apart<'py>(
    py: Python<'py>,
    held: &Held,
    side: Side,
    framework: Framework,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let shared = side == Side::Column && held.host().is_ok_and(|tensor| shares(tensor));
    let parts = if shared { &[] } else { Part::of(&*held.twin(side)?) };
    parts.iter().map(|&part| framework.array(py, held.lend(side, part)?)).collect()
}
