//! Tensors to FP8 and MXFP8 on the CPU.

use super::{Made, Options, Scale};
use crate::direction::{Direction, Fp8Description, Fp8Direction};
use crate::format::{BlockTile, Directions, Fp8Code, MxTile, Side};
use crate::{Error, Fp8Scales, Implementation, Result};
use nvfp4_kernels::fp8::quantize as kernel;
use nvfp4_kernels::{Input, amax};
use nvfp4_spec::fp8::{self, Mode, Scales, Scaling};
use nvfp4_spec::{Error as RuleError, Specials, check_len, zeros};

/// The amax of the whole tensor, if it is given.
pub(super) fn given_amax(options: &Options<'_>) -> Result<Option<f32>> {
    let one = |amax: Option<&[f32]>| -> Result<Option<f32>> {
        let Some(amax) = amax else { return Ok(None) };
        check_len("amax", 1, amax.len())?;
        match amax[0] < 0.0 {
            true => Err(RuleError::NegativeAmax { index: 0, value: amax[0] }.into()),
            false => Ok(Some(amax[0])),
        }
    };
    match (one(options.row_amax)?, one(options.col_amax)?) {
        (Some(row), Some(col)) if row.to_bits() != col.to_bits() => Err(Error::TwoAmaxes { row, col }),
        (row, col) => Ok(row.or(col)),
    }
}

pub(super) fn quantize(
    x: &Input<'_>,
    directions: Directions,
    (code, scale): (Fp8Code, Scale),
    given: Option<f32>,
    implementation: Implementation,
) -> Result<Made> {
    let scaling = match scale {
        Scale::Current(rule) => {
            let mut found = given.unwrap_or_default();
            if given.is_none() {
                let outputs = amax::Outputs { tensor: Some(&mut found), ..Default::default() };
                amax::amax(implementation, x, Specials::Kernel, outputs)?;
            }
            Scaling::Tensor { scale: rule.tensor_scale(found, code) }
        }
        Scale::Delayed(scale) => Scaling::Tensor { scale },
        Scale::Block(BlockTile::Row128, rule) => Scaling::Row128(rule),
        Scale::Block(BlockTile::Square128, rule) => Scaling::Square128(rule),
        Scale::Mx(MxTile::Row32) => Scaling::Mx,
        Scale::Mx(MxTile::Square32) => Scaling::MxSquare,
    };
    let mode = Mode { format: code, scaling };
    let blank = |side, wanted| directions.has(wanted).then(|| blank(&mode, side, x)).transpose();
    let (mut row, mut col) = (blank(fp8::Side::Row, Side::Row)?, blank(fp8::Side::Column, Side::Column)?);
    let mut found = 0.0;
    let delayed = matches!(scale, Scale::Delayed(_));
    let outputs = kernel::Outputs {
        row: row.as_mut().map(target),
        col: col.as_mut().map(target),
        amax: delayed.then_some(&mut found),
    };
    kernel::quantize(implementation, x, &mode, outputs)?;
    let seen = |side| (delayed && directions.has(side)).then_some(found);
    Ok(Made {
        row_amax: seen(Side::Row),
        col_amax: seen(Side::Column),
        row: row.map(Direction::Fp8),
        col: col.map(Direction::Fp8),
    })
}

/// A direction with room for its bytes.
fn blank(mode: &Mode, side: fp8::Side, x: &Input<'_>) -> Result<Fp8Direction> {
    let (tile, stored) = (mode.tile(side), mode.shape(side, (x.rows(), x.cols())));
    let (rows, cols) = tile.along_k(stored);
    let about = Fp8Description { rows, cols, code: mode.format, tile };
    let count = about.scale_len()?;
    let scales: Fp8Scales = match mode.scaling {
        Scaling::Mx | Scaling::MxSquare => Scales::E8m0(zeros(count, rows, cols)?),
        Scaling::Tensor { .. } | Scaling::Row128(_) | Scaling::Square128(_) => Scales::F32(zeros(count, rows, cols)?),
    };
    Fp8Direction::from_parts(about, zeros(about.code_len()?, rows, cols)?, scales)
}

fn target(direction: &mut Fp8Direction) -> kernel::Direction<'_> {
    let scales = match &mut direction.scales {
        Scales::F32(scales) => Scales::F32(&mut scales[..]),
        Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
    };
    kernel::Direction { codes: &mut direction.codes, scales }
}
