//! Products of FP8 operands on bf16 tensor cores; `tiles.cu` says how.

use super::decoded::{self, Condition};
use super::operand::Operand;
use super::output::{self, Add, Kind, Order, Output};
use super::scratch::Scratch;
use super::{MMA, OUTPUT, math};
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8};
use crate::cuda::{Allocator, Source, Stream, entry};
use crate::{Result, cuda};
use nvfp4_spec::Precision;
use nvfp4_spec::fp8::{Scales, Tile};

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
            Operand::Nvfp4(_) => None,
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

/// `Operand` of `tiles.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Side {
    values: u64,
    scales: u64,
    rows: u64,
    stride: u64,
    across: u64,
    height: u32,
    format: u32,
}

impl Side {
    fn new(operand: &Operand<'_>) -> Self {
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
            Operand::Nvfp4(_) => unreachable!("`kinds` refuses it"),
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
}

const _: () = assert!(size_of::<Params>() == 224);

/// Whether 16 values of a row can be loaded at once.
fn aligned(operand: &Operand<'_>) -> bool {
    match operand {
        Operand::Plain(x) => x.rows_aligned() && x.cols().is_multiple_of(16),
        Operand::Fp8(q) => q.cols.is_multiple_of(16) && q.codes.address().is_multiple_of(16),
        Operand::Nvfp4(_) => false,
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
    static VARIANTS: Variants<Variant> = Variants::new();
    let may_lose = left.may_lose() || right.may_lose();
    let scratch = Scratch::new(stream, memory, [if may_lose { 4 } else { 0 }])?;
    let [inexact] = scratch.addresses;
    let condition = Condition::new(inexact);
    let kernel = VARIANTS.get(stream.device(), (left, right, aligned(a) && aligned(b), output.kind), source)?;
    let tiles = a.rows().div_ceil(SIDE).saturating_mul(b.rows().div_ceil(SIDE));
    let blocks = u32::try_from(tiles).map_err(|_| cuda::Error::TooManyBlocks { rows: a.rows(), cols: b.rows() })?;
    let (a_side, b_side, mark) = (Side::new(a), Side::new(b), condition.mark.into());
    let params = Params { a: a_side, b: b_side, output: output.part(0, a.rows()), k: a.cols() as u64, inexact, mark };
    // SAFETY: `Params` is laid out as in tiles.cu; operands and outputs were checked, and the
    // scratch belongs to this stream alone.
    unsafe { kernel.launch(stream, [blocks, 1, 1], THREADS, SHARED, &params) }?;
    if may_lose {
        decoded::run_if(stream, a, b, output, Some(condition))?;
    }
    Ok(())
}

/// The kinds of both operands, whether 16 of their values can be loaded at once, and the outputs.
type Variant = (Values, Values, bool, Kind);

fn source((a, b, aligned, kind): Variant) -> (&'static str, &'static str, String) {
    let bf16 = [a, b].iter().any(|&values| values == Values::Bf16 || values.may_lose());
    let precision = if bf16 { Precision::Bf16 } else { Precision::F16 };
    let transposed = |values: Values| values == Values::Columns32;
    let settings = format!(
        "enum Kind {{ FP8_CODES, FP8_WIDE, FP8_BYTES, BRAIN }};\nconstexpr Kind A = {}, B = {};\n\
         constexpr bool A_TRANSPOSED = {}, B_TRANSPOSED = {}, ALIGNED = {};\n{}{}",
        a.name(),
        b.name(),
        transposed(a),
        transposed(b),
        aligned,
        math(precision),
        kind.settings()
    );
    ("gemm_tiles", "gemm_tiles", assemble_fp8(&settings, &[OUTPUT, MMA, include_str!("tiles.cu")]))
}

/// Every kind on either side, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let all = [Values::Bf16, Values::Codes, Values::Wide, Values::Rows32, Values::Columns32];
    let plain = Kind::PLAIN;
    let pairs = all
        .iter()
        .zip(all.iter().cycle().skip(1))
        .flat_map(|(&a, &b)| [true, false].map(|aligned| entry((a, b, aligned, plain), source)));
    let outputs = PRECISIONS.into_iter().zip([Order::Folded, Order::OneRow, Order::BothRows]);
    let wide = Values::Wide;
    let outputs = outputs
        .map(|(precision, order)| entry((wide, wide, true, Kind { precision, order, add: Add::C, ..plain }), source));
    pairs.chain(outputs).collect()
}
