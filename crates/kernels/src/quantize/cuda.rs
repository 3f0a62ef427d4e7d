//! Quantization on a GPU: which kernel a call needs, and with which settings. Read `block.cuh`, then `matrix.cuh`, then the
//! kernels: `rows.cu`, `whole_rows.cu`, `squares.cu`, `panels.cu`.

use super::{Layout, Lens, check};
use crate::amax::cuda as maxima;
use crate::cuda::text::{PRECISIONS, Variants, assemble, precision};
use crate::cuda::{self, Buffer, Device, Input, Kernel, Slice, SliceMut, Source, Stream, Uploaded};
use crate::{Result, input};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::{self, OFFSETS_PER_CALL};
use nvfp4_spec::{BLOCK, Edge, ErrorPath, GlobalScale, Metric, Mode, Precision, Profile, Rounding, ScaleRule, Tile};

/// What a thread does with a block of 16 elements.
pub(crate) const BLOCK_TEXT: &str = include_str!("block.cuh");

/// Where a direction takes its random bytes from.
#[derive(Clone, Copy, Debug)]
pub enum Random<'a> {
    /// Our position-keyed stream; see [`stochastic::Stream`].
    Stream {
        /// The Philox key.
        seed: u64,
        /// Tells calls apart. The column direction of a call takes the row direction's offset plus one.
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
    /// Read when the work runs: what one value of the GPU's memory holds then, plus a number. A captured graph that also
    /// [`advance`]s the value draws fresh random numbers at each replay.
    Memory {
        /// One value.
        at: Slice<'a, u64>,
        /// What is added to it.
        plus: u64,
    },
}

/// Where the amax of a direction comes from: one value, or one per row of that direction.
#[derive(Debug)]
pub enum Amax<'a> {
    /// The caller knows it: magnitudes, which are not checked. Values beyond it saturate.
    Given(Slice<'a, f32>),
    /// It is computed and left here.
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
    /// Tile, global scale, scale rule, edge.
    pub mode: Mode,
    /// How values become codes.
    pub rounding: Rounding<Random<'a>>,
    /// The Hadamard transform along the direction's rows, before everything else.
    pub transform: Option<Signs>,
    /// How scales are laid out.
    pub layout: Layout,
    /// Where the amax comes from.
    pub amax: Amax<'a>,
    /// `rows · ceil(cols/2)` bytes.
    pub codes: SliceMut<'a, u8>,
    /// [`Layout::scale_len`] bytes.
    pub scales: SliceMut<'a, u8>,
}

impl Direction<'_> {
    fn check(&self, device: Device, rows: usize, cols: usize) -> Result<()> {
        let random = match self.rounding {
            Rounding::Stochastic(Random::Bytes(bytes)) => Some(bytes),
            _ => None,
        };
        let lens = Lens {
            codes: self.codes.len(),
            scales: self.scales.len(),
            amax: self.amax.slice().len(),
            random: random.map(|bytes| bytes.len()),
        };
        check(&self.mode, &self.rounding, self.transform, self.layout, lens, (rows, cols))?;
        self.codes.check(device, "codes")?;
        self.scales.check(device, "scales")?;
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
            metric: match self.mode.rule {
                ScaleRule::Six => None,
                ScaleRule::FourOverSix { metric, .. } => Some(metric),
            },
            edge: self.mode.edge,
            profile: self.mode.profile,
            stochastic: matches!(self.rounding, Rounding::Stochastic(_)),
            transform: match self.transform {
                None => Transform::None,
                Some(signs @ (Signs::FIXED | Signs::NONE)) => Transform::Constant(signs),
                Some(_) => Transform::Passed,
            },
        }
    }

    /// As the kernels get it.
    fn params(&self, rows: usize, cols: usize) -> DirectionParams {
        let mut params = DirectionParams {
            codes: self.codes.address(),
            scales: self.scales.address(),
            amax: self.amax.slice().address(),
            random_bytes: 0,
            offset_memory: 0,
            seed: 0,
            offset: 0,
            first_block: 0,
            rows: rows as u64,
            cols: cols as u64,
            six_e: self.mode.rule.bound().six_e(),
            per_row: (self.mode.global == GlobalScale::PerRow).into(),
            swizzled: (self.layout == Layout::Swizzled).into(),
            error: match self.mode.rule {
                ScaleRule::FourOverSix { error: ErrorPath::Fast, .. } => 1,
                _ => 0,
            },
            signs: self.transform.map_or(0, |signs| signs.0.into()),
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

    /// Whether all blocks of a direction of rows of `cols` elements are whole, its codes aligned and its scales linear.
    fn is_whole(&self, cols: usize) -> bool {
        cols.is_multiple_of(BLOCK) && self.layout == Layout::Linear && self.codes.address().is_multiple_of(8)
    }

    /// Swizzled scales have padding, which is zero.
    fn clear_padding(&mut self, stream: &Stream) -> Result<()> {
        if self.layout == Layout::Swizzled {
            stream.fill_bytes(self.scales.reborrow(), 0)?;
        }
        Ok(())
    }
}

/// The settings of a direction that kernels have as constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Settings {
    tile: Tile,
    metric: Option<Metric>,
    edge: Edge,
    profile: Profile,
    stochastic: bool,
    transform: Transform,
}

