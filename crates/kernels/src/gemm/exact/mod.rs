//! NVFP4 × NVFP4 in vectors. **Exact**: twin of [`nvfp4_spec::gemm`].
//!
//! E2M1 values doubled are integers of at most 12, so a block's 16 products add up in integers. The
//! instructions need one unsigned factor: 12 is added to B's values, and 12 times the sum of A's
//! values is subtracted again. A block's term is that integer times both scales.
//!
//! # Why the sum is exact
//!
//! Scales are integers of a unit ([`scales`]). Where those of a run of 32 blocks are small enough,
//! as those of ordinary rows are, its terms are added up in 32 bits. Elsewhere a term is computed
//! in binary32: it has at most 20 significant bits.
//!
//! Sums of runs, and such terms, are added in binary64. With `g` the unit of a row, every term of
//! output (i, j) is a multiple of gᵢ·gⱼ/4 and at most 2304·sᵢ·sⱼ/4, s being the row's largest
//! scale. While the number of blocks times 2304·sᵢ·sⱼ stays below 2⁵³·gᵢ·gⱼ, no partial sum needs
//! more than 53 bits. Rows of ordinary matrices are far below that. Where they are not, sums are
//! taken over one run each, which are within it whatever the scales, and added up as integers.
//!
//! B is processed in panels of a few rows. A panel is unpacked once, side by side, and stays in
//! cache for all rows of A. Where A has few rows, B is read as it lies ([`row`]).

mod avx2;
mod avx512;
pub(super) mod row;
pub(super) mod scales;

use super::pieces::{in_pieces, rows_in_pieces};
use super::writer::{MOST, Writer};
use crate::avx2::Avx2;
use crate::avx512::Avx512;
pub(super) use avx2::for_rows;
use nvfp4_spec::gemm::{Accumulate, Product, TERM_UNIT};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element};
use rayon::prelude::*;
pub(super) use scales::SCALES;
use scales::{RUN, Range, runs};

/// What is added to B's doubled values.
pub(super) const SHIFT: i32 = 12;

/// E2M1 values doubled, by code.
pub(super) const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Which instructions.
#[derive(Clone, Copy)]
pub(super) enum Vectors {
    Avx2(Avx2),
    Avx512(Avx512),
}

impl Vectors {
    /// Those of AVX2, which few rows are multiplied with: they are bound by memory.
    pub fn avx2(self) -> Avx2 {
        match self {
            Vectors::Avx2(token) => token,
            Vectors::Avx512(token) => token.avx2(),
        }
    }
}

/// A block of a row of A.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Step {
    /// Its values in fours.
    pub values: [i32; 4],
    /// What undoes the shift of B's values.
    pub offset: i32,
    /// Half of that, in both halves of a word.
    halves: i32,
    /// The scale.
    scale: f32,
    /// The scale as an integer of its run, in both halves of a word; where it has one.
    pub integer: u32,
}

/// The rows of A.
struct Rows {
    blocks: usize,
    steps: Vec<Step>,
    /// Of every run of every row.
    ranges: Vec<Range>,
}

impl Rows {
    fn new(a: &View<'_>) -> Self {
        let blocks = a.cols.div_ceil(BLOCK);
        let row = |i: usize| a.scale_row(i).chunks(RUN).map(Range::of);
        let ranges: Vec<Range> = (0..a.rows).flat_map(row).collect();
        let count = blocks.div_ceil(RUN);
        let steps = rows_in_pieces(a.rows, a.cols).flat_map_iter(|i| steps(a, i, &ranges[i * count..][..count]));
        Rows { blocks, steps: steps.collect(), ranges }
    }

    fn row(&self, i: usize) -> &[Step] {
        &self.steps[i * self.blocks..][..self.blocks]
    }

    /// The ranges of the runs of row `i`.
    fn ranges(&self, i: usize) -> &[Range] {
        let count = self.blocks.div_ceil(RUN);
        &self.ranges[i * count..][..count]
    }
}

/// Row `i` of A; the ranges are those of its runs.
pub(super) fn steps<'a>(a: &View<'a>, i: usize, ranges: &'a [Range]) -> impl Iterator<Item = Step> + use<'a> {
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
        let half = (-SHIFT * sum / 2) as i16 as u16;
        Step {
            values: std::array::from_fn(|q| i32::from_le_bytes(fours[q].map(|v| v as u8))),
            offset: -SHIFT * sum,
            halves: (u32::from(half) << 16 | u32::from(half)) as i32,
            scale: table[usize::from(scale)],
            integer: ranges[k / RUN].integers()[usize::from(scale & 0x7F)],
        }
    })
}

