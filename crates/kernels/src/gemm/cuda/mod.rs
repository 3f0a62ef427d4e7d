//! Products on a GPU. **Bounded**: sums in binary32, within [`nvfp4_spec::gemm::bound`] of the
//! exact ones.
//!
//! There are two methods. If the right operand is NVFP4 and the left one NVFP4, bf16 or f16, tensor
//! cores multiply (`pipeline.cuh`). The weights are reordered for them first, once as a
//! [`PreparedWeight`] or before each product. A product of two decoded values is exact in binary32,
//! and so is a weight in bf16 and in f16, so only additions round. Every other pair, including FP8,
//! is decoded to binary32 and multiplied without tensor cores (`decoded.cu`). FP8 operands with one
//! scale per matrix can also go to NVIDIA's library, which is faster and less precise:
//! [`Cublas::matmul_fp8`].

mod cublas;
mod decoded;
mod global;
mod host;
mod operand;
mod output;
mod pipeline;
mod prepared;
mod scratch;
mod shape;

pub use cublas::Cublas;
pub(super) use host::on_host;
pub use operand::{Operand, Weights};
pub use output::Product;
pub use prepared::PreparedWeight;

use crate::cuda::text::precision;
use crate::cuda::{Allocator, Device, Plain, SliceMut, Source, Stream};
use crate::input::check_len;
use crate::{Result, cuda};
use nvfp4_spec::{Element, Error, Precision, area};
use output::{OperandOrder, Output};

const OUTPUT: &str = include_str!("output.cuh");
const WEIGHTS: &str = include_str!("weights.cuh");

/// The least number of rows of B for which the operands may be swapped: fewer do not fill the large
/// tiles.
const LEAST_SWAPPED: usize = 256;

/// How a product is computed.
enum Way<'a> {
    /// By tensor cores, in the type of the tokens. Tokens are the rows of A or, if the operands are
    /// swapped, the rows of B.
    Pipeline(pipeline::Tokens<'a>, pipeline::Right<'a>, OperandOrder),
    /// By multiply-adds on decoded values.
    Decoded(Operand<'a>, Operand<'a>),
}

impl<'a> Way<'a> {
    fn of(a: Operand<'a>, b: Weights<'a>) -> Result<Way<'a>> {
        use OperandOrder::{Given, Swapped};
        if let (Operand::Nvfp4(a), Weights::Operand(Operand::Nvfp4(b))) = (a, b)
            && a.rows > b.rows
            && b.rows >= LEAST_SWAPPED
            && a.cols >= b.rows
        {
            // Decoding tokens moves more bytes than preparing weights, so the larger side becomes
            // the weights. Outputs are then written in shorter runs, which is slower if there are
            // many compared with K.
            return Ok(Way::Pipeline(pipeline::Tokens::Nvfp4(b), pipeline::Right::View(a), Swapped));
        }
        match (pipeline::Tokens::of(a), b) {
            (Some(tokens), Weights::Operand(Operand::Nvfp4(b))) => {
                Ok(Way::Pipeline(tokens, pipeline::Right::View(b), Given))
            }
            (Some(tokens), Weights::Prepared(weight)) => {
                Ok(Way::Pipeline(tokens, pipeline::Right::Prepared(weight), Given))
            }
            (_, Weights::Operand(b)) => Ok(Way::Decoded(a, b)),
            // Only tensor cores read prepared weights.
            (None, Weights::Prepared(_)) => Err(cuda::Error::Prepared.into()),
        }
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
    match Way::of(a, b)? {
        Way::Pipeline(tokens, right, OperandOrder::Given) => pipeline::run(stream, tokens, right, &output, memory),
        Way::Pipeline(tokens, right, OperandOrder::Swapped) => {
            pipeline::run(stream, tokens, right, &output.swapped(), memory)
        }
        Way::Decoded(a, b) => decoded::run(stream, &a, &b, &output),
    }
}

/// A description of the kernel that computes a product.
pub fn describe<'a>(device: Device, a: impl Into<Operand<'a>>, b: impl Into<Weights<'a>>) -> Result<String> {
    Ok(match Way::of(a.into(), b.into())? {
        Way::Pipeline(tokens, right, OperandOrder::Given) => pipeline::describe(device, &tokens, &right)?,
        Way::Pipeline(tokens, right, OperandOrder::Swapped) => {
            format!("swapped: {}", pipeline::describe(device, &tokens, &right)?)
        }
        Way::Decoded(..) => "multiply-adds on decoded values".to_string(),
    })
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
        check(stream.device(), &member.a, &member.b, &member.product, &member.out)?;
        Way::of(member.a, member.b)?;
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
    let outputs = area(a.rows(), b.rows())?;
    check_len("output", outputs, out.len())?;
    out.check(device, "output")?;
    out.check_aligned(size_of::<T>(), "output")?;
    if let Some(bias) = product.bias {
        check_len("bias", b.rows(), bias.len())?;
        bias.check(device, "bias")?;
        bias.check_aligned(size_of::<f32>(), "bias")?;
    }
    if let Some((c, _)) = product.add {
        check_len("C", outputs, c.len())?;
        c.check(device, "C")?;
        c.check_aligned(size_of::<T>(), "C")?;
    }
    Ok(Output::new(a, b, product, out.address()))
}

/// Texts for [`crate::sources`].
pub(crate) fn sources() -> Vec<(String, Source)> {
    [pipeline::sources(), decoded::sources()].concat()
}

/// The setting for the type in which tensor cores multiply.
fn math(of: Precision) -> String {
    format!("constexpr Precision MATH = {};\n", precision(of))
}
