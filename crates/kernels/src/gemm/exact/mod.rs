//! NVFP4 × NVFP4 in vectors. **Exact**: twin of [`nvfp4_spec::gemm`].
//!
//! E2M1 values doubled are integers of at most 12, so a block's 16 products add up in integers. The
//! instructions need one unsigned factor: 12 is added to B's values, and 12 times the sum of A's
//! values is subtracted again. A block's term is that integer times both scales, at most 20
//! significant bits: exact in binary32. Terms are added in binary64.
//!
//! # Why that sum is exact
//!
//! With `g` the smallest unit that a row's scales are multiples of, every term of output (i, j) is
//! a multiple of gᵢ·gⱼ/4 and at most 2304·sᵢ·sⱼ/4, s being the row's largest scale. While the
//! number of blocks times 2304·sᵢ·sⱼ stays below 2⁵³·gᵢ·gⱼ, no partial sum needs more than 53 bits.
//! Rows of ordinary matrices are far below that. Where they are not, sums are taken over runs of 64
//! blocks, which are within it whatever the scales, and added up as integers.
//!
//! B is processed in panels of a few rows. A panel is unpacked once, side by side, and stays in
//! cache for all rows of A.

mod avx2;
mod avx512;
pub(super) mod row;

use super::pieces::{in_pieces, rows_in_pieces};
use super::writer::{MOST, Writer};
use crate::avx2::Avx2;
use crate::avx512::Avx512;
use nvfp4_spec::gemm::{Accumulate, Product, TERM_UNIT};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element, e4m3};
use rayon::prelude::*;
use std::sync::LazyLock;

/// What is added to B's doubled values.
const SHIFT: i32 = 12;

/// E2M1 values doubled, by code.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Which instructions.
#[derive(Clone, Copy)]
pub(super) enum Vectors {
    Avx2(Avx2),
    Avx512(Avx512),
}

/// A block of a row of A: its values in fours, what undoes the shift of B's, its scale, and, in the
/// first of two blocks, how far apart their scales are ([`spread`]).
#[derive(Clone, Copy)]
struct Step {
    values: [i32; 4],
    offset: i32,
    scale: f32,
    spread: u8,
}

/// The largest scale of a row and the unit of all: a power of two.
#[derive(Clone, Copy)]
struct Range {
    largest: f32,
    unit: f32,
}

impl Range {
    fn of(scales: &[u8]) -> Self {
        // Values and their units grow with the byte, so the largest and the smallest that is not
        // zero say it all. NaN makes its outputs NaN whatever the range.
        let (mut largest, mut below) = (0, e4m3::MAX_BYTE - 1);
        for &byte in scales {
            let magnitude = (byte & 0x7F).min(e4m3::MAX_BYTE);
            largest = magnitude.max(largest);
            // One less, so that zero is the largest of all.
            below = magnitude.wrapping_sub(1).min(below);
        }
        let smallest = below + 1;
        // A value has four significant bits; the subnormal ones are multiples of the smallest.
        let leading = f32::from_bits(e4m3::decode(smallest).to_bits() & 0x7F80_0000);
        Range { largest: e4m3::decode(largest), unit: (leading / 8.0).max(e4m3::MIN_POSITIVE) }
    }

    /// Whether a sum of `blocks` terms of two such rows is exact in binary64.
    fn fits(self, other: Range, blocks: usize) -> bool {
        let most = 2304.0 * f64::from(self.largest) * f64::from(other.largest) * blocks as f64;
        most == 0.0 || most < 2f64.powi(53) * f64::from(self.unit) * f64::from(other.unit)
    }

    fn and(self, other: Range) -> Range {
        Range { largest: self.largest.max(other.largest), unit: self.unit.min(other.unit) }
    }
}

/// A block of `N` rows of B side by side: values four by four, shifted, and scales; in the first of
/// two blocks the largest [`spread`] of a row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelStep<const N: usize> {
    values: [[[u8; 4]; N]; 4],
    scales: [f32; N],
    spread: u8,
}

