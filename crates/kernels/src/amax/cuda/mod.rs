//! The largest magnitudes on a GPU; `amax.cu` says how.

use crate::cuda::text::{ELEMENTS, PRECISIONS, Variants, assemble, precision};
use crate::cuda::{
    self, Buffer, Device, GROUPS, Groups, GroupsParams, Input, Matrix, SliceMut, Source, Stream, Uploaded,
};
use crate::input::check_len;
use crate::{Result, input};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{BLOCK, Precision, Specials};

/// The maxima to compute, any of them in one pass.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The maximum over everything: one value.
    pub tensor: Option<SliceMut<'a, f32>>,
    /// One per row.
    pub rows: Option<SliceMut<'a, f32>>,
    /// One per column.
    pub cols: Option<SliceMut<'a, f32>>,
}

/// Computes the maxima in `outputs`. NaN is ignored with kernel specials and wins with reference
/// specials. Does not wait.
pub fn amax(stream: &Stream, x: &Input<'_>, specials: Specials, outputs: Outputs<'_>) -> Result<()> {
    x.check(stream.device())?;
    run(stream, (x, None), specials, Values::Plain, outputs)
}

/// [`amax`] of each group of a matrix, in one launch: `tensor` has one value per group, `cols` one
/// per group and column.
pub fn amax_grouped(
    stream: &Stream,
    x: &Input<'_>,
    groups: &Groups,
    specials: Specials,
    outputs: Outputs<'_>,
) -> Result<()> {
    x.check(stream.device())?;
    groups.check(stream.device(), x.rows())?;
    run(stream, (x, Some(groups)), specials, Values::Plain, outputs)
}

