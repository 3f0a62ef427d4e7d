//! Quantization of rows with scales that are chosen by what they do to a layer's outputs. **Exact**:
//! the rules are [`nvfp4_spec::weighted`].

mod search;

use crate::input::check_len;
use crate::{Input, Result};
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::weighted::BlockHessian;
use nvfp4_spec::{BLOCK, Error, Mode, Rounding, e2m1};
use rayon::prelude::*;
use search::{Search, Turned};

/// What is known of a layer's inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weighting<'a> {
    /// The mean square of each column.
    Columns(&'a [f32]),
    /// For the columns of each block, the mean of their products with each other: 16 rows of 16.
    Hessians(&'a [f32]),
}

/// Quantizes the rows of a weight with this amax, on all threads. The mode's rule must be the one
/// that the weighting is a form of: `Mse` for columns, `ModelOptMse` for Hessians.
pub fn quantize(
    x: &Input<'_>,
    amax: f32,
    mode: &Mode,
    weighting: Weighting<'_>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    mode.check(&Rounding::<()>::NearestEven)?;
    if !cols.is_multiple_of(BLOCK) {
        return Err(Error::Multiple { what: "the columns of a weight", of: BLOCK, got: cols }.into());
    }
    check_len("codes", rows * e2m1::packed_len(cols), codes.len())?;
    check_len("scales", rows * cols / BLOCK, scales.len())?;
    match weighting {
        Weighting::Columns(weights) => check_len("mean squares", cols, weights.len())?,
        Weighting::Hessians(hessians) => check_len("Hessians", cols * BLOCK, hessians.len())?,
    }
    if cols == 0 {
        return Ok(());
    }
    let search = Search::new(Scaling::new(amax, mode, x.values().precision()));
    let hessians: &[BlockHessian] = match weighting {
        Weighting::Columns(_) => &[],
        Weighting::Hessians(all) => all.as_chunks().0.as_chunks().0,
    };
    let turned: Vec<Turned> = hessians.iter().map(Turned::new).collect();
    let lines = codes.par_chunks_exact_mut(cols / 2).zip(scales.par_chunks_exact_mut(cols / BLOCK));
    lines.enumerate().for_each(|(r, (codes, scales))| {
        let row = x.rows_of(r..r + 1).to_matrix();
        let blocks = row.data().as_chunks::<BLOCK>().0;
        let out = codes.as_chunks_mut::<{ BLOCK / 2 }>().0.iter_mut().zip(scales);
        for (i, (block, (codes, scale))) in blocks.iter().zip(out).enumerate() {
            let q = match weighting {
                Weighting::Columns(weights) => search.by_columns(block, &weights.as_chunks().0[i]),
                Weighting::Hessians(_) => search.by_hessian(block, &hessians[i], &turned[i]),
            };
            *scale = q.scale;
            let pairs = q.codes[0].as_chunks::<2>().0;
            codes.iter_mut().zip(pairs).for_each(|(byte, &[even, odd])| *byte = e2m1::pack(even, odd));
        }
    });
    Ok(())
}
