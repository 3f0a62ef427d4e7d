//! Products of FP8 codes on Hopper's FP8 tensor cores, also in groups; `promoted.cu` says how.

use super::groups::{GroupedOperand, Grouping, PARTS, Part};
use super::operand::Operand;
use super::output::{self, Add, Kind, Order, Output};
use super::scratch::Scratch;
use super::tiles::Side;
use super::{CODES, COPIES, OUTPUT, WGMMA, group_maps};
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8};
use crate::cuda::{Allocator, Along, Device, GROUPS, MapValues, Source, Stream, entry, tensor_map};
use crate::fp8::cuda::View;
use crate::{Result, cuda};
use nvfp4_spec::fp8::{BLOCK, Format, Scales, Tile};
use nvfp4_spec::gemm::Accumulator;

/// Outputs of a block.
const HIGH: usize = 192;
const WIDE: usize = 128;
/// Blocks of a cluster, side by side.
const CLUSTER: usize = 2;
/// Rows that one copy brings, of A to both blocks, and of B.
const BOXES: [u32; 2] = [(HIGH / CLUSTER) as u32, WIDE as u32];
const THREADS: u32 = 512;
/// Four stages of codes and scales, the sums that twelve warps exchange, barriers, and what alignment
/// takes.
const SHARED: u32 = 4 * ((HIGH + WIDE) * (128 + 4) + 64) as u32 + 12 * 2048 + 2048;

/// The scales of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Of {
    Tensor,
    Row128,
    Square128,
}

/// The formats and scales of both operands, and the outputs.
type Variant = ((Format, Of), (Format, Of), Kind, Grouping);

/// A product that this kernel computes.
pub(super) struct Promoted<'a> {
    a: View<'a>,
    b: View<'a>,
    kinds: (Of, Of),
}

impl<'a> Promoted<'a> {
    /// `None` if a product asks for precise sums, or cannot be computed so.
    pub fn of(device: Device, a: Operand<'a>, b: Operand<'a>, output: &Output) -> Option<Self> {
        let (Operand::Fp8(a), Operand::Fp8(b)) = (a, b) else { return None };
        let kinds = (scales_of(&a)?, scales_of(&b)?);
        let aligned = |q: &View<'_>| q.cols.is_multiple_of(16) && q.codes.address().is_multiple_of(16);
        // Rows, columns and scales are counted in 32 bits.
        let small = |q: &View<'_>| {
            let scales = q.rows.saturating_mul(q.cols.div_ceil(BLOCK));
            [q.rows, q.cols, scales].iter().all(|&n| n < u32::MAX as usize)
        };
        // The instruction is Hopper's alone.
        let fits = output.accumulator != Accumulator::Precise
            && device.capability() == (9, 0)
            && !device.portable()
            && output.kind.order == Order::Folded
            && a.cols > 0
            && [&a, &b].iter().all(|q| small(q) && aligned(q));
        fits.then_some(Promoted { a, b, kinds })
    }

    /// What multiplies.
    pub fn describe() -> &'static str {
        "FP8 tensor cores: wgmma 192×128×128, split accumulator"
    }

    /// Computes a checked product with at least one output.
    pub fn run(&self, stream: &Stream, output: &Output) -> Result<()> {
        let (a, b, device) = (&self.a, &self.b, stream.device());
        let [a_map, b_map] = maps(device, [a, b])?;
        let params = Params {
            a_map,
            b_map,
            maps: 0,
            a: Side::new(&Operand::Fp8(*a)),
            b: Side::new(&Operand::Fp8(*b)),
            output: output.part(0, a.rows),
            k: a.cols as u64,
            left: Part::default(),
            right: Part::default(),
        };
        let tiles = a.rows.div_ceil(HIGH).saturating_mul(b.rows.div_ceil(CLUSTER * WIDE));
        self.launch(stream, (output.kind, Grouping::Alone), tiles, &params)
    }

    /// The products of groups, in one launch. All operands were checked, and have at least one
    /// output.
    pub fn run_groups(
        &self,
        stream: &Stream,
        (a, b): (&GroupedOperand<'_>, &GroupedOperand<'_>),
        output: &Output,
        memory: &dyn Allocator,
    ) -> Result<()> {
        let (device, count) = (stream.device(), a.groups.count());
        let grouping = if a.along == Along::Rows { Grouping::Tokens } else { Grouping::K };
        let scratch =
            Scratch::new(stream, memory, [if grouping == Grouping::K { group_maps::bytes(count) } else { 0 }])?;
        let [groups_at] = scratch.addresses;
        // Of groups along K with one length: a matrix below the other.
        let right = View { rows: output.columns() * count, cols: a.operand.cols(), ..self.b };
        let maps_of = match grouping {
            Grouping::K => maps(device, [&self.a, &self.b])?,
            Grouping::Tokens | Grouping::Alone => maps(device, [&self.a, &right])?,
        };
        if grouping == Grouping::K {
            group_maps::write(stream, maps_of, (&self.a, &self.b), a.groups, groups_at)?;
        }
        let params = Params {
            a_map: maps_of[0],
            b_map: maps_of[1],
            maps: groups_at,
            a: Side::new(&a.operand),
            b: Side::new(&b.operand),
            output: output.part(0, a.rows()),
            k: a.operand.cols() as u64,
            left: a.part(&self.a),
            right: b.part(&self.b),
        };
        let wide = output.columns().div_ceil(CLUSTER * WIDE);
        // As many as there may be: each group has at most one row of tiles that is not full.
        let tiles = match grouping {
            Grouping::K => count.saturating_mul(a.rows().div_ceil(HIGH)).saturating_mul(wide),
            Grouping::Tokens | Grouping::Alone => (a.rows() / HIGH + count.min(a.rows())).saturating_mul(wide),
        };
        self.launch(stream, (output.kind, grouping), tiles, &params)
    }

    fn launch(&self, stream: &Stream, (kind, grouping): (Kind, Grouping), tiles: usize, params: &Params) -> Result<()> {
        static VARIANTS: Variants<Variant> = Variants::new();
        let device = stream.device();
        let too_many = cuda::Error::TooManyBlocks { rows: self.a.rows, cols: self.b.rows };
        u32::try_from(tiles).map_err(|_| too_many)?;
        let clusters = tiles.min(device.multiprocessors() as usize / CLUSTER) as u32;
        let variant = ((self.a.format, self.kinds.0), (self.b.format, self.kinds.1), kind, grouping);
        let kernel = VARIANTS.get(device, variant, source)?;
        // SAFETY: `Params` is laid out as in promoted.cu; operands and outputs were checked, and the
        // maps belong to this stream alone.
        unsafe { kernel.launch(stream, [clusters * CLUSTER as u32, 1, 1], THREADS, SHARED, params) }?;
        Ok(())
    }
}

