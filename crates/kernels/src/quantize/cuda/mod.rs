//! Quantization on a GPU: the kernel and the settings of a call. Read `block.cuh`, then
//! `matrix.cuh`, then the kernels: `rows.cu`, `whole_rows.cu`, `squares.cu`, `panels.cu`,
//! `full_panels.cu`.

mod amaxes;
mod host;
mod launch;
#[cfg(test)]
mod tests;
mod variant;

pub(super) use host::on_host;
pub(crate) use variant::sources;

use super::{Layout, Lens, check};
use crate::Result;
use crate::cuda::text::Variants;
use crate::cuda::{self, Along, Device, Groups, Input, Matrix, Slice, SliceMut, Stream, countable};
use amaxes::{find_amaxes, find_parts};
use half::bf16;
use launch::{DirectionParams, full_panels, panels, row_blocks, squares, whole_rows};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::OFFSETS_PER_CALL;
use nvfp4_spec::{BLOCK, Error, ErrorPath, GlobalScale, Mode, Rounding, ScaleRule, Tile, area};
use variant::{Rule, Settings, Transform};

/// What a thread does with a block of 16 elements, to come after `elements.cuh`.
const BLOCK_TEXT: &str = include_str!("block.cuh");

/// The source of a direction's random bytes.
#[derive(Clone, Copy, Debug)]
pub enum Random<'a> {
    /// Our position-keyed stream; see [`nvfp4_spec::stochastic::Stream`].
    Stream {
        /// The Philox key.
        seed: u64,
        /// Tells calls apart. The column direction of a call takes the row direction's offset plus
        /// one.
        offset: Offset<'a>,
        /// Index of the first block within the whole direction.
        first_block: u64,
    },
    /// The caller's own: 16 bytes per block, blocks in row-major order.
    Bytes(Slice<'a, u8>),
}

/// The offset of a stream of random numbers.
#[derive(Clone, Copy, Debug)]
pub enum Offset<'a> {
    /// Known when the work is queued.
    Value(u64),
    /// Read when the work runs: what one value of the GPU's memory holds then, plus a number. A
    /// captured graph that also [`advance`]s the value draws fresh random numbers at each replay.
    Memory {
        /// One value.
        at: Slice<'a, u64>,
        /// What is added to it.
        plus: u64,
    },
}

/// The source of a direction's amax: one value, or one per row of that direction.
#[derive(Debug)]
pub enum Amax<'a> {
    /// The caller knows it: magnitudes, which are not checked. Values beyond it saturate.
    Given(Slice<'a, f32>),
    /// It is computed and stored here.
    Compute(SliceMut<'a, f32>),
}

impl Amax<'_> {
    fn slice(&self) -> Slice<'_, f32> {
        match self {
            Amax::Given(amax) => *amax,
            Amax::Compute(amax) => amax.as_slice(),
        }
    }
}

/// What to write for one direction. Twin of [`super::Direction`].
#[derive(Debug)]
pub struct Direction<'a> {
    /// Tile, global scale, scale rule, specials.
    pub mode: Mode,
    /// How values become codes.
    pub rounding: Rounding<Random<'a>>,
    /// The Hadamard transform along the direction's rows, before everything else.
    pub transform: Option<Signs>,
    /// How scales are laid out.
    pub layout: Layout,
    /// Where the amax comes from.
    pub amax: Amax<'a>,
    /// What is written.
    pub to: Written<'a>,
}

/// What is written of a direction, beside its amax.
#[derive(Debug)]
pub enum Written<'a> {
    /// Codes and scales.
    Codes {
        /// `rows · ceil(cols/2)` bytes.
        codes: SliceMut<'a, u8>,
        /// [`Layout::scale_len`] bytes.
        scales: SliceMut<'a, u8>,
    },
    /// For a product that comes right after: the values of the codes, without the global scale and
    /// times 2⁻⁷, which is exact. `rows · cols` of them, where `cols` is a multiple of 16, at a
    /// multiple of 16 bytes. The layout of scales is linear.
    Values(SliceMut<'a, bf16>),
}

