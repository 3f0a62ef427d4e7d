//! Products by tensor cores; `pipeline.cuh` says how.

use super::choice::{Choice, shape_for_groups};
use super::groups::Grouping;
use super::operand::Operand;
use super::output::{self, Add, Kind, OperandOrder, Order, Output};
use super::prepared::{self, PreparedWeight, TILE, TILE_BYTES, prepare, tiles};
use super::scratch::Scratch;
use super::shape::{self, Chip, Instruction, Shape};
use super::{COPIES, MMA, OUTPUT, TOKENS, WEIGHTS, WGMMA, math};
use crate::cuda::text::{ELEMENTS, PRECISIONS, Variants, assemble};
use crate::cuda::{
    Allocator, Along, Device, GROUP_ROWS, GROUPS, Groups, GroupsParams, Input, MapValues, SliceMut, Source, Stream,
    entry, tensor_map,
};
use crate::dequantize::cuda::View;
use crate::quantize::Layout;
use crate::{Result, cuda};
use nvfp4_spec::{BLOCK, Error, GlobalScale, Precision};

/// The left operand.
#[derive(Clone, Copy)]
pub(super) enum Tokens<'a> {
    /// To be decoded to bf16 first.
    Nvfp4(View<'a>),
    /// Of 16 bits.
    Plain(Input<'a>, Precision),
}

impl<'a> Tokens<'a> {
    /// Tensor cores take numbers of 16 bits.
    pub fn of(a: Operand<'a>) -> Option<Self> {
        match a {
            _ if a.cols() == 0 => None,
            Operand::Nvfp4(view) => Some(Tokens::Nvfp4(view)),
            Operand::Fp8(_) | Operand::Values(_) => None,
            Operand::Plain(x) => match x.values().precision() {
                Precision::F32 => None,
                precision => Some(Tokens::Plain(x, precision)),
            },
        }
    }

    pub fn rows(&self) -> usize {
        match self {
            Tokens::Nvfp4(view) => view.rows,
            Tokens::Plain(x, _) => x.rows(),
        }
    }

    fn math(&self) -> Precision {
        match self {
            Tokens::Nvfp4(_) => Precision::Bf16,
            Tokens::Plain(_, precision) => *precision,
        }
    }

    /// Whether kernels can read it directly: rows start at multiples of 16 bytes and have whole
    /// 16-byte chunks.
    fn is_aligned(&self) -> bool {
        match self {
            Tokens::Nvfp4(_) => false,
            Tokens::Plain(x, _) => x.rows_aligned() && x.cols().is_multiple_of(8),
        }
    }
}

/// The right operand.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    /// To be reordered first.
    View(View<'a>),
    Prepared(&'a PreparedWeight),
}

impl Right<'_> {
    pub fn size(&self) -> (usize, usize) {
        match self {
            Right::View(view) => (view.rows, view.cols),
            Right::Prepared(weight) => (weight.rows(), weight.cols()),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Params {
    map: [u64; 16],
    tokens: u64,
    weights: u64,
    output: output::Params,
    k: u64,
    pitch: u64,
    tiles: u32,
    row_tiles: u32,
    token_tiles: u32,
    undo: f32,
    groups: GroupsParams,
    next_rows: u32,
    next_columns: u32,
    k_tiles: u32,
    settled: u32,
}

const _: () = assert!(size_of::<Params>() == 320);

/// The power of two that decoded weights and decoded tokens lack.
const UNDO: f32 = 128.0;

type Variant = (Shape, Precision, Kind, Grouping);

fn choose(choice: Choice, device: Device, m: usize, (rows, cols): (usize, usize)) -> Result<Shape> {
    let reason = match choice {
        Choice::Fastest => cuda::Error::TooManyBlocks { rows, cols },
        Choice::Given { .. } => cuda::Error::NotThisWay,
    };
    Ok(choice.shape(device, m, (rows, cols)).ok_or(reason)?)
}

pub(super) fn describe(device: Device, tokens: &Tokens<'_>, right: &Right<'_>) -> Result<String> {
    let before = match (tokens, right) {
        (Tokens::Nvfp4(_), Right::View(_)) => "decode A, prepare B, ",
        (Tokens::Nvfp4(_), Right::Prepared(_)) => "decode A, ",
        (Tokens::Plain(..), Right::View(_)) => "prepare B, ",
        (Tokens::Plain(..), Right::Prepared(_)) => "",
    };
    Ok(format!("{before}{}", choose(Choice::Fastest, device, tokens.rows(), right.size())?))
}

/// Tokens are decoded in multiples of this number.
const PART: usize = 1024;
/// Bytes of decoded tokens at a time: about the size of the L2 cache, so that most of them stay in
/// it.
const DECODED: usize = 64 << 20;

/// The product of checked operands with at least one output.
pub(super) fn run(
    stream: &Stream,
    tokens: Tokens<'_>,
    right: Right<'_>,
    choice: Choice,
    output: &Output,
    memory: &dyn Allocator,
) -> Result<()> {
    let (rows, cols) = right.size();
    let (row_tiles, k_tiles) = tiles(rows, cols);
    let weight_bytes = match right {
        Right::View(_) => row_tiles * k_tiles * TILE_BYTES,
        Right::Prepared(_) => 0,
    };
    // Misaligned tokens are copied to rows padded to whole blocks.
    let (m, pitch) = (tokens.rows(), 2 * cols.next_multiple_of(BLOCK));
    let part = match tokens {
        Tokens::Nvfp4(_) if output.kind.operands == OperandOrder::Given => {
            m.min((DECODED / pitch).next_multiple_of(PART).max(PART))
        }
        // With swapped operands, tokens are the smaller side and are decoded all at once.
        Tokens::Nvfp4(_) | Tokens::Plain(..) => m,
    };
    let token_bytes = if tokens.is_aligned() { 0 } else { part * pitch };
    // Dropped when all work is queued.
    let scratch = Scratch::new(stream, memory, [weight_bytes, token_bytes])?;
    let [weights, decoded] = scratch.addresses;
    let (weights, settled) = match right {
        Right::View(view) => {
            prepare(stream, &view, None, weights)?;
            (weights, false)
        }
        Right::Prepared(weight) => (weight.address(), weight.is_settled()),
    };
    let call = Call { stream, choice, bits: tokens.math(), weights, settled, size: (rows, cols), output };
    match tokens {
        Tokens::Nvfp4(view) => {
            for first in (0..m).step_by(part) {
                let count = part.min(m - first);
                decode(stream, &view, (first, count), decoded)?;
                call.launch((decoded, pitch), (first, count), UNDO * UNDO)?;
            }
            Ok(())
        }
        Tokens::Plain(x, _) => {
            // The stride of a single row may be any number.
            let (from, stride) = (x.values().address(), 2 * if m == 1 { cols } else { x.stride() });
            if tokens.is_aligned() {
                return call.launch((from, stride), (0, m), UNDO);
            }
            // The padding of a row is multiplied by zeros, so it must not be NaN.
            // SAFETY: the scratch has `token_bytes` bytes and belongs to this stream alone.
            stream.fill_bytes::<u8>(unsafe { SliceMut::from_raw(decoded, token_bytes) }, 0)?;
            // SAFETY: the matrix was checked, and the scratch has `m` rows of that pitch.
            unsafe { stream.copy_rows((from, stride), (decoded, pitch), 2 * cols, m) }?;
            call.launch((decoded, pitch), (0, m), UNDO)
        }
    }
}

/// What the launches of a product have in common.
struct Call<'a> {
    stream: &'a Stream,
    choice: Choice,
    bits: Precision,
    weights: u64,
    /// Whether they may be read before earlier work has finished.
    settled: bool,
    /// N and K.
    size: (usize, usize),
    output: &'a Output,
}

impl Call<'_> {
    /// Multiplies `m` tokens, from number `first` on, which are at the address `tokens`, `pitch`
    /// bytes apart.
    fn launch(&self, (tokens, pitch): (u64, usize), (first, m): (usize, usize), undo: f32) -> Result<()> {
        let (device, (rows, cols)) = (self.stream.device(), self.size);
        let shape = choose(self.choice, device, m, self.size)?;
        let (row_tiles, k_tiles) = tiles(rows, cols);
        let params = Params {
            map: tensor_map(device, self.bits.into(), (tokens, pitch), (m, cols), shape.tokens)?,
            tokens,
            weights: self.weights,
            output: self.output.part(first, m),
            k: cols as u64,
            pitch: pitch as u64,
            tiles: k_tiles as u32,
            row_tiles: row_tiles as u32,
            token_tiles: m.div_ceil(shape.tokens as usize) as u32,
            undo,
            groups: GroupsParams::default(),
            next_rows: 0,
            next_columns: 0,
            k_tiles: k_tiles as u32,
            settled: self.settled.into(),
        };
        let outputs = shape.outputs(m, row_tiles);
        let blocks =
            if shape.stays() { outputs.min(device.multiprocessors() as usize) } else { outputs * shape.split as usize };
        start(self.stream, (shape, self.bits, self.output.kind, Grouping::Alone), blocks, &params)
    }
}

/// Launches `blocks` groups of threads.
fn start(stream: &Stream, variant: Variant, blocks: usize, params: &Params) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let (shape, ..) = variant;
    let too_many = cuda::Error::TooManyBlocks { rows: params.token_tiles as usize, cols: params.row_tiles as usize };
    let blocks = u32::try_from(blocks).map_err(|_| too_many)?;
    let kernel = VARIANTS.get(stream.device(), variant, source)?;
    let shared = Chip::of(stream.device()).shared_memory_of(&shape);
    // SAFETY: `Params` is laid out as in pipeline.cuh; operands and outputs were checked, and the
    // scratch belongs to this stream alone. The kernel waits for earlier work before it accesses
    // memory other than settled weights.
    unsafe { kernel.launch_dependent(stream, [blocks, 1, 1], shape.threads(), shared, params) }?;
    Ok(())
}

/// The products of groups whose sizes the GPU reads, in one launch. All operands were checked;
/// tokens are A's rows, weights B's, as [`multiply_groups`](super::multiply_groups) pairs them.
/// `outputs` are those of A's rows and the rows of one group of B.
pub(super) fn run_groups(
    stream: &Stream,
    (a, a_along): (View<'_>, Along),
    (b, b_along): (View<'_>, Along),
    (tokens, weights): (&Groups, &Groups),
    output: &Output,
    memory: &dyn Allocator,
) -> Result<()> {
    let (device, count) = (stream.device(), tokens.count());
    // Of all weights; then of those of a group, and from one group to the next.
    let (row_tiles, k_tiles) = tiles(b.rows, b.cols);
    let each = b.rows / weights.count().max(1);
    if b_along == Along::Rows && !each.is_multiple_of(TILE) {
        return Err(Error::Multiple { what: "rows of the weights of a group", of: TILE, got: each }.into());
    }
    let (own_rows, own_k, next) = match (a_along, b_along) {
        (Along::Rows, Along::Rows) => (each.div_ceil(TILE), k_tiles, (each / TILE, 0)),
        (Along::Rows, Along::K) => (row_tiles, tiles(0, a.cols).1, (0, k_tiles / count.max(1))),
        (Along::K, _) => (row_tiles, k_tiles, (0, 0)),
    };
    let (grouping, average) = match a_along {
        Along::Rows => (Grouping::Tokens, a.rows.div_ceil(count.max(1))),
        Along::K => (Grouping::K, a.rows),
    };
    let too_large = cuda::Error::TooManyBlocks { rows: b.rows, cols: b.cols };
    // Groups along K have any even number of tiles, so a step has at most two.
    let steps = if a_along == Along::K { 2 * ((k_tiles / 2).div_ceil(count.max(1)) | 1) } else { own_k };
    let shape = shape_for_groups(device, (average, count), (own_rows, steps)).ok_or(too_large)?;
    let pitch = 2 * a.cols;
    let scratch = Scratch::new(stream, memory, [row_tiles * k_tiles * TILE_BYTES, a.rows * pitch])?;
    let [prepared, decoded] = scratch.addresses;
    prepare(stream, &b, (b_along == Along::K).then_some(weights), prepared)?;
    match a_along {
        Along::Rows => decode(stream, &a, (0, a.rows), decoded)?,
        Along::K => decode_groups(stream, &a, tokens, decoded)?,
    }
    let params = Params {
        map: tensor_map(device, MapValues::Bf16, (decoded, pitch), (a.rows, a.cols), shape.tokens)?,
        tokens: decoded,
        weights: prepared,
        output: output.part(0, a.rows),
        k: a.cols as u64,
        pitch: pitch as u64,
        tiles: k_tiles as u32,
        row_tiles: own_rows as u32,
        token_tiles: a.rows.div_ceil(shape.tokens as usize) as u32,
        undo: UNDO * UNDO,
        groups: tokens.params(),
        next_rows: next.0 as u32,
        next_columns: next.1 as u32,
        k_tiles: own_k as u32,
        settled: 0,
    };
    // As many as there may be: each group has at most one tile of tokens that is not full.
    let outputs = match grouping {
        Grouping::Tokens => {
            let high = a.rows / shape.tokens as usize + count.min(a.rows);
            own_rows.div_ceil(shape.rows as usize) * high
        }
        Grouping::Alone | Grouping::K => count * shape.outputs(a.rows, own_rows),
    };
    let blocks =
        if shape.stays() { outputs.min(device.multiprocessors() as usize) } else { outputs * shape.split as usize };
    if blocks == 0 {
        return Ok(());
    }
    start(stream, (shape, Precision::Bf16, output.kind, grouping), blocks, &params)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeParams {
    codes: u64,
    scales: u64,
    out: u64,
    first: u64,
    rows: u64,
    cols: u64,
    swizzled: u32,
    aligned: u32,
    groups: GroupsParams,
}

/// Decodes `rows` rows of a checked matrix, from row `first` on, to rows of whole blocks of bf16 at
/// `out`.
fn decode(stream: &Stream, q: &View<'_>, (first, rows): (usize, usize), out: u64) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    if rows * q.cols == 0 {
        return Ok(());
    }
    let params = DecodeParams {
        codes: q.codes.address(),
        scales: q.scales.address(),
        out,
        first: first as u64,
        rows: rows as u64,
        cols: q.cols as u64,
        swizzled: (q.layout == Layout::Swizzled).into(),
        aligned: (q.cols.is_multiple_of(BLOCK) && q.codes.address().is_multiple_of(8)).into(),
        groups: GroupsParams::default(),
    };
    let blocks = (rows * q.cols.div_ceil(BLOCK)).div_ceil(256);
    let blocks = u32::try_from(blocks).map_err(|_| cuda::Error::TooManyBlocks { rows: q.rows, cols: q.cols })?;
    let kernel = VARIANTS.get(stream.device(), Precision::Bf16, decode_source)?;
    // SAFETY: `DecodeParams` is laid out as in tokens.cu; the matrix was checked, and the caller
    // has allocated the output. The kernel waits for earlier work before it accesses memory.
    unsafe { kernel.launch_dependent(stream, [blocks, 1, 1], 256, 0, &params) }?;
    Ok(())
}

fn decode_source(bits: Precision) -> (&'static str, &'static str, String) {
    let files = [ELEMENTS, WEIGHTS, GROUPS, TOKENS, include_str!("tokens.cu")];
    ("gemm_tokens", "gemm_tokens", assemble(&math(bits), &files))
}

/// Decodes groups along K to rows of bf16 in which they come side by side.
fn decode_groups(stream: &Stream, q: &View<'_>, groups: &Groups, out: u64) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    let params = DecodeParams {
        codes: q.codes.address(),
        scales: q.scales.address(),
        out,
        first: 0,
        rows: q.rows as u64,
        cols: q.cols as u64,
        swizzled: 0,
        aligned: 1,
        groups: groups.params(),
    };
    let (across, down) = (q.cols / GROUP_ROWS, q.rows.div_ceil(32));
    if across * down == 0 {
        return Ok(());
    }
    let too_many = || cuda::Error::TooManyBlocks { rows: q.rows, cols: q.cols };
    let grid =
        [u32::try_from(across).map_err(|_| too_many())?, u32::from(u16::try_from(down).map_err(|_| too_many())?), 1];
    let kernel = VARIANTS.get(stream.device(), Precision::Bf16, grouped_decode_source)?;
    // SAFETY: as above.
    unsafe { kernel.launch(stream, grid, 256, 0, &params) }?;
    Ok(())
}

fn grouped_decode_source(bits: Precision) -> (&'static str, &'static str, String) {
    let (name, _, text) = decode_source(bits);
    (name, "gemm_grouped_tokens", text)
}

fn source((shape, bits, kind, grouping): Variant) -> (&'static str, &'static str, String) {
    let Shape { instruction, tokens, rows, slices, stages, tiles, split, registers } = shape;
    let set = |how: &str, registers: Option<u32>| match registers {
        Some(n) => format!("asm volatile(\"setmaxnreg.{how}.sync.aligned.u32 {n};\")"),
        None => "(void)0".to_string(),
    };
    let (lower, raise) = (set("dec", registers.map(|r| r.0)), set("inc", registers.map(|r| r.1)));
    let settings = format!(
        "#define LOWER_REGISTERS {lower}\n#define RAISE_REGISTERS {raise}\nconstexpr u32 TOKENS = {tokens}, ROWS = {rows}, SLICES = {slices}, \
         STAGES = {stages}, TILES = {tiles}, SPLIT = {split};\n{}{}{}",
        grouping.settings(),
        math(bits),
        kind.settings()
    );
    let pipeline = include_str!("pipeline.cuh");
    match instruction {
        Instruction::Mma => (
            "gemm_mma",
            "gemm_mma",
            assemble(&settings, &[ELEMENTS, OUTPUT, WEIGHTS, GROUPS, COPIES, pipeline, MMA, include_str!("mma.cu")]),
        ),
        Instruction::Wgmma => {
            let files = [
                ELEMENTS,
                OUTPUT,
                WEIGHTS,
                GROUPS,
                COPIES,
                pipeline,
                WGMMA,
                &wgmma(tokens, bits),
                include_str!("wgmma.cu"),
            ];
            ("gemm_wgmma", "gemm_wgmma", assemble(&settings, &files))
        }
    }
}

/// The warpgroup instruction as a function, for `tokens` tokens, with all accumulators named.
fn wgmma(tokens: u32, bits: Precision) -> String {
    let count = tokens / 2;
    let list =
        |item: &dyn Fn(u32) -> String, range: std::ops::Range<u32>| range.map(item).collect::<Vec<_>>().join(", ");
    let sums = list(&|i| format!("%{i}"), 0..count);
    let outputs = list(&|i| format!("\"+f\"(d[{i}])"), 0..count);
    let a = list(&|i| format!("%{i}"), count..count + 4);
    let kind = match bits {
        Precision::F16 => "f16",
        _ => "bf16",
    };
    let b = count + 4;
    format!(
        "RULE void wgmma(float (&d)[{count}], const u32 (&a)[4], u64 b) {{\n    asm volatile(\"{{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\n\
         wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kind}.{kind} {{{sums}}}, {{{a}}}, %{b}, p, 1, 1, 0;\\n}}\" : {outputs} : \
         \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b));\n}}\n"
    )
}

/// Every shape in both types, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let plain = Kind::PLAIN;
    let shapes = shape::all().into_iter().flat_map(|shape| {
        let alone = |shape, bits, kind| entry((shape, bits, kind, Grouping::Alone), source);
        let types = [Precision::Bf16, Precision::F16].map(|bits| alone(shape, bits, plain));
        let swapped = alone(shape, Precision::Bf16, Kind { operands: OperandOrder::Swapped, ..plain });
        let split = alone(Shape { split: 2, ..shape }, Precision::Bf16, plain);
        let groups = [Grouping::Tokens, Grouping::K].map(|of| entry((shape, Precision::Bf16, plain, of), source));
        types.into_iter().chain([swapped, split]).chain(groups)
    });
    let small = shape::all()[0];
    let kinds = PRECISIONS.into_iter().flat_map(|precision| {
        let orders = [Order::Folded, Order::OneRow, Order::BothRows];
        orders.map(|order| {
            entry(
                (
                    small,
                    Precision::Bf16,
                    Kind { precision, order, tokens: GlobalScale::PerRow, add: Add::C, ..plain },
                    if order == Order::Folded { Grouping::K } else { Grouping::Alone },
                ),
                source,
            )
        })
    });
    let others = [Precision::Bf16, Precision::F16].map(|bits| entry(bits, decode_source));
    shapes.chain(kinds).chain(others).chain(prepared::sources()).collect()
}
