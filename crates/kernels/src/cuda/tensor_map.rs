//! Descriptors of matrices for the tensor copy engine (TMA).

use super::device::Device;
use super::error::{Result, check};
use cudarc::driver::sys::{self, CUtensorMapDataType};
use nvfp4_spec::Precision;

/// The type of a matrix's values.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MapValues {
    Bf16,
    F16,
    Bytes,
}

impl From<Precision> for MapValues {
    /// Those of 16 bits.
    fn from(precision: Precision) -> Self {
        if precision == Precision::F16 { MapValues::F16 } else { MapValues::Bf16 }
    }
}

/// The descriptor of a matrix at `address`, with rows `pitch` bytes apart, for
/// copies of 128 bytes × `box_rows` rows with 128-byte swizzling (16-byte chunk c of row r goes to
/// c ^ r % 8). All zeros on GPUs without the engine.
///
/// The address and the pitch are multiples of 16; the memory is not accessed.
pub(crate) fn tensor_map(
    device: Device,
    values: MapValues,
    (address, pitch): (u64, usize),
    (rows, cols): (usize, usize),
    box_rows: u32,
) -> Result<[u64; 16]> {
    if device.capability().0 < 9 {
        return Ok([0; 16]);
    }
    let (kind, columns) = match values {
        MapValues::Bf16 => (CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 64),
        MapValues::F16 => (CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 64),
        MapValues::Bytes => (CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8, 128),
    };
    let (dims, strides, boxes, steps) = ([cols as u64, rows as u64], [pitch as u64], [columns, box_rows], [1, 1]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let _current = device.enter()?;
    // SAFETY: the driver reads as many numbers as there are dimensions, and writes one description;
    // the address is not followed.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            kind,
            2,
            address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("cuTensorMapEncodeTiled", code)?;
    Ok(map.opaque)
}
