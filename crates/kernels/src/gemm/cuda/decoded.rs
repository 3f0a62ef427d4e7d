//! Products of any operands; `decoded.cu` says how.

use super::OUTPUT;
use super::groups::{GroupedOperand, Grouping, PARTS, Part};
use super::operand::{NvfpValues, Operand};
use super::output::{self, Add, Kind, Order, Output};
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8, format as format_name};
use crate::cuda::{GROUPS, Source, Stream, entry};
use crate::fp8::cuda::View as Fp8View;
use crate::quantize::Layout;
use crate::{Result, cuda};
use nvfp4_spec::fp8::{Format, Scales, Tile};
use nvfp4_spec::{Precision, e2m1};
use std::sync::atomic::{AtomicU32, Ordering};

/// Outputs of a block, along each side.
const SIDE: usize = 64;
/// Blocks of a multiprocessor: as many as run at once, and some to fill up.
const BLOCKS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Values {
    Nvfp4,
    Fp8(Format, Fp8Scales),
    Plain(Precision),
}

/// The scales that an FP8 operand's values are multiplied by before they are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fp8Scales {
    /// Nothing: the scale of the whole matrix is for the outputs.
    Codes,
    F32,
    E8m0,
}

impl Values {
    fn name(self) -> &'static str {
        match self {
            Values::Nvfp4 => "NVFP4",
            Values::Fp8(_, Fp8Scales::Codes) => "FP8_CODES",
            Values::Fp8(_, Fp8Scales::F32) => "FP8_WIDE",
            Values::Fp8(_, Fp8Scales::E8m0) => "FP8_BYTES",
            Values::Plain(Precision::F32) => "WIDE",
            Values::Plain(Precision::Bf16) => "BRAIN",
            Values::Plain(Precision::F16) => "HALF",
        }
    }

    /// The format of its codes, if it is FP8.
    fn codes(self) -> Format {
        match self {
            Values::Fp8(format, _) => format,
            Values::Nvfp4 | Values::Plain(_) => Format::default(),
        }
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Side {
    values: u64,
    scales: u64,
    stride: u64,
    across: u64,
    height: u32,
    width: u32,
    transposed: u32,
    swizzled: u32,
}

impl Side {
    fn new(operand: &Operand<'_>) -> (Values, Side) {
        match operand {
            Operand::Nvfp4(q) => {
                let (values, scales, stride) = (q.codes.address(), q.scales.address(), e2m1::packed_len(q.cols) as u64);
                let swizzled = (q.layout == Layout::Swizzled).into();
                (Values::Nvfp4, Side { values, scales, stride, swizzled, ..Side::default() })
            }
            Operand::Fp8(q) => Side::of_fp8(q),
            Operand::Plain(x) | Operand::Values(NvfpValues { values: x, .. }) => {
                let values = x.values();
                // The stride of a single row leads nowhere.
                let stride = if x.rows() <= 1 { 0 } else { (x.stride() * values.element_size()) as u64 };
                (Values::Plain(values.precision()), Side { values: values.address(), stride, ..Side::default() })
            }
        }
    }

    fn of_fp8(q: &Fp8View<'_>) -> (Values, Side) {
        let (scales, kind) = match (q.scales, q.tile) {
            (Scales::F32(scales), Tile::Tensor) => (scales.address(), Fp8Scales::Codes),
            (Scales::F32(scales), _) => (scales.address(), Fp8Scales::F32),
            (Scales::E8m0(scales), _) => (scales.address(), Fp8Scales::E8m0),
        };
        let (height, width) = match q.tile {
            // A shift to zero.
            Tile::Tensor => (63, 63),
            Tile::Row128 => (0, 7),
            Tile::Square128 => (7, 7),
            Tile::Row32 => (0, 5),
            Tile::Column32 => (5, 0),
        };
        let side = Side {
            values: q.codes.address(),
            scales,
            stride: q.cols as u64,
            across: q.tile.grid(q.rows, q.cols).1 as u64,
            height,
            width,
            transposed: (q.tile == Tile::Column32).into(),
            swizzled: 0,
        };
        (Values::Fp8(q.format, kind), side)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: Side,
    b: Side,
    output: output::Params,
    k: u64,
    only_if: u64,
    mark: u64,
    left: Part,
    right: Part,
}

const _: () = assert!(size_of::<Params>() == 336);

type Variant = (Values, Values, Kind, Grouping);

/// The product of checked operands with at least one output.
pub(super) fn run(stream: &Stream, a: &Operand<'_>, b: &Operand<'_>, output: &Output) -> Result<()> {
    run_if(stream, a, b, output, None)
}

/// What a kernel before leaves in the memory of the GPU if a product is to be computed again: a mark
/// that no other product has, so that the memory need not be cleared.
#[derive(Clone, Copy)]
pub(super) struct Condition {
    pub at: u64,
    pub mark: u32,
}

impl Condition {
    pub fn new(at: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0x6E76_0001);
        Condition { at, mark: NEXT.fetch_add(1, Ordering::Relaxed) }
    }
}

/// The same, if a condition is met.
pub(super) fn run_if(
    stream: &Stream,
    a: &Operand<'_>,
    b: &Operand<'_>,
    output: &Output,
    condition: Option<Condition>,
) -> Result<()> {
    let ((left, a_side), (right, b_side)) = (Side::new(a), Side::new(b));
    let tiles = a.rows().div_ceil(SIDE).saturating_mul(b.rows().div_ceil(SIDE));
    let blocks = tiles.min(BLOCKS * stream.device().multiprocessors() as usize) as u32;
    let Condition { at: only_if, mark } = condition.unwrap_or(Condition { at: 0, mark: 0 });
    let params = Params {
        a: a_side,
        b: b_side,
        output: output.part(0, a.rows()),
        k: a.cols() as u64,
        only_if,
        mark: mark.into(),
        left: Part::default(),
        right: Part::default(),
    };
    launch(stream, (left, right, output.kind, Grouping::Alone), [blocks, 1, 1], &params)
}

fn launch(stream: &Stream, variant: Variant, grid: [u32; 3], params: &Params) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let kernel = VARIANTS.get(stream.device(), variant, source)?;
    // SAFETY: `Params` is laid out as in decoded.cu; operands and outputs were checked, and the
    // caller gives the address of a number or 0.
    unsafe { kernel.launch(stream, grid, 256, 0, params) }?;
    Ok(())
}