/// By how many powers of two the scales of two blocks differ; none if one of them is 0.
///
/// A scale is at most 15 times the unit of its power of two. Two terms of an output, each a sum of
/// 16 products times two scales, are then multiples of one unit, and with both sides' spreads at
/// most [`PAIRED`] together their sum is at most 2·2304·15²·2⁴ = 16,588,800 < 2²⁴ of those units:
/// exact in binary32.
fn spread(first: u8, second: u8) -> u8 {
    let power = |byte: u8| (byte >> 3 & 15).max(1);
    let difference = power(first).abs_diff(power(second));
    // Without a branch, so that the compiler vectorizes it.
    difference * u8::from((first & 0x7F != 0) & (second & 0x7F != 0))
}

const PAIRED: u8 = 4;

impl<const N: usize> PanelStep<N> {
    const EMPTY: Self = PanelStep { values: [[[SHIFT as u8; 4]; N]; 4], scales: [0.0; N], spread: 0 };
}

/// `N` sums for each of up to six rows of A, before they are rounded to binary32.
type Tile<const N: usize> = [[f64; N]; MOST_ROWS];
const MOST_ROWS: usize = 6;

/// A kernel: the sums of up to [`MOST_ROWS`] rows of A with the rows of a panel.
trait Kernel<const N: usize>: Copy + Sync {
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]);
    fn tile(self, rows: &[&[Step]], panel: &[PanelStep<N>], accumulate: Accumulate, out: &mut Tile<N>);
}

/// The product of two quantized matrices whose shapes were checked and which have elements.
pub(super) fn gemm<T: Element>(vectors: Vectors, a: &View<'_>, b: &View<'_>, product: &Product<'_, T>, out: &mut [T]) {
    match vectors {
        Vectors::Avx2(token) => run::<T, 8>(token, a, b, product, out),
        Vectors::Avx512(token) if a.rows <= FEW && product.accumulate == Accumulate::Exact => {
            few_rows(token, a, b, product, out);
        }
        Vectors::Avx512(token) => run::<T, 16>(token, a, b, product, out),
    }
}

/// The number of rows of A up to which unpacking B to memory costs more than it saves.
pub(super) const FEW: usize = 4;
/// Rows of B that a thread takes at a time where A has few.
pub(super) const CHUNK: usize = MOST;

/// The product where A has few rows.
fn few_rows<T: Element>(token: Avx512, a: &View<'_>, b: &View<'_>, product: &Product<'_, T>, out: &mut [T]) {
    let blocks = a.cols.div_ceil(BLOCK);
    let rows: Vec<Vec<row::Group>> = (0..a.rows).map(|i| row::groups(a, i)).collect();
    let a_range = (0..a.rows).map(|i| Range::of(a.scale_row(i))).reduce(Range::and).expect("A has rows");
    let writer = Writer::new((a.into(), b.into()), product, out);
    (0..b.rows.div_ceil(CHUNK)).into_par_iter().for_each(|chunk| {
        let first = chunk * CHUNK;
        let width = CHUNK.min(b.rows - first);
        // The sums of a row of B with all of A's.
        let column = |j: usize| {
            let step = if a_range.fits(Range::of(b.scale_row(j)), blocks) { blocks } else { RUN };
            in_runs(blocks, step, |run, tile| row::sums(token, &rows, b, j, run, tile.as_flattened_mut()))
        };
        let mut columns = [[[0f32; 1]; MOST_ROWS]; CHUNK];
        columns[..width].iter_mut().enumerate().for_each(|(c, sums)| *sums = column(first + c));
        for i in 0..a.rows {
            let sums = columns.map(|column| column[i][0]);
            // SAFETY: a chunk writes the columns of its own rows of B only.
            unsafe { writer.write(i, first, &sums[..width]) };
        }
    });
}

