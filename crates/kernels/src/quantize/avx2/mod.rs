//! Quantization with AVX2, on all threads. Read [`band`] for how a row of tiles is quantized and
//! [`cuts`] for how elements become codes without arithmetic; this file cuts a matrix into panels
//! and hands them out.
//!
//! A panel is a few rows. For the row direction alone, its rows are bands. For the column
//! direction, the panel is processed in chunks of columns, 16 rows at a time: these are bands of
//! the row direction if that is computed too, and are transposed into a buffer that stays in cache,
//! whose rows are the bands of the column direction. Memory is read once.

mod amaxes;
mod band;
mod column;
mod cuts;
mod encode;
mod four_over_six;
mod modelopt;
mod search;
mod squares;
mod target;
#[cfg_attr(target_arch = "aarch64", path = "wide/absent.rs")]
mod wide;

use super::Direction;
use crate::amax;
use crate::avx2::{Avx2, prefetch, value_of};
use crate::avx512::Avx512;
use crate::{Input, Result, Values};
use band::{Band, Draw, Output, Worker};
use column::Submatrix;
use half::bf16;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Element, GlobalScale, Rounding, e2m1};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use target::{ColContext, RowContext, RowPart, Target};
use wide::{Columns, Strip};

/// Rows of a panel with the column direction: two cache lines of codes per column.
const PANEL: usize = 256;
/// Columns that are processed at a time with the column direction.
const CHUNK: usize = 512;
/// Columns that are transposed at a time.
const COLUMNS: usize = 64;
/// Elements of a panel with the row direction alone.
const ROW_TASK: usize = 1 << 17;
/// Blocks of a band of square tiles at a time: 16 rows of this many stay in the first-level cache.
const SQUARE_BLOCKS: usize = 32;

/// Quantizes; returns how many tiles were left to the rules of `spec`.
pub(super) fn quantize(
    token: Avx2,
    wide: Option<Avx512>,
    x: &Input<'_>,
    row: Option<Direction<'_>>,
    col: Option<Direction<'_>>,
) -> Result<usize> {
    if x.rows() == 0 || x.cols() == 0 {
        return super::scalar::quantize(x, row, col).map(|()| 0);
    }
    // The transform along rows is no mode of any recipe; the rules compute it.
    let row = match row {
        Some(row) if row.transform.is_some() => {
            super::scalar::quantize(x, Some(row), None)?;
            None
        }
        row => row,
    };
    match x.values() {
        Values::F32(values) => Job { token, wide, values, x }.run(row, col),
        Values::Bf16(values) => Job { token, wide, values, x }.run(row, col),
        Values::F16(values) => Job { token, wide, values, x }.run(row, col),
    }
}

struct Job<'a, T> {
    token: Avx2,
    /// Proof of AVX-512, for what [`wide`] has.
    wide: Option<Avx512>,
    values: &'a [T],
    x: &'a Input<'a>,
}

