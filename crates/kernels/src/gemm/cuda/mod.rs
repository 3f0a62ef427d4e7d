//! Products on a GPU. **Bounded**: sums in binary32, within [`nvfp4_spec::gemm::bound`] of the
//! exact ones. **Reduced** where FP8 operands meet and the product asks for it: within
//! [`Accumulator::bound`](nvfp4_spec::gemm::Accumulator::bound).
//!
//! A product of two decoded values is exact in binary32, and values of NVFP4, FP8 codes and MXFP8
//! are exact in bf16, so on bf16 tensor cores only additions round. The ways to compute one:
//!
//! | way | for |
//! |---|---|
//! | `blocks.rs`: cuBLASLt on codes and their block scales | two NVFP4 or two MXFP8 operands, from compute capability 10.0 on |
//! | `codes.rs`: cuBLASLt on FP8 codes | two FP8 operands, where the product allows fewer bits |
//! | `promoted.rs`: FP8 codes, 128 products at a time | on Hopper: the same in groups whose sizes the GPU reads, and what cuBLASLt refuses |
//! | `to_bf16.rs`: both sides decoded to bf16, then cuBLASLt | NVFP4 with many rows, or written as values; FP8 codes, MXFP8 |
//! | `pipeline.rs`: weights decoded in registers | NVFP4 on the right, NVFP4, bf16 or f16 on the left |
//! | `tiles.rs`: decoded on the way to shared memory | FP8 otherwise, also in blocks of 128 |
//! | `decoded.rs`: multiply-adds on binary32 | everything else |
//!
//! What a product is decides, and for NVFP4 the expected time by the [`Costs`] of the GPU. They ship,
//! or were measured before and lie in a file; nothing is timed in a run. On GPUs other than Hopper, the
//! first product of a kind that cuBLASLt computes from codes is preceded by small ones with known
//! sums, which are waited for (`trial.rs`).

mod blocks;
mod choice;
mod codes;
mod costs;
mod cublas;
mod decoded;
mod global;
mod group_maps;
mod grouped;
mod groups;
mod host;
mod kept;
mod operand;
mod output;
mod pipeline;
mod prepared;
mod product_kind;
mod promoted;
mod scratch;
mod shape;
mod tiles;
mod to_bf16;
mod trial;
mod trial_data;
mod tune;

pub use choice::prefers_values;
pub use costs::{Cost, Costs};
pub use cublas::Cublas;
pub use grouped::multiply_groups;
pub use groups::GroupedOperand;
pub(super) use host::on_host;
pub use kept::Kept;
pub use operand::{NvfpValues, Operand, Weights};
pub use output::Product;
pub use prepared::PreparedWeight;
pub use product_kind::ProductKind;
pub use trial::{Verdict, known, try_on_any_chip, verdict};
pub use tune::{By, Form, Probe};

use crate::cuda::text::{TOKENS, WEIGHTS, precision};
use crate::cuda::{Allocator, Device, Plain, SliceMut, Source, Stream};
use crate::input::check_len;
use crate::{Result, cuda};
use choice::{Before, Choice};
use nvfp4_spec::{Element, Error, Precision, area};
use output::{OperandOrder, Output};

const CODES: &str = include_str!("codes.cuh");
const COPIES: &str = include_str!("copies.cuh");
const MMA: &str = include_str!("mma.cuh");
const OUTPUT: &str = include_str!("output.cuh");
const WGMMA: &str = include_str!("wgmma.cuh");

/// The least number of rows of B for which the operands may be swapped: fewer do not fill the large
/// tiles.
const LEAST_SWAPPED: usize = 256;
/// The alignment of outputs that a description assumes, in bytes.
const ALIGNED: u64 = 256;

