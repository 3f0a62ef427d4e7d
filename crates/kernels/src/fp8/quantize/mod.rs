//! Quantization to FP8 in the row direction, the column direction, or both. **Exact.**
//!
//! [`nvfp4_spec::fp8::Side`] defines the directions.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Input, Result, amax};
use nvfp4_spec::fp8::{self, Mode, Scales, Side};
use nvfp4_spec::{Error, Specials, area};

/// Buffers for scales: 32-bit numbers, or E8M0 bytes for MXFP8.
pub type ScaleMut<'a> = Scales<&'a mut [f32], &'a mut [u8]>;

/// What to write for one direction, whose shape is [`Mode::shape`].
#[derive(Debug)]
pub struct Direction<'a> {
    /// A byte per element.
    pub codes: &'a mut [u8],
    /// One per tile: [`nvfp4_spec::fp8::Tile::scale_count`].
    pub scales: ScaleMut<'a>,
}

impl Direction<'_> {
    fn check(&self, mode: &Mode, side: Side, shape: (usize, usize)) -> Result<()> {
        let scales = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.len()),
            Scales::E8m0(scales) => Scales::E8m0(scales.len()),
        };
        check(mode, side, shape, self.codes.len(), scales)
    }
}

/// Checks the lengths of a direction's buffers, on the host or on a GPU, and the kind of its
/// scales.
fn check(mode: &Mode, side: Side, shape: (usize, usize), codes: usize, scales: Scales<usize, usize>) -> Result<()> {
    let (rows, cols) = mode.shape(side, shape);
    check_len("codes", area(rows, cols)?, codes)?;
    let len = match (scales, mode.scaling.is_mx()) {
        (Scales::F32(_), true) => {
            return Err(Error::Combination("MXFP8 has E8M0 scales: give a buffer of bytes for them").into());
        }
        (Scales::E8m0(len), true) | (Scales::F32(len), false) => len,
        (Scales::E8m0(_), false) => {
            return Err(Error::Combination(
                "only MXFP8 has E8M0 scales: give a buffer of 32-bit numbers for them, or use the scaling `Mx` or \
                 `MxSquare`",
            )
            .into());
        }
    };
    Ok(check_len("scales", mode.tile(side).scale_count(rows, cols)?, len)?)
}

/// The outputs to compute, any of them in one call.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The row direction.
    pub row: Option<Direction<'a>>,
    /// The column direction.
    pub col: Option<Direction<'a>>,
    /// The largest magnitude of the matrix, without NaN, which delayed scaling records. With one
    /// scale for the whole matrix it needs no separate pass.
    pub amax: Option<&'a mut f32>,
}

/// Quantizes `x` in the directions of `outputs`.
pub fn quantize(implementation: Implementation, x: &Input<'_>, mode: &Mode, outputs: Outputs<'_>) -> Result<()> {
    let shape = (x.rows(), x.cols());
    if let Some(row) = &outputs.row {
        row.check(mode, Side::Row, shape)?;
    }
    if let Some(col) = &outputs.col {
        col.check(mode, Side::Column, shape)?;
    }
    match implementation {
        Implementation::Scalar => scalar(x, mode, outputs),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::quantize(token, x, mode, outputs),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::quantize(token, x, mode, outputs),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::quantize(token.avx2(), x, mode, outputs),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, x, mode, outputs),
    }
}

/// By the rules as written.
fn scalar(x: &Input<'_>, mode: &Mode, outputs: Outputs<'_>) -> Result<()> {
    let matrix = x.to_matrix();
    for (side, direction) in [(Side::Row, outputs.row), (Side::Column, outputs.col)] {
        let Some(out) = direction else { continue };
        let q = fp8::quantize(&matrix, mode, side);
        out.codes.copy_from_slice(&q.codes);
        match (out.scales, &q.scales) {
            (Scales::F32(out), Scales::F32(scales)) => out.copy_from_slice(scales),
            (Scales::E8m0(out), Scales::E8m0(scales)) => out.copy_from_slice(scales),
            _ => unreachable!("the kind of scales was checked"),
        }
    }
    find_amax(Implementation::Scalar, x, outputs.amax)
}

/// The largest magnitude, in a separate pass.
fn find_amax(implementation: Implementation, x: &Input<'_>, out: Option<&mut f32>) -> Result<()> {
    match out {
        None => Ok(()),
        out => amax::amax(implementation, x, Specials::Kernel, amax::Outputs { tensor: out, ..Default::default() }),
    }
}