impl Direction<'_> {
    fn check(&self, device: Device, (rows, cols): (usize, usize), amaxes: usize) -> Result<()> {
        let random = match self.rounding {
            Rounding::Stochastic(Random::Bytes(bytes)) => Some(bytes),
            _ => None,
        };
        let (codes, scales) = match &self.to {
            Written::Codes { codes, scales } => {
                codes.check(device, "codes")?;
                scales.check(device, "scales")?;
                (codes.len(), scales.len())
            }
            Written::Values(values) => {
                if !cols.is_multiple_of(BLOCK) {
                    let what = "the dimension that values are written along";
                    return Err(Error::Multiple { what, of: BLOCK, got: cols }.into());
                }
                if self.layout != Layout::Linear {
                    return Err(Error::Combination("values have no scales, so none that are swizzled").into());
                }
                nvfp4_spec::check_len("values", area(rows, cols)?, values.len())?;
                values.check(device, "values")?;
                values.check_aligned(16, "values")?;
                // As many as their codes and scales would be.
                (values.len() / 2, values.len() / BLOCK)
            }
        };
        let lens = Lens { codes, scales, amax: self.amax.slice().len(), random: random.map(|bytes| bytes.len()) };
        check(&self.mode, &self.rounding, self.transform, self.layout, lens, amaxes, (rows, cols))?;
        self.amax.slice().check(device, "amax")?;
        self.amax.slice().check_aligned(4, "amax")?;
        if let Some(bytes) = random {
            bytes.check(device, "random bytes (16 per block)")?;
        }
        if let Rounding::Stochastic(Random::Stream { offset: Offset::Memory { at, .. }, .. }) = self.rounding {
            nvfp4_spec::check_len("offset of the random numbers", 1, at.len())?;
            at.check(device, "offset of the random numbers")?;
            at.check_aligned(8, "offset of the random numbers")?;
        }
        Ok(())
    }

    fn settings(&self) -> Settings {
        Settings {
            tile: self.mode.tile,
            rule: match self.mode.rule {
                ScaleRule::Six => Rule::Six,
                ScaleRule::FourOverSix { metric, .. } => Rule::FourOverSix(metric),
                ScaleRule::Mse => Rule::Mse,
                ScaleRule::ModelOptMse => Rule::ModelOptMse,
                ScaleRule::ModelOptFourOverSix => Rule::ModelOptFourOverSix,
            },
            specials: self.mode.specials,
            profile: self.mode.profile,
            layout: self.layout,
            stochastic: matches!(self.rounding, Rounding::Stochastic(_)),
            transform: match self.transform {
                None => Transform::None,
                Some(signs @ (Signs::FIXED | Signs::NONE)) => Transform::Constant(signs),
                Some(_) => Transform::Passed,
            },
            values: matches!(self.to, Written::Values(_)),
        }
    }

    /// The parameters for the kernels.
    fn params(&self, rows: usize, cols: usize) -> DirectionParams {
        let (codes, scales) = match &self.to {
            Written::Codes { codes, scales } => (codes.address(), scales.address()),
            Written::Values(values) => (values.address(), 0),
        };
        let mut params = DirectionParams {
            codes,
            scales,
            amax: self.amax.slice().address(),
            stored: 0,
            random_bytes: 0,
            offset_memory: 0,
            seed: 0,
            offset: 0,
            first_block: 0,
            rows: rows as u64,
            cols: cols as u64,
            six_e: self.mode.rule.bound().six_e(),
            per_row: (self.mode.global == GlobalScale::PerRow).into(),
            error: match self.mode.rule {
                ScaleRule::FourOverSix { error: ErrorPath::Fast, .. } => 1,
                _ => 0,
            },
            signs: self.transform.map_or(0, |signs| signs.0.into()),
            parts: 0,
            padding: 0,
        };
        match self.rounding {
            Rounding::NearestEven => {}
            Rounding::Stochastic(Random::Bytes(bytes)) => params.random_bytes = bytes.address(),
            Rounding::Stochastic(Random::Stream { seed, offset, first_block }) => {
                (params.seed, params.first_block) = (seed, first_block);
                (params.offset_memory, params.offset) = match offset {
                    Offset::Value(offset) => (0, offset),
                    Offset::Memory { at, plus } => (at.address(), plus),
                };
            }
        }
        params
    }

    /// Whether all blocks of a direction of rows of `cols` elements are whole and its codes aligned.
    fn is_whole(&self, cols: usize) -> bool {
        cols.is_multiple_of(BLOCK) && self.aligned(8)
    }

    /// Whether what is written starts at a multiple of so many bytes.
    fn aligned(&self, bytes: u64) -> bool {
        let address = match &self.to {
            Written::Codes { codes, .. } => codes.address(),
            Written::Values(values) => values.address(),
        };
        address.is_multiple_of(bytes)
    }

    /// Swizzled scales of a direction of `rows` rows of `cols` elements may have padding, which is
    /// zero.
    fn clear_padding(&mut self, stream: &Stream, rows: usize, cols: usize) -> Result<()> {
        match &mut self.to {
            Written::Codes { scales, .. } if scales.len() > rows * cols.div_ceil(BLOCK) => {
                Ok(stream.fill_bytes(scales.reborrow(), 0)?)
            }
            Written::Codes { .. } | Written::Values(_) => Ok(()),
        }
    }
}

