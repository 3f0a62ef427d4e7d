//! Products by NVIDIA's library on operands that were decoded to bf16, which has every value of
//! NVFP4, FP8 codes and MXFP8 exactly; `to_bf16.cu` decodes.
//!
//! An MXFP8 value below the normal numbers of bf16 may lose bits. The decoder notes that in the
//! memory of the GPU, and multiply-adds then compute the product once more (`decoded.cu`).

use super::costs::NVFP4_BYTES;
use super::cublas::{self, Call, Cublas, Factors, Values};
use super::decoded::{self, Condition};
use super::global::Global;
use super::operand::{NvfpValues, Operand, Weights};
use super::output::{Kind, Order, Output, Side as Scale};
use super::prepared::restore;
use super::scratch::Scratch;
use super::{OUTPUT, TOKENS, WEIGHTS, math};
use crate::Result;
use crate::cuda::text::{Variants, assemble_fp8};
use crate::cuda::{Allocator, Source, Stream, entry};
use crate::dequantize::cuda::View;
use crate::quantize::Layout;
use nvfp4_spec::fp8::{Format, MX_BLOCK, Scales, Tile};
use nvfp4_spec::gemm::Accumulator;
use nvfp4_spec::{BLOCK, GlobalScale, Precision};

/// How an operand becomes bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Decoder {
    /// It is bf16.
    Plain,
    Nvfp4,
    /// Codes of a matrix with one scale.
    Codes,
    /// MXFP8.
    Rows32,
    /// MXFP8's column direction.
    Columns32,
    /// Prepared weights, which another kernel decodes.
    Prepared,
    /// It is NVFP4 that was written as values.
    Values,
}

/// The power of two that decoded NVFP4 values lack.
pub(super) const UNDO: f32 = 128.0;
/// Elements of a unit of `to_bf16.cu`.
const UNIT: usize = 8;
const THREADS: usize = 256;
const PER_THREAD: usize = 4;

