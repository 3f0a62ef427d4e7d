//! 4over6: a block's largest magnitude is mapped to 6 or to 4, whichever gives the smaller error.
//! Mapping to 4 gives up the codes ±6 and gains a finer grid. Source: numerics §5.

use crate::scale::{Global, amax, inverse_scale};
use crate::tile::{self, Quantized, Rows};
use crate::{BLOCK, ErrorPath, Metric, Specials, e2m1, e4m3};

/// Quantizes a tile both ways and keeps the better one. Mapping to 4 wins only if its error is
/// strictly smaller: ties and errors that are NaN choose 6.
pub fn quantize<const H: usize>(
    tile: &Rows<f32, H>,
    global: &Global,
    metric: Metric,
    error: ErrorPath,
    specials: Specials,
) -> Quantized<H> {
    let [six, four] = candidate_scales(amax(tile.as_flattened(), specials), global, specials)
        .map(|scale| Quantized { scale, codes: tile::encode(tile, inverse_scale(scale, global, specials), specials) });
    let total = |candidate: &Quantized<H>| tile_error(tile, candidate, global, metric, error);
    if total(&four) < total(&six) { four } else { six }
}

/// The scale bytes `[S6, S4]`: with `base = fl(fl(bm/6) · enc)` they are `E4M3(base)` and
/// `E4M3(fl(base · 1.5))`, both saturating at 448. The division by 6 comes first here, unlike in
/// the rule "six".
pub fn candidate_scales(block_amax: f32, global: &Global, specials: Specials) -> [u8; 2] {
    let base = block_amax / 6.0 * global.encode;
    [base, base * 1.5].map(|s| e4m3::encode(specials.min_with_max(s)))
}

/// The error of a candidate over a tile: each row summed in element order, then the rows by
/// [`sum_rows`].
pub fn tile_error<const H: usize>(
    tile: &Rows<f32, H>,
    candidate: &Quantized<H>,
    global: &Global,
    metric: Metric,
    error: ErrorPath,
) -> f32 {
    let element_error = match error {
        ErrorPath::Strict => strict_error,
        ErrorPath::Fast => fast_error,
    };
    sum_rows::<H>(std::array::from_fn(|r| {
        sum_row(
            std::array::from_fn(|i| element_error(candidate.codes[r][i], candidate.scale, tile[r][i], global)),
            metric,
        )
    }))
}

/// `err = 0`, then for each element in order `err = fl(err + |e|)`, or `fl(err + fl(e·e))`.
fn sum_row(errors: [f32; BLOCK], metric: Metric) -> f32 {
    errors.into_iter().fold(0.0, |sum, e| match metric {
        Metric::Mae => sum + e.abs(),
        Metric::Mse => sum + e * e,
    })
}

/// The strict error of an element, in the units of the input: `fl(fl(fl(q·sf · amax) / 6E) − x)`.
///
/// `q·sf` is exact. The division is a true one: multiplying by the reciprocal changes decisions.
pub fn strict_error(code: u8, scale: u8, x: f32, global: &Global) -> f32 {
    e2m1::decode(code) * e4m3::decode(scale) * global.amax / global.bound.six_e() - x
}

/// The fast error of an element, in the units of code × scale: `fl(q·sf − fl(x · enc))`, two
/// roundings.
///
/// Upstream forms `q·sf` in FP16. It has at most 6 significant bits and lies in 0 ∪ [2⁻¹⁰, 2688],
/// so it is exact there and equals the binary32 product.
pub fn fast_error(code: u8, scale: u8, x: f32, global: &Global) -> f32 {
    fast_candidate(code, scale) - x * global.encode
}

/// The product `q·sf` of the fast path. Code 8 counts as +0 here, which no error shows.
pub fn fast_candidate(code: u8, scale: u8) -> f32 {
    (e2m1::decode(code) + 0.0) * e4m3::decode(scale)
}

/// The rows' errors summed as a tree: with 16 rows `r[j] + r[j+8]` for j < 8, then `+ r[j+4]`, `+
/// r[j+2]`, `+ r[j+1]`. One row is its own sum. The number of rows must be a power of two; another
/// one does not compile.
pub fn sum_rows<const H: usize>(mut rows: [f32; H]) -> f32 {
    const { assert!(H.is_power_of_two(), "a tree that halves the rows reaches all of them") };
    let mut half = H / 2;
    while half > 0 {
        for j in 0..half {
            rows[j] += rows[j + half];
        }
        half /= 2;
    }
    rows[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bound;
    use half::f16;

    #[test]
    fn the_half_precision_product_is_exact() {
        for scale in 0..=e4m3::MAX_BYTE {
            for code in 0..16 {
                let in_half = f16::from_f32(e2m1::decode(code)) * f16::from_f32(e4m3::decode(scale));
                assert_eq!(fast_candidate(code, scale), in_half.to_f32());
            }
        }
    }

    #[test]
    fn four_wins_where_its_grid_fits_better() {
        // 4 of 4 and 3 of 4 are on the grid of the candidate "four"; with "six" 3/4 would be 4.5 of
        // 6.
        let row = std::array::from_fn(|i| if i % 2 == 0 { 4.0 } else { 3.0 });
        let global = Global::new(1536.0, Bound::E256, Specials::Kernel);
        for metric in [Metric::Mae, Metric::Mse] {
            for error in [ErrorPath::Strict, ErrorPath::Fast] {
                let q = quantize(&[row], &global, metric, error, Specials::Kernel);
                assert_eq!((q.scale, q.codes[0][0], q.codes[0][1]), (0x38, 6, 5));
            }
        }
    }

    #[test]
    fn ties_and_nan_errors_choose_six() {
        let global = Global::new(448.0 * 6.0, Bound::E448, Specials::Kernel);
        // Both candidates saturate at 448, so they are equal.
        let q = quantize(&[[2688.0; 16]], &global, Metric::Mae, ErrorPath::Strict, Specials::Kernel);
        assert_eq!((q.scale, q.codes[0][0]), (0x7E, 7));
        let infinite = Global::new(f32::INFINITY, Bound::E256, Specials::Kernel);
        let row = std::array::from_fn(|i| if i == 0 { f32::INFINITY } else { 3.0 });
        let q = quantize(&[row], &infinite, Metric::Mse, ErrorPath::Strict, Specials::Kernel);
        assert_eq!(q.scale, 0x7E);
        let tiny = quantize(&[[3.0; 16]], &infinite, Metric::Mae, ErrorPath::Strict, Specials::Kernel);
        assert_eq!(tiny.scale, candidate_scales(3.0, &infinite, Specials::Kernel)[0]);
    }

    #[test]
    fn the_tree_adds_distant_rows_first() {
        let mut rows = [0.0f32; 16];
        (rows[0], rows[8], rows[1]) = (1e8, -1e8, 1.0);
        assert_eq!(sum_rows(rows), 1.0);
        assert_eq!(sum_rows([2.5]), 2.5);
    }
}
