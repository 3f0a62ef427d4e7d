//! How the library computes products of one kind.
//!
//! It is column-major: a row-major matrix is a transposed one there, so its left operand is B, its
//! right operand A and its result N × M.

use super::library::*;
use super::{Call, Factors, ScaleMode, Side, Values};
use crate::cuda::{Error, Result};
use nvfp4_spec::Precision;
use nvfp4_spec::fp8::Format;
use nvfp4_spec::gemm::Accumulator;
use std::ffi::{c_int, c_void};

/// The most scratch memory of a product.
const WORKSPACE: usize = 32 << 20;

/// Everything about a product but its addresses, of which only the alignments count.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    sizes: [usize; 3],
    /// B and A, in the library's order.
    sides: [SideKey; 2],
    precision: Precision,
    /// Of B, A, C and the outputs.
    alignments: [u32; 4],
    factors_in_memory: bool,
    bias: bool,
    fast: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct SideKey {
    values: Values,
    pitch: usize,
    transposed: bool,
    scales: Option<ScaleMode>,
}

impl Key {
    pub fn new(call: &Call) -> Self {
        let side = |side: &Side| SideKey {
            values: side.values,
            pitch: side.pitch,
            transposed: side.transposed,
            scales: side.scales.map(|(mode, _)| mode),
        };
        Key {
            sizes: call.sizes,
            sides: [side(&call.b), side(&call.a)],
            precision: call.precision,
            alignments: [call.b.address, call.a.address, call.c, call.out]
                .map(|address| 1 << address.trailing_zeros().min(8)),
            factors_in_memory: matches!(call.factors, Factors::Memory(_)),
            bias: call.bias.is_some(),
            fast: call.accumulator == Accumulator::Fast,
        }
    }
}

/// What the library is told.
pub(super) struct Plan {
    pub operation: Descriptor,
    pub b: Descriptor,
    pub a: Descriptor,
    pub out: Descriptor,
    pub algorithm: Algorithm,
    pub workspace: usize,
}

fn type_of(values: Values) -> c_int {
    match values {
        Values::Bf16 => R_16BF,
        Values::Fp8(Format::E4m3) => R_8F_E4M3,
        Values::Fp8(Format::E5m2) => R_8F_E5M2,
        Values::E2m1 => R_4F_E2M1,
    }
}

fn output_type(precision: Precision) -> c_int {
    match precision {
        Precision::F32 => R_32F,
        Precision::Bf16 => R_16BF,
        Precision::F16 => R_16F,
    }
}

/// The library's numbers for what scales belong to. Blocks came with CUDA 12.8, rows and squares of
/// 128 with CUDA 12.9.
fn scale_mode(mode: ScaleMode) -> i32 {
    match mode {
        ScaleMode::Tensor => 0,
        ScaleMode::Block16 => 1,
        ScaleMode::Block32 => 2,
        ScaleMode::Row128 => 4,
        ScaleMode::Square128 => 5,
    }
}

impl Plan {
    /// The algorithm that the library expects to be the fastest; `None` if it has none, or is too
    /// old to know the types and scales.
    pub fn new(session: &Session, key: &Key, call: &Call) -> Result<Option<Plan>> {
        match Plan::find(session, key, call) {
            Err(Error::Driver { code, .. }) if [NOT_SUPPORTED, INVALID_VALUE].contains(&(code as c_int)) => Ok(None),
            found => found,
        }
    }

