//! Quantization with AVX2, on all threads. Read [`band`] for how a row of tiles is quantized and [`cuts`] for how elements
//! become codes without arithmetic; this file cuts a matrix into panels and hands them out.
//!
//! A panel is a few rows. For the row direction its rows are bands as they lie; for the column direction it is transposed in
//! small pieces, which are then bands themselves. If both are wanted the panel is worked through in chunks of columns that
//! stay in cache, so that memory is read once.

mod band;
mod column;
mod cuts;
mod encode;
mod four_over_six;

use super::{Amax, Direction, Layout};
use crate::amax::{self, Wanted};
use crate::avx2::{Avx2, value_of};
use crate::{Implementation, Input, Result, Values};
use band::{Band, Draw, Output, Worker};
use half::bf16;
use nvfp4_spec::block::Scaling;
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{BLOCK, Edge, Element, GlobalScale, Mode, Precision, Rounding, e2m1, swizzle};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a panel where the column direction is wanted: a cache line of codes per column.
const PANEL: usize = 128;
/// Columns that are worked through at a time where both directions are wanted.
const CHUNK: usize = 512;
/// Columns that are transposed at a time.
const COLUMNS: usize = 64;
/// Elements of a panel where only the row direction is wanted.
const ROW_TASK: usize = 1 << 17;
/// Blocks of a band of square tiles at a time: 16 rows of this many stay in the first-level cache.
const SQUARE_BLOCKS: usize = 32;

/// Quantizes; returns how many tiles were left to the rules of `spec`.
pub(super) fn quantize(
    token: Avx2,
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
        Values::F32(values) => Job { token, values, x }.run(row, col),
        Values::Bf16(values) => Job { token, values, x }.run(row, col),
        Values::F16(values) => Job { token, values, x }.run(row, col),
    }
}

struct Job<'a, T> {
    token: Avx2,
    values: &'a [T],
    x: &'a Input<'a>,
}

/// The amaxes of a direction: known, or to be found row by row on the way.
enum Known<'a> {
    Values(Vec<f32>),
    OnTheWay(&'a mut [f32]),
}

