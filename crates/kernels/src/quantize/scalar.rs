//! Quantization by the rules as written: each direction goes through
//! [`nvfp4_spec::matrix::quantize`], a band of rows at a time, on all threads.

use super::{Amax, Direction, Layout};
use crate::{Input, Result};
use nvfp4_spec::matrix::{self, Matrix};
use nvfp4_spec::stochastic::{Random, Stream};
use nvfp4_spec::{BLOCK, GlobalScale, Rounding, e2m1, scale, swizzle};
use rayon::prelude::*;
use std::ops::Range;

/// Elements that one task takes, or a band of square tiles where that is more.
const TASK: usize = 1 << 14;

pub(super) fn quantize(x: &Input<'_>, row: Option<Direction<'_>>, col: Option<Direction<'_>>) -> Result<()> {
    if let Some(col) = col {
        let columns = |range| x.columns(range).to_matrix().transpose();
        direction((x.cols(), x.rows()), columns, col)?;
    }
    if let Some(row) = row {
        direction((x.rows(), x.cols()), |range| x.rows_of(range).to_matrix(), row)?;
    }
    Ok(())
}

/// Quantizes a direction, some rows of which `band` gives.
fn direction(
    (rows, cols): (usize, usize),
    band: impl Fn(Range<usize>) -> Matrix + Sync,
    out: Direction<'_>,
) -> Result<()> {
    let band = |range: &Range<usize>| -> Result<Matrix> {
        let x = band(range.clone());
        Ok(match out.transform {
            Some(signs) => matrix::transform(&x, signs)?,
            None => x,
        })
    };
    let (bytes, blocks) = (e2m1::packed_len(cols), cols.div_ceil(BLOCK));
    // Without elements there may be any number of rows, and no time is spent on them.
    let (filled, height) = match cols {
        0 => (0, BLOCK),
        _ => (rows, (TASK / cols).next_multiple_of(BLOCK).max(BLOCK)),
    };
    let ranges: Vec<Range<usize>> = (0..filled).step_by(height).map(|r| r..filled.min(r + height)).collect();
    let amax = match out.amax {
        Amax::Given(amax) => amax,
        Amax::Compute(amax) => {
            let (global, specials) = (out.mode.global, out.mode.amax_specials());
            let of_band = |range: &Range<usize>| Ok(matrix::amax(&band(range)?, global, specials)?);
            let found = ranges.par_iter().map(of_band).collect::<Result<Vec<_>>>()?.concat();
            match global {
                GlobalScale::PerTensor => amax[0] = scale::amax(&found, specials),
                GlobalScale::PerRow if found.is_empty() => amax.fill(0.0),
                GlobalScale::PerRow => amax.copy_from_slice(&found),
            }
            &*amax
        }
    };
    let mut linear = match out.layout {
        Layout::Linear => Vec::new(),
        Layout::Swizzled => vec![0; filled * blocks],
    };
    let scales = if out.layout == Layout::Linear { &mut *out.scales } else { &mut linear };
    // Without rows there may be any number of columns.
    let chunk = |of_row: usize| height.saturating_mul(of_row).max(1);
    let parts = out.codes.par_chunks_mut(chunk(bytes)).zip(scales.par_chunks_mut(chunk(blocks)));
    parts.zip(&ranges).try_for_each(|((codes, scales), range)| -> Result<()> {
        let amax = match out.mode.global {
            GlobalScale::PerTensor => amax,
            GlobalScale::PerRow => &amax[range.clone()],
        };
        let rounding = from_block(out.rounding, range.start * blocks..range.end * blocks);
        let q = matrix::quantize(&band(range)?, amax, &out.mode, rounding)?;
        codes.copy_from_slice(&q.codes);
        scales.copy_from_slice(&q.scales);
        Ok(())
    })?;
    if out.layout == Layout::Swizzled {
        out.scales.copy_from_slice(&swizzle::swizzle(&linear, rows, blocks)?);
    }
    Ok(())
}

/// The randomness of some blocks of a direction.
fn from_block(rounding: Rounding<Random<'_>>, blocks: Range<usize>) -> Rounding<Random<'_>> {
    match rounding {
        Rounding::NearestEven => Rounding::NearestEven,
        Rounding::Stochastic(Random::Bytes(bytes)) => {
            Rounding::Stochastic(Random::Bytes(&bytes[blocks.start * BLOCK..blocks.end * BLOCK]))
        }
        Rounding::Stochastic(Random::Stream(stream)) => {
            let first_block = stream.first_block.wrapping_add(blocks.start as u64);
            Rounding::Stochastic(Random::Stream(Stream { first_block, ..stream }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::hadamard::Signs;
    use nvfp4_spec::{Mode, Tile};

    /// Bands give what the rule gives for the whole, whatever their number.
    #[test]
    fn bands_equal_the_whole() {
        for (rows, cols) in [(300, 96), (96, 300), (16, 5000), (1, 1), (77, 530)] {
            let values: Vec<f32> = (0..rows * cols).map(|i| (i * 37 % 1013) as f32 / 7.0 - 60.0).collect();
            let (x, whole) =
                (Input::new((&values[..]).into(), rows, cols).unwrap(), &Matrix::new(rows, cols, &values).unwrap());
            let stream = Rounding::Stochastic(Random::Stream(Stream { first_block: 7, ..Stream::row(5, 3) }));
            for (tile, global) in [
                (Tile::Row16, GlobalScale::PerTensor),
                (Tile::Row16, GlobalScale::PerRow),
                (Tile::Square16, GlobalScale::PerTensor),
            ] {
                for (rounding, layout) in [(Rounding::NearestEven, Layout::Linear), (stream, Layout::Swizzled)] {
                    for signs in [None, Some(Signs::FIXED)] {
                        let mode = Mode { tile, global, ..Mode::default() };
                        let columns = matrix::columns(whole, signs.filter(|_| rows % 16 == 0)).unwrap();
                        let along = match signs.filter(|_| cols % 16 == 0) {
                            Some(signs) => matrix::transform(whole, signs).unwrap(),
                            None => whole.clone(),
                        };
                        for (is_row, rule) in [(true, along), (false, columns)] {
                            let amax = matrix::amax(&rule, global, mode.amax_specials()).unwrap();
                            let q = matrix::quantize(&rule, &amax, &mode, rounding).unwrap();
                            let (mut codes, mut found) = (vec![0; q.codes.len()], vec![0.0; amax.len()]);
                            let mut scales = vec![0; layout.scale_len(rule.rows(), rule.cols()).unwrap()];
                            let transform = signs.filter(|_| rule.cols() % 16 == 0);
                            let (codes_out, amax_out) = (&mut codes, Amax::Compute(&mut found));
                            let out = Direction {
                                mode,
                                rounding,
                                transform,
                                layout,
                                amax: amax_out,
                                codes: codes_out,
                                scales: &mut scales,
                            };
                            let (row, col) = if is_row { (Some(out), None) } else { (None, Some(out)) };
                            quantize(&x, row, col).unwrap();
                            assert_eq!((codes, found), (q.codes, amax), "{rows} × {cols} {mode:?} {signs:?}");
                            let linear = match layout {
                                Layout::Linear => q.scales,
                                Layout::Swizzled => {
                                    swizzle::swizzle(&q.scales, rule.rows(), rule.cols().div_ceil(BLOCK)).unwrap()
                                }
                            };
                            assert_eq!(scales, linear);
                        }
                    }
                }
            }
        }
    }
}
