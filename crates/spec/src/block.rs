//! A tile becomes one scale byte and its codes. Read [`scaling`](mod@crate::scaling) and
//! [`tile`](mod@crate::tile) first. Source: numerics §3, §4.

use crate::scale::amax;
use crate::scaling::Scaling;
use crate::tile::{Quantized, Rows};
use crate::{Rounding, ScaleRule, four_over_six, modelopt, mse};

/// The random bytes of a tile: one per element.
pub type TileRounding<'a, const H: usize> = Rounding<&'a Rows<u8, H>>;

/// Quantizes a tile. 4over6 and the search of scales round to nearest; [`Mode::check`](crate::Mode::check) refuses them
/// with stochastic rounding.
pub fn quantize<const H: usize>(tile: &Rows<f32, H>, scaling: &Scaling, rounding: TileRounding<'_, H>) -> Quantized<H> {
    match scaling.mode.rule {
        ScaleRule::Six => six(tile, scaling, rounding),
        ScaleRule::FourOverSix { metric, error, .. } => {
            four_over_six::quantize(tile, &scaling.global, metric, error, scaling.mode.specials)
        }
        ScaleRule::Mse => mse::quantize(tile, scaling),
        ScaleRule::ModelOptMse => modelopt::sweep(tile, scaling),
        ScaleRule::ModelOptFourOverSix => modelopt::four_over_six(tile, scaling),
    }
}

/// The rule "six": the tile's largest magnitude is mapped to 6.
///
/// In the TransformerEngine profile a tile of zeros gives scale 0 and codes 0, and a non-zero tile
/// whose scale byte underflows to 0 is not zeroed: its elements are multiplied by `f32::MAX` and
/// mostly saturate.
pub fn six<const H: usize>(tile: &Rows<f32, H>, scaling: &Scaling, rounding: TileRounding<'_, H>) -> Quantized<H> {
    let scale = scaling.block_scale(amax(tile.as_flattened(), scaling.mode.amax_specials()));
    let factor = scaling.factor(scale);
    let codes = std::array::from_fn(|r| {
        std::array::from_fn(|i| {
            let random = match rounding {
                Rounding::NearestEven => None,
                Rounding::Stochastic(random) => Some(random[r][i]),
            };
            scaling.code(factor.apply(tile[r][i]), random)
        })
    });
    Quantized { scale, codes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, Precision};

    fn quantize_row(row: [f32; 16], tensor_amax: f32) -> Quantized<1> {
        six(&[row], &Scaling::new(tensor_amax, &Mode::default(), Precision::F32), Rounding::NearestEven)
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
