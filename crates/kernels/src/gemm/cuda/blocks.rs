//! Products by NVIDIA's library on block-scaled tensor cores, which compute capability 10.0 brought:
//! codes of NVFP4 and MXFP8 as they are, sums in binary32. `trial.rs` compares them with exact sums
//! before they are used.
//!
//! The library reads swizzled scales; linear ones are brought into that order (`blocks.cu`). It
//! multiplies sums by one number: scales of rows, and whatever else it does not compute, are applied
//! to sums that it leaves in binary32 (`finish.cu`).
//!
//! These units have no negative scales, and may have no subnormal numbers. `blocks.cu` notes in the
//! memory of the GPU whether there are any, and multiply-adds then compute the product once more.

use super::cublas::{self, Call, Cublas, Factors, ScaleMode, Values};
use super::decoded::{self, Condition};
use super::operand::Operand;
use super::output::{self, Add, Kind, Order, Output, Side as Scale};
use super::product_kind::ProductKind;
use super::scratch::Scratch;
use super::{ALIGNED, OUTPUT};
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8};
use crate::cuda::{Allocator, Source, Stream, entry};
use crate::quantize::Layout;
use crate::{Result, cuda};
use nvfp4_spec::fp8::{MX_BLOCK, Scales, Tile};
use nvfp4_spec::gemm::Accumulator;
use nvfp4_spec::{BLOCK, GlobalScale, Precision, swizzle};

/// K is a multiple of this number: whole blocks of MXFP8, and rows of NVFP4 of 16 bytes.
const WHOLE: usize = 32;
/// Rows of B are a multiple of this number, so that rows of outputs are aligned.
const WHOLE_ROWS: usize = 16;
const THREADS: usize = 256;
/// Rows of outputs that a thread of `finish.cu` has, about.
const ROWS_PER_THREAD: usize = 4;

/// What both operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Format {
    Nvfp4,
    Mxfp8,
}

/// How scales lie.
#[derive(Clone, Copy, PartialEq)]
enum Scaling {
    /// As the library reads them.
    Tiles,
    /// Those of a row side by side.
    Rows,
    /// Those of a column of the operand side by side: it lies transposed.
    Columns,
}

/// An operand of these units.
#[derive(Clone, Copy)]
struct Side<'a> {
    operand: Operand<'a>,
    format: Format,
    values: Values,
    scaling: Scaling,
    codes: u64,
    scales: u64,
}

impl<'a> Side<'a> {
    /// `None` if these units do not multiply it, or if it does not lie as the library reads it.
    fn of(operand: Operand<'a>) -> Option<Self> {
        let (format, values, scaling, codes, scales) = match operand {
            Operand::Nvfp4(q) => {
                let scaling = if q.layout == Layout::Swizzled { Scaling::Tiles } else { Scaling::Rows };
                (Format::Nvfp4, Values::E2m1, scaling, q.codes.address(), q.scales.address())
            }
            Operand::Fp8(q) => {
                let (scaling, scales) = match (q.tile, q.scales) {
                    (Tile::Row32, Scales::E8m0(scales)) => (Scaling::Rows, scales),
                    (Tile::Column32, Scales::E8m0(scales)) => (Scaling::Columns, scales),
                    _ => return None,
                };
                (Format::Mxfp8, Values::Fp8(q.format), scaling, q.codes.address(), scales.address())
            }
            Operand::Plain(_) | Operand::Values(_) => return None,
        };
        let whole = operand.cols() > 0
            && operand.cols().is_multiple_of(WHOLE)
            && codes.is_multiple_of(16)
            && match scaling {
                Scaling::Tiles => scales.is_multiple_of(16),
                Scaling::Rows => true,
                Scaling::Columns => operand.rows().is_multiple_of(16),
            };
        whole.then_some(Side { operand, format, values, scaling, codes, scales })
    }

    /// Scales along K.
    fn across(&self) -> usize {
        match self.format {
            Format::Nvfp4 => self.operand.cols() / BLOCK,
            Format::Mxfp8 => self.operand.cols() / MX_BLOCK,
        }
    }

    /// Bytes of scratch for scales that have to be in another order.
    fn scratch(&self) -> Result<usize> {
        if self.scaling == Scaling::Tiles { Ok(0) } else { Ok(swizzle::len(self.operand.rows(), self.across())?) }
    }

    /// The operand as the library reads it, with scales in scratch at `at` unless they lie right.
    fn side(&self, at: u64) -> cublas::Side {
        let transposed = self.scaling == Scaling::Columns;
        let mode = match self.format {
            Format::Nvfp4 => ScaleMode::Block16,
            Format::Mxfp8 => ScaleMode::Block32,
        };
        cublas::Side {
            address: self.codes,
            values: self.values,
            pitch: if transposed { self.operand.rows() } else { self.operand.cols() },
            transposed,
            scales: Some((mode, if self.scaling == Scaling::Tiles { self.scales } else { at })),
        }
    }

