//! Products by NVIDIA's library on FP8 codes as they are: twice as fast as bf16, with the
//! accumulators of FP8 tensor cores ([`nvfp4_spec::gemm::Accumulator`]).

use super::cublas::{Call, Cublas, Factors, ScaleMode, Side, Values};
use super::operand::Operand;
use super::output::{Order, Output};
use super::product_kind::ProductKind;
use super::scratch::Scratch;
use crate::cuda::text::{Variants, assemble};
use crate::cuda::{Allocator, Device, Slice, Source, Stream, entry};
use crate::fp8::cuda::View;
use crate::gemm::units::{BLOCKS_OF_128, LEAST_FP8};
use crate::{Result, cuda};
use nvfp4_spec::Precision;
use nvfp4_spec::fp8::{BLOCK, Format, Scales, Tile};
use nvfp4_spec::gemm::Accumulator;

/// Rows of the library's scales of 128 × 128 begin at multiples of this number.
const SCALES: usize = 4;

/// A product of FP8 codes that the library may take.
pub(super) struct Codes<'a> {
    a: Operand8<'a>,
    b: Operand8<'a>,
    accumulator: Accumulator,
    library: &'static Cublas,
}

#[derive(Clone, Copy)]
struct Operand8<'a> {
    view: View<'a>,
    mode: ScaleMode,
    scales: Slice<'a, f32>,
}

impl<'a> Operand8<'a> {
    fn of(operand: Operand<'a>) -> Option<Self> {
        let Operand::Fp8(view) = operand else { return None };
        let (mode, scales) = match (view.tile, view.scales) {
            (Tile::Tensor, Scales::F32(scales)) => (ScaleMode::Tensor, scales),
            // The library takes whole tiles only, and scales of 16 bytes.
            (Tile::Row128, Scales::F32(scales)) if view.rows.is_multiple_of(SCALES) => (ScaleMode::Row128, scales),
            (Tile::Square128, Scales::F32(scales)) => (ScaleMode::Square128, scales),
            _ => return None,
        };
        let whole = mode == ScaleMode::Tensor || view.cols.is_multiple_of(BLOCK);
        let aligned = view.cols.is_multiple_of(16) && view.codes.address().is_multiple_of(16);
        (whole && aligned).then_some(Operand8 { view, mode, scales })
    }

    /// Scales along K.
    fn across(&self) -> usize {
        self.view.cols.div_ceil(BLOCK)
    }

    /// Bytes of scratch for scales that have to be in another order.
    fn scratch(&self) -> usize {
        match self.mode {
            ScaleMode::Tensor | ScaleMode::Block16 | ScaleMode::Block32 => 0,
            ScaleMode::Row128 => 4 * self.view.rows * self.across(),
            ScaleMode::Square128
                if self.across().is_multiple_of(SCALES) && self.scales.address().is_multiple_of(16) =>
            {
                0
            }
            ScaleMode::Square128 => 4 * self.view.rows.div_ceil(BLOCK) * self.across().next_multiple_of(SCALES),
        }
    }

    fn side(&self, scratch: u64) -> Side {
        let scales = if self.scratch() == 0 { self.scales.address() } else { scratch };
        Side {
            address: self.view.codes.address(),
            values: Values::Fp8(self.view.format),
            pitch: self.view.cols,
            transposed: false,
            scales: Some((self.mode, scales)),
        }
    }

    /// Brings scales into the library's order.
    fn arrange(&self, stream: &Stream, to: u64) -> Result<()> {
        if self.scratch() == 0 {
            return Ok(());
        }
        let (rows, across) = (self.view.rows, self.across());
        match self.mode {
            ScaleMode::Tensor | ScaleMode::Block16 | ScaleMode::Block32 => Ok(()),
            ScaleMode::Row128 => transpose(stream, self.scales, (rows, across), to),
            ScaleMode::Square128 => {
                let pitch = 4 * across.next_multiple_of(SCALES);
                let from = (self.scales.address(), 4 * across);
                // SAFETY: the scales were checked, and the scratch has rows of that pitch.
                Ok(unsafe { stream.copy_rows(from, (to, pitch), 4 * across, rows.div_ceil(BLOCK)) }?)
            }
        }
    }
}