impl<T: Element> Job<'_, T> {
    fn run<'a>(&self, row: Option<Direction<'a>>, col: Option<Direction<'a>>) -> Result<usize> {
        let (rows, cols) = (self.x.rows(), self.x.cols());
        let mut row = row.map(|d| Target::new(d, rows, cols));
        let mut col = col.map(|d| Target::new(d, cols, rows));
        self.find_amaxes(&mut row, &mut col)?;
        let undecided = AtomicUsize::new(0);
        let height = if col.is_some() { PANEL } else { ROW_TASK.div_ceil(cols).next_multiple_of(BLOCK) };
        let (row_context, row_parts) = match &mut row {
            Some(target) => target.split(height, rows.div_ceil(height)),
            None => (None, (0..rows.div_ceil(height)).map(|_| None).collect()),
        };
        let col_context = col.as_mut().map(Target::scatter);
        row_parts.into_par_iter().enumerate().for_each_init(Scratch::<T>::new, |scratch, (p, part)| {
            let range = (p * height, rows.min((p + 1) * height));
            self.panel(scratch, range, row_context.as_ref().zip(part), col_context.as_ref(), &undecided);
        });
        for target in [row, col].into_iter().flatten() {
            target.finish()?;
        }
        Ok(undecided.into_inner())
    }

    /// Finds the amaxes that are asked for, in as few passes over the matrix as possible.
    fn find_amaxes<'a>(&self, row: &mut Option<Target<'a>>, col: &mut Option<Target<'a>>) -> Result<()> {
        let both = col.is_some();
        let (mut tensor, mut rows, mut cols) = (None, None, None);
        if let Some(target) = row
            && target.wants_amax()
        {
            match target.mode.global {
                GlobalScale::PerTensor => tensor = Some((0.0, target.mode.amax_edge())),
                GlobalScale::PerRow if both => rows = Some(target.mode.amax_edge()),
                GlobalScale::PerRow => {} // on the way
            }
        }
        if let Some(target) = col
            && target.wants_amax()
        {
            match (target.transform, target.mode.global) {
                (Some(signs), _) => {
                    let found = self.transformed_amax(signs, &target.mode);
                    target.set_amax(found);
                }
                (None, GlobalScale::PerTensor) => tensor = Some((0.0, target.mode.amax_edge())),
                (None, GlobalScale::PerRow) => cols = Some(target.mode.amax_edge()),
            }
        }
        let implementation = Implementation::Avx2(self.token);
        let mut row_values = vec![0.0; if rows.is_some() { self.x.rows() } else { 0 }];
        let mut col_values = vec![0.0; if cols.is_some() { self.x.cols() } else { 0 }];
        for edge in [Edge::Kernel, Edge::Reference] {
            let wanted = Wanted {
                tensor: tensor.as_mut().filter(|(_, e)| *e == edge).map(|(value, _)| value),
                rows: rows.filter(|&e| e == edge).map(|_| &mut row_values[..]),
                cols: cols.filter(|&e| e == edge).map(|_| &mut col_values[..]),
            };
            if wanted.tensor.is_some() || wanted.rows.is_some() || wanted.cols.is_some() {
                amax::amax(implementation, self.x, edge, wanted)?;
            }
        }
        let tensor = tensor.map(|(value, _)| vec![value]);
        for (target, found) in [(row.as_mut(), rows.map(|_| row_values)), (col.as_mut(), cols.map(|_| col_values))] {
            let Some(target) = target.filter(|t| t.wants_amax()) else { continue };
            let of_tensor = tensor.clone().filter(|_| target.mode.global == GlobalScale::PerTensor);
            if let Some(values) = found.or(of_tensor) {
                target.set_amax(values);
            }
        }
        Ok(())
    }

    /// The amax of the transformed columns: of the whole, or of each column.
    fn transformed_amax(&self, signs: Signs, mode: &Mode) -> Vec<f32> {
        let (rows, cols) = (self.x.rows(), self.x.cols());
        let maxima = (0..rows.div_ceil(PANEL))
            .into_par_iter()
            .map_init(Scratch::<T>::new, |scratch, p| {
                let range = (p * PANEL, rows.min((p + 1) * PANEL));
                let mut maxima = vec![0; cols];
                for c in (0..cols).step_by(COLUMNS) {
                    let n = COLUMNS.min(cols - c);
                    let pitch = scratch.transpose(self, range, c, n, Some(signs));
                    for (m, column) in maxima[c..].iter_mut().zip(scratch.transformed.chunks_exact(pitch)).take(n) {
                        // SAFETY: an Avx2 token is only made after detection.
                        *m = unsafe { amax::avx2::row_amax(self.token, column, mode.amax_edge(), &mut []) };
                    }
                }
                maxima
            })
            .reduce(|| vec![0; cols], |a, b| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect());
        let values = maxima.into_iter().map(|bits| value_of(bits, Precision::Bf16));
        match mode.global {
            GlobalScale::PerRow => values.collect(),
            // A NaN is the largest of all bits, and stays so as a value's bits.
            GlobalScale::PerTensor => vec![f32::from_bits(values.map(f32::to_bits).max().unwrap_or(0))],
        }
    }

    fn panel(
        &self,
        scratch: &mut Scratch<T>,
        (first, end): (usize, usize),
        row: Option<(&RowContext<'_>, RowPart<'_>)>,
        col: Option<&ColContext<'_>>,
        undecided: &AtomicUsize,
    ) {
        let cols = self.x.cols();
        let chunk = if col.is_some() { CHUNK } else { cols };
        let mut row = row;
        let mut left = 0;
        for c in (0..cols).step_by(chunk) {
            let width = chunk.min(cols - c);
            if let Some((context, part)) = &mut row {
                left += self.rows(scratch, (first, end), (c, width), context, part);
            }
            if let Some(context) = col {
                for sub in (c..c + width).step_by(COLUMNS) {
                    left += self.columns(scratch, (first, end), (sub, COLUMNS.min(c + width - sub)), context);
                }
            }
        }
        undecided.fetch_add(left, Ordering::Relaxed);
    }

    /// Quantizes columns `c..c + width` of some rows along the rows.
    fn rows(
        &self,
        scratch: &mut Scratch<T>,
        (first, end): (usize, usize),
        (c, width): (usize, usize),
        context: &RowContext<'_>,
        part: &mut RowPart<'_>,
    ) -> usize {
        let (stride, height) = (self.x.stride(), context.mode.tile.height());
        let (bytes, blocks) = (e2m1::packed_len(self.x.cols()), self.x.cols().div_ceil(BLOCK));
        let mut left = 0;
        for r in (first..end).step_by(height) {
            let amax = match &mut part.amax {
                Some(out) => {
                    // SAFETY: an Avx2 token is only made after detection.
                    let bits = unsafe {
                        let row = &self.values[r * stride..][..self.x.cols()];
                        amax::avx2::row_amax(self.token, row, context.mode.amax_edge(), &mut [])
                    };
                    out[r - first] = value_of(bits, T::PRECISION);
                    out[r - first]
                }
                None => context.amax[if context.mode.global == GlobalScale::PerRow { r } else { 0 }],
            };
            let scaling = Scaling::new(amax, &context.mode, T::PRECISION);
            let worker = scratch.row_worker.get_or_insert_with(|| Worker::new(self.token, &scaling));
            let real = height.min(end - r);
            let step = if height == 1 { width / BLOCK } else { SQUARE_BLOCKS };
            let whole = if real == height { width / BLOCK } else { 0 };
            for b in (0..width.div_ceil(BLOCK)).step_by(step.max(1)) {
                let at = c + b * BLOCK;
                let draw = Draw { rounding: context.rounding, first: r * blocks + at / BLOCK, pitch: blocks };
                let (code_at, scale_at) = ((r - first) * bytes + at / 2, (r - first) * blocks + at / BLOCK);
                let (codes, scales) = (&mut part.codes[code_at..], &mut part.scales[scale_at..]);
                // Whole tiles inside the matrix are quantized where they lie, others from a padded copy.
                let inside = step.min(whole.saturating_sub(b));
                if inside > 0 {
                    let band = Band { data: &self.values[r * stride + at..], stride, height, blocks: inside };
                    let mut out = Output { codes, code_stride: bytes, scales, scale_stride: blocks };
                    worker.quantize(self.token, &scaling, &band, draw, &mut out);
                    left += worker.undecided();
                }
                let padded = step.max(1).min(width.div_ceil(BLOCK) - b) - inside;
                for i in (inside..inside + padded).map(|i| i * BLOCK) {
                    let n = BLOCK.min(c + width - (at + i));
                    let mut tile = [T::default(); BLOCK * BLOCK];
                    for k in 0..real {
                        let from = &self.values[(r + k) * stride + at + i..][..n];
                        tile[k * BLOCK..][..n].copy_from_slice(from);
                    }
                    let (mut tile_codes, mut tile_scales) = ([0; BLOCK * BLOCK / 2], [0; BLOCK]);
                    let band = Band { data: &tile, stride: BLOCK, height, blocks: 1 };
                    let mut out = Output {
                        codes: &mut tile_codes,
                        code_stride: BLOCK / 2,
                        scales: &mut tile_scales,
                        scale_stride: 1,
                    };
                    let draw = Draw { first: draw.first + i / BLOCK, ..draw };
                    worker.quantize(self.token, &scaling, &band, draw, &mut out);
                    left += worker.undecided();
                    for k in 0..real {
                        let (code_at, scale_at) =
                            ((r + k - first) * bytes + (at + i) / 2, (r + k - first) * blocks + (at + i) / BLOCK);
                        let len = n.div_ceil(2);
                        part.codes[code_at..][..len].copy_from_slice(&tile_codes[k * BLOCK / 2..][..len]);
                        part.scales[scale_at] = tile_scales[k];
                    }
                }
            }
        }
        left
    }

    /// Quantizes `n` columns of a panel along the columns.
    fn columns(
        &self,
        scratch: &mut Scratch<T>,
        range: (usize, usize),
        (c, n): (usize, usize),
        context: &ColContext<'_>,
    ) -> usize {
        let pitch = scratch.transpose(self, range, c, n, context.transform);
        let Scratch { plain, transformed, codes, scales, col_worker, .. } = scratch;
        match context.transform {
            None => self.quantize_columns(plain, pitch, range, (c, n), context, codes, scales, col_worker),
            Some(_) => self.quantize_columns(transformed, pitch, range, (c, n), context, codes, scales, col_worker),
        }
    }

    #[allow(clippy::too_many_arguments)] // the scratch buffers, borrowed one by one
    fn quantize_columns<U: Element>(
        &self,
        data: &[U],
        pitch: usize,
        (first, end): (usize, usize),
        (c, n): (usize, usize),
        context: &ColContext<'_>,
        codes: &mut Vec<u8>,
        scales: &mut Vec<u8>,
        worker: &mut Option<Worker>,
    ) -> usize {
        let (rows, nb) = (self.x.rows(), pitch / BLOCK);
        let (bytes, blocks) = (e2m1::packed_len(rows), rows.div_ceil(BLOCK));
        let height = context.mode.tile.height();
        let padded = n.next_multiple_of(height);
        codes.resize(padded * pitch / 2, 0);
        scales.resize(padded * nb, 0);
        // One scale for all and no position to keep: all columns are one long row of blocks.
        let one_run = context.mode.global == GlobalScale::PerTensor
            && height == 1
            && matches!(context.rounding, Rounding::NearestEven);
        let step = if one_run { n } else { height };
        let mut left = 0;
        for i in (0..padded).step_by(step) {
            let amax = context.amax[if context.mode.global == GlobalScale::PerRow { c + i } else { 0 }];
            let scaling = Scaling::new(amax, &context.mode, U::PRECISION);
            let worker = worker.get_or_insert_with(|| Worker::new(self.token, &scaling));
            let run = if one_run { n * nb } else { nb };
            let band = Band { data: &data[i * pitch..], stride: pitch, height, blocks: run };
            let first = (c + i) * blocks + first / BLOCK;
            let draw = Draw { rounding: context.rounding, first, pitch: blocks };
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
            let len = (end - first).div_ceil(2);
            context.codes.write((c + i) * bytes + first / 2, &codes[i * pitch / 2..][..len]);
            context.scales.write((c + i) * blocks + first / BLOCK, &scales[i * nb..][..nb]);
        }
        left
    }
}