impl Decoder {
    /// `None` if there is none for the operand, or if it does not lie in whole units.
    fn of(operand: &Operand<'_>) -> Option<Self> {
        match operand {
            Operand::Plain(x) => {
                let whole = x.rows_aligned() && x.cols().is_multiple_of(UNIT);
                (x.values().precision() == Precision::Bf16 && whole).then_some(Decoder::Plain)
            }
            Operand::Values(of) => {
                (of.values.rows_aligned() && of.values.cols().is_multiple_of(UNIT)).then_some(Decoder::Values)
            }
            Operand::Nvfp4(q) => {
                let whole = q.cols.is_multiple_of(BLOCK) && q.codes.address().is_multiple_of(4);
                (whole && q.layout == Layout::Linear && q.global == GlobalScale::PerTensor).then_some(Decoder::Nvfp4)
            }
            Operand::Fp8(q) => {
                let whole = q.cols.is_multiple_of(UNIT) && q.codes.address().is_multiple_of(8);
                match (q.tile, q.scales) {
                    _ if !whole => None,
                    (Tile::Tensor, Scales::F32(_)) => Some(Decoder::Codes),
                    (Tile::Row32, Scales::E8m0(_)) if q.cols.is_multiple_of(MX_BLOCK) => Some(Decoder::Rows32),
                    (Tile::Column32, Scales::E8m0(scales)) if scales.address().is_multiple_of(8) => {
                        Some(Decoder::Columns32)
                    }
                    _ => None,
                }
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Decoder::Plain | Decoder::Prepared | Decoder::Values => "PLAIN",
            Decoder::Nvfp4 => "NVFP4",
            Decoder::Codes => "FP8_CODES",
            Decoder::Rows32 => "FP8_BYTES",
            Decoder::Columns32 => "FP8_COLUMNS",
        }
    }

    fn undo(self) -> f32 {
        if matches!(self, Decoder::Nvfp4 | Decoder::Prepared | Decoder::Values) { UNDO } else { 1.0 }
    }

    /// Whether a product reads the operand where it lies.
    fn in_place(self) -> bool {
        matches!(self, Decoder::Plain | Decoder::Values)
    }

    /// Whether values may be too small for bf16.
    fn may_lose(self) -> bool {
        matches!(self, Decoder::Rows32 | Decoder::Columns32)
    }
}

/// A product of operands that have decoders.
pub(super) struct ToBf16<'a> {
    a: (Operand<'a>, Decoder),
    b: (Weights<'a>, Decoder),
    library: &'static Cublas,
}

impl<'a> ToBf16<'a> {
    /// `None` if a product cannot be computed so.
    pub fn of(library: Option<&'static Cublas>, a: Operand<'a>, b: Weights<'a>, output: &Output) -> Option<Self> {
        let right = match b {
            Weights::Operand(b) => Decoder::of(&b)?,
            Weights::Prepared(weight) => weight.cols().is_multiple_of(UNIT).then_some(Decoder::Prepared)?,
        };
        let left = Decoder::of(&a)?;
        let here = output.kind.order == Order::Folded && output.bias_fits() && a.cols() > 0;
        let made = ToBf16 { a: (a, left), b: (b, right), library: library? };
        // cuBLASLt takes any shape, but outputs and operands that are not aligned make it slow.
        (here && (left, right) != (Decoder::Plain, Decoder::Plain) && output.aligned(16)).then_some(made)
    }

    /// Bytes that decoding reads and writes.
    pub fn bytes(&self) -> f64 {
        let bytes = |decoder: Decoder, rows: usize| {
            let each = match decoder {
                Decoder::Plain | Decoder::Values => 0.0,
                Decoder::Nvfp4 | Decoder::Prepared => NVFP4_BYTES,
                Decoder::Codes | Decoder::Rows32 | Decoder::Columns32 => 3.0,
            };
            each * rows as f64 * self.a.0.cols() as f64
        };
        bytes(self.a.1, self.a.0.rows()) + bytes(self.b.1, self.b.0.rows())
    }

    /// Computes a checked product with at least one output; `false` if the library does not.
    pub fn run(&self, stream: &Stream, output: &Output, memory: &dyn Allocator) -> Result<bool> {
        let ((a, left), (b, right)) = (self.a, self.b);
        let (m, n, k) = (a.rows(), b.rows(), a.cols());
        let bytes = |rows: usize, decoder: Decoder| if decoder.in_place() { 0 } else { rows * k * 2 };
        let params = output.part(0, m);
        // Addresses are multiples of 256, as those of the scratch will be.
        let call = |[a_at, b_at, factors]: [u64; 3]| Call {
            sizes: [m, n, k],
            a: side(&a, left, a_at),
            b: match &b {
                Weights::Operand(b) => side(b, right, b_at),
                Weights::Prepared(weight) => decoded_side(b_at, weight.cols(), false),
            },
            factors: Factors::Memory(factors),
            c: if params.c == 0 { params.out } else { params.c },
            out: params.out,
            precision: output.kind.precision,
            bias: (params.bias != 0).then_some(params.bias),
            accumulator: Accumulator::Precise,
        };
        let Some(workspace_bytes) = self.library.scratch(&call([0; 3]))? else { return Ok(false) };
        // Two factors, and whether a value lost bits.
        let scratch = Scratch::new(stream, memory, [bytes(m, left), bytes(n, right), 16, workspace_bytes])?;
        let [a_at, b_at, factors, workspace] = scratch.addresses;
        let call = call([a_at, b_at, factors]);
        let condition = Condition::new(factors + 8);
        let may_lose = left.may_lose() || right.may_lose();
        let a_matrix = Matrix::new(&a, left, a_at);
        let b_matrix = match &b {
            Weights::Operand(b) => Matrix::new(b, right, b_at),
            Weights::Prepared(weight) => {
                restore(stream, weight, b_at)?;
                Matrix::NONE
            }
        };
        let decode = Params {
            a: a_matrix,
            b: b_matrix,
            left: params.a,
            right: params.b,
            factors,
            inexact: condition.at,
            alpha: params.alpha,
            beta: params.beta,
            undo: left.undo() * right.undo(),
            mark: condition.mark,
            count: 1,
            padding: 0,
        };
        decode.launch(stream, (left, right))?;
        self.library.run_in(stream, &call, (workspace, workspace_bytes))?;
        if let (true, Weights::Operand(b)) = (may_lose, &b) {
            decoded::run_if(stream, &a, b, output, Some(condition))?;
        }
        Ok(true)
    }
}

/// An operand as the library reads it; a decoded one is at `at`.
fn side(operand: &Operand<'_>, decoder: Decoder, at: u64) -> cublas::Side {
    let (address, pitch) = match operand {
        Operand::Plain(x) | Operand::Values(NvfpValues { values: x, .. }) => {
            (x.values().address(), if x.rows() == 1 { x.cols() } else { x.stride() })
        }
        Operand::Nvfp4(q) => (at, q.cols),
        Operand::Fp8(q) => (at, q.cols),
    };
    let transposed = decoder == Decoder::Columns32;
    decoded_side(address, pitch, transposed)
}

fn decoded_side(address: u64, pitch: usize, transposed: bool) -> cublas::Side {
    cublas::Side { address, values: Values::Bf16, pitch, transposed, scales: None }
}

/// `Matrix` of `to_bf16.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Matrix {
    codes: u64,
    scales: u64,
    out: u64,
    units: u64,
    across: u32,
    groups: u32,
    format: u64,
}

impl Matrix {
    /// Nothing to decode.
    const NONE: Matrix = Matrix { codes: 0, scales: 0, out: 0, units: 0, across: 0, groups: 0, format: 0 };

