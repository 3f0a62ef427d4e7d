//! The values of MXFP4's codes.

use nvfp4_spec::fp8::MX_BLOCK;
use nvfp4_spec::{e2m1, e8m0};
use std::sync::LazyLock;

/// The values of both codes of every byte.
static PAIRS: LazyLock<[[f32; 2]; 256]> =
    LazyLock::new(|| std::array::from_fn(|byte| e2m1::unpack(byte as u8).map(e2m1::decode)));

/// The values of codes, of which 32 have an exponent.
pub(super) fn decode(codes: &[u8], exponents: &[u8], out: &mut [f32]) {
    let (pairs, blocks) = (&*PAIRS, codes.as_chunks::<{ MX_BLOCK / 2 }>().0);
    for ((codes, &exponent), out) in blocks.iter().zip(exponents).zip(out.as_chunks_mut::<MX_BLOCK>().0) {
        let scale = e8m0::decode(exponent);
        for (&byte, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = pairs[usize::from(byte)].map(|value| value * scale);
        }
    }
}