/// A block of `N` rows of B side by side: values four by four, shifted, and scales as their run has
/// them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelStep<const N: usize> {
    values: [[[u8; 4]; N]; 4],
    scales: [u32; N],
}

impl<const N: usize> PanelStep<N> {
    const EMPTY: Self = PanelStep { values: [[[SHIFT as u8; 4]; N]; 4], scales: [0; N] };
}

/// What the scales of a run of a panel are.
#[derive(Clone, Copy)]
enum Form<const N: usize> {
    /// Integers in both halves of a word, of these units.
    Integers([f32; N]),
    /// Numbers of binary32.
    Floats,
}

/// A few rows of B.
struct Panel<const N: usize> {
    steps: Vec<PanelStep<N>>,
    forms: Vec<Form<N>>,
    /// The largest of the rows' ranges, run by run.
    ranges: Vec<Range>,
    /// The range of all.
    range: Range,
}

impl<const N: usize> Panel<N> {
    fn new(blocks: usize) -> Self {
        let runs = blocks.div_ceil(RUN);
        let none = Range::of(&[]);
        Panel {
            steps: vec![PanelStep::EMPTY; blocks],
            forms: vec![Form::Floats; runs],
            ranges: vec![none; runs],
            range: none,
        }
    }

    /// Unpacks up to `N` rows of B from row `first` on.
    fn unpack(&mut self, kernel: impl Kernel<N>, b: &View<'_>, first: usize, accumulate: Accumulate) {
        let width = N.min(b.rows - first);
        if width < N {
            self.steps.fill(PanelStep::EMPTY);
        }
        kernel.unpack(b, first, &mut self.steps);
        let table = &*SCALES;
        self.range = Range::of(&[]);
        for (r, steps) in self.steps.chunks_mut(RUN).enumerate() {
            let scales = |c: usize| &b.scale_row(first + c)[r * RUN..][..steps.len()];
            let mut ranges = [Range::of(&[]); N];
            ranges[..width].iter_mut().enumerate().for_each(|(c, range)| *range = Range::of(scales(c)));
            self.range = ranges.into_iter().fold(self.range, Range::and);
            self.ranges[r] = ranges.into_iter().reduce(Range::largest_of).expect("a panel has rows");
            let integers = accumulate == Accumulate::Exact && self.ranges[r].has_integers();
            for (c, range) in ranges[..width].iter().enumerate() {
                let (scales, integer) = (&b.scale_row(first + c)[r * RUN..], range.integers());
                for (step, &byte) in steps.iter_mut().zip(scales) {
                    step.scales[c] =
                        if integers { integer[usize::from(byte & 0x7F)] } else { table[usize::from(byte)].to_bits() };
                }
            }
            self.forms[r] = if integers { Form::Integers(ranges.map(Range::unit)) } else { Form::Floats };
        }
    }
}

/// `N` sums for each of up to six rows of A, before they are rounded to binary32.
type Tile<const N: usize> = [[f64; N]; MOST_ROWS];
const MOST_ROWS: usize = 6;

/// Some blocks of a row of A, and the unit of their integers.
#[derive(Clone, Copy)]
struct Part<'a> {
    steps: &'a [Step],
    unit: f32,
}

