//! Whose bytes are written: four producers of NVFP4 agree on the format and differ in the arithmetic of the scales.
//!
//! | | stored 32-bit number `g` | scale byte `S` of a block | elements |
//! |---|---|---|---|
//! | TransformerEngine | `amax` | [`scale`](mod@crate::scale) | `fl(x · inv)` |
//! | ModelOpt 0.47 | `fl(amax/2688)`, a multiplier | `fl(bm / fl(6g))`, 0 → 1, at least 2⁻⁹ | `fl(x / fl(S·g))` |
//! | llm-compressor 0.14 | `2688 · (1/amax)`, both steps in the input's type, a divisor | `fl(g · bm/6)`, `bm/6` in the input's type; byte 0 → 0x20 | `fl(x / fl(S/g))` |
//! | torchao 0.18 | `fl(amax/2688)`, a multiplier | `fl(fl(bm/6) / g)`, at least 2⁻⁶ | `fl(x · fl(fl(1/g)/S))` |
//!
//! All round scale bytes and codes to nearest even and saturate at 448 and 6. In the last three NaN takes over the amax,
//! as in [`Edge::Reference`]; ModelOpt and llm-compressor write code 0 for −0, torchao code 8. An element that is NaN after
//! scaling becomes code 7 in ModelOpt; the other two have no rule for it (their code depends on the NaN's bits and on the
//! vector instructions at hand), and here it becomes 0 for llm-compressor and 7 for torchao.
//!
//! Where a producer writes NaN for a tensor of zeros (ModelOpt, torchao), `g` is 1 here: the scales are finite and the
//! tensor decodes to zeros.

use crate::block::{self, Quantized, Rows, TileRounding};
use crate::scale::{Unit, amax};
use crate::{Bound, Edge, Precision, e4m3};

/// Whose bytes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// NVIDIA TransformerEngine, in every mode. The only profile with 4over6 and a choice of [`Edge`].
    #[default]
    TransformerEngine,
    /// NVIDIA ModelOpt's checkpoints.
    ModelOpt,
    /// llm-compressor's (compressed-tensors') checkpoints.
    LlmCompressor,
    /// torchao's `NVFP4Tensor`.
    TorchAo,
}

/// `6 · 448`, what an amax is mapped to.
const SIX_E: f32 = Bound::E448.six_e();

/// The scale byte that llm-compressor writes for a block whose scale rounds to 0: 0.125.
const LLM_COMPRESSOR_ZERO: u8 = 0x20;

impl Profile {
    /// What the stored 32-bit number means.
    pub fn unit(self, bound: Bound) -> Unit {
        match self {
            Profile::TransformerEngine => Unit::Amax(bound),
            Profile::ModelOpt | Profile::TorchAo => Unit::Multiplier,
            Profile::LlmCompressor => Unit::Divisor,
        }
    }

    /// The stored 32-bit number of a tensor or row with this amax, whose elements came in this type.
    pub fn stored(self, amax: f32, precision: Precision) -> f32 {
        match self {
            Profile::TransformerEngine => amax,
            Profile::ModelOpt | Profile::TorchAo => match amax / SIX_E {
                0.0 => 1.0,
                g => g,
            },
            Profile::LlmCompressor => {
                // Its source divides a number by a tensor, which torch computes as the tensor's reciprocal times the number.
                let reciprocal = precision.round(1.0 / amax.max(precision.min_normal()));
                match precision.round(reciprocal * SIX_E) {
                    g if g.is_finite() => g,
                    _ => 1.0,
                }
            }
        }
    }

    /// How amax treats NaN: TransformerEngine has a choice, the others let NaN win.
    pub fn amax_edge(self, edge: Edge) -> Edge {
        match self {
            Profile::TransformerEngine => edge,
            Profile::ModelOpt | Profile::LlmCompressor | Profile::TorchAo => Edge::Reference,
        }
    }
}

/// Quantizes a tile as ModelOpt does. Unlike elsewhere NaN becomes code 7 while −0 becomes code 0.
pub fn model_opt<const H: usize>(tile: &Rows<f32, H>, g: f32, rounding: TileRounding<'_, H>) -> Quantized<H> {
    let requested = match amax(tile.as_flattened(), Edge::Reference) / (6.0 * g) {
        0.0 => 1.0,
        s => s,
    };
    let scale = e4m3::encode(at_least(e4m3::MIN_POSITIVE, requested));
    let divisor = e4m3::decode(scale) * g;
    let scaled = tile.map(|row| row.map(|x| x / divisor));
    let mut codes = block::encode(&scaled, Edge::Reference, rounding);
    for (code, y) in codes.as_flattened_mut().iter_mut().zip(scaled.as_flattened()) {
        if y.is_nan() {
            *code = 7;
        }
    }
    Quantized { scale, codes }
}