impl<T: Element> Job<'_, T> {
    fn run<'a>(&self, row: Option<Direction<'a>>, col: Option<Direction<'a>>) -> Result<usize> {
        let (rows, cols) = (self.x.rows(), self.x.cols());
        let mut row = row.map(|d| Target::new(self.token, d, rows, cols));
        let mut col = col.map(|d| Target::new(self.token, d, cols, rows));
        self.find_amaxes(&mut row, &mut col)?;
        let undecided = AtomicUsize::new(0);
        let col_context = col.as_mut().map(Target::scatter);
        let wide = col_context.as_ref().and_then(|context| Columns::new::<T>(self.wide, context));
        let (height, chunk) = match (&col_context, &wide) {
            (None, _) => (ROW_TASK.div_ceil(cols).next_multiple_of(BLOCK), cols),
            (Some(_), None) => (PANEL, CHUNK),
            (Some(_), Some(columns)) => columns.panel(rows, row.is_some()),
        };
        let (row_context, row_parts) = match &mut row {
            Some(target) => target.split(height, rows.div_ceil(height)),
            None => (None, (0..rows.div_ceil(height)).map(|_| None).collect()),
        };
        let columns = col_context.as_ref().map(|context| (context, wide.as_ref()));
        row_parts.into_par_iter().enumerate().for_each_init(Scratch::<T>::new, |scratch, (p, part)| {
            let range = (p * height, rows.min((p + 1) * height));
            self.panel(scratch, range, chunk, row_context.as_ref().zip(part), columns, &undecided);
        });
        for target in [row, col].into_iter().flatten() {
            target.finish()?;
        }
        Ok(undecided.into_inner())
    }

    fn panel(
        &self,
        scratch: &mut Scratch<T>,
        (first, end): (usize, usize),
        chunk: usize,
        row: Option<(&RowContext<'_>, RowPart<'_>)>,
        col: Option<(&ColContext<'_>, Option<&Columns>)>,
        undecided: &AtomicUsize,
    ) {
        let cols = self.x.cols();
        let mut row = row;
        let mut left = 0;
        let Some((context, wide)) = col else {
            if let Some((context, part)) = &mut row {
                let submatrix = self.submatrix((first, end), (0, cols));
                left += self.rows(&mut scratch.row_worker, &submatrix, (first, 0), context, &mut part.rows_from(0));
            }
            undecided.fetch_add(left, Ordering::Relaxed);
            return;
        };
        let Scratch { row_worker, plain, transformed, output, strip } = scratch;
        let pitch = (end - first).next_multiple_of(BLOCK);
        for c in (0..cols).step_by(chunk) {
            let width = chunk.min(cols - c);
            let room = width.next_multiple_of(BLOCK) * pitch;
            match context.transform {
                _ if wide.is_some() => strip.resize(end - first, width),
                None => plain.resize(room, T::default()),
                Some(_) => transformed.resize(room, bf16::ZERO),
            }
            for r in (first..end).step_by(BLOCK) {
                match r + BLOCK < end {
                    // Chunks of whole pages: the hardware prefetches.
                    _ if wide.is_some() => {}
                    true => self.prefetch((r + BLOCK, end), c, width),
                    false => self.prefetch((first, end), c + width, chunk.min(cols - c - width)),
                }
                let submatrix = self.submatrix((r, end.min(r + BLOCK)), (c, width));
                if let Some((context, part)) = &mut row {
                    left += self.rows(row_worker, &submatrix, (r, c), context, &mut part.rows_from(r - first));
                }
                if let Some(columns) = wide {
                    columns.band(&submatrix, context, (r - first) / BLOCK, strip);
                    continue;
                }
                match context.transform {
                    // SAFETY: an Avx2 token is only made after detection.
                    None => unsafe { column::transpose(&submatrix, pitch, &mut plain[r - first..]) },
                    // SAFETY: an Avx2 token is only made after detection.
                    Some(signs) => unsafe {
                        column::transpose_hadamard(&submatrix, signs, pitch, &mut transformed[r - first..])
                    },
                }
            }
            if let Some(columns) = wide {
                columns.write(strip, (first, end), (c, width), self.x.rows(), context);
                continue;
            }
            for sub in (0..width).step_by(COLUMNS) {
                let (shape, at) = ((end - first, COLUMNS.min(width - sub)), (first, c + sub));
                left += match context.transform {
                    None => self.columns(output, &plain[sub * pitch..], shape, at, context),
                    Some(_) => self.columns(output, &transformed[sub * pitch..], shape, at, context),
                };
            }
        }
        undecided.fetch_add(left, Ordering::Relaxed);
    }

    /// Rows `first..end` of columns `c..c + width`.
    fn submatrix(&self, (first, end): (usize, usize), (c, width): (usize, usize)) -> Submatrix<'_, T> {
        let stride = self.x.stride();
        Submatrix { data: &self.values[first * stride + c..], stride, rows: end - first, cols: width }
    }

    /// Prefetches 16 rows of a chunk. The hardware prefetcher does not recognise this access
    /// pattern; without this, half of the time is spent waiting for memory.
    fn prefetch(&self, (first, end): (usize, usize), c: usize, width: usize) {
        for r in first..end.min(first + BLOCK) {
            prefetch(&self.values[r * self.x.stride()..][c..c + width]);
        }
    }

    /// Quantizes a submatrix along its rows; its first element is at (`first`, `c`).
    fn rows(
        &self,
        worker: &mut Option<Worker>,
        x: &Submatrix<'_, T>,
        (first, c): (usize, usize),
        context: &RowContext<'_>,
        part: &mut RowPart<'_>,
    ) -> usize {
        let height = context.mode.tile.height();
        let (bytes, blocks) = (e2m1::packed_len(self.x.cols()), self.x.cols().div_ceil(BLOCK));
        let all = x.cols.div_ceil(BLOCK);
        let step = if height == 1 { all } else { SQUARE_BLOCKS };
        let mut left = 0;
        for r in (0..x.rows).step_by(height) {
            let amax = match &mut part.amax {
                Some(out) => {
                    let row = &x.data[r * x.stride..][..x.cols];
                    // SAFETY: an Avx2 token is only made after detection.
                    let bits = unsafe { amax::avx2::row_amax(self.token, row, context.mode.amax_specials(), &mut []) };
                    out[r] = value_of(bits, T::PRECISION);
                    out[r]
                }
                None => context.amax[if context.mode.global == GlobalScale::PerRow { first + r } else { 0 }],
            };
            let scaling = Scaling::new(amax, &context.mode, T::PRECISION);
            let worker = worker.get_or_insert_with(|| Worker::new(self.token, self.wide, &scaling));
            let inside = if r + height <= x.rows { x.cols / BLOCK } else { 0 };
            let draw = |b: usize| Draw {
                rounding: context.rounding,
                first: (first + r) * blocks + c / BLOCK + b,
                pitch: blocks,
            };
            let (code_at, scale_at) = (r * bytes + c / 2, r * blocks + c / BLOCK);
            // Whole tiles are quantized in place.
            for b in (0..inside).step_by(step) {
                let band = Band {
                    data: &x.data[r * x.stride + b * BLOCK..],
                    stride: x.stride,
                    height,
                    blocks: step.min(inside - b),
                };
                let mut out = Output {
                    codes: &mut part.codes[code_at + b * BLOCK / 2..],
                    code_stride: bytes,
                    scales: &mut part.scales[scale_at + b..],
                    scale_stride: blocks,
                };
                worker.quantize(self.token, &scaling, &band, draw(b), &mut out);
                left += worker.undecided();
            }
            // Tiles that reach beyond the matrix are quantized from a padded copy.
            for b in inside..all {
                let (real, width) = (height.min(x.rows - r), BLOCK.min(x.cols - b * BLOCK));
                let mut tile = [T::default(); BLOCK * BLOCK];
                for k in 0..real {
                    let row = &x.data[(r + k) * x.stride + b * BLOCK..][..width];
                    tile[k * BLOCK..][..width].copy_from_slice(row);
                }
                let (mut codes, mut scales) = ([0; BLOCK * BLOCK / 2], [0; BLOCK]);
                let band = Band { data: &tile, stride: BLOCK, height, blocks: 1 };
                let mut out =
                    Output { codes: &mut codes, code_stride: BLOCK / 2, scales: &mut scales, scale_stride: 1 };
                worker.quantize(self.token, &scaling, &band, draw(b), &mut out);
                left += worker.undecided();
                for k in 0..real {
                    let (code_at, len) = (code_at + k * bytes + b * BLOCK / 2, width.div_ceil(2));
                    let out = &mut part.codes[code_at..][..len];
                    out.copy_from_slice(&codes[k * BLOCK / 2..][..len]);
                    clear_padding(out, width);
                    part.scales[scale_at + k * blocks + b] = scales[k];
                }
            }
        }
        left
    }

    /// Quantizes transposed columns, `n` of them with `rows` elements each; the first element is at
    /// (`first`, `c`).
    fn columns<U: Element>(
        &self,
        scratch: &mut ColumnOutput,
        data: &[U],
        (rows, n): (usize, usize),
        (first, c): (usize, usize),
        context: &ColContext<'_>,
    ) -> usize {
        let ColumnOutput { codes, scales, worker } = scratch;
        let (nb, pitch) = (rows.div_ceil(BLOCK), rows.next_multiple_of(BLOCK));
        let (bytes, blocks) = (e2m1::packed_len(self.x.rows()), self.x.rows().div_ceil(BLOCK));
        let height = context.mode.tile.height();
        let padded = n.next_multiple_of(height);
        codes.resize(padded * pitch / 2, 0);
        scales.resize(padded * nb, 0);
        // One scale for all, and rounding does not depend on positions: all columns are one long
        // row of blocks.
        let one_run = context.mode.global == GlobalScale::PerTensor
            && height == 1
            && matches!(context.rounding, Rounding::NearestEven);
        let (step, run) = if one_run { (n, n * nb) } else { (height, nb) };
        let mut left = 0;
        for i in (0..padded).step_by(step) {
            let amax = context.amax[if context.mode.global == GlobalScale::PerRow { c + i } else { 0 }];
            let scaling = Scaling::new(amax, &context.mode, U::PRECISION);
            let worker = worker.get_or_insert_with(|| Worker::new(self.token, self.wide, &scaling));
            let band = Band { data: &data[i * pitch..], stride: pitch, height, blocks: run };
            let draw = Draw { rounding: context.rounding, first: (c + i) * blocks + first / BLOCK, pitch: blocks };
            let mut out = Output {
                codes: &mut codes[i * pitch / 2..],
                code_stride: pitch / 2,
                scales: &mut scales[i * nb..],
                scale_stride: nb,
            };
            worker.quantize(self.token, &scaling, &band, draw, &mut out);
            left += worker.undecided();
        }
        for i in 0..n {
            let column = &mut codes[i * pitch / 2..][..rows.div_ceil(2)];
            clear_padding(column, rows);
            // SAFETY: a panel writes the blocks of its own rows only, and panels start at whole
            // blocks.
            unsafe { context.codes.write((c + i) * bytes + first / 2, column) };
            // SAFETY: as above.
            unsafe { context.scales.write((c + i) * blocks + first / BLOCK, &scales[i * nb..][..nb]) };
        }
        left
    }
}