/// Blocks of the longest row that is quantized in one pass: 1024 threads with 4 blocks each.
const LONGEST_ROW: usize = 4096;

/// Quantizes `x` in the directions that are given. Does not wait.
pub fn quantize(stream: &Stream, x: &Input<'_>, row: Option<Direction<'_>>, col: Option<Direction<'_>>) -> Result<()> {
    quantize_in(stream, x, row, col, None)
}

/// Bytes of scratch that are enough for [`quantize_in`].
pub const SCRATCH: usize = amaxes::SCRATCH;

/// The same with memory for scratch, which spares clearing the amaxes before. Later work of the stream
/// may reuse it. Less than [`SCRATCH`] is not used.
pub fn quantize_in(
    stream: &Stream,
    x: &Input<'_>,
    row: Option<Direction<'_>>,
    col: Option<Direction<'_>>,
    scratch: Option<SliceMut<'_, f32>>,
) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    x.check(stream.device())?;
    if let Some(row) = &row {
        row.check(stream.device(), (rows, cols), row.mode.global.count(rows))?;
    }
    if let Some(col) = &col {
        col.check(stream.device(), (cols, rows), col.mode.global.count(cols))?;
    }
    if row.is_some() && !countable(rows, cols) || col.is_some() && !countable_along_columns(rows, cols) {
        return Err(cuda::Error::TooManyBlocks { rows, cols }.into());
    }
    checked(stream, (x, None), (row, col), scratch)
}

/// Quantizes the groups of a matrix in the directions that are given, all in one launch. Does not
/// wait.
///
/// The row direction has the rows of `x` as they lie. The column direction has one matrix after the
/// other, each of a group whose rows were padded with zeros to a multiple of
/// [`GROUP_ROWS`](cuda::GROUP_ROWS); together they have [`Groups::padded_rows`] columns. The amax of
/// a tensor is one per group, that of a row of the column direction one per group and row. Each
/// group has the bits that it would have as a matrix by itself; its random numbers are those of the
/// next call after the group before it.
pub fn quantize_grouped(
    stream: &Stream,
    x: &Input<'_>,
    groups: &Groups,
    row: Option<Direction<'_>>,
    col: Option<Direction<'_>>,
) -> Result<()> {
    let (rows, cols, padded) = (x.rows(), x.cols(), groups.padded_rows());
    groups.check_input(stream.device(), x)?;
    if let Some(row) = &row {
        row.check(stream.device(), (rows, cols), Along::Rows.stored_count(row.mode.global, groups, rows)?)?;
    }
    if let Some(col) = &col {
        col.check(stream.device(), (cols, padded), Along::K.stored_count(col.mode.global, groups, cols)?)?;
    }
    for d in [&row, &col].into_iter().flatten() {
        if d.layout != Layout::Linear || matches!(d.rounding, Rounding::Stochastic(Random::Bytes(_))) {
            let why = "groups have linear scales, and random numbers from a seed";
            return Err(Error::Combination(why).into());
        }
        match &d.to {
            Written::Codes { codes, .. } => codes.check_aligned(16, "codes of a matrix in groups")?,
            Written::Values(_) => return Err(Error::Combination("a matrix in groups is written as codes").into()),
        }
    }
    if !countable(padded.max(rows), cols) {
        return Err(cuda::Error::TooManyBlocks { rows, cols }.into());
    }
    checked(stream, (x, Some(groups)), (row, col), None)
}

