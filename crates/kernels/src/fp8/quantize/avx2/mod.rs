//! Quantization to FP8 with AVX2, on all threads. Read [`encode`] for how a row becomes codes, then
//! [`rows`] and [`columns`] for the directions; this file cuts a matrix into panels of rows and
//! hands them out.
//!
//! For the row direction alone, a panel's rows are processed in order. For the column direction, a
//! panel is 128 rows, processed in chunks of columns that stay in cache: scales come from maxima
//! over its rows, with a multiplier per column, and the codes are transposed when they are written,
//! except for MXFP8. Where both directions have the same codes, they are computed once: with one
//! scale for the matrix, and in squares.

mod columns;
mod encode;
mod part;
mod rows;
mod scales;
mod tiles;

use super::{Direction, Outputs, ScaleMut, find_amax};
use crate::avx2::small_float::{E4m3, E5m2, SmallFloat};
use crate::avx2::{Avx2, prefetch};
use crate::scatter::Scatter;
use crate::{Input, Result, Values};
use nvfp4_spec::Element;
use nvfp4_spec::fp8::{BLOCK, Format, MX_BLOCK, Mode, Scales, Scaling, Side};
use part::{Area, Columns, Part, Transposed, is_tensor};
use rayon::prelude::*;
use std::marker::PhantomData;

/// Elements of a panel with the row direction alone.
const TASK: usize = 1 << 17;
/// Columns that are processed at a time with the column direction: whole blocks.
const CHUNK: usize = 4 * BLOCK;
/// The same for MXFP8, whose columns are not transposed, 32 rows at a time.
const MX_CHUNK: usize = 4096;
/// Prefetch distance in rows.
const AHEAD: usize = 8;
/// Columns that are transposed at a time.
const COLUMNS: usize = 64;

pub(super) fn quantize(token: Avx2, x: &Input<'_>, mode: &Mode, outputs: Outputs<'_>) -> Result<()> {
    let positive = match mode.scaling {
        Scaling::Tensor { scale } => scale > 0.0 && scale.is_finite(),
        _ => true,
    };
    if x.rows() == 0 || x.cols() == 0 || !positive {
        return super::scalar(x, mode, outputs);
    }
    match mode.format {
        Format::E4m3 => quantize_to::<E4m3>(token, x, mode, outputs),
        Format::E5m2 => quantize_to::<E5m2>(token, x, mode, outputs),
    }
}

fn quantize_to<F: SmallFloat>(token: Avx2, x: &Input<'_>, mode: &Mode, outputs: Outputs<'_>) -> Result<()> {
    let format = PhantomData::<F>;
    match x.values() {
        Values::F32(values) => Job { token, values, x, mode, format }.run(outputs),
        Values::Bf16(values) => Job { token, values, x, mode, format }.run(outputs),
        Values::F16(values) => Job { token, values, x, mode, format }.run(outputs),
    }
}

struct Job<'a, T, F> {
    token: Avx2,
    values: &'a [T],
    x: &'a Input<'a>,
    mode: &'a Mode,
    format: PhantomData<F>,
}

/// What a thread keeps between panels.
#[derive(Default)]
struct Scratch<T> {
    codes: Vec<u8>,
    scales: Vec<f32>,
    bytes: Vec<u8>,
    maxima: Vec<T>,
    multipliers: Vec<f32>,
    transposed: Vec<u8>,
}