    fn new(operand: &Operand<'_>, decoder: Decoder, out: u64) -> Self {
        let (codes, scales, across, format) = match operand {
            Operand::Plain(_) | Operand::Values(_) => (0, 0, 0, Format::default()),
            Operand::Nvfp4(q) => (q.codes.address(), q.scales.address(), q.cols / UNIT, Format::default()),
            Operand::Fp8(q) => (q.codes.address(), q.scale_address(), q.cols / UNIT, q.format),
        };
        let units = if decoder.in_place() { 0 } else { operand.rows() * operand.cols() / UNIT };
        let groups = units.div_ceil(THREADS * PER_THREAD);
        Matrix {
            codes,
            scales,
            out,
            units: units as u64,
            across: across as u32,
            groups: groups as u32,
            format: format as u64,
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: Matrix,
    b: Matrix,
    left: Scale,
    right: Scale,
    factors: u64,
    inexact: u64,
    alpha: f32,
    beta: f32,
    undo: f32,
    mark: u32,
    count: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Params>() == 184);

impl Params {
    /// Decodes both operands.
    fn launch(&self, stream: &Stream, decoders: (Decoder, Decoder)) -> Result<()> {
        static VARIANTS: Variants<(Decoder, Decoder)> = Variants::new();
        let kernel = VARIANTS.get(stream.device(), decoders, source)?;
        let groups = (self.a.groups + self.b.groups).max(1);
        // SAFETY: `Params` is laid out as in to_bf16.cu; operands were checked, and the scratch has
        // room for them. The kernel waits for earlier work before anything else.
        unsafe { kernel.launch_dependent(stream, [groups, 1, 1], THREADS as u32, 0, self) }?;
        Ok(())
    }
}

/// A product of a group: its operands, which are parts of those of all groups, and its outputs.
pub(super) type Part<'a> = (View<'a>, View<'a>, Output);

/// The products of groups of NVFP4 after all operands were decoded in one launch; `false` if the
/// library does not compute them so. All have at least one output and a K.
pub(super) fn run_groups(
    stream: &Stream,
    library: &'static Cublas,
    (a, b): (View<'_>, View<'_>),
    parts: &[Part<'_>],
    memory: &dyn Allocator,
) -> Result<bool> {
    let takes =
        |(a, b, output): &Part<'_>| ToBf16::of(Some(library), (*a).into(), Operand::from(*b).into(), output).is_some();
    let Some((_, _, first)) = parts.first().filter(|_| parts.iter().all(takes)) else { return Ok(false) };
    let params = first.part(0, 0);
    let scratch = Scratch::new(stream, memory, [2 * a.rows * a.cols, 2 * b.rows * b.cols, 8 * a.stored.len()])?;
    let [a_at, b_at, factors] = scratch.addresses;
    let call = |(part_a, part_b, output): &Part<'_>| {
        // Decoded elements lie as codes do.
        let side = |part: &View<'_>, whole: &View<'_>, at: u64| {
            decoded_side(at + 4 * (part.codes.address() - whole.codes.address()), part.cols, false)
        };
        let number = (part_a.stored.address() - a.stored.address()) / 4;
        let params = output.part(0, part_a.rows);
        Call {
            sizes: [part_a.rows, part_b.rows, part_a.cols],
            a: side(part_a, &a, a_at),
            b: side(part_b, &b, b_at),
            factors: Factors::Memory(factors + 8 * number),
            c: if params.c == 0 { params.out } else { params.c },
            out: params.out,
            precision: output.kind.precision,
            bias: (params.bias != 0).then_some(params.bias),
            accumulator: Accumulator::Precise,
        }
    };
    let calls: Vec<Call> = parts.iter().map(call).collect();
    for call in &calls {
        if !library.takes(call)? {
            return Ok(false);
        }
    }
    let of_all = |view: View<'_>, at| Matrix::new(&view.into(), Decoder::Nvfp4, at);
    let decode = Params {
        a: of_all(a, a_at),
        b: of_all(b, b_at),
        left: Scale::of_each(Global::of_view(&a)),
        right: Scale::of_each(Global::of_view(&b)),
        factors,
        inexact: 0,
        alpha: params.alpha,
        beta: params.beta,
        undo: UNDO * UNDO,
        mark: 0,
        count: a.stored.len() as u32,
        padding: 0,
    };
    decode.launch(stream, (Decoder::Nvfp4, Decoder::Nvfp4))?;
    calls.iter().try_for_each(|call| library.run(stream, call, memory))?;
    Ok(true)
}

fn source((a, b): (Decoder, Decoder)) -> (&'static str, &'static str, String) {
    // Factors are one number whatever the outputs are.
    let settings = format!(
        "enum Kind {{ PLAIN, NVFP4, FP8_CODES, FP8_BYTES, FP8_COLUMNS }};\nconstexpr Kind A = {}, B = {};\n\
         {}{}",
        a.name(),
        b.name(),
        math(Precision::Bf16),
        Kind::PLAIN.settings()
    );
    ("gemm_to_bf16", "gemm_to_bf16", assemble_fp8(&settings, &[OUTPUT, WEIGHTS, TOKENS, include_str!("to_bf16.cu")]))
}

/// Every decoder on either side.
pub(super) fn sources() -> Vec<(String, Source)> {
    let all = [Decoder::Plain, Decoder::Nvfp4, Decoder::Codes, Decoder::Rows32, Decoder::Columns32];
    let pairs = all.iter().zip(all.iter().cycle().skip(1));
    pairs.map(|(&a, &b)| entry((a, b), source)).collect()
}