fn run<T: Element, const N: usize>(
    kernel: impl Kernel<N>,
    a: &View<'_>,
    b: &View<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) {
    let blocks = a.cols.div_ceil(BLOCK);
    let steps: Vec<Step> = rows_in_pieces(a.rows, a.cols).flat_map_iter(|i| steps(a, i)).collect();
    let range = |rows: std::ops::Range<usize>| rows.map(|i| Range::of(a.scale_row(i))).reduce(Range::and);
    let group_of = |first: usize| range(first..a.rows.min(first + MOST_ROWS)).expect("a group has rows");
    let a_ranges: Vec<Range> = (0..a.rows).step_by(MOST_ROWS).map(group_of).collect();
    let rows: Vec<&[Step]> = steps.chunks_exact(blocks).collect();
    let writer = Writer::new((a.into(), b.into()), product, out);
    in_pieces(b.rows.div_ceil(N), N * a.rows * a.cols).for_each_init(
        || vec![PanelStep::<N>::EMPTY; blocks],
        |panel, p| {
            let first = p * N;
            let width = N.min(b.rows - first);
            if width < N {
                panel.fill(PanelStep::EMPTY);
            }
            kernel.unpack(b, first, panel);
            let b_range = (first..first + width).map(|j| Range::of(b.scale_row(j))).reduce(Range::and);
            let b_range = b_range.expect("a panel has rows");
            for group in (0..a.rows).step_by(MOST_ROWS) {
                let height = MOST_ROWS.min(a.rows - group);
                let fits = a_ranges[group / MOST_ROWS].fits(b_range, blocks);
                let step = if fits || product.accumulate == Accumulate::Reference { blocks } else { RUN };
                let tile = in_runs(blocks, step, |run, tile| {
                    let mut part: [&[Step]; MOST_ROWS] = [&[]; MOST_ROWS];
                    for (part, row) in part.iter_mut().zip(&rows[group..group + height]) {
                        *part = &row[run.clone()];
                    }
                    kernel.tile(&part[..height], &panel[run], product.accumulate, tile);
                });
                for (r, sums) in tile[..height].iter().enumerate() {
                    // SAFETY: a panel writes the columns of its own rows of B only.
                    unsafe { writer.write(group + r, first, &sums[..width]) };
                }
            }
        },
    );
}

/// Blocks of a run: a sum of 64·2304·(448·2⁹)² < 2⁵³ units is exact however far apart scales are.
/// Even, and a multiple of what [`row::sums`] takes at a time.
const RUN: usize = 64;

/// A tile of sums over all blocks, rounded once. `sums` adds `step` blocks at a time, exactly.
fn in_runs<const N: usize>(
    blocks: usize,
    step: usize,
    mut sums: impl FnMut(std::ops::Range<usize>, &mut Tile<N>),
) -> [[f32; N]; MOST_ROWS] {
    let mut tile = [[0.0; N]; MOST_ROWS];
    if step >= blocks {
        sums(0..blocks, &mut tile);
        return tile.map(|row| row.map(|sum| sum as f32));
    }
    let unit = f64::from(TERM_UNIT);
    let mut totals = [[Some(0i128); N]; MOST_ROWS];
    for first in (0..blocks).step_by(step) {
        sums(first..blocks.min(first + step), &mut tile);
        for (total, &sum) in totals.as_flattened_mut().iter_mut().zip(tile.as_flattened()) {
            // A sum that is NaN stays so.
            *total = total.filter(|_| !sum.is_nan()).map(|total| total + (sum / unit) as i128);
        }
    }
    totals.map(|row| row.map(|total| total.map_or(f32::NAN, |total| total as f32 * TERM_UNIT)))
}

/// Row `i` of A.
fn steps<'a>(a: &View<'a>, i: usize) -> impl Iterator<Item = Step> + use<'a> {
    let (codes, scales, cols, table) = (a.code_row(i), a.scale_row(i), a.cols, &*SCALES);
    scales.iter().enumerate().map(move |(k, &scale)| {
        let mut values = [0i8; BLOCK];
        for (pair, &byte) in values.chunks_exact_mut(2).zip(&codes[k * BLOCK / 2..]) {
            pair.copy_from_slice(&[DOUBLED[usize::from(byte & 15)], DOUBLED[usize::from(byte >> 4)]]);
        }
        // The format requires codes beyond an odd end to be zero, but a caller's buffer may differ.
        if cols < (k + 1) * BLOCK {
            values[cols - k * BLOCK..].fill(0);
        }
        let sum: i32 = values.iter().map(|&v| i32::from(v)).sum();
        let fours = values.as_chunks::<4>().0;
        Step {
            values: std::array::from_fn(|q| i32::from_le_bytes(fours[q].map(|v| v as u8))),
            offset: -SHIFT * sum,
            scale: table[usize::from(scale)],
            spread: scales.get(k + 1).map_or(0, |&next| spread(scale, next)),
        }
    })
}

/// The values of every scale byte.
pub(super) static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3::decode(byte as u8)));
