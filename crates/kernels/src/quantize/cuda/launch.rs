//! The five kernels and their parameters, laid out as in `matrix.cuh`.

use super::super::Layout;
use super::Direction;
use super::amaxes::Parts;
use super::variant::{Function, THREADS, Variant};
use crate::Result;
use crate::cuda::{Groups, GroupsParams, Input, Matrix, Stream, divisor};
use nvfp4_spec::{BLOCK, GlobalScale, Precision, ScaleRule, Tile};

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DirectionParams {
    pub codes: u64,
    pub scales: u64,
    pub amax: u64,
    pub stored: u64,
    pub random_bytes: u64,
    pub offset_memory: u64,
    pub seed: u64,
    pub offset: u64,
    pub first_block: u64,
    pub rows: u64,
    pub cols: u64,
    pub six_e: f32,
    pub per_row: u32,
    pub error: u32,
    pub signs: u32,
    pub parts: u32,
    pub padding: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Params {
    x: u64,
    rows: u64,
    cols: u64,
    stride: u64,
    divisor_magic: u32,
    divisor_shift: u32,
    wide_codes: u32,
    padding: u32,
    row: DirectionParams,
    col: DirectionParams,
    groups: GroupsParams,
}

/// Rows and columns of a panel, and its tiles of 16×16.
const HEIGHT: usize = 128;
const WIDTH: usize = 64;
const TILES: usize = HEIGHT * WIDTH / (BLOCK * BLOCK);

fn params((x, groups): Matrix<'_>, row: Option<&Direction<'_>>, col: Option<&Direction<'_>>) -> Params {
    let (rows, cols) = (x.rows(), x.cols());
    let padded = groups.map_or(rows, Groups::padded_rows);
    let (divisor_magic, divisor_shift) = divisor(cols.div_ceil(BLOCK));
    Params {
        x: x.values().address(),
        rows: rows as u64,
        cols: cols as u64,
        stride: x.stride() as u64,
        divisor_magic,
        divisor_shift,
        wide_codes: 0,
        padding: 0,
        // The kernel ignores a direction that it does not compute; the other one's parameters stand
        // in.
        row: row.or(col).expect("a direction is wanted").params(rows, cols),
        col: col.or(row).expect("a direction is wanted").params(cols, padded),
        groups: groups.map(Groups::params).unwrap_or_default(),
    }
}

/// 1×16 blocks along rows, every amax known.
pub(super) fn row_blocks(stream: &Stream, matrix: Matrix<'_>, d: &Direction<'_>) -> Result<()> {
    let (x, groups) = matrix;
    let whole = x.rows_aligned() && d.is_whole(x.cols());
    // Two blocks keep more loads in flight; with more arithmetic, one leaves more registers.
    let light = d.settings().is_light();
    let per_thread = if light && x.values().precision() != Precision::F32 { 2 } else { 1 };
    let variant = Variant {
        function: Function::Rows,
        precision: x.values().precision(),
        row: Some(d.settings()),
        col: None,
        whole,
        // Contiguous rows are one row, unless scales or groups tell them apart.
        flat: whole
            && d.mode.global == GlobalScale::PerTensor
            && d.layout == Layout::Linear
            && x.stride() == x.cols()
            && groups.is_none(),
        full: false,
        grouped: groups.is_some(),
        per_thread,
        threads: THREADS,
    };
    let kernel = variant.kernel(stream.device())?;
    let mut params = params(matrix, Some(d), None);
    if variant.flat {
        (params.cols, params.rows) = (params.rows * params.cols, 1);
        (params.row.rows, params.row.cols, params.stride) = (1, params.cols, params.cols);
    }
    let blocks = (x.rows() * x.cols().div_ceil(BLOCK)).div_ceil((THREADS * per_thread) as usize) as u32;
    // A few times what runs at once, so that multiprocessors that finish early get more work.
    let at_once = kernel.max_blocks_per_sm(THREADS, 0)? * stream.device().multiprocessors();
    let most = (if light { at_once } else { 6 * at_once }).max(1);
    // SAFETY: `Params` is laid out as in matrix.cuh; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [blocks.min(most), 1, 1], THREADS, 0, &params) }?;
    Ok(())
}

/// 1×16 blocks along rows, the amax of each row computed on the way.
pub(super) fn whole_rows(stream: &Stream, x: &Input<'_>, d: &Direction<'_>) -> Result<()> {
    let blocks = x.cols().div_ceil(BLOCK);
    let per_thread = if blocks <= 128 { 1 } else { 2 * (blocks.div_ceil(2048)).next_power_of_two() as u32 };
    let threads = (blocks.div_ceil(per_thread as usize) as u32).next_multiple_of(32);
    let variant = Variant {
        function: Function::WholeRows,
        precision: x.values().precision(),
        row: Some(d.settings()),
        col: None,
        whole: x.rows_aligned() && d.is_whole(x.cols()),
        flat: false,
        full: false,
        grouped: false,
        per_thread,
        threads: threads.next_power_of_two(),
    };
    let kernel = variant.kernel(stream.device())?;
    // SAFETY: as above.
    unsafe { kernel.launch(stream, [x.rows() as u32, 1, 1], threads, 0, &params((x, None), Some(d), None)) }?;
    Ok(())
}

/// 16×16 tiles, the row direction alone.
pub(super) fn squares(stream: &Stream, matrix: Matrix<'_>, d: &Direction<'_>) -> Result<()> {
    let (x, groups) = matrix;
    let variant = Variant {
        function: Function::Squares,
        precision: x.values().precision(),
        row: Some(d.settings()),
        col: None,
        whole: x.rows_aligned() && d.is_whole(x.cols()) && (x.rows().is_multiple_of(BLOCK) || groups.is_some()),
        flat: false,
        full: false,
        grouped: groups.is_some(),
        per_thread: 4,
        threads: THREADS,
    };
    let rows = groups.map_or(x.rows(), Groups::padded_rows);
    let blocks = rows.div_ceil(BLOCK) * x.cols().div_ceil(BLOCK).div_ceil(32);
    let kernel = variant.kernel(stream.device())?;
    let threads = 512 / variant.per_thread;
    // SAFETY: as above.
    unsafe { kernel.launch(stream, [blocks as u32, 1, 1], threads, 0, &params(matrix, Some(d), None)) }?;
    Ok(())
}

/// The column direction, and the row direction if `row` is given; with the maxima of parts that a
/// kernel before finds, if it does.
pub(super) fn panels(
    stream: &Stream,
    matrix: Matrix<'_>,
    (row, col): (Option<&Direction<'_>>, &Direction<'_>),
    parts: Option<&Parts>,
) -> Result<()> {
    let (x, groups) = matrix;
    let (rows, cols) = (groups.map_or(x.rows(), Groups::padded_rows), x.cols());
    let whole = whole_panels(matrix, row, col);
    let blocks = rows.div_ceil(HEIGHT) * cols.div_ceil(WIDTH);
    // More threads for a panel where panels are few.
    let few = blocks <= 8 * stream.device().multiprocessors() as usize;
    let threads = if few { 2 * THREADS } else { THREADS };
    let variant = Variant {
        function: if full_panels(matrix, row, col) { Function::FullPanels } else { Function::Panels },
        precision: x.values().precision(),
        row: row.map(Direction::settings),
        col: Some(col.settings()),
        whole,
        flat: false,
        full: whole && rows.is_multiple_of(HEIGHT) && cols.is_multiple_of(WIDTH) && full_groups(groups),
        grouped: groups.is_some(),
        per_thread: 4,
        threads,
    };
    let kernel = variant.kernel(stream.device())?;
    let mut params = params(matrix, row, Some(col));
    (params.divisor_magic, params.divisor_shift) = divisor(cols.div_ceil(WIDTH));
    params.wide_codes = (whole && wide_codes(col, rows)).into();
    let (grid, shared) = ([blocks as u32, 1, 1], panel_memory(x.values().element_size(), [row, Some(col)]));
    match parts {
        // SAFETY: as above.
        None => unsafe { kernel.launch(stream, grid, threads, shared, &params) }?,
        Some(parts) => {
            for (d, amax) in [(&mut params.row, parts.row), (&mut params.col, parts.col)] {
                (d.stored, d.amax, d.parts) = (d.amax, amax, parts.count);
            }
            // SAFETY: as above. The kernel waits before it reads the maxima, and writes after that;
            // the kernel that finds them lets it start when everything before is complete.
            unsafe { kernel.launch_dependent(stream, grid, threads, shared, &params) }?;
        }
    }
    Ok(())
}

/// Whether all blocks of both directions are whole.
fn whole_panels((x, groups): Matrix<'_>, row: Option<&Direction<'_>>, col: &Direction<'_>) -> bool {
    let (rows, cols) = (groups.map_or(x.rows(), Groups::padded_rows), x.cols());
    x.rows_aligned()
        && row.is_none_or(|row| row.is_whole(cols))
        && col.is_whole(rows)
        && cols.is_multiple_of(BLOCK)
        && rows.is_multiple_of(BLOCK)
}

/// Whether no group has a panel with missing rows.
fn full_groups(groups: Option<&Groups>) -> bool {
    groups.is_none_or(|groups| groups.sizes().is_some_and(|sizes| sizes.iter().all(|size| size.is_multiple_of(HEIGHT))))
}

/// Whether rows of the column direction's codes, or values, are aligned to 16 bytes.
fn wide_codes(col: &Direction<'_>, rows: usize) -> bool {
    let whole_rows = if col.settings().values { BLOCK } else { 2 * BLOCK };
    col.aligned(16) && rows.is_multiple_of(whole_rows)
}

/// Whether [`panels`] takes the kernel that has a block in registers at a time, which is faster and
/// leaves both directions enough of them.
pub(super) fn full_panels(matrix: Matrix<'_>, row: Option<&Direction<'_>>, col: &Direction<'_>) -> bool {
    let (x, groups) = matrix;
    let rows = groups.map_or(x.rows(), Groups::padded_rows);
    whole_panels(matrix, row, col)
        && rows.is_multiple_of(HEIGHT)
        && x.cols().is_multiple_of(WIDTH)
        && wide_codes(col, rows)
        && x.values().precision() != Precision::F32
        && [row, Some(col)].into_iter().flatten().all(|d| d.mode.tile == Tile::Row16)
}

/// Bytes of a `Scaling`.
const SCALING: usize = 24;

/// Bytes of shared memory of a panel: its elements, the codes and scales of its columns, the
/// scalings of both directions, and what the rows of square tiles share.
fn panel_memory(element: usize, directions: [Option<&Direction<'_>>; 2]) -> u32 {
    let squares = |d: &Direction<'_>| match (d.mode.tile, d.mode.rule) {
        (Tile::Row16, _) => 0,
        (Tile::Square16, ScaleRule::FourOverSix { .. }) => 2 * TILES * 4 + 2 * BLOCK * TILES * 4,
        (Tile::Square16, _) => 2 * TILES * 4 + 2 * BLOCK * 4,
    };
    let largest = directions.into_iter().flatten().map(squares).max().unwrap_or(0);
    let outputs = HEIGHT / BLOCK * (8 * (WIDTH + 2) + WIDTH);
    (HEIGHT * WIDTH * element + outputs + 2 * SCALING + largest) as u32
}