/// The last high nibble of an odd number of codes is 0, whatever the padding was rounded to.
fn clear_padding(codes: &mut [u8], elements: usize) {
    if !elements.is_multiple_of(2)
        && let Some(last) = codes.last_mut()
    {
        *last &= 0x0F;
    }
}

/// What a thread keeps between panels.
struct Scratch<T> {
    row_worker: Option<Worker>,
    plain: Vec<T>,
    transformed: Vec<bf16>,
    output: ColumnOutput,
    strip: Strip,
}

struct ColumnOutput {
    codes: Vec<u8>,
    scales: Vec<u8>,
    worker: Option<Worker>,
}

impl<T: Element> Scratch<T> {
    fn new() -> Self {
        let output = ColumnOutput { codes: Vec::new(), scales: Vec::new(), worker: None };
        Scratch { row_worker: None, plain: Vec::new(), transformed: Vec::new(), output, strip: Strip::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Amax, Layout};
    use super::*;
    use nvfp4_spec::{Mode, Profile, ScaleRule};
    use nvfp4_testing::{Need, missing};

    /// How many blocks of standard normal bf16 data the filter leaves to the rule.
    #[test]
    fn the_filter_decides_all_but_a_few_of_ten_thousand_blocks() {
        let Some(token) = Avx2::detect() else { return missing(Need::Avx2, "the CPU has no AVX2") };
        let (rows, cols) = (512, 1024);
        let words = |i: usize| nvfp4_spec::philox::philox4x32([i as u32, 0, 0, 0], [1, 2]);
        let unit = |w: u32| (f64::from(w) + 0.5) / 4294967296.0;
        let x: Vec<bf16> = (0..rows * cols)
            .map(|i| {
                let [a, b, ..] = words(i);
                bf16::from_f64((-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos())
            })
            .collect();
        let input = Input::new(Values::Bf16(&x), rows, cols).unwrap();
        let wides = [
            None,
            #[cfg(target_arch = "x86_64")]
            Avx512::detect(),
        ];
        for (wide, rule) in wides.into_iter().flat_map(|wide| ScaleRule::ALL.map(|rule| (wide, rule))) {
            let profile = if rule.is_modelopt() { Profile::ModelOpt } else { Profile::TransformerEngine };
            let (mut codes, mut scales, mut amax) = (vec![0; x.len() / 2], vec![0; x.len() / 16], [0.0]);
            let row = Direction {
                mode: Mode { rule, profile, ..Mode::default() },
                rounding: Rounding::NearestEven,
                transform: None,
                layout: Layout::Linear,
                amax: Amax::Compute(&mut amax),
                codes: &mut codes,
                scales: &mut scales,
            };
            let undecided = quantize(token, wide, &input, Some(row), None).unwrap();
            let share = undecided as f64 / (x.len() / 16) as f64;
            assert!(share < 0.003, "{rule:?}, {wide:?}: {undecided} undecided, {:.3} %", share * 100.0);
            println!("{rule:?}, {wide:?}: {:.4} % undecided", share * 100.0);
        }
    }
}
