//! Weights in the order of the tensor cores; `weights.cuh` says which.

use super::global::Global;
use super::{WEIGHTS, math};
use crate::cuda::text::{Variants, assemble};
use crate::cuda::{Allocator, Device, GROUPS, Groups, GroupsParams, Memory, Source, Stream, entry};
use crate::dequantize::cuda::View;
use crate::quantize::Layout;
use crate::{Result, cuda};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{GlobalScale, Precision, check_len};

/// Rows and columns of a tile.
pub(super) const TILE: usize = 64;
/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 2304;

/// The number of tiles along rows and along K. The latter is even, for kernels that take two at a
/// time.
pub(super) fn tiles(rows: usize, cols: usize) -> (usize, usize) {
    (rows.div_ceil(TILE), cols.div_ceil(2 * TILE) * 2)
}

/// Bytes of the tiles. Each is a multiple of 256, so what follows is aligned.
fn tiles_len(rows: usize, cols: usize) -> usize {
    let (row_tiles, k_tiles) = tiles(rows, cols);
    row_tiles.saturating_mul(k_tiles).saturating_mul(TILE_BYTES)
}

/// A quantized matrix in the order in which tensor cores read it, as the right operand of products:
/// 4.5 bits per element, rows padded to a multiple of 64 and columns to a multiple of 128. The
/// values are unchanged.
#[derive(Debug)]
pub struct PreparedWeight {
    rows: usize,
    cols: usize,
    tiles: Memory,
    stored: Memory,
    global: GlobalScale,
    unit: Unit,
    settled: bool,
}

impl PreparedWeight {
    /// Reorders a matrix, into memory from `memory`. Does not wait.
    pub fn new(stream: &Stream, q: &View<'_>, memory: &dyn Allocator) -> Result<Self> {
        q.check(stream.device())?;
        let block = memory.bytes(stream, PreparedWeight::block_len(q.rows, q.cols, q.global))?;
        let mut made = PreparedWeight::over(q.rows, q.cols, (q.global, q.unit), block)?;
        prepare(stream, q, None, made.tiles.address())?;
        // The copy begins when the tiles are there, and everything later after the copy has begun:
        // products need not wait for the tiles.
        stream.copy(q.stored, made.stored.slice_mut())?;
        made.settled = !q.stored.is_empty();
        Ok(made)
    }

    /// Bytes of the block that [`PreparedWeight::new`] asks for: tiles, then 32-bit scales.
    pub fn block_len(rows: usize, cols: usize, global: GlobalScale) -> usize {
        tiles_len(rows, cols).saturating_add(global.count(rows).saturating_mul(size_of::<f32>()))
    }

    /// A prepared matrix over the block of one.
    pub fn over(rows: usize, cols: usize, (global, unit): (GlobalScale, Unit), block: Memory) -> Result<Self> {
        let len = PreparedWeight::block_len(rows, cols, global);
        check_len("block of a prepared weight", len, block.len())?;
        let at = tiles_len(rows, cols);
        let [tiles, stored] = block.parts([0..at, at..len]);
        // Whoever has the block may write it by a kernel that comes right before a product.
        Ok(PreparedWeight { rows, cols, tiles, stored, global, unit, settled: false })
    }

    /// Number of rows: N.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: K.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory, its 32-bit scales included.
    pub fn bytes(&self) -> usize {
        self.tiles.len() + self.stored.len()
    }

    pub(super) fn address(&self) -> u64 {
        self.tiles.address()
    }

    /// Whether its tiles are complete before any kernel that is launched from now on can start, even
    /// one that starts before earlier work has finished. Other streams wait for this one's copy, as
    /// for all that they read of it.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    pub(super) fn global(&self) -> Global {
        Global { stored: self.stored.address(), of: self.global, unit: self.unit, step: 1 }
    }

    pub(super) fn check(&self, device: Device) -> Result<()> {
        Ok(self.tiles.slice::<u8>().check(device, "prepared weights")?)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    codes: u64,
    scales: u64,
    out: u64,
    rows: u64,
    cols: u64,
    tiles: u32,
    count: u32,
    swizzled: u32,
    aligned: u32,
    groups: GroupsParams,
}

/// Tiles that a block of threads prepares.
const AT_ONCE: u32 = 2;

/// Writes the tiles of a checked matrix to `out`, which has enough memory for them. Groups along K
/// come side by side.
pub(super) fn prepare(stream: &Stream, q: &View<'_>, groups: Option<&Groups>, out: u64) -> Result<()> {
    static VARIANTS: Variants<bool> = Variants::new();
    let (row_tiles, k_tiles) = tiles(q.rows, q.cols);
    let count =
        u32::try_from(row_tiles * k_tiles).map_err(|_| cuda::Error::TooManyBlocks { rows: q.rows, cols: q.cols })?;
    let params = Params {
        codes: q.codes.address(),
        scales: q.scales.address(),
        out,
        rows: q.rows as u64,
        cols: q.cols as u64,
        tiles: k_tiles as u32,
        count,
        swizzled: (q.layout == Layout::Swizzled).into(),
        aligned: (q.cols.is_multiple_of(32) && q.codes.address().is_multiple_of(16)).into(),
        groups: groups.map(Groups::params).unwrap_or_default(),
    };
    let kernel = VARIANTS.get(stream.device(), groups.is_some(), source)?;
    // SAFETY: `Params` is laid out as in prepare.cu; the matrix was checked, and the caller has
    // room for its tiles.
    unsafe { kernel.launch(stream, [count.div_ceil(AT_ONCE), 1, 1], 128 * AT_ONCE, 0, &params) }?;
    Ok(())
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RestoreParams {
    weights: u64,
    out: u64,
    rows: u64,
    cols: u64,
    tiles: u32,
    count: u32,
}

/// Decodes checked weights to rows of bf16 at `out`, which has enough memory for them; columns are a
/// multiple of 8.
pub(super) fn restore(stream: &Stream, weight: &PreparedWeight, out: u64) -> Result<()> {
    static VARIANTS: Variants<()> = Variants::new();
    let (rows, cols) = (weight.rows, weight.cols);
    let (row_tiles, k_tiles) = tiles(rows, cols);
    let count = u32::try_from(row_tiles * k_tiles).map_err(|_| cuda::Error::TooManyBlocks { rows, cols })?;
    let (weights, tiles) = (weight.address(), k_tiles as u32);
    let params = RestoreParams { weights, out, rows: rows as u64, cols: cols as u64, tiles, count };
    let kernel = VARIANTS.get(stream.device(), (), restore_source)?;
    // SAFETY: `RestoreParams` is laid out as in restore.cu; the weights were checked, and the caller
    // has room for them.
    unsafe { kernel.launch(stream, [count, 1, 1], 128, 0, &params) }?;
    Ok(())
}

fn restore_source((): ()) -> (&'static str, &'static str, String) {
    let text = assemble(&math(Precision::Bf16), &[WEIGHTS, include_str!("restore.cu")]);
    ("gemm_restore", "gemm_restore", text)
}

fn source(grouped: bool) -> (&'static str, &'static str, String) {
    let settings = format!("{}constexpr bool GROUPED = {grouped};\n", math(Precision::Bf16));
    let text = assemble(&settings, &[WEIGHTS, GROUPS, include_str!("prepare.cu")]);
    ("gemm_prepare", "gemm_prepare", text)
}

pub(super) fn sources() -> Vec<(String, Source)> {
    [entry(false, source), entry(true, source), entry((), restore_source)].to_vec()
}