/// Quantizes what was checked.
fn checked(
    stream: &Stream,
    (x, groups): Matrix<'_>,
    (mut row, mut col): (Option<Direction<'_>>, Option<Direction<'_>>),
    scratch: Option<SliceMut<'_, f32>>,
) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    // Only now, so that a refused call writes nothing.
    row.as_mut().map_or(Ok(()), |row| row.clear_padding(stream, rows, cols))?;
    col.as_mut().map_or(Ok(()), |col| col.clear_padding(stream, cols, rows))?;
    // An amax per row needs no separate pass if a row fits the registers of a group of threads.
    let in_one_pass = row.as_ref().is_some_and(|d| {
        col.is_none()
            && matches!(d.amax, Amax::Compute(_))
            && d.mode.global == GlobalScale::PerRow
            && cols.div_ceil(BLOCK) <= LONGEST_ROW
            && rows * cols > 0
            // Random numbers depend on the group.
            && !(groups.is_some() && matches!(d.rounding, Rounding::Stochastic(_)))
    });
    // One kernel for both directions reads `x` once. Where arithmetic is the bottleneck, two kernels
    // leave each direction more registers, unless one has enough for both.
    let apart = row.as_ref().zip(col.as_ref()).is_some_and(|(row, col)| {
        row.mode.tile == Tile::Row16 && !row.settings().is_light() && !full_panels((x, groups), Some(row), col)
    });
    let mut parts = None;
    if let (Some(row), Some(col), Some(scratch), None, false) = (&mut row, &mut col, scratch, groups, apart) {
        parts = find_parts(stream, x, row, col, scratch)?;
    }
    if !in_one_pass && parts.is_none() {
        find_amaxes(stream, (x, groups), row.as_mut(), col.as_mut())?;
    }
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    match (row, col) {
        (None, None) => Ok(()),
        (Some(row), None) if in_one_pass => whole_rows(stream, x, &row),
        (Some(row), None) if row.mode.tile == Tile::Square16 => squares(stream, (x, groups), &row),
        (Some(row), None) => row_blocks(stream, (x, groups), &row),
        (Some(row), Some(col)) if apart => {
            row_blocks(stream, (x, groups), &row)?;
            panels(stream, (x, groups), (None, &col), None)
        }
        (row, Some(col)) => panels(stream, (x, groups), (row.as_ref(), &col), parts.as_ref()),
    }
}

/// [`countable`] for the column direction of a matrix, whose kernel counts the rows of the matrix
/// in 31 bits too.
fn countable_along_columns(rows: usize, cols: usize) -> bool {
    countable(cols, rows) && countable(rows, cols.min(1))
}

/// Adds the offsets that one quantization consumes to an offset in the GPU's memory, after the work
/// queued before. Does not wait.
pub fn advance(stream: &Stream, offset: SliceMut<'_, u64>) -> Result<()> {
    static VARIANTS: Variants<()> = Variants::new();
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Params {
        at: u64,
        by: u64,
    }
    nvfp4_spec::check_len("offset of the random numbers", 1, offset.len())?;
    offset.check(stream.device(), "offset of the random numbers")?;
    offset.check_aligned(8, "offset of the random numbers")?;
    let kernel = VARIANTS.get(stream.device(), (), advance_source)?;
    let params = Params { at: offset.address(), by: OFFSETS_PER_CALL };
    // SAFETY: the kernel has these parameters; the address was checked.
    unsafe { kernel.launch(stream, [1; 3], 1, 0, &params) }?;
    Ok(())
}

fn advance_source((): ()) -> (&'static str, &'static str, String) {
    let text = "struct Params { unsigned long long* at; unsigned long long by; };\n\
                extern \"C\" __global__ void advance(Params p) { *p.at += p.by; }\n";
    ("advance", "advance", text.to_string())
}