/// Which values the maxima are taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Values {
    /// Those of the matrix.
    Plain,
    /// Those of the matrix after the Hadamard transform along its rows. Not with `cols`.
    AlongRows(Signs),
    /// Those of the matrix after the Hadamard transform along its columns. Not with `rows`.
    AlongColumns(Signs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    precision: Precision,
    specials: Specials,
    function: Function,
    tensor: bool,
    rows: bool,
    cols: bool,
    /// Beside those after a transform.
    plain: bool,
    /// Of the parts that blocks of threads have.
    parts: bool,
    grouped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Function {
    Plain,
    AlongRows,
    AlongColumns,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    rows: u64,
    cols: u64,
    stride: u64,
    tensor: u64,
    row: u64,
    col: u64,
    plain: u64,
    aligned: u32,
    signs: u32,
    panel: u32,
    padding: u32,
    groups: GroupsParams,
}

/// The most rows that a block of threads walks down. More rows mean fewer atomic updates per column.
const PANEL: usize = 32;
const PANEL_OF_COLUMNS: usize = 128;
/// Blocks of threads of a multiprocessor; a matrix that is too small for as many has lower panels.
const BLOCKS: usize = 4;
/// The most maxima of parts: every block of threads of the next kernel reads all of them.
pub(crate) const MOST_PARTS: usize = 1024;

fn source(v: Variant) -> (&'static str, &'static str, String) {
    let function = match v.function {
        Function::Plain => "amax",
        Function::AlongRows => "amax_hadamard_rows",
        Function::AlongColumns => "amax_hadamard",
    };
    let specials = if v.specials == Specials::Kernel { "KERNEL" } else { "REFERENCE" };
    let settings = format!(
        "constexpr Precision INPUT = {};\nconstexpr Specials SPECIALS = {specials};\n\
         constexpr bool OUTPUT_TENSOR = {}, OUTPUT_ROWS = {}, OUTPUT_COLS = {}, OUTPUT_PLAIN = {}, PARTS = {}, GROUPED = {};\n",
        precision(v.precision),
        v.tensor,
        v.rows,
        v.cols,
        v.plain,
        v.parts,
        v.grouped,
    );
    ("amax", function, assemble(&settings, &[ELEMENTS, GROUPS, include_str!("amax.cu")]))
}

/// Texts for [`crate::sources`]; each has all three functions.
pub(crate) fn sources() -> Vec<(String, Source)> {
    let (mut variants, specials) = (Vec::new(), [Specials::Kernel, Specials::Reference]);
    for (precision, specials) in PRECISIONS.into_iter().flat_map(|p| specials.map(|e| (p, e))) {
        variants.push(Variant {
            precision,
            specials,
            function: Function::Plain,
            tensor: true,
            rows: true,
            cols: true,
            plain: false,
            parts: false,
            grouped: specials == Specials::Kernel,
        });
    }
    let tensor = Variant {
        rows: false,
        cols: false,
        precision: Precision::Bf16,
        specials: Specials::Kernel,
        grouped: false,
        ..variants[0]
    };
    variants.push(tensor);
    variants.push(Variant { function: Function::AlongRows, tensor: false, rows: true, ..tensor });
    variants.push(Variant { function: Function::AlongColumns, tensor: false, cols: true, ..tensor });
    variants.push(Variant { function: Function::AlongColumns, plain: true, ..tensor });
    variants.push(Variant { function: Function::AlongColumns, plain: true, parts: true, ..tensor });
    variants.push(Variant { parts: true, ..tensor });
    variants.push(Variant { function: Function::AlongColumns, plain: true, grouped: true, ..tensor });
    variants.into_iter().map(|v| cuda::entry(v, source)).collect()
}

/// [`amax`], also after the Hadamard transform; `x` has been checked.
pub(crate) fn run(
    stream: &Stream,
    x: Matrix<'_>,
    specials: Specials,
    values: Values,
    outputs: Outputs<'_>,
) -> Result<()> {
    pass(stream, x, specials, values, (outputs, None), Start::Zero)
}

/// [`run`] after the Hadamard transform along columns, and the maximum of everything before it,
/// which is one value.
pub(crate) fn run_with_plain(
    stream: &Stream,
    x: Matrix<'_>,
    specials: Specials,
    signs: Signs,
    outputs: Outputs<'_>,
    plain: SliceMut<'_, f32>,
) -> Result<()> {
    pass(stream, x, specials, Values::AlongColumns(signs), (outputs, Some(plain)), Start::Zero)
}

/// [`amax`] with kernel specials, combined with the magnitudes that the outputs held before; `x` has
/// been checked.
pub(crate) fn join(stream: &Stream, x: Matrix<'_>, outputs: Outputs<'_>) -> Result<()> {
    pass(stream, x, Specials::Kernel, Values::Plain, (outputs, None), Start::AsItIs)
}

/// The initial values of maxima.
#[derive(Clone, Copy, PartialEq)]
enum Start {
    Zero,
    AsItIs,
    /// None: each block of threads stores its own.
    Parts,
}

/// The maximum of everything, or that after a transform along columns.
fn of_parts(x: &Input<'_>, (specials, values): (Specials, Values), plain: bool) -> Option<Variant> {
    let function = match values {
        Values::Plain => Function::Plain,
        Values::AlongColumns(_) => Function::AlongColumns,
        Values::AlongRows(_) => return None,
    };
    let (precision, [tensor, rows, cols]) = (x.values().precision(), [true, false, false]);
    Some(Variant { precision, specials, function, tensor, rows, cols, plain, parts: true, grouped: false })
}

/// How many maxima [`run_parts`] finds; `None` if it does not, or if they are many.
pub(crate) fn part_count(device: Device, x: &Input<'_>, values: Values) -> Option<usize> {
    let variant = of_parts(x, (Specials::Kernel, values), false)?;
    Layout::new(device, (x, None), &variant).blocks().filter(|blocks| (1..=MOST_PARTS).contains(blocks))
}

/// The maxima of so many parts of a matrix, without clearing anything before: one kernel that lets
/// the next one start early. `plain` is for those before a transform. `x` has been checked.
pub(crate) fn run_parts(
    stream: &Stream,
    x: &Input<'_>,
    (specials, values): (Specials, Values),
    parts: SliceMut<'_, f32>,
    plain: Option<SliceMut<'_, f32>>,
) -> Result<()> {
    let outputs = Outputs { tensor: Some(parts), ..Outputs::default() };
    pass(stream, (x, None), specials, values, (outputs, plain), Start::Parts)
}

fn pass(
    stream: &Stream,
    (x, groups): Matrix<'_>,
    specials: Specials,
    values: Values,
    (outputs, plain): (Outputs<'_>, Option<SliceMut<'_, f32>>),
    start: Start,
) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let Outputs { tensor, rows, cols } = outputs;
    let mut address = [0; 4];
    let count = match start {
        Start::Parts => part_count(stream.device(), x, values).unwrap_or(0),
        Start::Zero | Start::AsItIs => groups.map_or(1, Groups::count),
    };
    let asked = [
        ("tensor amax", tensor, count),
        ("row amax", rows, x.rows()),
        ("column amax", cols, count * x.cols()),
        ("tensor amax", plain, count),
    ];
    for ((what, slice, len), address) in asked.into_iter().zip(&mut address) {
        let Some(mut slice) = slice else { continue };
        check_len(what, len, slice.len())?;
        slice.check(stream.device(), what)?;
        slice.check_aligned(4, what)?;
        *address = slice.address();
        if start == Start::Zero {
            stream.fill_bytes(slice.reborrow(), 0)?;
        }
    }
    if x.rows() == 0 || x.cols() == 0 || address == [0; 4] {
        return Ok(());
    }
    let variant = Variant {
        precision: x.values().precision(),
        specials,
        function: match values {
            Values::Plain => Function::Plain,
            Values::AlongRows(_) => Function::AlongRows,
            Values::AlongColumns(_) => Function::AlongColumns,
        },
        tensor: address[0] != 0,
        rows: address[1] != 0,
        cols: address[2] != 0,
        plain: address[3] != 0,
        parts: start == Start::Parts,
        grouped: groups.is_some(),
    };
    let kernel = VARIANTS.get(stream.device(), variant, source)?;
    let layout = Layout::new(stream.device(), (x, groups), &variant);
    let Layout { rows, cols, panel, threads, .. } = layout;
    let too_large = cuda::Error::TooManyBlocks { rows: x.rows(), cols: x.cols() };
    let blocks = layout.blocks().and_then(|b| u32::try_from(b).ok()).ok_or(too_large)?;
    let params = Params {
        x: x.values().address(),
        rows: rows as u64,
        cols: cols as u64,
        stride: if layout.one_row { cols } else { x.stride() } as u64,
        tensor: address[0],
        row: address[1],
        col: address[2],
        plain: address[3],
        aligned: x.rows_aligned().into(),
        signs: match values {
            Values::Plain => 0,
            Values::AlongRows(signs) | Values::AlongColumns(signs) => signs.0.into(),
        },
        panel: panel as u32,
        padding: 0,
        groups: groups.map(Groups::params).unwrap_or_default(),
    };
    // SAFETY: `Params` is laid out as in amax.cu; every address was checked to be of this GPU's
    // memory, and its length to fit.
    // With parts it waits for earlier work before anything else.
    unsafe {
        match start {
            Start::Parts => kernel.launch_dependent(stream, [blocks, 1, 1], threads as u32, 0, &params),
            Start::Zero | Start::AsItIs => kernel.launch(stream, [blocks, 1, 1], threads as u32, 0, &params),
        }
    }?;
    Ok(())
}