impl<'a> Codes<'a> {
    /// `None` if a product asks for precise sums, or cannot be computed so.
    pub fn of(
        library: Option<&'static Cublas>,
        device: Device,
        a: Operand<'a>,
        b: Operand<'a>,
        output: &Output,
    ) -> Option<Self> {
        let accumulator = output.accumulator;
        let (a, b) = (Operand8::of(a)?, Operand8::of(b)?);
        let tensors = [a.mode, b.mode].map(|mode| mode == ScaleMode::Tensor);
        let fits = accumulator != Accumulator::Precise
            && device.capability() >= LEAST_FP8
            && tensors[0] == tensors[1]
            && (tensors[0] || device.capability().0 == BLOCKS_OF_128)
            && (a.mode, b.mode) != (ScaleMode::Square128, ScaleMode::Square128)
            && (a.view.format, b.view.format) != (Format::E5m2, Format::E5m2)
            && output.kind.order == Order::Folded
            && a.view.cols > 0
            && b.view.rows.is_multiple_of(16)
            && output.aligned(16)
            && output.bias_fits()
            && !(output.has_bias() && output.kind.precision == Precision::F32);
        // Blocks have a sum in binary32 for every 128 products, whatever is asked for.
        let accumulator = if tensors[0] { accumulator } else { Accumulator::Split };
        fits.then_some(Codes { a, b, accumulator, library: library? })
    }

    fn call(&self, output: &Output, [a, b]: [u64; 2]) -> Call {
        let params = output.part(0, self.a.view.rows);
        Call {
            sizes: [self.a.view.rows, self.b.view.rows, self.a.view.cols],
            a: self.a.side(a),
            b: self.b.side(b),
            factors: Factors::Values(params.alpha, params.beta),
            c: if params.c == 0 { params.out } else { params.c },
            out: params.out,
            precision: output.kind.precision,
            bias: (params.bias != 0).then_some(params.bias),
            accumulator: self.accumulator,
        }
    }

    /// Whether the library computes it.
    pub fn taken(&self, output: &Output) -> Result<bool> {
        Ok(self.library.takes(&self.call(output, [16; 2]))?)
    }

    /// Computes a checked product with at least one output; `false` if the library does not.
    pub fn run(&self, stream: &Stream, output: &Output, memory: &dyn Allocator) -> Result<bool> {
        let scratch = Scratch::new(stream, memory, [self.a.scratch(), self.b.scratch()])?;
        let call = self.call(output, scratch.addresses);
        if !self.library.takes(&call)? {
            return Ok(false);
        }
        self.a.arrange(stream, scratch.addresses[0])?;
        self.b.arrange(stream, scratch.addresses[1])?;
        self.library.run(stream, &call, memory)?;
        Ok(true)
    }

    /// What is tried before it is used.
    pub fn kind(&self) -> ProductKind {
        match self.accumulator {
            Accumulator::Fast => ProductKind::Fp8Fast,
            Accumulator::Split | Accumulator::Precise => ProductKind::Fp8Split,
        }
    }

    /// What multiplies.
    pub fn describe(&self) -> &'static str {
        match self.accumulator {
            Accumulator::Fast => "FP8 tensor cores, fast accumulator",
            Accumulator::Split | Accumulator::Precise => "FP8 tensor cores, split accumulator",
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct TransposeParams {
    from: u64,
    to: u64,
    rows: u32,
    cols: u32,
}

/// Sides of a tile of `scales.cu`.
const TILE: usize = 32;

/// Writes a transposed matrix of 32-bit numbers to scratch.
fn transpose(stream: &Stream, from: Slice<'_, f32>, (rows, cols): (usize, usize), to: u64) -> Result<()> {
    static VARIANTS: Variants<()> = Variants::new();
    let too_large = || cuda::Error::TooManyBlocks { rows, cols };
    let count = |n: usize| u32::try_from(n).map_err(|_| too_large());
    let params = TransposeParams { from: from.address(), to, rows: count(rows)?, cols: count(cols)? };
    let grid = [count(rows.div_ceil(TILE))?, count(cols.div_ceil(TILE))?, 1];
    let kernel = VARIANTS.get(stream.device(), (), source)?;
    // SAFETY: `TransposeParams` is laid out as in scales.cu; the scales were checked, and the
    // scratch has as many.
    unsafe { kernel.launch(stream, grid, 256, 0, &params) }?;
    Ok(())
}

fn source((): ()) -> (&'static str, &'static str, String) {
    ("gemm_scales", "gemm_scales", assemble("", &[include_str!("scales.cu")]))
}

pub(super) fn sources() -> Vec<(String, Source)> {
    vec![entry((), source)]
}