/// The Hadamard transform as kernels have it: the usual signs are constants, others are passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Transform {
    None,
    Constant(Signs),
    Passed,
}

impl Settings {
    /// 1×16 tiles of TransformerEngine, the rule "six", rounded to nearest.
    const PLAIN: Settings = Settings {
        tile: Tile::Row16,
        metric: None,
        edge: Edge::Kernel,
        profile: Profile::TransformerEngine,
        stochastic: false,
        transform: Transform::None,
    };

    /// Whether memory, and not arithmetic, sets the time.
    fn is_light(self) -> bool {
        self.metric.is_none() && !self.stochastic && self.transform == Transform::None
    }

    /// A type with the settings, for a direction that may not be wanted.
    fn text(name: &str, settings: Option<Settings>) -> String {
        let s = settings.unwrap_or(Settings::PLAIN);
        let rule = match s.metric {
            None => "SIX",
            Some(Metric::Mae) => "FOUR_OVER_SIX_MAE",
            Some(Metric::Mse) => "FOUR_OVER_SIX_MSE",
        };
        let edge = match s.edge {
            Edge::Kernel => "KERNEL",
            Edge::Reference => "REFERENCE",
        };
        let profile = match s.profile {
            Profile::TransformerEngine => "TRANSFORMER_ENGINE",
            Profile::ModelOpt => "MODEL_OPT",
            Profile::LlmCompressor => "LLM_COMPRESSOR",
            Profile::TorchAo => "TORCH_AO",
        };
        format!(
            "struct {name} {{\n    static constexpr bool WANTED = {}, SQUARE = {}, STOCHASTIC = {}, TRANSFORM = {};\n    \
             static constexpr int SIGNS = {};\n    static constexpr ScaleRule RULE_OF = {rule};\n    static constexpr Edge EDGE = {edge};\n    \
             static constexpr Profile PROFILE = {profile};\n}};\n",
            settings.is_some(),
            s.tile == Tile::Square16,
            s.stochastic,
            s.transform != Transform::None,
            match s.transform {
                Transform::Constant(signs) => i32::from(signs.0),
                Transform::None | Transform::Passed => -1,
            },
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    function: Function,
    precision: Precision,
    row: Option<Settings>,
    col: Option<Settings>,
    whole: bool,
    /// Whether the matrix is one row of whole blocks under one amax.
    flat: bool,
    /// Whether all panels lie within the matrix.
    full: bool,
    /// Blocks that a thread has at a time, where that is a choice.
    per_thread: u32,
    /// The most threads of a group.
    threads: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Function {
    Rows,
    WholeRows,
    Squares,
    Panels,
}

impl Variant {
    fn source(self) -> (&'static str, &'static str, String) {
        const MATRIX: &str = include_str!("matrix.cuh");
        const SQUARES: &str = include_str!("squares.cuh");
        let settings = format!(
            "constexpr bool WHOLE = {}, FLAT = {}, FULL = {};\n\
             constexpr Precision INPUT = {};\nconstexpr int PER_THREAD = {}, MOST_THREADS = {}, MIN_BLOCKS = {};\n{}{}",
            self.whole,
            self.flat,
            self.full,
            precision(self.precision),
            self.per_thread,
            self.threads,
            self.min_blocks(),
            Settings::text("Row", self.row),
            Settings::text("Col", self.col),
        );
        let (function, files): (_, &[&str]) = match self.function {
            Function::Rows => ("quantize_rows", &[BLOCK_TEXT, MATRIX, include_str!("rows.cu")]),
            Function::WholeRows => ("quantize_whole_rows", &[BLOCK_TEXT, MATRIX, include_str!("whole_rows.cu")]),
            Function::Squares => ("quantize_squares", &[BLOCK_TEXT, MATRIX, SQUARES, include_str!("squares.cu")]),
            Function::Panels => ("quantize_panels", &[BLOCK_TEXT, MATRIX, SQUARES, include_str!("panels.cu")]),
        };
        ("quantize", function, assemble(&settings, files))
    }

    /// How many groups of threads a multiprocessor should hold at a time, which limits registers. Measured; docs/gpu.md.
    fn min_blocks(self) -> u32 {
        let filtered = [self.row, self.col].into_iter().flatten().any(|s| s.metric.is_some());
        match (self.function, self.precision, filtered) {
            (Function::WholeRows, ..) => 1,
            (Function::Panels, Precision::F32, _) => 4,
            (Function::Panels, _, true) => 4,
            (Function::Panels, _, false) => 6,
            (_, Precision::F32, _) => 4,
            (Function::Rows | Function::Squares, _, true) => 5,
            (Function::Rows, _, false) if self.per_thread > 1 => 6,
            (Function::Rows | Function::Squares, _, false) => 8,
        }
    }

    fn kernel(self, device: Device) -> Result<Kernel> {
        static VARIANTS: Variants<Variant> = Variants::new();
        Ok(VARIANTS.get(device, self, Variant::source)?)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DirectionParams {
    codes: u64,
    scales: u64,
    amax: u64,
    random_bytes: u64,
    offset_memory: u64,
    seed: u64,
    offset: u64,
    first_block: u64,
    rows: u64,
    cols: u64,
    six_e: f32,
    per_row: u32,
    swizzled: u32,
    error: u32,
    signs: u32,
    padding: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
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
}

/// Threads of a group, but for the kernel over whole rows.
const THREADS: u32 = 128;
/// Rows and columns of a panel, and its tiles of 16×16.
const HEIGHT: usize = 128;
const WIDTH: usize = 64;
const TILES: usize = HEIGHT * WIDTH / (BLOCK * BLOCK);
/// Blocks of the longest row that is quantized in one pass: 1024 threads with 4 blocks each.
const LONGEST_ROW: usize = 4096;

/// Quantizes `x` in the directions that are given. Does not wait.
pub fn quantize(
    stream: &Stream,
    x: &Input<'_>,
    mut row: Option<Direction<'_>>,
    mut col: Option<Direction<'_>>,
) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    x.check(stream.device())?;
    if let Some(row) = &row {
        row.check(stream.device(), rows, cols)?;
    }
    if let Some(col) = &col {
        col.check(stream.device(), cols, rows)?;
    }
    if row.is_some() && !countable(rows, cols) || col.is_some() && !countable_along_columns(rows, cols) {
        return Err(cuda::Error::TooManyBlocks { rows, cols }.into());
    }
    // Only now, so that a call that is refused has written nothing.
    row.as_mut().map_or(Ok(()), |row| row.clear_padding(stream))?;
    col.as_mut().map_or(Ok(()), |col| col.clear_padding(stream))?;
    // An amax per row needs no pass of its own where a row fits into the registers of a group of threads.
    let in_one_pass = row.as_ref().is_some_and(|d| {
        col.is_none()
            && matches!(d.amax, Amax::Compute(_))
            && d.mode.global == GlobalScale::PerRow
            && cols.div_ceil(BLOCK) <= LONGEST_ROW
            && rows * cols > 0
    });
    if !in_one_pass {
        find_amaxes(stream, x, row.as_mut(), col.as_mut())?;
    }
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    match (row, col) {
        (None, None) => Ok(()),
        (Some(row), None) if in_one_pass => whole_rows(stream, x, &row),
        (Some(row), None) if row.mode.tile == Tile::Square16 => squares(stream, x, &row),
        (Some(row), None) => row_blocks(stream, x, &row),
        (row, Some(col)) => panels(stream, x, row.as_ref(), &col),
    }
}

/// Whether kernels can count the blocks of `rows` rows of `cols` elements: in 31 bits.
pub(crate) fn countable(rows: usize, cols: usize) -> bool {
    rows.checked_mul(cols.div_ceil(BLOCK)).is_some_and(|blocks| blocks < 1 << 31)
}

/// The same for the column direction of a matrix, whose kernel counts the rows of the matrix in 31 bits too.
fn countable_along_columns(rows: usize, cols: usize) -> bool {
    countable(cols, rows) && countable(rows, cols.min(1))
}

/// Computes the amaxes that are to be computed, in one pass if one will do.
fn find_amaxes(
    stream: &Stream,
    x: &Input<'_>,
    row: Option<&mut Direction<'_>>,
    col: Option<&mut Direction<'_>>,
) -> Result<()> {
    match (wanted(row, Along::Rows), wanted(col, Along::Columns)) {
        (Some(mut row), Some(col)) if (row.edge, row.values) == (col.edge, col.values) => {
            let (edge, values, mut both) = (row.edge, row.values, maxima::Wanted::default());
            if (row.global, col.global) == (GlobalScale::PerTensor, GlobalScale::PerTensor) {
                // The maximum of all is the same in both directions; the copy comes after it in the stream.
                both.tensor = Some(row.out.reborrow());
                maxima::run(stream, x, edge, values, both)?;
                return Ok(stream.copy(row.out.as_slice(), col.out)?);
            }
            row.add_to(&mut both);
            col.add_to(&mut both);
            maxima::run(stream, x, edge, values, both)
        }
        (row, col) => [row, col].into_iter().flatten().try_for_each(|one| {
            let (edge, values, mut alone) = (one.edge, one.values, maxima::Wanted::default());
            one.add_to(&mut alone);
            maxima::run(stream, x, edge, values, alone)
        }),
    }
}

/// The way in which a direction goes through the matrix.
#[derive(Clone, Copy)]
enum Along {
    Rows,
    Columns,
}

/// An amax, or one per row of a direction, that is to be computed.
struct WantedAmax<'a> {
    along: Along,
    global: GlobalScale,
    edge: Edge,
    values: maxima::Values,
    out: SliceMut<'a, f32>,
}

/// What a direction wants computed.
fn wanted<'a>(d: Option<&'a mut Direction<'_>>, along: Along) -> Option<WantedAmax<'a>> {
    let d = d?;
    let values = match (d.transform, along) {
        (None, _) => maxima::Values::Plain,
        (Some(signs), Along::Rows) => maxima::Values::AlongRows(signs),
        (Some(signs), Along::Columns) => maxima::Values::AlongColumns(signs),
    };
    let (global, edge) = (d.mode.global, d.mode.amax_edge());
    match &mut d.amax {
        Amax::Given(_) => None,
        Amax::Compute(out) => Some(WantedAmax { along, global, edge, values, out: out.reborrow() }),
    }
}

impl<'a> WantedAmax<'a> {
    fn add_to(self, pass: &mut maxima::Wanted<'a>) {
        let place = match (self.global, self.along) {
            (GlobalScale::PerTensor, _) => &mut pass.tensor,
            (GlobalScale::PerRow, Along::Rows) => &mut pass.rows,
            (GlobalScale::PerRow, Along::Columns) => &mut pass.cols,
        };
        *place = Some(self.out);
    }
}

fn params(x: &Input<'_>, row: Option<&Direction<'_>>, col: Option<&Direction<'_>>) -> Params {
    let (rows, cols) = (x.rows(), x.cols());
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
        // A direction that is not wanted is not looked at; the other one's numbers are as good as any.
        row: row.or(col).expect("a direction is wanted").params(rows, cols),
        col: col.or(row).expect("a direction is wanted").params(cols, rows),
    }
}

/// A multiplier `m` and a shift `s` with `n / d = (n·m >> 32) >> s` for every n < 2³¹; (0, 0) for d = 1.
///
/// With l = ceil(log₂ d) and m = ceil(2^(31+l) / d), m·d exceeds 2^(31+l) by less than 2^l, too little to show.
pub(crate) fn divisor(d: usize) -> (u32, u32) {
    let l = d.next_power_of_two().trailing_zeros();
    if l == 0 { (0, 0) } else { ((1u64 << (31 + l)).div_ceil(d as u64) as u32, l - 1) }
}

/// 1×16 blocks along rows, every amax known.
fn row_blocks(stream: &Stream, x: &Input<'_>, d: &Direction<'_>) -> Result<()> {
    let whole = x.rows_aligned() && d.is_whole(x.cols());
    // Two blocks keep more of memory's requests under way; with more arithmetic, one leaves more registers.
    let light = d.settings().is_light();
    let per_thread = if light && x.values().precision() != Precision::F32 { 2 } else { 1 };
    let variant = Variant {
        function: Function::Rows,
        precision: x.values().precision(),
        row: Some(d.settings()),
        col: None,
        whole,
        // Rows that follow each other without a gap are one.
        flat: whole && d.mode.global == GlobalScale::PerTensor && x.stride() == x.cols(),
        full: false,
        per_thread,
        threads: THREADS,
    };
    let kernel = variant.kernel(stream.device())?;
    let mut params = params(x, Some(d), None);
    if variant.flat {
        (params.cols, params.rows) = (params.rows * params.cols, 1);
        (params.row.rows, params.row.cols, params.stride) = (1, params.cols, params.cols);
    }
    let groups = (x.rows() * x.cols().div_ceil(BLOCK)).div_ceil((THREADS * per_thread) as usize) as u32;
    // A few times what runs at once, so that multiprocessors which are done early find more.
    let at_once = kernel.max_blocks_per_sm(THREADS, 0)? * stream.device().multiprocessors();
    let most = (if light { at_once } else { 6 * at_once }).max(1);
    // SAFETY: `Params` is laid out as in matrix.cuh; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups.min(most), 1, 1], THREADS, 0, &params) }?;
    Ok(())
}

/// 1×16 blocks along rows, the amax of each row computed on the way.
fn whole_rows(stream: &Stream, x: &Input<'_>, d: &Direction<'_>) -> Result<()> {
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
        per_thread,
        threads: threads.next_power_of_two(),
    };
    let kernel = variant.kernel(stream.device())?;
    // SAFETY: as above.
    unsafe { kernel.launch(stream, [x.rows() as u32, 1, 1], threads, 0, &params(x, Some(d), None)) }?;
    Ok(())
}

/// 16×16 tiles, the row direction alone.
fn squares(stream: &Stream, x: &Input<'_>, d: &Direction<'_>) -> Result<()> {
    let variant = Variant {
        function: Function::Squares,
        precision: x.values().precision(),
        row: Some(d.settings()),
        col: None,
        whole: x.rows_aligned() && d.is_whole(x.cols()) && x.rows().is_multiple_of(BLOCK),
        flat: false,
        full: false,
        per_thread: 4,
        threads: THREADS,
    };
    let groups = x.rows().div_ceil(BLOCK) * x.cols().div_ceil(BLOCK).div_ceil(32);
    let kernel = variant.kernel(stream.device())?;
    let threads = 512 / variant.per_thread;
    // SAFETY: as above.
    unsafe { kernel.launch(stream, [groups as u32, 1, 1], threads, 0, &params(x, Some(d), None)) }?;
    Ok(())
}

/// The column direction, and the row direction if it is wanted too.
fn panels(stream: &Stream, x: &Input<'_>, row: Option<&Direction<'_>>, col: &Direction<'_>) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    let whole = x.rows_aligned()
        && row.is_none_or(|row| row.is_whole(cols))
        && col.is_whole(rows)
        && cols.is_multiple_of(BLOCK)
        && rows.is_multiple_of(BLOCK);
    let variant = Variant {
        function: Function::Panels,
        precision: x.values().precision(),
        row: row.map(Direction::settings),
        col: Some(col.settings()),
        whole,
        flat: false,
        full: whole && rows.is_multiple_of(HEIGHT) && cols.is_multiple_of(WIDTH),
        per_thread: 4,
        threads: THREADS,
    };
    let kernel = variant.kernel(stream.device())?;
    let mut params = params(x, row, Some(col));
    (params.divisor_magic, params.divisor_shift) = divisor(cols.div_ceil(WIDTH));
    let wide_codes = whole && col.codes.address().is_multiple_of(16) && rows.is_multiple_of(2 * BLOCK);
    params.wide_codes = wide_codes.into();
    let groups = rows.div_ceil(HEIGHT) * cols.div_ceil(WIDTH);
    let shared = panel_memory(x.values().element_size(), [row, Some(col)]);
    // SAFETY: as above.
    unsafe { kernel.launch(stream, [groups as u32, 1, 1], THREADS, shared, &params) }?;
    Ok(())
}

/// Bytes of a `Scaling`.
const SCALING: usize = 24;

/// Bytes of shared memory of a panel: its elements, the codes and scales of its columns, how both
/// directions are scaled, what square tiles agree on.
fn panel_memory(element: usize, directions: [Option<&Direction<'_>>; 2]) -> u32 {
    let squares = |d: &Direction<'_>| match (d.mode.tile, d.mode.rule) {
        (Tile::Row16, _) => 0,
        (Tile::Square16, ScaleRule::Six) => 2 * TILES * 4 + 2 * BLOCK * 4,
        (Tile::Square16, ScaleRule::FourOverSix { .. }) => 2 * TILES * 4 + 2 * BLOCK * TILES * 4,
    };
    let largest = directions.into_iter().flatten().map(squares).max().unwrap_or(0);
    let outputs = HEIGHT / BLOCK * (8 * (WIDTH + 2) + WIDTH);
    (HEIGHT * WIDTH * element + outputs + 2 * SCALING + largest) as u32
}

/// Adds the offsets that one quantization consumes to an offset in the GPU's memory, after the work queued before. Does not
/// wait.
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

/// Texts for [`cuda::sources`]: every setting in every function, while types, whole and ragged, and the directions of a
/// panel take turns.
pub(crate) fn sources() -> Vec<(String, Source)> {
    let plain = Settings::PLAIN;
    let profile = |profile| Settings { profile, ..plain };
    let settings = [
        plain,
        Settings { edge: Edge::Reference, ..plain },
        Settings { stochastic: true, ..plain },
        Settings { stochastic: true, transform: Transform::Passed, edge: Edge::Reference, ..plain },
        Settings { metric: Some(Metric::Mae), ..plain },
        Settings { metric: Some(Metric::Mse), edge: Edge::Reference, ..plain },
        Settings { metric: Some(Metric::Mse), transform: Transform::Constant(Signs::FIXED), ..plain },
        profile(Profile::ModelOpt),
        Settings { stochastic: true, ..profile(Profile::LlmCompressor) },
        Settings { transform: Transform::Constant(Signs::NONE), ..profile(Profile::TorchAo) },
    ];
    let square = |s: Settings| Settings { tile: Tile::Square16, ..s };
    let mut all = vec![cuda::entry((), advance_source)];
    for (i, s) in settings.into_iter().enumerate() {
        // Every type comes whole and ragged within six turns.
        let turn = |function, turn: usize, row, col| Variant {
            function,
            precision: PRECISIONS[(i + turn) % 3],
            row,
            col,
            whole: (i + turn).is_multiple_of(2),
            flat: false,
            full: function == Function::Panels && (i + turn).is_multiple_of(4),
            per_thread: 4,
            threads: THREADS,
        };
        let (other, both) = (settings[(i + 3) % settings.len()], i.is_multiple_of(2));
        let rows = turn(Function::Rows, 0, Some(s), None);
        let (flat, light) = (i.is_multiple_of(4), s.is_light() && rows.precision != Precision::F32);
        let (per_thread, threads) = [(1, 128), (2, 1024), (4, 1024)][i % 3];
        let variants = [
            Variant { flat, per_thread: if light { 2 } else { 1 }, ..rows },
            Variant { per_thread, threads, ..turn(Function::WholeRows, 1, Some(s), None) },
            turn(Function::Squares, 2, Some(square(s)), None),
            turn(Function::Panels, 3, both.then_some(square(other)), Some(s)),
            turn(Function::Panels, 4, (!both).then_some(other), Some(square(s))),
        ];
        all.extend(variants.map(|v| cuda::entry(v, Variant::source)));
    }
    all
}

/// The operation on memory of the host.
pub(super) fn on_host(
    device: Device,
    x: &input::Input<'_>,
    row: Option<super::Direction<'_>>,
    col: Option<super::Direction<'_>>,
) -> Result<()> {
    let stream = Stream::new(device)?;
    let uploaded = Uploaded::new(&stream, x)?;
    let mut row = row.map(|d| Copied::new(&stream, d)).transpose()?;
    let mut col = col.map(|d| Copied::new(&stream, d)).transpose()?;
    let directions = (row.as_mut().map(Copied::direction), col.as_mut().map(Copied::direction));
    quantize(&stream, &uploaded.input(), directions.0, directions.1)?;
    for direction in [row, col].into_iter().flatten() {
        direction.finish(&stream)?;
    }
    Ok(())
}

/// A direction of the host with its buffers on a GPU.
struct Copied<'a> {
    host: super::Direction<'a>,
    amax: Buffer<f32>,
    random: Option<Buffer<u8>>,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
}