/// A direction's settings, its amaxes and its buffers, scales in linear layout.
struct Target<'a> {
    mode: Mode,
    rounding: Rounding<Random<'a>>,
    transform: Option<Signs>,
    rows: usize,
    blocks: usize,
    bytes: usize,
    amax: Known<'a>,
    amax_out: Option<&'a mut [f32]>,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    /// Linear scales on their way to the swizzled ones in `scales`.
    linear: Option<Vec<u8>>,
}

impl<'a> Target<'a> {
    fn new(d: Direction<'a>, rows: usize, cols: usize) -> Self {
        let (amax, amax_out) = match d.amax {
            Amax::Given(amax) => (Known::Values(amax.to_vec()), None),
            Amax::Compute(out) => (Known::Values(Vec::new()), Some(out)),
        };
        let blocks = cols.div_ceil(BLOCK);
        let linear = (d.layout == Layout::Swizzled).then(|| vec![0; rows * blocks]);
        Target {
            mode: d.mode,
            rounding: d.rounding,
            transform: d.transform,
            rows,
            blocks,
            bytes: e2m1::packed_len(cols),
            amax,
            amax_out,
            codes: d.codes,
            scales: d.scales,
            linear,
        }
    }

    fn wants_amax(&self) -> bool {
        self.amax_out.is_some()
    }

