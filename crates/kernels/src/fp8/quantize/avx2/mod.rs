//! Quantization to FP8 with AVX2, on all threads. Read [`encode`] for how a row becomes codes; this file cuts a matrix into
//! panels of rows and finds the scales.
//!
//! For the row direction alone a panel's rows are worked through as they lie. For the column direction a panel is 128 rows, worked
//! through in chunks of columns that stay in cache: scales come from maxima over its rows, a multiplier per column, and the
//! codes are transposed on their way out, unless they stay as they lie (MXFP8). Where both directions have the same codes they
//! are computed once.

mod encode;
mod turn;

use super::{Direction, ScaleMut, Wanted, find_amax};
use crate::amax::avx2::row_amax;
use crate::avx2::small_float::{E4m3, E5m2, SmallFloat};
use crate::avx2::{Avx2, value_of};
use crate::scatter::Scatter;
use crate::{Implementation, Input, Result, Values};
use encode::is_nan;
use nvfp4_spec::fp8::{BLOCK, Format, MX_BLOCK, Mode, Scales, Scaling, Side, TileScale};
use nvfp4_spec::{Edge, Element};
use rayon::prelude::*;
use std::marker::PhantomData;
use turn::Codes;

/// Elements of a panel where only the row direction is wanted.
const TASK: usize = 1 << 17;
/// Columns that are worked through at a time where the column direction is wanted: whole blocks.
const CHUNK: usize = 4 * BLOCK;
/// Columns that are transposed at a time.
const COLUMNS: usize = 64;

pub(super) fn quantize(token: Avx2, x: &Input<'_>, mode: &Mode, wanted: Wanted<'_>) -> Result<()> {
    let positive = match mode.scaling {
        Scaling::Tensor { scale } => scale > 0.0 && scale.is_finite(),
        _ => true,
    };
    if x.rows() == 0 || x.cols() == 0 || !positive {
        return super::scalar(x, mode, wanted);
    }
    match mode.format {
        Format::E4m3 => quantize_to::<E4m3>(token, x, mode, wanted),
        Format::E5m2 => quantize_to::<E5m2>(token, x, mode, wanted),
    }
}

fn quantize_to<F: SmallFloat>(token: Avx2, x: &Input<'_>, mode: &Mode, wanted: Wanted<'_>) -> Result<()> {
    let format = PhantomData::<F>;
    match x.values() {
        Values::F32(values) => Job { token, values, x, mode, format }.run(wanted),
        Values::Bf16(values) => Job { token, values, x, mode, format }.run(wanted),
        Values::F16(values) => Job { token, values, x, mode, format }.run(wanted),
    }
}

struct Job<'a, T, F> {
    token: Avx2,
    values: &'a [T],
    x: &'a Input<'a>,
    mode: &'a Mode,
    format: PhantomData<F>,
}

/// A rectangle of the matrix: its first row and column, its height and width.
#[derive(Clone, Copy)]
struct Area {
    row: usize,
    col: usize,
    height: usize,
    width: usize,
}

/// What is written for a panel or a chunk of it: codes and scales in rows, their strides.
struct Part<'a> {
    codes: &'a mut [u8],
    code_stride: usize,
    scales: ScaleMut<'a>,
    scale_stride: usize,
}