/// How a product is computed.
enum Way<'a> {
    /// By cuBLASLt on codes and block scales.
    Blocks(blocks::Blocks<'a>),
    /// By cuBLASLt on FP8 codes.
    Codes(codes::Codes<'a>),
    /// By tensor cores on FP8 codes.
    Promoted(promoted::Promoted<'a>),
    /// By cuBLASLt on operands decoded to bf16.
    ToBf16(to_bf16::ToBf16<'a>),
    /// By tensor cores, in the type of the tokens. Tokens are the rows of A or, if the operands are
    /// swapped, the rows of B.
    Pipeline(pipeline::Tokens<'a>, pipeline::Right<'a>, OperandOrder),
    /// By tensor cores, FP8 decoded to bf16.
    Tiles(Operand<'a>, Operand<'a>, (tiles::Values, tiles::Values)),
    /// By multiply-adds on decoded values.
    MultiplyAdds(Operand<'a>, Operand<'a>),
}

impl<'a> Way<'a> {
    /// The ways that compute a product, the best one first. cuBLASLt may refuse; the last way never
    /// does. `stream` is where it runs, if that is known.
    fn of(
        device: Device,
        stream: Option<&Stream>,
        a: Operand<'a>,
        b: Weights<'a>,
        output: &Output,
    ) -> Result<Vec<Way<'a>>> {
        let right = match b {
            Weights::Prepared(weight) => {
                let tokens = pipeline::Tokens::of(a).ok_or(cuda::Error::Prepared)?;
                let before = match tokens {
                    pipeline::Tokens::Nvfp4(_) => Before::Tokens,
                    pipeline::Tokens::Plain(..) => Before::Nothing,
                };
                let size = (a.rows(), (weight.rows(), weight.cols()));
                let library = to_bf16::ToBf16::of(Cublas::of(device), a, b, output)
                    .filter(|way| choice::prefers_library(device, way.bytes(), before, size));
                let pipeline = Way::Pipeline(tokens, pipeline::Right::Prepared(weight), OperandOrder::Given);
                return Ok(library.map(Way::ToBf16).into_iter().chain([pipeline]).collect());
            }
            Weights::Operand(operand) => operand,
        };
        let library = Cublas::of(device);
        let pipeline = Way::pipeline(a, right);
        let to_bf16 = to_bf16::ToBf16::of(library, a, b, output).filter(|way| match &pipeline {
            Some(Way::Pipeline(tokens, weights, _)) => {
                choice::prefers_library(device, way.bytes(), Before::Both, (tokens.rows(), weights.size()))
            }
            _ => true,
        });
        let own = pipeline.unwrap_or_else(|| match tiles::kinds(&a, &right) {
            Some(kinds) => Way::Tiles(a, right, kinds),
            None => Way::MultiplyAdds(a, right),
        });
        let blocks = blocks::Blocks::of(library, a, right);
        let blocks = blocks.filter(|way| trial::allows(device, way.kind(), stream)).map(Way::Blocks);
        let codes = codes::Codes::of(library, device, a, right, output);
        let codes = codes.filter(|way| trial::allows(device, way.kind(), stream)).map(Way::Codes);
        let own_codes = promoted::Promoted::of(device, a, right, output).map(Way::Promoted);
        let codes = codes.into_iter().chain(own_codes);
        let library = blocks.into_iter().chain(codes).chain(to_bf16.map(Way::ToBf16));
        Ok(library.chain([own]).collect())
    }

    /// The pipeline, if it reads both operands.
    fn pipeline(a: Operand<'a>, b: Operand<'a>) -> Option<Way<'a>> {
        use OperandOrder::{Given, Swapped};
        let Operand::Nvfp4(right) = b else { return None };
        if let Operand::Nvfp4(left) = a
            && left.rows > right.rows
            && right.rows >= LEAST_SWAPPED
            && left.cols >= right.rows
        {
            // Decoding tokens moves more bytes than preparing weights, so the larger side becomes
            // the weights. Outputs are then written in shorter runs, which is slower if there are
            // many compared with K.
            return Some(Way::Pipeline(pipeline::Tokens::Nvfp4(right), pipeline::Right::View(left), Swapped));
        }
        Some(Way::Pipeline(pipeline::Tokens::of(a)?, pipeline::Right::View(right), Given))
    }

    /// Queues the product; `false` if this way does not compute it.
    fn run(&self, stream: &Stream, output: &Output, memory: &dyn Allocator) -> Result<bool> {
        match self {
            Way::Blocks(blocks) => return blocks.run(stream, output, memory),
            Way::Codes(codes) => return codes.run(stream, output, memory),
            Way::Promoted(way) => way.run(stream, output)?,
            Way::ToBf16(way) => return way.run(stream, output, memory),
            Way::Pipeline(tokens, right, OperandOrder::Given) => {
                pipeline::run(stream, *tokens, *right, Choice::Fastest, output, memory)?
            }
            Way::Pipeline(tokens, right, OperandOrder::Swapped) => {
                pipeline::run(stream, *tokens, *right, Choice::Fastest, &output.swapped(), memory)?;
            }
            Way::Tiles(a, b, kinds) => tiles::run(stream, (a, b), *kinds, output, memory)?,
            Way::MultiplyAdds(a, b) => {
                let undo =
                    [a, b].iter().filter(|of| matches!(of, Operand::Values(_))).fold(1.0, |f, _| f * to_bf16::UNDO);
                decoded::run(stream, a, b, &output.times(undo))?;
            }
        }
        Ok(true)
    }

    fn describe(&self, device: Device, output: &Output) -> Result<Option<String>> {
        Ok(match self {
            Way::Blocks(blocks) => blocks.taken(output)?.then(|| format!("cuBLASLt: {}", blocks.describe())),
            Way::Codes(codes) => codes.taken(output)?.then(|| format!("cuBLASLt: {}", codes.describe())),
            Way::Promoted(_) => Some(promoted::Promoted::describe().to_string()),
            Way::ToBf16(_) => Some("decode to bf16, cuBLASLt: bf16 tensor cores".to_string()),
            Way::Pipeline(tokens, right, OperandOrder::Given) => Some(pipeline::describe(device, tokens, right)?),
            Way::Pipeline(tokens, right, OperandOrder::Swapped) => {
                Some(format!("swapped: {}", pipeline::describe(device, tokens, right)?))
            }
            Way::Tiles(..) => Some("mma.sync 128×128×64, FP8 decoded to bf16".to_string()),
            Way::MultiplyAdds(..) => Some("multiply-adds on decoded values".to_string()),
        })
    }
}

/// `out = α·A·Bᵀ (+ bias) (+ β·C)`; `out` is `a.rows` × `b.rows`, row-major. Does not wait.
///
/// `memory` allocates the scratch of the product. It is dropped before this returns, so later work
/// of the stream may reuse it.
pub fn gemm<'a, T: Element + Plain>(
    stream: &Stream,
    a: impl Into<Operand<'a>>,
    b: impl Into<Weights<'a>>,
    product: &Product<'_, T>,
    out: SliceMut<'_, T>,
    memory: &dyn Allocator,
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let output = check(stream.device(), &a, &b, product, &out)?;
    if out.is_empty() {
        return Ok(());
    }
    for way in Way::of(stream.device(), Some(stream), a, b, &output)? {
        if way.run(stream, &output, memory)? {
            return Ok(());
        }
    }
    unreachable!("the last way computes every product")
}