    fn set_amax(&mut self, values: Vec<f32>) {
        if let Some(out) = self.amax_out.take() {
            out.copy_from_slice(&values);
        }
        self.amax = Known::Values(values);
    }

    /// The row direction in pieces of `height` rows.
    fn split(&mut self, height: usize, panels: usize) -> (Option<RowContext<'_>>, Vec<Option<RowPart<'_>>>) {
        if let Some(out) = self.amax_out.take() {
            self.amax = Known::OnTheWay(out);
        }
        let (amax, mut on_the_way) = match &mut self.amax {
            Known::Values(values) => (&values[..], None),
            Known::OnTheWay(out) => (&[][..], Some(out.chunks_mut(height))),
        };
        let scales = self.linear.as_deref_mut().unwrap_or(self.scales);
        let mut codes = self.codes.chunks_mut(height * self.bytes);
        let mut scales = scales.chunks_mut(height * self.blocks);
        let parts = (0..panels)
            .map(|_| {
                Some(RowPart {
                    codes: codes.next().expect("a panel has rows"),
                    scales: scales.next().expect("a panel has rows"),
                    amax: on_the_way.as_mut().map(|chunks| chunks.next().expect("a panel has rows")),
                })
            })
            .collect();
        (Some(RowContext { mode: self.mode, rounding: self.rounding, amax }), parts)
    }

