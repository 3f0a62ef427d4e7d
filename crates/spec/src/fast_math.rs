//! TransformerEngine's fast-math variant of the rule "six" (its tuned bf16 1×16 kernel under
//! `NVTE_USE_FAST_MATH=1`). It exists to reproduce that output; nothing else uses it. Source:
//! numerics §3.1.

use crate::scale::{Global, amax, block_scale};
use crate::tile::{self, Quantized};
use crate::{BLOCK, Specials, e4m3};
use half::bf16;

/// Quantizes a block of bf16 values. The scale byte is that of the rule "six"; the elements are
/// multiplied by `c = bf16(min(fl(enc / value(S)), bf16::MAX))`, and adding +0 to the product turns
/// −0 into +0.
pub fn quantize(row: &[f32; BLOCK], global: &Global, specials: Specials) -> Quantized<1> {
    let scale = block_scale(amax(row, specials), global, specials);
    let inverse = bf16::from_f32((global.encode / e4m3::decode(scale)).min(bf16::MAX.to_f32())).to_f32();
    let products = row.map(|x| x.mul_add(inverse, 0.0));
    Quantized { scale, codes: tile::encode(&[products], 1.0, specials) }
}