/// The same as [`gemm()`], in a way that the caller chooses, to find out what it takes; an error if the
/// product cannot be computed so. Does not wait.
pub fn gemm_by<'a, T: Element + Plain>(
    stream: &Stream,
    by: By,
    (a, b): (impl Into<Operand<'a>>, impl Into<Weights<'a>>),
    product: &Product<'_, T>,
    out: SliceMut<'_, T>,
    memory: &dyn Allocator,
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let output = check(stream.device(), &a, &b, product, &out)?;
    if out.is_empty() {
        return Ok(());
    }
    let ran = match by {
        By::Library => {
            let way = to_bf16::ToBf16::of(Cublas::of(stream.device()), a, b, &output);
            way.map(|way| way.run(stream, &output, memory)).transpose()?.unwrap_or(false)
        }
        By::Shape { number, split } => {
            let right = match b {
                Weights::Prepared(weight) => Some(pipeline::Right::Prepared(weight)),
                Weights::Operand(Operand::Nvfp4(view)) => Some(pipeline::Right::View(view)),
                Weights::Operand(_) => None,
            };
            let operands = pipeline::Tokens::of(a).zip(right);
            let run = |(tokens, right)| {
                pipeline::run(stream, tokens, right, Choice::Given { number, split }, &output, memory)
            };
            operands.map(run).transpose()?.is_some()
        }
    };
    if ran { Ok(()) } else { Err(cuda::Error::NotThisWay.into()) }
}