fn scales_of(view: &View<'_>) -> Option<Of> {
    match (view.tile, view.scales) {
        (Tile::Tensor, Scales::F32(_)) => Some(Of::Tensor),
        (Tile::Row128, Scales::F32(_)) => Some(Of::Row128),
        (Tile::Square128, Scales::F32(_)) => Some(Of::Square128),
        _ => None,
    }
}

/// Maps of both operands.
fn maps(device: Device, views: [&View<'_>; 2]) -> Result<[[u64; 16]; 2]> {
    let map = |view: &View<'_>, high| {
        let at = (view.codes.address(), view.cols);
        tensor_map(device, MapValues::Bytes, at, (view.rows, view.cols), high)
    };
    Ok([map(views[0], BOXES[0])?, map(views[1], BOXES[1])?])
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Params {
    a_map: [u64; 16],
    b_map: [u64; 16],
    maps: u64,
    a: Side,
    b: Side,
    output: output::Params,
    k: u64,
    left: Part,
    right: Part,
}

const _: () = assert!(size_of::<Params>() == 640);

/// The warpgroup instruction as a function, with all sums named.
fn wgmma(a: Format, b: Format) -> String {
    const SUMS: usize = 64;
    let list = |item: &dyn Fn(usize) -> String| (0..SUMS).map(item).collect::<Vec<_>>().join(", ");
    let sums = list(&|i| format!("%{i}"));
    let outputs = list(&|i| format!("\"+f\"(d[{i}])"));
    let name = |format: Format| match format {
        Format::E4m3 => "e4m3",
        Format::E5m2 => "e5m2",
    };
    format!(
        "RULE void wgmma(float (&d)[{SUMS}], u64 a, u64 b, u32 add) {{\n    asm volatile(\"{{\\n.reg .pred p;\\nsetp.ne.u32 p, %66, 0;\\n\
         wgmma.mma_async.sync.aligned.m64n128k32.f32.{}.{} {{{sums}}}, %64, %65, p, 1, 1;\\n}}\" : {outputs} : \"l\"(a), \"l\"(b), \
         \"r\"(add));\n}}\n",
        name(a),
        name(b)
    )
}

fn source(((a, left), (b, right), kind, grouping): Variant) -> (&'static str, &'static str, String) {
    let settings = format!(
        "constexpr bool A_WIDE = {}, B_WIDE = {}, B_SQUARE = {};\n{}{}",
        left != Of::Tensor,
        right != Of::Tensor,
        right == Of::Square128,
        grouping.settings(),
        kind.settings()
    );
    let files = [GROUPS, OUTPUT, PARTS, CODES, COPIES, WGMMA, &wgmma(a, b), include_str!("promoted.cu")];
    ("gemm_promoted", "gemm_promoted", assemble_fp8(&settings, &files))
}

/// Every kind of scales and groups, the formats together, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    use Format::{E4m3, E5m2};
    let all = [Of::Tensor, Of::Row128, Of::Square128];
    let plain = Kind::PLAIN;
    let scales = all
        .iter()
        .flat_map(|&a| all.map(|b| (a, b)))
        .zip([Grouping::Alone, Grouping::Tokens, Grouping::K].iter().cycle());
    let scales = scales.map(|((a, b), &of)| entry(((E4m3, a), (E4m3, b), plain, of), source));
    let formats = [(E5m2, E4m3), (E4m3, E5m2), (E5m2, E5m2)];
    let formats = formats.map(|(a, b)| entry(((a, Of::Row128), (b, Of::Row128), plain, Grouping::K), source));
    let outputs = PRECISIONS.map(|precision| {
        let kind = Kind { precision, add: Add::C, ..plain };
        entry(((E4m3, Of::Row128), (E4m3, Of::Square128), kind, Grouping::Tokens), source)
    });
    scales.chain(formats).chain(outputs).chain(group_maps::sources()).collect()
}