/// A kernel: the sums of up to [`MOST_ROWS`] rows of A with the rows of a panel.
trait Kernel<const N: usize>: Copy + Sync {
    /// Unpacks the values of up to `N` rows of B from row `first` on.
    fn unpack(self, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]);
    /// Adds the sums of a run, all of whose scales are integers, those of B's of the given units.
    fn add_integers(self, rows: &[Part<'_>], panel: &[PanelStep<N>], units: &[f32; N], out: &mut Tile<N>);
    /// Adds the sums of some blocks, term by term.
    fn add_terms(self, rows: &[Part<'_>], panel: &[PanelStep<N>], form: &Form<N>, out: &mut Tile<N>);
    /// Adds the sums of some blocks in binary32, in order; the scales are of binary32.
    fn add_in_order(self, rows: &[Part<'_>], panel: &[PanelStep<N>], out: &mut Tile<N>);
}

/// The product of two quantized matrices whose shapes were checked and which have elements.
pub(super) fn gemm<T: Element>(vectors: Vectors, a: &View<'_>, b: &View<'_>, product: &Product<'_, T>, out: &mut [T]) {
    let few = a.rows <= FEW && product.accumulate == Accumulate::Exact;
    match vectors {
        _ if few => few_rows(vectors.avx2(), a, b, product, out),
        Vectors::Avx2(token) => run::<T, 8>(token, a, b, product, out),
        Vectors::Avx512(token) => run::<T, 16>(token, a, b, product, out),
    }
}

/// The number of rows of A up to which unpacking B to memory costs more than it saves.
pub(super) const FEW: usize = 4;
/// Rows of B that a thread takes at a time where A has few.
pub(super) const CHUNK: usize = MOST;

/// The product where A has few rows.
fn few_rows<T: Element>(token: Avx2, a: &View<'_>, b: &View<'_>, product: &Product<'_, T>, out: &mut [T]) {
    let blocks = a.cols.div_ceil(BLOCK);
    let rows: Vec<row::Row> = (0..a.rows).map(|i| row::Row::new(a, i)).collect();
    let writer = Writer::new((a.into(), b.into()), product, out);
    in_pieces(b.rows.div_ceil(CHUNK), CHUNK * a.rows * a.cols).for_each(|chunk| {
        let first = chunk * CHUNK;
        let width = CHUNK.min(b.rows - first);
        let mut sums = [[0f32; CHUNK]; FEW];
        for c in 0..width {
            let (codes, scales) = (b.code_row(first + c), b.scale_row(first + c));
            let range = Range::of(scales);
            let mut column = [0.0; FEW];
            if rows.iter().all(|row| row.range.fits_integers(range)) {
                row::integers_of(token, &rows, codes, scales, range, &mut column);
            } else {
                let step = if rows.iter().all(|row| row.range.fits(range, blocks)) { blocks } else { RUN };
                let tile = in_runs(blocks, step, |run, tile: &mut Tile<1>| {
                    row::terms_of(token, &rows, codes, scales, run, &mut column);
                    tile.iter_mut().zip(column).for_each(|(to, sum)| to[0] = sum);
                });
                column.iter_mut().zip(tile).for_each(|(to, [sum])| *to = f64::from(sum));
            }
            sums.iter_mut().zip(column).for_each(|(row, sum)| row[c] = sum as f32);
        }
        for (i, sums) in sums[..a.rows].iter().enumerate() {
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
    let rows = Rows::new(a);
    let blocks = rows.blocks;
    let range_of = |i: usize| rows.ranges(i).iter().copied().fold(Range::of(&[]), Range::and);
    let ranges: Vec<Range> = (0..a.rows).map(range_of).collect();
    let writer = Writer::new((a.into(), b.into()), product, out);
    in_pieces(b.rows.div_ceil(N), N * a.rows * a.cols).for_each_init(
        || Panel::<N>::new(blocks),
        |panel, p| {
            let first = p * N;
            let width = N.min(b.rows - first);
            panel.unpack(kernel, b, first, product.accumulate);
            for group in (0..a.rows).step_by(MOST_ROWS) {
                let height = MOST_ROWS.min(a.rows - group);
                let fits = || (group..group + height).all(|i| ranges[i].fits(panel.range, blocks));
                let step = if product.accumulate == Accumulate::Reference || fits() { blocks } else { RUN };
                let tile = in_runs(blocks, step, |some, tile| {
                    tile_of(kernel, &rows, group..group + height, panel, some, product.accumulate, tile);
                });
                for (r, sums) in tile[..height].iter().enumerate() {
                    // SAFETY: a panel writes the columns of its own rows of B only.
                    unsafe { writer.write(group + r, first, &sums[..width]) };
                }
            }
        },
    );
}

/// The sums of a group of rows of A with a panel over some blocks, from a multiple of [`RUN`] on.
fn tile_of<const N: usize>(
    kernel: impl Kernel<N>,
    rows: &Rows,
    group: std::ops::Range<usize>,
    panel: &Panel<N>,
    blocks: std::ops::Range<usize>,
    accumulate: Accumulate,
    tile: &mut Tile<N>,
) {
    *tile = [[0.0; N]; MOST_ROWS];
    let mut parts = [Part { steps: &[], unit: 0.0 }; MOST_ROWS];
    let height = group.len();
    let mut select = |blocks: std::ops::Range<usize>| {
        for (part, i) in parts.iter_mut().zip(group.clone()) {
            *part = Part { steps: &rows.row(i)[blocks.clone()], unit: rows.ranges(i)[blocks.start / RUN].unit() };
        }
        parts
    };
    if accumulate == Accumulate::Reference {
        return kernel.add_in_order(&select(blocks.clone())[..height], &panel.steps[blocks], tile);
    }
    for run in runs(blocks) {
        let (r, steps, parts) = (run.start / RUN, &panel.steps[run.clone()], select(run));
        let fits = || group.clone().all(|i| rows.ranges(i)[r].fits_integers(panel.ranges[r]));
        match &panel.forms[r] {
            Form::Integers(units) if fits() => kernel.add_integers(&parts[..height], steps, units, tile),
            form => kernel.add_terms(&parts[..height], steps, form, tile),
        }
    }
}

/// A tile of sums over all blocks, rounded once. `sums` gives those of `step` blocks, exactly.
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