impl<'a> Part<'a> {
    /// From column `c` on, tiles being `width` columns wide.
    fn columns_from(&mut self, c: usize, width: usize) -> Part<'_> {
        let scales = match &mut self.scales {
            Scales::F32([]) => Scales::F32(&mut [][..]),
            Scales::F32(scales) => Scales::F32(&mut scales[c / width..]),
            Scales::E8m0(scales) => Scales::E8m0(&mut scales[c / width..]),
        };
        Part { codes: &mut self.codes[c..], scales, ..*self }
    }

    fn set_scale(&mut self, row: usize, col: usize, scale: f32) {
        let Scales::F32(scales) = &mut self.scales else { unreachable!("blocks have 32-bit scales") };
        scales[row * self.scale_stride + col] = scale;
    }

    /// A direction that is written as it lies, in pieces of `height` rows. The one scale of a tensor is in none of them.
    fn split(direction: Direction<'a>, mode: &Mode, side: Side, cols: usize, height: usize) -> Vec<Self> {
        let (tile_height, _) = mode.tile(side).size(1, 1);
        let (_, scale_stride) = mode.tile(side).grid(1, cols);
        let len = scale_stride * height / tile_height;
        let codes = direction.codes.chunks_mut(height * cols);
        let scales: Vec<ScaleMut<'a>> = match direction.scales {
            Scales::F32(_) if is_tensor(mode) => (0..codes.len()).map(|_| Scales::F32(&mut [][..])).collect(),
            Scales::F32(scales) => scales.chunks_mut(len).map(Scales::F32).collect(),
            Scales::E8m0(scales) => scales.chunks_mut(len).map(Scales::E8m0).collect(),
        };
        codes.zip(scales).map(|(codes, scales)| Part { codes, code_stride: cols, scales, scale_stride }).collect()
    }
}

fn is_tensor(mode: &Mode) -> bool {
    matches!(mode.scaling, Scaling::Tensor { .. })
}

/// A column direction that is transposed, written to from all panels.
struct Transposed<'a> {
    codes: Scatter<'a, u8>,
    scales: Scatter<'a, f32>,
}

/// What a panel writes for the column direction.
enum Columns<'a> {
    Transposed(&'a Transposed<'a>),
    AsTheyLie(Part<'a>),
}

/// What a thread keeps between panels.
#[derive(Default)]
struct Scratch<T> {
    codes: Vec<u8>,
    scales: Vec<f32>,
    maxima: Vec<T>,
    multipliers: Vec<f32>,
    mx_scales: Vec<u8>,
    turned: Vec<u8>,
}