/// How a pass divides a matrix among blocks of threads.
struct Layout {
    rows: usize,
    cols: usize,
    /// Rows of a panel.
    panel: usize,
    threads: usize,
    /// Blocks side by side.
    across: usize,
    one_row: bool,
}

impl Layout {
    fn new(device: Device, (x, groups): Matrix<'_>, variant: &Variant) -> Self {
        let size = x.values().element_size();
        // Contiguous rows are treated as one row if only the maximum of all elements is computed.
        let one_row = variant.function == Function::Plain
            && !variant.rows
            && !variant.cols
            && x.stride() == x.cols()
            && groups.is_none();
        let (rows, cols) = match groups {
            _ if one_row => fold(x.rows() * x.cols()),
            Some(groups) => (groups.padded_rows(), x.cols()),
            None => (x.rows(), x.cols()),
        };
        let (threads, units) = match variant.function {
            Function::Plain => (256, cols.div_ceil(16 / size)),
            Function::AlongRows => (256, cols.div_ceil(BLOCK)),
            Function::AlongColumns => (128, cols.div_ceil(if size == 4 { 1 } else { 2 })),
        };
        let across = units.div_ceil(threads);
        let (most, least) = match variant.function {
            Function::AlongColumns => (PANEL_OF_COLUMNS, BLOCK),
            // Groups begin at multiples of 16.
            _ if groups.is_some() => (if variant.cols { PANEL_OF_COLUMNS } else { PANEL }, BLOCK),
            _ => (if variant.cols { PANEL_OF_COLUMNS } else { PANEL }, 8),
        };
        let enough = BLOCKS * device.multiprocessors() as usize;
        let mut panel = most;
        while panel > least && rows.div_ceil(panel).saturating_mul(across) < enough {
            panel /= 2;
        }
        Layout { rows, cols, panel, threads, across, one_row }
    }

    /// Blocks of threads.
    fn blocks(&self) -> Option<usize> {
        self.rows.div_ceil(self.panel).checked_mul(self.across)
    }
}

/// `len` elements as a contiguous matrix whose rows suit the kernel: rows of 6144, 4096 or 2048
/// elements if that divides `len`, else one row.
fn fold(len: usize) -> (usize, usize) {
    [6144, 4096, 2048].into_iter().find(|c| len.is_multiple_of(*c)).map_or((1, len), |c| (len / c, c))
}

/// The operation on memory of the host.
pub(super) fn on_host(
    device: Device,
    x: &input::Input<'_>,
    specials: Specials,
    outputs: super::Outputs<'_>,
) -> Result<()> {
    let stream = Stream::new(device)?;
    let uploaded = Uploaded::new(&stream, x)?;
    let room = |len: Option<usize>| len.map(|len| device.alloc::<f32>(len)).transpose();
    let mut tensor = room(outputs.tensor.is_some().then_some(1))?;
    let mut rows = room(outputs.rows.as_ref().map(|r| r.len()))?;
    let mut cols = room(outputs.cols.as_ref().map(|c| c.len()))?;
    let all = Outputs {
        tensor: tensor.as_mut().map(Buffer::slice_mut),
        rows: rows.as_mut().map(Buffer::slice_mut),
        cols: cols.as_mut().map(Buffer::slice_mut),
    };
    amax(&stream, &uploaded.input(), specials, all)?;
    let back = |from: Option<Buffer<f32>>, to: Option<&mut [f32]>| -> cuda::Result<()> {
        from.zip(to).map_or(Ok(()), |(from, to)| stream.download(from.slice(), to))
    };
    back(tensor, outputs.tensor.map(std::slice::from_mut))?;
    back(rows, outputs.rows)?;
    back(cols, outputs.cols)?;
    Ok(())
}