/// Quantizes a tile as llm-compressor does.
pub fn llm_compressor<const H: usize>(
    tile: &Rows<f32, H>,
    g: f32,
    precision: Precision,
    rounding: TileRounding<'_, H>,
) -> Quantized<H> {
    let local = precision.round(amax(tile.as_flattened(), Edge::Reference) / 6.0);
    let scale = match e4m3::encode(g * local) {
        0 => LLM_COMPRESSOR_ZERO,
        byte => byte,
    };
    let divisor = e4m3::decode(scale) / g;
    let scaled = tile.map(|row| row.map(|x| x / divisor));
    Quantized { scale, codes: block::encode(&scaled, Edge::Reference, rounding) }
}

/// Quantizes a tile as torchao does.
pub fn torch_ao<const H: usize>(tile: &Rows<f32, H>, g: f32, rounding: TileRounding<'_, H>) -> Quantized<H> {
    let requested = amax(tile.as_flattened(), Edge::Reference) / 6.0 / g;
    let scale = e4m3::encode(at_least(e4m3::MIN_NORMAL, requested));
    let factor = 1.0 / g / e4m3::decode(scale);
    let scaled = tile.map(|row| row.map(|x| x * factor));
    Quantized { scale, codes: block::encode(&scaled, Edge::Kernel, rounding) }
}

/// `max(x, least)`; NaN stays NaN, as in torch's `clamp`.
fn at_least(least: f32, x: f32) -> f32 {
    if x < least { least } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rounding;

    const GRID: [f32; 16] =
        [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0];
    const CODES: [u8; 16] = [7, 6, 6, 4, 4, 2, 2, 0, 8, 10, 10, 12, 12, 14, 14, 15];

    /// Every profile's tile rule at the stored number for `amax`.
    fn quantize(profile: Profile, row: [f32; 16], amax: f32, precision: Precision) -> Quantized<1> {
        let (tile, g, nearest) = ([row], profile.stored(amax, precision), Rounding::NearestEven);
        match profile {
            Profile::TransformerEngine => unreachable!("has its own tests"),
            Profile::ModelOpt => model_opt(&tile, g, nearest),
            Profile::LlmCompressor => llm_compressor(&tile, g, precision, nearest),
            Profile::TorchAo => torch_ao(&tile, g, nearest),
        }
    }

    const OTHERS: [Profile; 3] = [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo];

    #[test]
    fn a_block_on_the_grid_has_the_codes_of_the_worked_example() {
        for profile in OTHERS {
            for precision in [Precision::F32, Precision::Bf16] {
                let q = quantize(profile, GRID, 2688.0, precision);
                assert_eq!((q.scale, q.codes[0]), (0x38, CODES), "{profile:?}");
            }
        }
    }

    #[test]
    fn zero_blocks_get_the_producers_scale_byte() {
        let byte = |profile| quantize(profile, [0.0; 16], 1.0, Precision::F32);
        assert_eq!(OTHERS.map(|p| byte(p).scale), [0x38, 0x20, 0x08]);
        assert!(OTHERS.iter().all(|&p| byte(p).codes[0] == [0; 16]));
    }

    #[test]
    fn underflowing_blocks_get_the_producers_smallest_scale() {
        let byte = |profile| quantize(profile, [1e-6; 16], 1.0, Precision::F32).scale;
        assert_eq!(OTHERS.map(byte), [0x01, 0x20, 0x08]);
    }

    #[test]
    fn a_tensor_of_zeros_stores_finite_scales_and_decodes_to_zeros() {
        for profile in OTHERS {
            for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
                assert_eq!(profile.stored(0.0, precision), 1.0);
                let q = quantize(profile, [0.0; 16], 0.0, precision);
                assert!(q.codes[0] == [0; 16] && q.scale < e4m3::NAN_BYTE, "{profile:?}");
            }
        }
    }

    #[test]
    fn llm_compressor_rounds_its_scales_to_the_inputs_type() {
        // 2688/0.0903 is 29756.9; the producer's file holds 29696, the nearest bf16.
        let amax = 0.09033203;
        assert_eq!(Profile::LlmCompressor.stored(amax, Precision::Bf16), 29696.0);
        assert_eq!(Profile::LlmCompressor.stored(amax, Precision::F32), 1.0 / amax * 2688.0);
        // A case where a division would give 1696.
        assert_eq!(Profile::LlmCompressor.stored(1.5859375, Precision::Bf16), 1688.0);
        assert_eq!(Profile::LlmCompressor.stored(0.03, Precision::F16), 1.0, "the quotient overflows f16");
    }

    #[test]
    fn negative_zero_and_nan() {
        let mut row = [1.0; 16];
        (row[1], row[2]) = (-0.0, -1e-30);
        let codes = |profile| quantize(profile, row, 1.0, Precision::F32).codes[0];
        assert_eq!(OTHERS.map(|p| codes(p)[1]), [0, 0, 8], "-0");
        assert_eq!(OTHERS.map(|p| codes(p)[2]), [8, 8, 8], "a small negative value");
        row[3] = f32::NAN;
        let q = OTHERS.map(|p| quantize(p, row, 1.0, Precision::F32));
        assert_eq!(q.map(|q| (q.scale, q.codes[0][0])), [(0x7F, 7), (0x7F, 0), (0x7F, 7)]);
    }
}