    /// The column direction, written to from all panels.
    fn scatter(&mut self) -> ColContext<'_> {
        let Known::Values(amax) = &self.amax else { unreachable!("column amaxes are found beforehand") };
        ColContext {
            mode: self.mode,
            rounding: self.rounding,
            transform: self.transform,
            amax,
            codes: Scatter::new(self.codes),
            scales: Scatter::new(self.linear.as_deref_mut().unwrap_or(self.scales)),
        }
    }

    fn finish(self) -> Result<()> {
        if let Some(linear) = self.linear {
            let swizzled = swizzle::swizzle(&linear, self.rows, self.blocks)?;
            self.scales.copy_from_slice(&swizzled);
        }
        Ok(())
    }
}

struct RowContext<'a> {
    mode: Mode,
    rounding: Rounding<Random<'a>>,
    amax: &'a [f32],
}

struct RowPart<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    /// Row amaxes that are found on the way.
    amax: Option<&'a mut [f32]>,
}

struct ColContext<'a> {
    mode: Mode,
    rounding: Rounding<Random<'a>>,
    transform: Option<Signs>,
    amax: &'a [f32],
    codes: Scatter<'a>,
    scales: Scatter<'a>,
}

/// A buffer that several threads write disjoint pieces of.
struct Scatter<'a> {
    start: *mut u8,
    len: usize,
    buffer: std::marker::PhantomData<&'a mut [u8]>,
}

// SAFETY: every panel writes the bytes of its own rows' blocks only, and no two panels share a block: panels are a multiple
// of 16 rows high, so that their codes and scales start at whole bytes.
unsafe impl Sync for Scatter<'_> {}

impl<'a> Scatter<'a> {
    fn new(buffer: &'a mut [u8]) -> Self {
        Scatter { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: std::marker::PhantomData }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "a panel writes inside the buffer");
        // SAFETY: the range was checked, and no other thread touches it (see `Sync`).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }
}

/// What a thread keeps between panels.
struct Scratch<T> {
    row_worker: Option<Worker>,
    col_worker: Option<Worker>,
    plain: Vec<T>,
    transformed: Vec<bf16>,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl<T: Element> Scratch<T> {
    fn new() -> Self {
        Scratch {
            row_worker: None,
            col_worker: None,
            plain: Vec::new(),
            transformed: Vec::new(),
            codes: Vec::new(),
            scales: Vec::new(),
        }
    }

    /// Columns `c..c + n` of a panel as rows of the returned length, in `transformed` if there is a transform, else in `plain`.
    /// Columns up to a multiple of 16 are zeros.
    fn transpose(
        &mut self,
        job: &Job<'_, T>,
        (first, end): (usize, usize),
        c: usize,
        n: usize,
        transform: Option<Signs>,
    ) -> usize {
        let (rows, stride) = (end - first, job.x.stride());
        let pitch = rows.next_multiple_of(BLOCK);
        let padded = n.next_multiple_of(BLOCK);
        self.plain.resize(padded * pitch, T::default());
        self.plain[n * pitch..].fill(T::default());
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { column::transpose(&job.values[first * stride + c..], stride, rows, n, pitch, &mut self.plain) };
        if let Some(signs) = transform {
            self.transformed.resize(padded * pitch, bf16::ZERO);
            let groups = self.plain.as_chunks::<BLOCK>().0;
            // SAFETY: an Avx2 token is only made after detection.
            unsafe { column::hadamard(groups, signs, self.transformed.as_chunks_mut::<BLOCK>().0) };
        }
        pitch
    }
}
