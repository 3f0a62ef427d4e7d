//! Matrices that are kept as blocks of bytes, one for each direction: what torch's quantized
//! parameters are made of.

#[cfg(feature = "cuda")]
use super::cuda;
use super::formats::Slot;
use super::{host, precision};
use crate::array::Array;
use crate::dlpack::Tensor;
use crate::error::OrRaise;
use crate::place::Place;
use crate::threads;
use crate::words::{DIRECTIONS, choose};
use half::{bf16, f16};
#[cfg(feature = "cuda")]
use nvfp4::cuda::Options as OnGpu;
use nvfp4::{Direction, Directions, Elements, Finite, Options, Precision, PreparedWeight, Side};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

type Object<'py> = Bound<'py, PyAny>;

/// Quantizes a matrix: the blocks of the directions that are asked for, row first.
#[pyfunction]
#[pyo3(name = "_quantize_blocks")]
pub fn quantize<'py>(x: Object<'py>, spec: &str, directions: &str) -> PyResult<Vec<Object<'py>>> {
    let directions = choose("directions", DIRECTIONS, directions)?;
    let (slot, array, py) = (Slot::of(spec, directions)?, Array::of_torch(&x)?, x.py());
    let maker = slot.maker([None, None], Finite::Keep)?;
    match array.place {
        Place::Host => {
            let matrix = array.tensor_ref()?;
            let blocks = threads::run(py, || {
                let made = maker.quantize_with(&matrix, &Options::default())?;
                let sides = [Side::Row, Side::Column].into_iter().filter(|&side| directions.has(side));
                sides.map(|side| made.direction(side)?.to_block()).collect::<nvfp4::Result<Vec<_>>>()
            })?;
            blocks.or_raise()?.into_iter().map(|block| host::shown_block(py, block)).collect()
        }
        #[cfg(feature = "cuda")]
        Place::Cuda(id) => {
            let blocks = cuda::Blocks::beside(&x);
            let gpu = crate::cuda::gpu(py, id)?.with_kept(Directions::Both, blocks.clone());
            let input = array.input().ok_or_else(cuda::misaligned)?;
            gpu.quantize(&maker, &input, &OnGpu::default()).or_raise()?;
            Ok(blocks.into_objects(py))
        }
    }
}

/// The values of a matrix of `rows` × `cols` whose row direction is in a block.
#[pyfunction]
#[pyo3(name = "_dequantize_block")]
pub fn dequantize<'py>(
    block: Object<'py>,
    spec: &str,
    rows: usize,
    cols: usize,
    dtype: Object<'py>,
) -> PyResult<Object<'py>> {
    let (slot, precision, py) = (Slot::of(spec, Directions::Row)?, precision(&dtype)?, block.py());
    let (like, tensor) = (row(&slot)?, Tensor::borrowed(&block)?);
    match Place::of(&tensor)? {
        Place::Host => {
            let bytes = host::bytes(&tensor)?;
            let values = threads::run(py, || -> nvfp4::Result<_> {
                let direction = like.from_block(rows, cols, bytes)?;
                Ok(match precision {
                    Precision::F32 => Elements::F32(direction.dequantize::<f32>()?),
                    Precision::Bf16 => Elements::Bf16(direction.dequantize::<bf16>()?),
                    Precision::F16 => Elements::F16(direction.dequantize::<f16>()?),
                })
            })?;
            host::shown(py, values.or_raise()?, &[rows, cols])
        }
        #[cfg(feature = "cuda")]
        Place::Cuda(id) => {
            let direction = cuda::over(like, (rows, cols), &block, id)?;
            crate::cuda::dequantize(py, &direction, id, precision, &[rows, cols])
        }
    }
}

/// A block in the order in which tensor cores or this CPU's vectors read it, for a weight that many
/// products with few rows read; none where products read the block itself: in formats other than
/// NVFP4, and on CPUs without AVX2.
#[pyfunction]
#[pyo3(name = "_prepare_block")]
pub fn prepare<'py>(block: Object<'py>, spec: &str, rows: usize, cols: usize) -> PyResult<Option<Object<'py>>> {
    let slot = Slot::of(spec, Directions::Row)?;
    let (like, tensor) = (row(&slot)?, Tensor::borrowed(&block)?);
    match (Place::of(&tensor)?, like) {
        (Place::Host, _) => {
            let (bytes, py) = (host::bytes(&tensor)?, block.py());
            let made =
                || -> nvfp4::Result<_> { Ok(PreparedWeight::new(like.in_block(rows, cols, bytes)?)?.into_bytes()) };
            threads::run(py, made)?.or_raise()?.map(|bytes| host::shown_block(py, bytes)).transpose()
        }
        #[cfg(feature = "cuda")]
        (Place::Cuda(id), Direction::Nvfp4(_)) if like.rotation().is_none() => {
            let blocks = cuda::Blocks::beside(&block);
            let gpu = crate::cuda::gpu(block.py(), id)?;
            let gpu = nvfp4::cuda::Gpu::with(gpu.stream().clone(), blocks.clone());
            gpu.prepare(&cuda::over(like, (rows, cols), &block, id)?).or_raise()?;
            Ok(blocks.into_objects(block.py()).pop())
        }
        #[cfg(feature = "cuda")]
        (Place::Cuda(_), _) => Ok(None),
    }
}

/// The format of a row direction that has a block.
fn row(slot: &Slot) -> PyResult<&Direction> {
    match slot.like(Side::Row)? {
        Direction::Plain(_) => Err(PyValueError::new_err("expected the spec of a quantized format")),
        like => Ok(like),
    }
}