    fn find(session: &Session, key: &Key, call: &Call) -> Result<Option<Plan>> {
        let (api, [m, n, k]) = (session.api, key.sizes);
        let operation = operation(&api, key)?;
        // The library looks at them when it chooses.
        set_addresses(&operation, &api, call)?;
        // SAFETY: cuBLASLt writes one handle.
        let layout = |of: c_int, (rows, cols): (usize, usize), pitch: usize| {
            Descriptor::new(&api, "cublasLtMatrixLayoutCreate", api.layout_destroy, |raw| unsafe {
                (api.layout_create)(raw, of, rows as u64, cols as u64, pitch as i64)
            })
        };
        let side = |side: &SideKey, rows: usize| {
            let shape = if side.transposed { (rows, k) } else { (k, rows) };
            layout(type_of(side.values), shape, side.pitch)
        };
        let (b, a) = (side(&key.sides[0], n)?, side(&key.sides[1], m)?);
        let out = layout(output_type(key.precision), (n, m), n)?;
        // SAFETY: as above.
        let preference =
            Descriptor::new(&api, "cublasLtMatmulPreferenceCreate", api.preference_destroy, |raw| unsafe {
                (api.preference_create)(raw)
            })?;
        let call = "cublasLtMatmulPreferenceSetAttribute";
        preference.set(&api, call, api.preference_set, PREFERENCE_WORKSPACE, &(WORKSPACE as u64))?;
        // Otherwise partial sums may be rounded to bf16 before they are added.
        preference.set(&api, call, api.preference_set, PREFERENCE_REDUCTION, &REDUCTION_COMPUTE_TYPE)?;
        for (attribute, alignment) in PREFERENCE_ALIGNMENTS.into_iter().zip(key.alignments) {
            preference.set(&api, call, api.preference_set, attribute, &alignment)?;
        }
        let (mut found, mut count) = (Found::default(), 0);
        // SAFETY: all descriptors exist; cuBLASLt writes at most one result, as it is told, and one
        // number.
        let status = unsafe {
            (api.heuristic)(
                session.handle,
                operation.raw,
                b.raw,
                a.raw,
                out.raw,
                out.raw,
                preference.raw,
                1,
                &mut found,
                &mut count,
            )
        };
        api.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        if count < 1 || found.state != 0 {
            return Ok(None);
        }
        Ok(Some(Plan { operation, b, a, out, algorithm: found.algorithm, workspace: found.workspace }))
    }
}

/// Writes the addresses of scales and bias into the description of an operation.
pub(super) fn set_addresses(operation: &Descriptor, api: &Api, call: &Call) -> Result<()> {
    let set = |attribute: c_int, address: u64| {
        operation.set(api, SET_OPERATION, api.operation_set, attribute, &(address as *const c_void))
    };
    for (attribute, side) in OPERATION_SCALES.into_iter().zip([&call.b, &call.a]) {
        if let Some((_, address)) = side.scales {
            set(attribute, address)?;
        }
    }
    call.bias.map_or(Ok(()), |address| set(OPERATION_BIAS, address))
}

fn operation(api: &Api, key: &Key) -> Result<Descriptor> {
    // SAFETY: cuBLASLt writes one handle.
    let operation = Descriptor::new(api, "cublasLtMatmulDescCreate", api.operation_destroy, |raw| unsafe {
        (api.operation_create)(raw, COMPUTE_32F, R_32F)
    })?;
    // The left one lies as the transposed of what is multiplied, the right one as it is.
    for (attribute, transposed) in
        OPERATION_TRANSPOSED.into_iter().zip([!key.sides[0].transposed, key.sides[1].transposed])
    {
        let value = if transposed { TRANSPOSED } else { AS_IT_IS };
        operation.set(api, SET_OPERATION, api.operation_set, attribute, &value)?;
    }
    for (attribute, side) in OPERATION_SCALE_MODES.into_iter().zip(&key.sides) {
        // One scale for a matrix is the default, which older libraries know no name for.
        if let Some(mode) = side.scales.filter(|&mode| mode != ScaleMode::Tensor) {
            operation.set(api, SET_OPERATION, api.operation_set, attribute, &scale_mode(mode))?;
        }
    }
    if key.factors_in_memory {
        operation.set(api, SET_OPERATION, api.operation_set, OPERATION_POINTER_MODE, &POINTERS_TO_GPU)?;
    }
    if key.fast {
        operation.set(api, SET_OPERATION, api.operation_set, OPERATION_FAST_ACCUMULATION, &1i8)?;
    }
    if key.bias {
        operation.set(api, SET_OPERATION, api.operation_set, OPERATION_EPILOGUE, &EPILOGUE_BIAS)?;
        operation.set(api, SET_OPERATION, api.operation_set, OPERATION_BIAS_TYPE, &output_type(key.precision))?;
    }
    Ok(operation)
}