    fn matrix(&self, at: u64) -> Result<Matrix> {
        let (rows, cols, across) = (self.operand.rows(), self.operand.cols(), self.across());
        let fours = rows.next_multiple_of(swizzle::TILE_ROWS) * across.div_ceil(swizzle::TILE_COLS);
        let groups = u32::try_from(fours.div_ceil(THREADS)).map_err(|_| cuda::Error::TooManyBlocks { rows, cols })?;
        let by_columns = self.scaling == Scaling::Columns;
        let (down, right) = if by_columns { (1, rows) } else { (across, 1) };
        let (code, code_right) = if by_columns { (1, rows) } else { (cols, 1) };
        Ok(Matrix {
            codes: self.codes,
            scales: self.scales,
            to: if self.scaling == Scaling::Tiles { 0 } else { at },
            rows: rows as u64,
            across: across as u64,
            down: down as u64,
            right: right as u64,
            code: code as u64,
            code_right: code_right as u64,
            groups,
            by_columns: by_columns.into(),
        })
    }
}

/// Where the library leaves its sums.
#[derive(Clone, Copy, PartialEq)]
enum Sums {
    /// In the outputs, with all that belongs to them.
    Outputs,
    /// In scratch, as they are.
    Scratch,
}

/// A product that the library may take.
pub(super) struct Blocks<'a> {
    a: Side<'a>,
    b: Side<'a>,
    library: &'static Cublas,
}

impl<'a> Blocks<'a> {
    /// `None` if a product cannot be computed so.
    pub fn of(library: Option<&'static Cublas>, a: Operand<'a>, b: Operand<'a>) -> Option<Self> {
        let (a, b) = (Side::of(a)?, Side::of(b)?);
        let fits = a.format == b.format && b.operand.rows().is_multiple_of(WHOLE_ROWS);
        fits.then_some(Blocks { a, b, library: library? })
    }

    fn row_scaled(&self) -> bool {
        [&self.a, &self.b].iter().any(|side| side.operand.global().of == GlobalScale::PerRow)
    }

    /// What is tried before it is used.
    pub fn kind(&self) -> ProductKind {
        match self.a.format {
            Format::Nvfp4 if self.row_scaled() => ProductKind::Nvfp4RowScaled,
            Format::Nvfp4 => ProductKind::Nvfp4,
            Format::Mxfp8 => ProductKind::Mxfp8,
        }
    }

    /// What multiplies.
    pub fn describe(&self) -> String {
        format!("block-scaled tensor cores, {}", self.kind())
    }

    /// Where the library leaves its sums; `None` if it does not compute the product.
    fn sums(&self, output: &Output) -> Result<Option<Sums>> {
        let here = output.kind.order == Order::Folded
            && !self.row_scaled()
            && output.aligned(16)
            && output.bias_fits()
            && !(output.has_bias() && output.kind.precision == Precision::F32);
        for sums in [Sums::Outputs, Sums::Scratch] {
            // Scratch is aligned so, and its address does not matter otherwise.
            if (here || sums == Sums::Scratch) && self.library.takes(&self.call(output, sums, [ALIGNED; 4]))? {
                return Ok(Some(sums));
            }
        }
        Ok(None)
    }

    fn call(&self, output: &Output, sums: Sums, [a, b, factors, at]: [u64; 4]) -> Call {
        let (m, n, k) = (self.a.operand.rows(), self.b.operand.rows(), self.a.operand.cols());
        let (params, sides) = (output.part(0, m), (self.a.side(a), self.b.side(b)));
        let (factors, c, out, precision, bias) = match sums {
            Sums::Outputs => {
                let c = if params.c == 0 { params.out } else { params.c };
                let bias = (params.bias != 0).then_some(params.bias);
                (Factors::Memory(factors), c, params.out, output.kind.precision, bias)
            }
            Sums::Scratch => (Factors::Values(1.0, 0.0), at, at, Precision::F32, None),
        };
        let accumulator = Accumulator::Precise;
        Call { sizes: [m, n, k], a: sides.0, b: sides.1, factors, c, out, precision, bias, accumulator }
    }

    /// Whether the library computes it.
    pub fn taken(&self, output: &Output) -> Result<bool> {
        Ok(self.sums(output)?.is_some())
    }

    /// Computes a checked product with at least one output; `false` if the library does not.
    pub fn run(&self, stream: &Stream, output: &Output, memory: &dyn Allocator) -> Result<bool> {
        let Some(sums) = self.sums(output)? else { return Ok(false) };
        let (m, n) = (self.a.operand.rows(), self.b.operand.rows());
        let bytes = if sums == Sums::Scratch { 4 * m * n } else { 0 };
        // Two factors, and whether a value is odd.
        let scratch = Scratch::new(stream, memory, [self.a.scratch()?, self.b.scratch()?, 16, bytes])?;
        let [a_at, b_at, factors, sums_at] = scratch.addresses;
        let condition = Condition::new(factors + 8);
        self.arrange(stream, output, [a_at, b_at], factors, condition)?;
        self.library.run(stream, &self.call(output, sums, scratch.addresses), memory)?;
        if sums == Sums::Scratch {
            finish(stream, output, (m, n), sums_at)?;
        }
        decoded::run_if(stream, &self.a.operand, &self.b.operand, output, Some(condition))?;
        Ok(true)
    }

