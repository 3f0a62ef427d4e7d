//! Products with an operand that is FP8 or plain, in vectors. **Bounded**: sums in binary32, see
//! [`nvfp4_spec::gemm::bound`].
//!
//! Where A is plain, B is NVFP4 and A has few rows, B is read once, as it lies (`streamed`). bf16 × NVFP4 has panels of its own, of bf16 with AVX-512 (`avx512`), of integers with
//! AVX2 (`aligned`). Every other pair is decoded to binary32, some rows and columns at a time, and
//! multiplied by one kernel (`decoded`).

pub(super) mod aligned;
mod avx512;
mod decoded;
mod panel;
mod streamed;

use super::Operand;
use super::exact::{FEW, Vectors};
use super::writer::Writer;
use crate::{Input, Values};
use nvfp4_spec::gemm::Product;
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::{Element, e2m1};

/// The product of operands whose shapes were checked and which have elements; `matrices` are the
/// plain ones, gathered.
pub(super) fn gemm<T: Element>(
    vectors: Vectors,
    (a, b): (&Operand<'_>, &Operand<'_>),
    matrices: [Option<&Matrix>; 2],
    product: &Product<'_, T>,
    out: &mut [T],
) {
    let operands = (a.to_spec(matrices[0]), b.to_spec(matrices[1]));
    let writer = &Writer::new(operands, product, out);
    match (vectors, a, b) {
        (_, Operand::Plain(x), Operand::Nvfp4(weights)) if x.rows() <= FEW => {
            streamed::few_rows(vectors.avx2(), x, weights, writer);
        }
        (Vectors::Avx512(token), Operand::Plain(x), Operand::Nvfp4(weights))
            if matches!(x.values(), Values::Bf16(_)) && token.has_bf16() =>
        {
            avx512::panels(token, x, weights, writer);
        }
        (Vectors::Avx2(token), Operand::Plain(x), Operand::Nvfp4(weights)) => match aligned::rows_of(token, x) {
            Some(rows) => aligned::panels(token, rows, weights, writer),
            None => decoded::run::<T, 16>(token, &operands, writer),
        },
        (Vectors::Avx512(token), ..) => decoded::run::<T, 32>(token, &operands, writer),
        (Vectors::Avx2(token), ..) => decoded::run::<T, 16>(token, &operands, writer),
    }
}

/// Row `i` of a plain operand.
fn plain_row(x: &Input<'_>, i: usize) -> Vec<f32> {
    let at = i * x.stride()..i * x.stride() + x.cols();
    match x.values() {
        Values::F32(values) => values[at].to_vec(),
        Values::Bf16(values) => values[at].iter().map(|x| x.to_f32()).collect(),
        Values::F16(values) => values[at].iter().map(|x| x.to_f32()).collect(),
    }
}

/// The bf16 bits of E2M1 values, by code: low bytes, high bytes.
const BYTES: [[u8; 16]; 2] = {
    let (mut low, mut high) = ([0; 16], [0; 16]);
    let mut code = 0;
    while code < 16 {
        let magnitude = e2m1::MAGNITUDES[code % 8].to_bits() >> 16;
        low[code] = magnitude as u8;
        high[code] = (magnitude >> 8) as u8 | if code < 8 { 0 } else { 0x80 };
        code += 1;
    }
    [low, high]
};
