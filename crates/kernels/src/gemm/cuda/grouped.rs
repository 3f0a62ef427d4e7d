//! Products of groups: those of a layer of experts.

use super::choice::{prefers_library_for_all, prefers_one_launch};
use super::cublas::Cublas;
use super::groups::GroupedOperand;
use super::operand::{Operand, Weights};
use super::output::{Output, Product};
use super::prepared::TILE;
use super::{Member, check, check_outputs, grouped, pipeline, promoted, tiles, to_bf16};
use crate::Result;
use crate::cuda::{Allocator, Along, GROUP_ROWS, Plain, SliceMut, Stream};
use crate::gemm::units::LEAST_BLOCK_SCALED;
use crate::input::check_len;
use nvfp4_spec::{Element, Error, area};

/// Bytes of decoded operands up to which those of all groups are decoded in one launch. Beyond, a
/// launch more per group takes no time beside its work, and decoding one after the other needs less
/// memory.
const MOST_DECODED: usize = 512 << 20;

/// `out = α·A·Bᵀ (+ bias) (+ β·C)` of every group. Does not wait.
///
/// | groups of A | of B | a group's product | `out` |
/// |---|---|---|---|
/// | rows | rows, all of N | its rows × N | all rows × N |
/// | rows | K, all of K | its rows × N | all rows × N |
/// | K | K, the same groups | M × N | groups × M × N |
///
/// A bias has N values per group. Groups without rows cost nothing where they lie along rows, and
/// have sums of exactly 0 where they lie along K.
pub fn multiply_groups<T: Element + Plain>(
    stream: &Stream,
    a: GroupedOperand<'_>,
    b: GroupedOperand<'_>,
    product: &Product<'_, T>,
    out: SliceMut<'_, T>,
    memory: &dyn Allocator,
) -> Result<()> {
    let (n, count) = (check_groups(stream, (&a, &b), product, &out)?, a.groups.count());
    if out.is_empty() {
        return Ok(());
    }
    let known = a.groups.sizes().zip(b.groups.sizes()).filter(|(tokens, _)| {
        // Few tokens per group are multiplied at once, also where sizes are known, unless the chip
        // has units for codes.
        let nvfp4 = matches!(a.operand, Operand::Nvfp4(_)) && n.is_multiple_of(TILE);
        let at_once = a.along == Along::Rows && nvfp4 && stream.device().capability() < LEAST_BLOCK_SCALED;
        !(at_once && prefers_one_launch(stream.device(), tokens, (n, a.operand.cols())))
    });
    let Some((left, right)) = known else {
        let output = Output::new(&a.operand, &b.operand.into(), product, out.address()).with_columns(n);
        if let Some(way) = promoted::Promoted::of(stream.device(), a.operand, b.operand, &output) {
            return way.run_groups(stream, (&a, &b), &output, memory);
        }
        return match (a.operand, b.operand) {
            (Operand::Nvfp4(left), Operand::Nvfp4(right)) => {
                let groups = (a.groups, b.groups);
                pipeline::run_groups(stream, (left, a.along), (right, b.along), groups, &output, memory)
            }
            (Operand::Fp8(_), Operand::Fp8(_)) => tiles::run_groups(stream, (&a, &b), &output, memory),
            _ => Err(Error::Combination("products of groups have the same format on both sides").into()),
        };
    };
    let mut members = Vec::with_capacity(count);
    let (mut rest, mut before) = (out, 0);
    for (number, (a, b)) in a.parts(left).into_iter().zip(b.parts(right)).enumerate() {
        let len = a.rows() * n;
        let (out, after) = rest.split_at(len);
        rest = after;
        let product = Product {
            bias: product.bias.map(|bias| bias.range(number * n..(number + 1) * n)),
            add: product.add.map(|(c, beta)| (c.range(before..before + len), beta)),
            ..*product
        };
        before += len;
        members.push(Member { a, b: b.into(), product, out });
    }
    if let (Operand::Nvfp4(left), Operand::Nvfp4(right)) = (a.operand, b.operand)
        && let Some(library) = Cublas::of(stream.device())
        && stream.device().capability() < LEAST_BLOCK_SCALED
        && 2 * (left.rows * left.cols + right.rows * right.cols) <= MOST_DECODED
    {
        // All are decoded in one launch, unless something about one of them is special.
        let parts = members.iter().filter(|member| member.a.cols() > 0 && !member.out.is_empty());
        let parts: Vec<to_bf16::Part<'_>> =
            parts.filter_map(|member| part(stream, member).transpose()).collect::<Result<_>>()?;
        let sizes = parts.iter().map(|(a, b, _)| [a.rows, b.rows, a.cols]);
        if prefers_library_for_all(stream.device(), sizes)
            && to_bf16::run_groups(stream, library, (left, right), &parts, memory)?
        {
            members.retain(|member| member.a.cols() == 0);
        }
    }
    grouped(stream, &mut members, memory)
}

/// Checks products of groups; returns the number of columns of a group's outputs.
fn check_groups<T: Element + Plain>(
    stream: &Stream,
    (a, b): (&GroupedOperand<'_>, &GroupedOperand<'_>),
    product: &Product<'_, T>,
    out: &SliceMut<'_, T>,
) -> Result<usize> {
    let device = stream.device();
    a.check(device)?;
    b.check(device)?;
    let count = a.groups.count();
    check_len("groups of the right operand", count, b.groups.count())?;
    let each = || b.each().ok_or(Error::Combination("every group of the right operand has the same, known size"));
    let same_k = |k: usize| match a.operand.cols() == k {
        true => Ok(()),
        false => Err(Error::InnerLength { expected: a.operand.cols(), got: k }),
    };
    let n = match (a.along, b.along) {
        (Along::Rows, Along::Rows) => {
            same_k(b.operand.cols())?;
            each()?
        }
        (Along::Rows, Along::K) => {
            let k = each()?;
            if !k.is_multiple_of(GROUP_ROWS) {
                return Err(Error::Multiple { what: "rows of a group that are K", of: GROUP_ROWS, got: k }.into());
            }
            same_k(k)?;
            b.rows()
        }
        (Along::K, Along::K) => {
            let same = match (a.groups.sizes(), b.groups.sizes()) {
                (Some(left), Some(right)) => left == right,
                _ => std::ptr::eq(a.groups, b.groups),
            };
            if !same || a.lies_as_rows() != b.lies_as_rows() {
                return Err(Error::Combination("operands with groups along K have the same groups and format").into());
            }
            b.rows()
        }
        (Along::K, Along::Rows) => {
            return Err(
                Error::Combination("where groups of the left operand lie along K, so do the right one's").into()
            );
        }
    };
    let outputs = area(if a.along == Along::Rows { a.rows() } else { area(count, a.rows())? }, n)?;
    check_outputs(device, product, out, (outputs, area(count, n)?))?;
    Ok(n)
}

/// A member in NVFP4 with its checked outputs.
fn part<'a, T: Element + Plain>(stream: &Stream, member: &Member<'a, T>) -> Result<Option<to_bf16::Part<'a>>> {
    let (Operand::Nvfp4(a), Weights::Operand(Operand::Nvfp4(b))) = (member.a, member.b) else { return Ok(None) };
    Ok(Some((a, b, check(stream.device(), &member.a, &member.b, &member.product, &member.out)?)))
}