/// The products of groups of FP8 whose sizes the GPU reads, if a condition is met.
pub(super) fn run_groups_if(
    stream: &Stream,
    (a, b): (&GroupedOperand<'_>, &GroupedOperand<'_>),
    grouping: Grouping,
    output: &Output,
    condition: Condition,
) -> Result<()> {
    let (Operand::Fp8(left), Operand::Fp8(right)) = (&a.operand, &b.operand) else { unreachable!("the caller knows") };
    let ((left_values, a_side), (right_values, b_side)) = (Side::of_fp8(left), Side::of_fp8(right));
    let params = Params {
        a: a_side,
        b: b_side,
        output: output.part(0, a.rows()),
        k: a.operand.cols() as u64,
        only_if: condition.at,
        mark: condition.mark.into(),
        left: a.part(left),
        right: b.part(right),
    };
    let count = a.groups.count();
    let too_many = cuda::Error::TooManyBlocks { rows: a.rows(), cols: count };
    let count = u16::try_from(count).map_err(|_| too_many)?;
    let variant = (left_values, right_values, output.kind, grouping);
    launch(stream, variant, [stream.device().multiprocessors(), count.into(), 1], &params)
}

fn source((a, b, kind, grouping): Variant) -> (&'static str, &'static str, String) {
    let settings = format!(
        "enum Kind {{ NVFP4, FP8_CODES, FP8_WIDE, FP8_BYTES, WIDE, BRAIN, HALF }};\nconstexpr Kind A = {}, B = {};\n\
         constexpr Format A_CODES = {}, B_CODES = {};\n{}{}",
        a.name(),
        b.name(),
        format_name(a.codes()),
        format_name(b.codes()),
        grouping.settings(),
        kind.settings()
    );
    let files = [GROUPS, OUTPUT, PARTS, include_str!("decoded.cu")];
    ("gemm_decoded", "gemm_decoded", assemble_fp8(&settings, &files))
}

/// Every kind on both sides, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let fp8 = [Fp8Scales::Codes, Fp8Scales::F32, Fp8Scales::E8m0];
    let fp8 = Format::ALL.into_iter().flat_map(|format| fp8.map(|scales| Values::Fp8(format, scales)));
    let kinds = [Values::Nvfp4].into_iter().chain(PRECISIONS.map(Values::Plain)).chain(fp8);
    let plain = Kind { precision: Precision::F32, ..Kind::PLAIN };
    let pairs = kinds.map(|values| entry((values, Values::Nvfp4, plain, Grouping::Alone), source));
    let outputs = PRECISIONS.into_iter().zip([Order::Folded, Order::OneRow, Order::BothRows]);
    let outputs = outputs.map(|(precision, order)| {
        let plain = Values::Plain(precision);
        entry((plain, plain, Kind { precision, order, add: Add::C, ..Kind::PLAIN }, Grouping::Alone), source)
    });
    // Binary32 activations by weights of 16 bits.
    let mixed = [Precision::Bf16, Precision::F16]
        .map(|weights| entry((Values::Plain(Precision::F32), Values::Plain(weights), plain, Grouping::Alone), source));
    let mx = Values::Fp8(Format::E4m3, Fp8Scales::E8m0);
    let groups = [Grouping::Tokens, Grouping::K].map(|of| entry((mx, mx, plain, of), source));
    pairs.chain(outputs).chain(mixed).chain(groups).collect()
}