    fn arrange(
        &self,
        stream: &Stream,
        output: &Output,
        [a_at, b_at]: [u64; 2],
        factors: u64,
        condition: Condition,
    ) -> Result<()> {
        static VARIANTS: Variants<Format> = Variants::new();
        let params = Params::new((&self.a, a_at), (&self.b, b_at), output, factors, condition)?;
        let kernel = VARIANTS.get(stream.device(), self.a.format, source)?;
        // SAFETY: `Params` is laid out as in blocks.cu; operands were checked, and the scratch has
        // room for their scales, two factors and a mark.
        unsafe { kernel.launch(stream, [params.groups(), 1, 1], THREADS as u32, 0, &params) }?;
        Ok(())
    }
}

/// Writes the outputs of a product, given its sums in scratch.
fn finish(stream: &Stream, output: &Output, (m, n): (usize, usize), sums: u64) -> Result<()> {
    static VARIANTS: Variants<Kind> = Variants::new();
    let kernel = VARIANTS.get(stream.device(), output.kind, finish_source)?;
    let (params, groups) = FinishParams::new(output, (m, n), sums)?;
    // SAFETY: `FinishParams` is laid out as in finish.cu; outputs were checked, and the scratch has
    // as many sums.
    unsafe { kernel.launch(stream, [groups, 1, 1], THREADS as u32, 0, &params) }?;
    Ok(())
}

/// `Matrix` of `blocks.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Matrix {
    codes: u64,
    scales: u64,
    to: u64,
    rows: u64,
    across: u64,
    down: u64,
    right: u64,
    code: u64,
    code_right: u64,
    groups: u32,
    by_columns: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: Matrix,
    b: Matrix,
    left: Scale,
    right: Scale,
    factors: u64,
    odd: u64,
    alpha: f32,
    beta: f32,
    mark: u64,
}

const _: () = assert!(size_of::<Params>() == 240);

impl Params {
    /// For operands whose scales go to these addresses.
    fn new(
        (a, a_at): (&Side<'_>, u64),
        (b, b_at): (&Side<'_>, u64),
        output: &Output,
        factors: u64,
        condition: Condition,
    ) -> Result<Self> {
        let of = output.part(0, a.operand.rows());
        Ok(Params {
            a: a.matrix(a_at)?,
            b: b.matrix(b_at)?,
            left: of.a,
            right: of.b,
            factors,
            odd: condition.at,
            alpha: of.alpha,
            beta: of.beta,
            mark: condition.mark.into(),
        })
    }

    /// Groups of threads.
    fn groups(&self) -> u32 {
        self.a.groups + self.b.groups
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FinishParams {
    output: output::Params,
    sums: u64,
    across: u64,
}

const _: () = assert!(size_of::<FinishParams>() == 120);

impl FinishParams {
    /// The parameters for M × N outputs, and the groups of threads.
    fn new(output: &Output, (m, n): (usize, usize), sums: u64) -> Result<(Self, u32)> {
        let across = n.div_ceil(2 * THREADS);
        let groups = u32::try_from(across * m.div_ceil(ROWS_PER_THREAD));
        let groups = groups.map_err(|_| cuda::Error::TooManyBlocks { rows: m, cols: n })?;
        Ok((FinishParams { output: output.part(0, m), sums, across: across as u64 }, groups))
    }
}

fn source(format: Format) -> (&'static str, &'static str, String) {
    // Factors are one number whatever the outputs are.
    let settings = format!("constexpr bool MX = {};\n{}", format == Format::Mxfp8, Kind::PLAIN.settings());
    ("gemm_blocks", "gemm_blocks", assemble_fp8(&settings, &[OUTPUT, include_str!("blocks.cu")]))
}

fn finish_source(kind: Kind) -> (&'static str, &'static str, String) {
    ("gemm_finish", "gemm_finish", assemble_fp8(&kind.settings(), &[OUTPUT, include_str!("finish.cu")]))
}

/// Both formats, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let outputs = PRECISIONS.into_iter().zip([Order::Folded, Order::OneRow, Order::BothRows]);
    let outputs = outputs.flat_map(|(precision, order)| {
        let tokens = if order == Order::Folded { GlobalScale::PerTensor } else { GlobalScale::PerRow };
        [Add::Nothing, Add::C].map(|add| entry(Kind { precision, order, tokens, add, ..Kind::PLAIN }, finish_source))
    });
    [Format::Nvfp4, Format::Mxfp8].map(|format| entry(format, source)).into_iter().chain(outputs).collect()
}

#[cfg(test)]
#[path = "../../../tests/emulated/blocks.rs"]
mod emulated;
