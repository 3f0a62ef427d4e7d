//! Products of FP8 operands on bf16 tensor cores; `tiles.cu` says how.

use super::decoded::{self, Condition};
use super::groups::{GroupedOperand, Grouping, PARTS, Part};
use super::operand::Operand;
use super::output::{self, Add, Kind, Order, Output};
use super::scratch::Scratch;
use super::{CODES, MMA, OUTPUT, math};
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8};
use crate::cuda::{Allocator, Along, GROUPS, Source, Stream, entry};
use crate::{Result, cuda};
use nvfp4_spec::fp8::{Scales, Tile};
use nvfp4_spec::{Error, Precision};

/// Outputs of a block, along each side.
const SIDE: usize = 128;
const THREADS: u32 = 256;
/// Two stages of two operands: 128 rows of 64 values.
const SHARED: u32 = 2 * 2 * 128 * 64 * 2;

/// What an operand is to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Values {
    Bf16,
    /// Codes of a matrix with one scale.
    Codes,
    /// Codes with a 32-bit scale for 128 values along K.
    Wide,
    /// MXFP8.
    Rows32,
    /// MXFP8's column direction, which lies transposed.
    Columns32,
}

impl Values {
    /// `None` if the kernel does not read it.
    fn of(operand: &Operand<'_>) -> Option<Self> {
        match operand {
            Operand::Nvfp4(_) | Operand::Values(_) => None,
            Operand::Plain(x) => (x.values().precision() == Precision::Bf16).then_some(Values::Bf16),
            Operand::Fp8(q) => match (q.tile, q.scales) {
                (Tile::Tensor, Scales::F32(_)) => Some(Values::Codes),
                (Tile::Row128 | Tile::Square128, Scales::F32(_)) => Some(Values::Wide),
                (Tile::Row32, Scales::E8m0(_)) => Some(Values::Rows32),
                (Tile::Column32, Scales::E8m0(_)) => Some(Values::Columns32),
                _ => None,
            },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Values::Bf16 => "BRAIN",
            Values::Codes => "FP8_CODES",
            Values::Wide => "FP8_WIDE",
            Values::Rows32 | Values::Columns32 => "FP8_BYTES",
        }
    }

    /// Whether values may be too small for bf16.
    fn may_lose(self) -> bool {
        matches!(self, Values::Rows32 | Values::Columns32)
    }
}

/// The kinds of both operands; `None` if this kernel does not multiply them.
pub(super) fn kinds(a: &Operand<'_>, b: &Operand<'_>) -> Option<(Values, Values)> {
    let (left, right) = (Values::of(a)?, Values::of(b)?);
    (a.cols() > 0 && (left, right) != (Values::Bf16, Values::Bf16)).then_some((left, right))
}

/// `Operand` of `codes.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Side {
    values: u64,
    scales: u64,
    rows: u64,
    stride: u64,
    across: u64,
    height: u32,
    format: u32,
}