impl<'a> Copied<'a> {
    fn new(stream: &Stream, host: super::Direction<'a>) -> Result<Self> {
        let device = stream.device();
        let random = match host.rounding {
            Rounding::Stochastic(stochastic::Random::Bytes(bytes)) => Some(stream.to_device(bytes)?),
            _ => None,
        };
        let amax = match &host.amax {
            super::Amax::Given(amax) => stream.to_device(amax)?,
            super::Amax::Compute(amax) => device.alloc(amax.len())?,
        };
        let (codes, scales) = (device.alloc(host.codes.len())?, device.alloc(host.scales.len())?);
        Ok(Copied { host, amax, random, codes, scales })
    }

    fn direction(&mut self) -> Direction<'_> {
        Direction {
            mode: self.host.mode,
            rounding: match (self.host.rounding, &self.random) {
                (Rounding::Stochastic(stochastic::Random::Stream(s)), _) => Rounding::Stochastic(Random::Stream {
                    seed: s.seed,
                    offset: Offset::Value(s.offset),
                    first_block: s.first_block,
                }),
                (_, Some(bytes)) => Rounding::Stochastic(Random::Bytes(bytes.slice())),
                (_, None) => Rounding::NearestEven,
            },
            transform: self.host.transform,
            layout: self.host.layout,
            amax: match &self.host.amax {
                super::Amax::Given(_) => Amax::Given(self.amax.slice()),
                super::Amax::Compute(_) => Amax::Compute(self.amax.slice_mut()),
            },
            codes: self.codes.slice_mut(),
            scales: self.scales.slice_mut(),
        }
    }

    fn finish(self, stream: &Stream) -> Result<()> {
        stream.download(self.codes.slice(), self.host.codes)?;
        stream.download(self.scales.slice(), self.host.scales)?;
        if let super::Amax::Compute(amax) = self.host.amax {
            stream.download(self.amax.slice(), amax)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiplications_divide() {
        for d in (1..200).chain([1000, 6144 / 16, 65535, 65536, 65537, (1 << 27) - 1, 1 << 30, (1 << 31) - 1]) {
            let (magic, shift) = divisor(d);
            for n in [0, 1, d - 1, d, d + 1, 2 * d - 1, 7 * d + 3, 1 << 30, (1 << 31) - 2, (1 << 31) - 1] {
                let n = n as u64;
                if n < 1 << 31 {
                    let quotient = if magic == 0 { n } else { ((n * u64::from(magic)) >> 32) >> shift };
                    assert_eq!(quotient, n / d as u64, "{n} / {d}");
                }
            }
        }
    }

    #[test]
    fn parameters_have_the_sizes_that_the_kernels_expect() {
        assert_eq!((size_of::<DirectionParams>(), size_of::<Params>()), (104, 256));
    }

    #[test]
    fn blocks_are_counted_in_31_bits() {
        let most = (1 << 31) - 1;
        for (rows, cols) in [(most, 16), (1, most * 16), (most, 1), (0, usize::MAX), (usize::MAX, 0)] {
            assert!(countable(rows, cols), "{rows} × {cols}");
        }
        for (rows, cols) in [(most, 17), (1, most * 16 + 1), (most + 1, 1), (usize::MAX, usize::MAX)] {
            assert!(!countable(rows, cols), "{rows} × {cols}");
        }
        // Of few columns the row direction has more blocks than the column direction.
        assert!(countable_along_columns(most, 1) && countable_along_columns(1 << 30, 17));
        assert!(countable_along_columns(usize::MAX, 0) && countable_along_columns(0, usize::MAX));
        assert!(!countable_along_columns(most + 1, 1) && !countable_along_columns(most, 16));
    }

    /// Every mantissa, at exponents from the smallest to the largest that regular scalings lead to: reciprocals without a
    /// division's checks are those of a division.
    #[test]
    fn reciprocals_round_as_divisions_do() {
        let device = match Device::open(0) {
            Ok(device) => device,
            Err(reason) => return println!("skipped: {reason}"),
        };
        let kernel = "struct Params { u32* wrong; };\n\
            extern \"C\" __global__ void compare(Params p) {\n\
                u32 mantissa = blockIdx.x * 256 + threadIdx.x;\n\
                for (u32 exponent = 27; exponent <= 227; exponent += 25) {\n\
                    float x = from_bits(exponent << 23 | mantissa);\n\
                    if (reciprocal(x) != 1.0f / x) atomicAdd(p.wrong, 1);\n\
                }\n\
            }\n";
        let text = assemble("constexpr bool WHOLE = true;\n", &[BLOCK_TEXT, kernel]);
        let kernel = device.kernel("reciprocals", "compare", &text).unwrap();
        let stream = Stream::new(device).unwrap();
        let wrong = stream.to_device(&[0u32]).unwrap();
        // SAFETY: the kernel has one address as its parameter, of one counter.
        unsafe { kernel.launch(&stream, [1 << 15, 1, 1], 256, 0, &wrong.slice().address()) }.unwrap();
        assert_eq!(stream.to_host(wrong.slice()).unwrap(), [0]);
    }

    /// Every mantissa: products by a rounded reciprocal, corrected by their remainder, are quotients.
    #[test]
    fn corrected_products_round_as_divisions_do() {
        for by in [6.0f32, 1536.0, 2688.0] {
            let reciprocal = 1.0 / by;
            for bits in 0x3F80_0000..0x4000_0000 {
                let x = f32::from_bits(bits);
                let quotient = x * reciprocal;
                let corrected = (-by).mul_add(quotient, x).mul_add(reciprocal, quotient);
                assert!(corrected == x / by, "{x} / {by}");
            }
        }
    }
}
