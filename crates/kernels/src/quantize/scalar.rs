//! Quantization by the rules as written: each direction goes through
//! [`nvfp4_spec::matrix::quantize`].

use super::{Amax, Direction, Layout};
use crate::{Input, Result};
use nvfp4_spec::matrix::{self, Matrix};
use nvfp4_spec::swizzle;

pub(super) fn quantize(x: &Input<'_>, row: Option<Direction<'_>>, col: Option<Direction<'_>>) -> Result<()> {
    let matrix = x.to_matrix();
    if let Some(col) = col {
        direction(matrix.transpose(), col)?;
    }
    if let Some(row) = row {
        direction(matrix, row)?;
    }
    Ok(())
}

fn direction(x: Matrix, out: Direction<'_>) -> Result<()> {
    let x = match out.transform {
        Some(signs) => matrix::transform(&x, signs)?,
        None => x,
    };
    let amax = match out.amax {
        Amax::Given(amax) => amax.to_vec(),
        Amax::Compute(amax) => {
            amax.copy_from_slice(&matrix::amax(&x, out.mode.global, out.mode.amax_specials())?);
            amax.to_vec()
        }
    };
    let q = matrix::quantize(&x, &amax, &out.mode, out.rounding)?;
    out.codes.copy_from_slice(&q.codes);
    match out.layout {
        Layout::Linear => out.scales.copy_from_slice(&q.scales),
        Layout::Swizzled => {
            out.scales.copy_from_slice(&swizzle::swizzle(&q.scales, x.rows(), x.cols().div_ceil(nvfp4_spec::BLOCK))?)
        }
    }
    Ok(())
}