impl<T: Element, F: SmallFloat> Job<'_, T, F> {
    fn run(&self, wanted: Wanted<'_>) -> Result<()> {
        let Wanted { mut row, mut col, amax } = wanted;
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
            Some(col) if self.mode.scaling == Scaling::Mx => {
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
            out => find_amax(Implementation::Avx2(self.token), self.x, out)?,
        }
        Ok(())
    }

    /// Quantizes a panel; its largest magnitude, where there is one scale for the whole matrix.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn panel(&self, scratch: &mut Scratch<T>, area: Area, row: Option<Part<'_>>, col: Option<Columns<'_>>) -> f32 {
        let (mut row, mut col, mut largest) = (row, col, 0f32);
        let Some(columns) = &mut col else {
            return row.as_mut().map_or(0.0, |row| self.rows(area, row));
        };
        let (_, tile_width) = self.mode.tile(Side::Row).size(1, 1);
        for c in (0..area.width).step_by(CHUNK) {
            let area = Area { col: c, width: CHUNK.min(area.width - c), ..area };
            let row = row.as_mut().map(|row| row.columns_from(c, tile_width));
            match columns {
                Columns::AsTheyLie(part) => {
                    if let Some(mut row) = row {
                        self.rows(area, &mut row);
                    }
                    self.mx_columns(scratch, area, &mut part.columns_from(c, 1));
                }
                Columns::Transposed(out) => match self.mode.scaling {
                    Scaling::Row128(_) => {
                        if let Some(mut row) = row {
                            self.rows(area, &mut row);
                        }
                        self.columns(scratch, area, out);
                    }
                    _ => largest = largest.max(self.same_codes(scratch, area, row, out)),
                },
            }
        }
        largest
    }

    /// The elements of a row of an area.
    fn row(&self, area: Area, r: usize) -> &[T] {
        &self.values[(area.row + r) * self.x.stride() + area.col..][..area.width]
    }

    /// The scale of a block of rows `rows` and columns `cols` of an area.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn block_scale(&self, area: Area, rows: std::ops::Range<usize>, cols: std::ops::Range<usize>) -> TileScale {
        let largest = |edge| {
            let maxima = rows.clone().map(|r| row_amax(self.token, &self.row(area, r)[cols.clone()], edge, &mut []));
            maxima.max().unwrap_or(0)
        };
        let bits = largest(Edge::Reference);
        let bits = if is_nan::<T>(bits) { largest(Edge::Kernel) } else { bits };
        self.mode.tile_scale(value_of(bits, T::PRECISION), T::PRECISION)
    }

    /// Quantizes an area in the row direction; its largest magnitude, where there is one scale for the whole matrix.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn rows(&self, area: Area, out: &mut Part<'_>) -> f32 {
        let (height, width) = self.mode.tile(Side::Row).size(area.height, area.width);
        let mut largest = 0;
        match self.mode.scaling {
            Scaling::Tensor { scale } => {
                for r in 0..area.height {
                    let x = self.row(area, r);
                    let bits = encode::encode::<T, F>(x, scale, &mut out.codes[r * out.code_stride..][..area.width]);
                    let nan = is_nan::<T>(bits);
                    largest = largest.max(if nan { row_amax(self.token, x, Edge::Kernel, &mut []) } else { bits });
                }
            }
            Scaling::Row128(_) | Scaling::Square128(_) => {
                for r in (0..area.height).step_by(height) {
                    for c in (0..area.width).step_by(width) {
                        let (rows, cols) = (r..area.height.min(r + height), c..area.width.min(c + width));
                        let scale = self.block_scale(area, rows.clone(), cols.clone());
                        if let Scales::F32(stored) = scale.stored {
                            out.set_scale(r / height, c / width, stored);
                        }
                        for r in rows {
                            let codes = &mut out.codes[r * out.code_stride..][cols.clone()];
                            encode::encode::<T, F>(&self.row(area, r)[cols.clone()], scale.multiplier, codes);
                        }
                    }
                }
            }
            Scaling::Mx => {
                let Scales::E8m0(scales) = &mut out.scales else { unreachable!("MXFP8 has bytes for scales") };
                let blocks = area.width.div_ceil(width);
                for r in 0..area.height {
                    let codes = &mut out.codes[r * out.code_stride..][..area.width];
                    let scales = &mut scales[r * out.scale_stride..][..blocks];
                    encode::mx_row::<T, F>(self.row(area, r), codes, scales);
                }
            }
        }
        value_of(largest, T::PRECISION)
    }

    /// Both directions where the codes of one are those of the other, transposed: one scale for the matrix, or squares.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn same_codes(&self, scratch: &mut Scratch<T>, area: Area, row: Option<Part<'_>>, out: &Transposed<'_>) -> f32 {
        scratch.codes.resize(BLOCK * CHUNK, 0);
        scratch.scales.resize(CHUNK / BLOCK, 0.0);
        let mut own = Part {
            codes: &mut scratch.codes,
            code_stride: CHUNK,
            scales: Scales::F32(&mut scratch.scales),
            scale_stride: CHUNK / BLOCK,
        };
        let mut row = row;
        let part = row.as_mut().unwrap_or(&mut own);
        let largest = self.rows(area, part);
        if let (Scaling::Square128(_), Scales::F32(scales)) = (self.mode.scaling, &part.scales) {
            let down = self.x.rows().div_ceil(BLOCK);
            for (i, scale) in scales[..area.width.div_ceil(BLOCK)].iter().enumerate() {
                // SAFETY: a panel writes the scales of its own rows only, and is one block high.
                unsafe { out.scales.write((area.col / BLOCK + i) * down + area.row / BLOCK, &[*scale]) };
            }
        }
        let codes = Codes { data: part.codes, stride: part.code_stride, rows: area.height, cols: area.width };
        self.write_turned(&mut scratch.turned, codes, area, out);
        largest
    }

    /// The column direction in blocks of 128 rows of a column.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn columns(&self, scratch: &mut Scratch<T>, area: Area, out: &Transposed<'_>) {
        self.find_maxima(scratch, area);
        let down = self.x.rows().div_ceil(BLOCK);
        scratch.multipliers.resize(CHUNK, 0.0);
        for (i, amax) in scratch.maxima[..area.width].iter().enumerate() {
            let scale = self.mode.tile_scale(amax.to_f32(), T::PRECISION);
            scratch.multipliers[i] = scale.multiplier;
            if let Scales::F32(stored) = scale.stored {
                // SAFETY: a panel writes the scales of its own rows only, and is one block high.
                unsafe { out.scales.write((area.col + i) * down + area.row / BLOCK, &[stored]) };
            }
        }
        scratch.codes.resize(BLOCK * CHUNK, 0);
        for (r, codes) in scratch.codes.chunks_exact_mut(CHUNK).take(area.height).enumerate() {
            encode::encode_columns::<T, F>(self.row(area, r), &scratch.multipliers, &mut codes[..area.width]);
        }
        let codes = Codes { data: &scratch.codes, stride: CHUNK, rows: area.height, cols: area.width };
        self.write_turned(&mut scratch.turned, codes, area, out);
    }

    /// The column direction in blocks of 32 rows of a column, as they lie.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn mx_columns(&self, scratch: &mut Scratch<T>, area: Area, out: &mut Part<'_>) {
        let Scales::E8m0(scales) = &mut out.scales else { unreachable!("MXFP8 has bytes for scales") };
        scratch.multipliers.resize(CHUNK, 0.0);
        scratch.mx_scales.resize(CHUNK, 0);
        for first in (0..area.height).step_by(MX_BLOCK) {
            let height = MX_BLOCK.min(area.height - first);
            self.find_maxima(scratch, Area { row: area.row + first, height, ..area });
            let eights = scratch.multipliers.as_chunks_mut::<8>().0.iter_mut();
            let eights = eights.zip(scratch.mx_scales.as_chunks_mut::<8>().0).zip(scratch.maxima.as_chunks::<8>().0);
            for ((multipliers, scales), maxima) in eights.take(area.width.div_ceil(8)) {
                *multipliers = encode::mx_scales::<F>(encode::eight(&maxima.map(|m| m.to_f32())), scales);
            }
            let scales = &mut scales[first / MX_BLOCK * out.scale_stride..][..area.width];
            scales.copy_from_slice(&scratch.mx_scales[..area.width]);
            for r in first..first + height {
                let codes = &mut out.codes[r * out.code_stride..][..area.width];
                encode::encode_columns::<T, F>(self.row(area, r), &scratch.multipliers, codes);
            }
        }
    }

    /// The largest magnitudes of the columns of an area, NaN left out; zeros behind them.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn find_maxima(&self, scratch: &mut Scratch<T>, area: Area) {
        for edge in [Edge::Reference, Edge::Kernel] {
            scratch.maxima.clear();
            scratch.maxima.resize(CHUNK, T::default());
            let maxima = &mut scratch.maxima[..area.width];
            let rows = (0..area.height).map(|r| row_amax(self.token, self.row(area, r), edge, maxima));
            if !is_nan::<T>(rows.max().unwrap_or(0)) {
                break;
            }
        }
    }

    /// Transposes the codes of an area and writes its columns.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn write_turned(&self, turned: &mut Vec<u8>, codes: Codes<'_>, area: Area, out: &Transposed<'_>) {
        turned.resize(COLUMNS * BLOCK, 0);
        for c in (0..area.width).step_by(COLUMNS) {
            let cols = COLUMNS.min(area.width - c);
            turn::turn(Codes { data: &codes.data[c..], cols, ..codes }, BLOCK, turned);
            for (i, column) in turned.chunks_exact(BLOCK).take(cols).enumerate() {
                let at = (area.col + c + i) * self.x.rows() + area.row;
                // SAFETY: a panel writes the codes of its own rows only.
                unsafe { out.codes.write(at, &column[..area.height]) };
            }
        }
    }
}
