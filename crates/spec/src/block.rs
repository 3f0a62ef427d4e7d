//! A tile becomes one scale byte and its codes. Read [`scale`](mod@crate::scale) first.
//!
//! A tile is `H` rows of 16 elements: one row in 1×16 mode, sixteen in 16×16 mode. Elements outside the matrix are
//! zeros. Source: numerics §3, §4.

use crate::scale::{Global, amax, block_scale, inverse_scale};
use crate::{BLOCK, Edge, Mode, Precision, Profile, Rounding, ScaleRule, e2m1, four_over_six, profile, stochastic};

/// `H` rows of 16 values.
pub type Rows<T, const H: usize> = [[T; BLOCK]; H];

/// The random bytes of a tile: one per element.
pub type TileRounding<'a, const H: usize> = Rounding<&'a Rows<u8, H>>;

/// A quantized tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized<const H: usize> {
    /// The E4M3 byte that all rows share.
    pub scale: u8,
    /// The E2M1 codes, one per byte.
    pub codes: Rows<u8, H>,
}

/// Quantizes a tile whose tensor or row has this amax; `precision` is the type its elements came in, which one profile
/// asks for.
///
/// 4over6 always rounds to nearest; [`Mode::check`] refuses it with stochastic rounding.
pub fn quantize<const H: usize>(
    tile: &Rows<f32, H>,
    amax: f32,
    mode: &Mode,
    precision: Precision,
    rounding: TileRounding<'_, H>,
) -> Quantized<H> {
    let stored = mode.profile.stored(amax, precision);
    match mode.profile {
        Profile::TransformerEngine => {
            let global = Global::new(amax, mode.rule.bound(), mode.edge);
            match mode.rule {
                ScaleRule::Six => six(tile, &global, mode.edge, rounding),
                ScaleRule::FourOverSix { metric, error, .. } => {
                    four_over_six::quantize(tile, &global, metric, error, mode.edge)
                }
            }
        }
        Profile::ModelOpt => profile::model_opt(tile, stored, rounding),
        Profile::LlmCompressor => profile::llm_compressor(tile, stored, precision, rounding),
        Profile::TorchAo => profile::torch_ao(tile, stored, rounding),
    }
}

/// The rule "six": the tile's largest magnitude is mapped to 6.
///
/// A tile of zeros gives scale 0 and codes 0. A non-zero tile whose scale byte underflows to 0 is not zeroed: its
/// elements are multiplied by `f32::MAX` and mostly saturate.
pub fn six<const H: usize>(
    tile: &Rows<f32, H>,
    global: &Global,
    edge: Edge,
    rounding: TileRounding<'_, H>,
) -> Quantized<H> {
    let scale = block_scale(amax(tile.as_flattened(), edge), global, edge);
    Quantized { scale, codes: encode(&multiply(tile, inverse_scale(scale, global, edge)), edge, rounding) }
}

/// Every element times `inverse`, one rounding each.
pub fn multiply<const H: usize>(tile: &Rows<f32, H>, inverse: f32) -> Rows<f32, H> {
    tile.map(|row| row.map(|x| x * inverse))
}

/// The codes of a tile of scaled values.
pub fn encode<const H: usize>(scaled: &Rows<f32, H>, edge: Edge, rounding: TileRounding<'_, H>) -> Rows<u8, H> {
    std::array::from_fn(|r| {
        std::array::from_fn(|i| match rounding {
            Rounding::NearestEven => e2m1::encode(scaled[r][i], edge),
            Rounding::Stochastic(random) => stochastic::encode(scaled[r][i], random[r][i], edge),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bound;

    fn quantize_row(row: [f32; 16], tensor_amax: f32) -> Quantized<1> {
        let global = Global::new(tensor_amax, Bound::E448, Edge::Kernel);
        six(&[row], &global, Edge::Kernel, Rounding::NearestEven)
    }

    #[test]
    fn a_block_on_the_grid_is_exact() {
        let row = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0];
        let q = quantize_row(row, 2688.0);
        assert_eq!(q.scale, 0x38, "scale 1");
        assert_eq!(q.codes[0], [7, 6, 6, 4, 4, 2, 2, 0, 8, 10, 10, 12, 12, 14, 14, 15]);
    }

    #[test]
    fn an_underflowing_block_keeps_saturated_codes() {
        let mut row = [0.0; 16];
        row[0] = 1e-9;
        row[1] = -1e-9;
        let q = quantize_row(row, 1.0);
        assert_eq!((q.scale, &q.codes[0][..3]), (0, &[7, 15, 0][..]));
    }

    #[test]
    fn infinity_saturates_its_block() {
        let mut row = [1.0; 16];
        row[3] = f32::NEG_INFINITY;
        let q = quantize_row(row, f32::INFINITY);
        assert_eq!((q.scale, q.codes[0][3], q.codes[0][0]), (0x7E, 15, 0));
    }
}