impl<T: Element, F: SmallFloat> Job<'_, T, F> {
    fn run(&self, outputs: Outputs<'_>) -> Result<()> {
        let Outputs { mut row, mut col, amax } = outputs;
        let (rows, cols) = (self.x.rows(), self.x.cols());
        if let Scaling::Tensor { scale } = self.mode.scaling {
            let stored = self.mode.tile_scale(scale, T::PRECISION).stored;
            for direction in [&mut row, &mut col].into_iter().flatten() {
                if let (Scales::F32(out), Scales::F32(stored)) = (&mut direction.scales, stored) {
                    out[0] = stored;
                }
            }
        }
        let on_the_way = is_tensor(self.mode) && (row.is_some() || col.is_some());
        let height = if col.is_some() { BLOCK } else { TASK.div_ceil(cols).next_multiple_of(BLOCK) };
        let panels = rows.div_ceil(height);
        let row_parts: Vec<Option<Part<'_>>> = match row {
            None => (0..panels).map(|_| None).collect(),
            Some(row) => Part::split(row, self.mode, Side::Row, cols, height).into_iter().map(Some).collect(),
        };
        let transposed;
        let col_parts: Vec<Option<Columns<'_>>> = match col {
            None => (0..panels).map(|_| None).collect(),
            Some(col) if self.mode.scaling.is_mx() => {
                let parts = Part::split(col, self.mode, Side::Column, cols, height);
                parts.into_iter().map(|part| Some(Columns::AsTheyLie(part))).collect()
            }
            Some(Direction { codes, scales: Scales::F32(scales) }) => {
                transposed = Transposed { codes: Scatter::new(codes), scales: Scatter::new(scales) };
                (0..panels).map(|_| Some(Columns::Transposed(&transposed))).collect()
            }
            Some(_) => unreachable!("the kind of scales was checked"),
        };
        let largest = row_parts
            .into_par_iter()
            .zip(col_parts)
            .enumerate()
            .map_init(Scratch::default, |scratch, (p, (row, col))| {
                let area = Area { row: p * height, col: 0, height: height.min(rows - p * height), width: cols };
                // SAFETY: an Avx2 token is only made after detection.
                unsafe { self.panel(scratch, area, row, col) }
            })
            .reduce(|| 0.0, f32::max);
        match amax {
            Some(out) if on_the_way => *out = largest,
            out => find_amax(self.token.into(), self.x, out)?,
        }
        Ok(())
    }

    /// Quantizes a panel; its largest magnitude, where there is one scale for the whole matrix.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn panel(&self, scratch: &mut Scratch<T>, area: Area, row: Option<Part<'_>>, col: Option<Columns<'_>>) -> f32 {
        let (mut row, mut col, mut largest) = (row, col, 0f32);
        let Some(columns) = &mut col else {
            return row.as_mut().map_or(0.0, |row| self.rows(area, row));
        };
        let (strip, chunk) = match columns {
            Columns::Transposed(_) => (BLOCK, CHUNK),
            Columns::AsTheyLie(_) => (MX_BLOCK, MX_CHUNK),
        };
        for r in (0..area.height).step_by(strip) {
            for c in (0..area.width).step_by(chunk) {
                let (height, width) = (strip.min(area.height - r), chunk.min(area.width - c));
                let area = Area { row: area.row + r, col: c, height, width };
                let mut row = row.as_mut().map(|row| row.at((r, c), self.mode.tile(Side::Row)));
                // In these, columns have codes of their own.
                if let (Scaling::Row128(_) | Scaling::Mx, Some(row)) = (self.mode.scaling, &mut row) {
                    self.rows(area, row);
                }
                match (&mut *columns, self.mode.scaling) {
                    (Columns::Transposed(out), Scaling::Tensor { .. } | Scaling::Square128(_)) => {
                        largest = largest.max(self.same_codes(scratch, area, row, out));
                    }
                    (Columns::Transposed(out), Scaling::Row128(rule)) => self.columns(scratch, area, rule, out),
                    (Columns::AsTheyLie(part), Scaling::Mx) => {
                        self.mx_columns(scratch, area, &mut part.at((r, c), self.mode.tile(Side::Column)));
                    }
                    (Columns::AsTheyLie(part), Scaling::MxSquare) => {
                        self.mx_squares(scratch, area, row, part.at((r, c), self.mode.tile(Side::Column)));
                    }
                    _ => unreachable!("only MXFP8 has its columns as they lie"),
                }
            }
        }
        largest
    }

    /// Prefetches a row of an area. Where an area has only some of the columns, the hardware
    /// prefetcher does not recognise the access pattern.
    fn prefetch(&self, area: Area, r: usize) {
        if area.width < self.x.cols() && r < area.height {
            prefetch(self.row(area, r));
        }
    }

    /// The elements of a row of an area.
    fn row(&self, area: Area, r: usize) -> &[T] {
        &self.values[(area.row + r) * self.x.stride() + area.col..][..area.width]
    }
}