impl Side {
    pub fn new(operand: &Operand<'_>) -> Self {
        let rows = operand.rows() as u64;
        match operand {
            Operand::Plain(x) => {
                let values = x.values().address();
                // The stride of a single row leads nowhere.
                let stride = if x.rows() <= 1 { 0 } else { 2 * x.stride() as u64 };
                Side { values, scales: 0, rows, stride, across: 0, height: 0, format: 0 }
            }
            Operand::Fp8(q) => Side {
                values: q.codes.address(),
                scales: q.scale_address(),
                rows,
                stride: q.cols as u64,
                across: q.tile.grid(q.rows, q.cols).1 as u64,
                height: if q.tile == Tile::Square128 { 7 } else { 0 },
                format: q.format as u32,
            },
            Operand::Nvfp4(_) | Operand::Values(_) => unreachable!("`kinds` refuses it"),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: Side,
    b: Side,
    output: output::Params,
    k: u64,
    inexact: u64,
    mark: u64,
    left: Part,
    right: Part,
}

const _: () = assert!(size_of::<Params>() == 336);

/// Whether 16 values of a row can be loaded at once.
fn aligned(operand: &Operand<'_>) -> bool {
    match operand {
        Operand::Plain(x) => x.rows_aligned() && x.cols().is_multiple_of(16),
        Operand::Fp8(q) => q.cols.is_multiple_of(16) && q.codes.address().is_multiple_of(16),
        Operand::Nvfp4(_) | Operand::Values(_) => false,
    }
}

/// The product of checked operands of these kinds, with at least one output.
pub(super) fn run(
    stream: &Stream,
    (a, b): (&Operand<'_>, &Operand<'_>),
    (left, right): (Values, Values),
    output: &Output,
    memory: &dyn Allocator,
) -> Result<()> {
    let may_lose = left.may_lose() || right.may_lose();
    let scratch = Scratch::new(stream, memory, [if may_lose { 4 } else { 0 }])?;
    let [inexact] = scratch.addresses;
    let condition = Condition::new(inexact);
    let tiles = a.rows().div_ceil(SIDE).saturating_mul(b.rows().div_ceil(SIDE));
    let params = Params {
        a: Side::new(a),
        b: Side::new(b),
        output: output.part(0, a.rows()),
        k: a.cols() as u64,
        inexact,
        mark: condition.mark.into(),
        left: Part::default(),
        right: Part::default(),
    };
    let variant = (left, right, aligned(a) && aligned(b), output.kind, Grouping::Alone);
    launch(stream, variant, tiles, &params)?;
    if may_lose {
        decoded::run_if(stream, a, b, output, Some(condition))?;
    }
    Ok(())
}

fn launch(stream: &Stream, variant: Variant, tiles: usize, params: &Params) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let too_many = cuda::Error::TooManyBlocks { rows: params.a.rows as usize, cols: params.b.rows as usize };
    let blocks = u32::try_from(tiles).map_err(|_| too_many)?;
    let kernel = VARIANTS.get(stream.device(), variant, source)?;
    // SAFETY: `Params` is laid out as in tiles.cu; operands and outputs were checked, and the
    // scratch belongs to this stream alone.
    unsafe { kernel.launch(stream, [blocks, 1, 1], THREADS, SHARED, params) }?;
    Ok(())
}

/// The products of groups whose sizes the GPU reads, in one launch. All operands were checked.
pub(super) fn run_groups(
    stream: &Stream,
    (a, b): (&GroupedOperand<'_>, &GroupedOperand<'_>),
    output: &Output,
    memory: &dyn Allocator,
) -> Result<()> {
    let (Operand::Fp8(left), Operand::Fp8(right)) = (a.operand, b.operand) else { unreachable!("the caller knows") };
    let unlike = Error::Combination("this kernel multiplies FP8");
    let (Some(left_kind), Some(right_kind)) = (Values::of(&a.operand), Values::of(&b.operand)) else {
        return Err(unlike.into());
    };
    let may_lose = left_kind.may_lose() || right_kind.may_lose();
    let scratch = Scratch::new(stream, memory, [if may_lose { 4 } else { 0 }])?;
    let [inexact] = scratch.addresses;
    let condition = Condition::new(inexact);
    let (grouping, count) = match a.along {
        Along::Rows => (Grouping::Tokens, a.groups.count().min(a.rows())),
        Along::K => (Grouping::K, a.groups.count()),
    };
    let params = Params {
        a: Side::new(&a.operand),
        b: Side::new(&b.operand),
        output: output.part(0, a.rows()),
        k: a.operand.cols() as u64,
        inexact,
        mark: condition.mark.into(),
        left: a.part(&left),
        right: b.part(&right),
    };
    let wide = output.columns().div_ceil(SIDE);
    // As many as there may be: each group has at most one row of tiles that is not full.
    let tiles = match grouping {
        Grouping::Tokens => (a.rows() / SIDE + count).saturating_mul(wide),
        Grouping::Alone | Grouping::K => count.saturating_mul(a.rows().div_ceil(SIDE)).saturating_mul(wide),
    };
    let variant = (left_kind, right_kind, aligned(&a.operand) && aligned(&b.operand), output.kind, grouping);
    launch(stream, variant, tiles, &params)?;
    if may_lose {
        decoded::run_groups_if(stream, (a, b), grouping, output, condition)?;
    }
    Ok(())
}

/// The kinds of both operands, whether 16 of their values can be loaded at once, and the outputs.
type Variant = (Values, Values, bool, Kind, Grouping);

fn source((a, b, aligned, kind, grouping): Variant) -> (&'static str, &'static str, String) {
    let bf16 = [a, b].iter().any(|&values| values == Values::Bf16 || values.may_lose());
    let precision = if bf16 { Precision::Bf16 } else { Precision::F16 };
    let transposed = |values: Values| values == Values::Columns32;
    let settings = format!(
        "enum Kind {{ FP8_CODES, FP8_WIDE, FP8_BYTES, BRAIN }};\nconstexpr Kind A = {}, B = {};\n\
         constexpr bool A_TRANSPOSED = {}, B_TRANSPOSED = {}, ALIGNED = {};\n{}{}{}",
        a.name(),
        b.name(),
        transposed(a),
        transposed(b),
        aligned,
        grouping.settings(),
        math(precision),
        kind.settings()
    );
    let files = [GROUPS, OUTPUT, PARTS, CODES, MMA, include_str!("tiles.cu")];
    ("gemm_tiles", "gemm_tiles", assemble_fp8(&settings, &files))
}

/// Every kind on either side, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let all = [Values::Bf16, Values::Codes, Values::Wide, Values::Rows32, Values::Columns32];
    let plain = Kind::PLAIN;
    let pairs = all.iter().zip(all.iter().cycle().skip(1)).flat_map(|(&a, &b)| {
        let kinds = [(true, Grouping::Alone), (false, Grouping::Alone), (true, Grouping::Tokens), (true, Grouping::K)];
        kinds.map(|(aligned, of)| entry((a, b, aligned, plain, of), source))
    });
    let outputs = PRECISIONS.into_iter().zip([Order::Folded, Order::OneRow, Order::BothRows]);
    let wide = Values::Wide;
    let outputs = outputs.map(|(precision, order)| {
        let kind = Kind { precision, order, add: Add::C, ..plain };
        entry((wide, wide, true, kind, Grouping::Alone), source)
    });
    pairs.chain(outputs).collect()
}