/// A description of how a product with outputs of type `T` is computed.
pub fn describe<'a, T: Element + Plain>(
    device: Device,
    a: impl Into<Operand<'a>>,
    b: impl Into<Weights<'a>>,
    product: &Product<'_, T>,
) -> Result<String> {
    let (a, b) = (a.into(), b.into());
    let output = Output::new(&a, &b, product, ALIGNED);
    for way in Way::of(device, None, a, b, &output)? {
        if let Some(text) = way.describe(device, &output)? {
            return Ok(text);
        }
    }
    unreachable!("the last way computes every product")
}

/// One product of a group.
#[derive(Debug)]
pub struct Member<'a, T: Plain> {
    /// The left operand, M rows of its own.
    pub a: Operand<'a>,
    /// The right operand.
    pub b: Weights<'a>,
    /// Everything else about it.
    pub product: Product<'a, T>,
    /// `a.rows` × `b.rows`, row-major.
    pub out: SliceMut<'a, T>,
}

/// A group of products, each with operands of any size. A product without outputs is a no-op; a
/// product with K = 0 has sums of exactly 0. All are checked before the first is launched. Does not
/// wait.
pub fn grouped<T: Element + Plain>(
    stream: &Stream,
    members: &mut [Member<'_, T>],
    memory: &dyn Allocator,
) -> Result<()> {
    for member in &*members {
        let output = check(stream.device(), &member.a, &member.b, &member.product, &member.out)?;
        Way::of(stream.device(), Some(stream), member.a, member.b, &output)?;
    }
    for member in members {
        gemm(stream, member.a, member.b, &member.product, member.out.reborrow(), memory)?;
    }
    Ok(())
}

/// Checks a product; returns what the kernels need to know about its outputs.
fn check<T: Element + Plain>(
    device: Device,
    a: &Operand<'_>,
    b: &Weights<'_>,
    product: &Product<'_, T>,
    out: &SliceMut<'_, T>,
) -> Result<Output> {
    a.check(device)?;
    b.check(device)?;
    if a.cols() != b.cols() {
        return Err(Error::InnerLength { expected: a.cols(), got: b.cols() }.into());
    }
    check_outputs(device, product, out, (area(a.rows(), b.rows())?, b.rows()))?;
    Ok(Output::new(a, b, product, out.address()))
}

/// Checks the memory of so many outputs, of as many numbers of C, and of so many of a bias.
fn check_outputs<T: Element + Plain>(
    device: Device,
    product: &Product<'_, T>,
    out: &SliceMut<'_, T>,
    (outputs, biases): (usize, usize),
) -> Result<()> {
    check_len("output", outputs, out.len())?;
    out.check(device, "output")?;
    out.check_aligned(size_of::<T>(), "output")?;
    if let Some(bias) = product.bias {
        check_len("bias", biases, bias.len())?;
        bias.check(device, "bias")?;
    }
    if let Some((c, _)) = product.add {
        check_len("C", outputs, c.len())?;
        c.check(device, "C")?;
        c.check_aligned(size_of::<T>(), "C")?;
    }
    Ok(())
}

/// Texts for [`crate::sources`].
pub(crate) fn sources() -> Vec<(String, Source)> {
    let parts = [
        pipeline::sources(),
        tiles::sources(),
        decoded::sources(),
        to_bf16::sources(),
        codes::sources(),
        promoted::sources(),
        blocks::sources(),
    ];
    parts.concat()
}

/// The setting for the type in which tensor cores multiply.
fn math(of: Precision) -> String {
    format!("constexpr Precision MATH = {};\n", precision(of))
}
