//! The codes of rows, some columns at a time. Twin of [`nvfp4_spec::gptq::codes`].
//!
//! Errors reach the columns of their own block at once, and those behind it when the block is done:
//! each element still takes them in the order of places.

use super::subtract::subtract;
use crate::input::check_len;
use crate::{Input, Result};
use nvfp4_spec::gptq::Factor;
use nvfp4_spec::profile::Factor as Scaled;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Error, Mode, area, e2m1, mse};
use rayon::prelude::*;

/// Columns whose errors wait for each other, and rows that a thread takes.
const PLACES: usize = 128;
const ROWS: usize = 32;
/// Columns that are updated together: the part of the factor for them stays in the cache.
const TILE: usize = 512;

/// Replaces the codes of rows whose block scales are found: two to a byte, as
/// [`quantize`](crate::quantize::quantize) wrote them.
pub fn codes(x: &Input<'_>, amax: f32, mode: &Mode, factor: &Factor, scales: &[u8], codes: &mut [u8]) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    if !cols.is_multiple_of(BLOCK) {
        return Err(Error::Multiple { what: "the columns of a weight", of: BLOCK, got: cols }.into());
    }
    check_len("columns of the factor", cols, factor.columns())?;
    check_len("factor", area(cols, cols)?, factor.upper.len())?;
    check_len("codes", rows * cols / 2, codes.len())?;
    check_len("scales", rows * cols / BLOCK, scales.len())?;
    if cols == 0 {
        return Ok(());
    }
    let scaling = Scaling::new(amax, mode, x.values().precision());
    let bytes: [(Scaled, f32); 256] =
        std::array::from_fn(|byte| (scaling.factor(byte as u8), mse::decode_factor(byte as u8, &scaling)));
    let lines = codes.par_chunks_mut(ROWS * cols / 2).zip(scales.par_chunks(ROWS * cols / BLOCK));
    lines.enumerate().for_each(|(band, (codes, scales))| {
        let count = codes.len() / (cols / 2);
        let source = x.rows_of(band * ROWS..band * ROWS + count).to_matrix();
        let mut rows: Vec<f32> =
            (0..count).flat_map(|r| factor.order.iter().map(move |&c| (r, c))).map(|(r, c)| source.row(r)[c]).collect();
        let mut found = vec![0u8; count * cols];
        let mut errors = vec![[0f32; PLACES]; count];
        for start in (0..cols).step_by(PLACES) {
            let end = (start + PLACES).min(cols);
            for (r, (row, errors)) in rows.chunks_exact_mut(cols).zip(&mut errors).enumerate() {
                for place in start..end {
                    let (column, upper) = (factor.order[place], &factor.upper[place * cols..][..end]);
                    let (scaled, decode) = &bytes[scales[(r * cols + column) / BLOCK] as usize];
                    let code = scaling.code(scaled.apply(row[place]), None);
                    let error = (row[place] - e2m1::decode(code) * decode) / upper[place];
                    subtract(&mut row[place + 1..end], &[(error, &upper[place + 1..])]);
                    errors[place - start] = error;
                    found[r * cols + column] = code;
                }
            }
            for first in (end..cols).step_by(TILE) {
                let last = (first + TILE).min(cols);
                for (row, errors) in rows.chunks_exact_mut(cols).zip(&errors) {
                    let product = |place: usize| (errors[place - start], &factor.upper[place * cols..][first..last]);
                    let products: Vec<(f32, &[f32])> = (start..end).map(product).collect();
                    subtract(&mut row[first..last], &products);
                }
            }
        }
        let pairs = found.as_chunks::<2>().0;
        codes.iter_mut().zip(pairs).for_each(|(byte, &[even, odd])| *byte = e2m1::pack(even, odd));
    });
    Ok(())
}
