//! The choice of scales by filter against the rule, of 4over6 and of the searches: ties, near ties,
//! extreme magnitudes, and very many random blocks.

#[allow(dead_code)] // another test uses the rest
mod runner;

use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::four_over_six::{candidate_scales, tile_error};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::scale::{Global, inverse_scale};
use nvfp4_spec::tile::{self, Rows};
use nvfp4_spec::{ErrorPath, Metric, Mode, Profile, Rounding, ScaleRule, Specials, Tile};
use rayon::prelude::*;

fn modes(tile: Tile) -> Vec<Mode> {
    let rules = ScaleRule::ALL.into_iter().filter(|rule| matches!(rule, ScaleRule::FourOverSix { .. }));
    rules.map(|rule| Mode { tile, rule, ..Mode::default() }).collect()
}

/// Those that search among more than two scales, with a profile that multiplies and one that divides.
fn searches() -> Vec<Mode> {
    let mode = |rule, profile| Mode { rule, profile, ..Mode::default() };
    vec![
        mode(ScaleRule::Mse, Profile::TransformerEngine),
        mode(ScaleRule::Mse, Profile::ModelOpt),
        mode(ScaleRule::Mse, Profile::LlmCompressor),
        mode(ScaleRule::ModelOptMse, Profile::ModelOpt),
        mode(ScaleRule::ModelOptFourOverSix, Profile::ModelOpt),
    ]
}

/// A standard normal value.
fn normal(seed: u32, i: usize) -> f32 {
    let [a, b, ..] = philox4x32([i as u32, (i >> 32) as u32, 0, 46], [seed, 0]);
    runner::normal(a, b)
}

/// Codes and scales of the row direction with a given amax.
fn run(implementation: Implementation, x: &[f32], cols: usize, mode: &Mode, amax: f32) -> (Vec<u8>, Vec<u8>) {
    let (rows, mut codes, mut scales) = (x.len() / cols, vec![0; x.len() / 2], vec![0; x.len() / 16]);
    let row = Direction {
        mode: *mode,
        rounding: Rounding::NearestEven,
        transform: None,
        layout: Layout::Linear,
        amax: Amax::Given(&[amax]),
        codes: &mut codes,
        scales: &mut scales,
    };
    quantize(implementation, &Input::new(Values::F32(x), rows, cols).unwrap(), Some(row), None).unwrap();
    (codes, scales)
}

fn check(x: &[f32], cols: usize, mode: &Mode, amax: f32) {
    let expected = run(Implementation::Scalar, x, cols, mode, amax);
    for implementation in Implementation::available() {
        let got = run(implementation, x, cols, mode, amax);
        assert!(got == expected, "{implementation} {mode:?} amax {amax:e}: {x:?}");
    }
}

/// The rule's two errors of a tile: six, four.
fn errors<const H: usize>(tile: &Rows<f32, H>, mode: &Mode, amax: f32) -> [f32; 2] {
    let ScaleRule::FourOverSix { metric, error, bound } = mode.rule else { unreachable!() };
    let global = Global::new(amax, bound, Specials::Kernel);
    let largest = tile.as_flattened().iter().fold(0f32, |m, x| m.max(x.abs()));
    candidate_scales(largest, &global, Specials::Kernel).map(|scale| {
        let codes = tile::encode(tile, inverse_scale(scale, &global, Specials::Kernel), Specials::Kernel);
        tile_error(tile, &tile::Quantized { scale, codes }, &global, metric, error)
    })
}

/// Finds where the rule's choice flips between two neighbouring values of a number that a tile is
/// made from, and checks around that point; `false` if the choice is the same at both ends.
fn flip<const H: usize>(mode: &Mode, amax: f32, ends: [f32; 2], tile: impl Fn(f32) -> Rows<f32, H>) -> bool {
    let four_wins = |x: f32| {
        let [six, four] = errors(&tile(x), mode, amax);
        four < six
    };
    let [mut low, mut high] = ends;
    let at_low = four_wins(low);
    if at_low == four_wins(high) {
        return false;
    }
    while high.to_bits() - low.to_bits() > 1 {
        let middle = f32::from_bits((low.to_bits() + high.to_bits()) / 2);
        if four_wins(middle) == at_low {
            low = middle;
        } else {
            high = middle;
        }
    }
    for step in -8i32..=8 {
        let x = f32::from_bits(low.to_bits().saturating_add_signed(step));
        check(tile(x).as_flattened(), 16, mode, amax);
    }
    true
}

/// Flips of tiles of normal values whose largest element stays, so that the scales do: one element
/// moves, then all others move together.
fn near_ties<const H: usize>(mode: &Mode, seed: u32, scale: f32) -> usize {
    let mut base: Rows<f32, H> =
        std::array::from_fn(|r| std::array::from_fn(|i| normal(seed, r * 16 + i).clamp(-3.0, 3.0) * scale));
    base[0][0] = 3.3 * scale;
    let amax = 5.0 * scale;
    let mut flips = 0;
    for place in 1..16 {
        let tile = |x: f32| {
            let mut tile = base;
            tile[H / 2][place] = x;
            tile
        };
        flips += usize::from(flip(mode, amax, [0.0, 3.0 * scale], tile));
    }
    // At 0.8 of the largest, "four" is much the better grid.
    let tile = |x: f32| {
        let mut tile = base.map(|row| row.map(|y| y + x * ((2.64 * scale).copysign(y) - y)));
        tile[0][0] = base[0][0];
        tile
    };
    flips + usize::from(flip(mode, amax, [0.0, 1.0], tile))
}

#[test]
fn blocks_at_the_edge_of_a_tie() {
    for mode in modes(Tile::Row16) {
        let flips: usize = (0..40).map(|seed| near_ties::<1>(&mode, seed, 1.0)).sum();
        assert!(flips > 50, "only {flips} flips were found");
    }
}

#[test]
fn square_tiles_at_the_edge_of_a_tie() {
    for mode in modes(Tile::Square16) {
        let flips: usize = (0..30).map(|seed| near_ties::<16>(&mode, seed, 1.0)).sum();
        assert!(flips > 10, "only {flips} flips were found");
    }
}

/// The neighbourhood of a tie at magnitudes where products and squares underflow, overflow or come close to
/// it.
#[test]
fn ties_at_extreme_magnitudes() {
    for exponent in [-126, -110, -80, -74, -70, -66, -62, -58, -51, -49, -20, 20, 49, 51, 62, 100, 117] {
        for mode in modes(Tile::Row16) {
            let flips: usize = (0..8).map(|seed| near_ties::<1>(&mode, seed, 2f32.powi(exponent))).sum();
            let ScaleRule::FourOverSix { metric, error, .. } = mode.rule else { unreachable!() };
            // The strict rule's squares vanish or overflow far out, and its products with the amax
            // at the very end; then all is a tie. The fast rule works in units of the scale, where
            // nothing does.
            let strict = error == ErrorPath::Strict;
            let meaningful = match metric {
                Metric::Mae => !strict || exponent < 117,
                Metric::Mse => !strict || (-66..=62).contains(&exponent),
            };
            assert!(flips > 0 || !meaningful, "{mode:?} at 2^{exponent}");
        }
    }
}

/// Exact ties: both candidates represent the block without error, or are the same.
#[test]
fn exact_ties_choose_six() {
    for mode in modes(Tile::Row16) {
        for x in [0.0f32, 1.0, 6.0, 1536.0] {
            check(&[x; 16], 16, &mode, 1536.0);
            check(&std::array::from_fn::<f32, 16, _>(|i| if i % 2 == 0 { x } else { x / 2.0 }), 16, &mode, 1536.0);
        }
    }
}

/// Subnormal elements, huge dynamic range within a block, an amax that does not belong to the data.
#[test]
fn blocks_outside_the_filters_range() {
    for mode in modes(Tile::Row16).into_iter().chain(modes(Tile::Square16)) {
        for amax in [0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e20, 3e38, f32::INFINITY] {
            for spread in [1, 20, 60, 120] {
                let x: Vec<f32> = (0..16 * 64)
                    .map(|i| normal(spread, i) * 2f32.powi((i as i32 * 37 % (2 * spread as i32 + 1)) - spread as i32))
                    .collect();
                check(&x, 64, &mode, amax);
            }
        }
    }
}

/// Small integers, of which most are zeros in some blocks: many scales have the same error, or none.
#[test]
fn searches_of_coarse_numbers_which_tie_often() {
    searches().into_par_iter().for_each(|mode| {
        for (largest, amax) in [(1, 1.0), (2, 6.0), (4, 64.0), (7, 7.0), (13, 1536.0), (40, 41.3), (127, 127.0)] {
            let number = |i: usize| {
                let [a, b, c, _] = philox4x32([i as u32, largest, 0, 47], [0, 0]);
                let zero = b % 16 < (i / 16 % 17) as u32;
                if zero { 0.0 } else { ((a % (2 * largest + 1)) as f32 - largest as f32) * [1.0, 1.5][c as usize % 2] }
            };
            let x: Vec<f32> = (0..16 * 17 * 24).map(number).collect();
            check(&x, 16 * 17, &mode, amax);
        }
    });
}

/// Random blocks at every distance below the largest one, and magnitudes at the ends of the range that
/// is filtered.
#[test]
fn searches_of_random_blocks() {
    searches().into_par_iter().for_each(|mode| {
        for exponent in [-60, -52, -44, 0, 44, 58] {
            let unit = 2f32.powi(exponent);
            let x: Vec<f32> = (0..16 * 1600)
                .map(|i| unit * normal(exponent as u32, i) * 0.97f32.powi((i / 16 % 400) as i32))
                .collect();
            check(&x, 1600, &mode, 4.7 * unit);
        }
    });
}

/// 10⁸ random blocks over the eight 1×16 modes, then 10⁶ square tiles: `cargo test --release -p
/// nvfp4-kernels --test four_over_six -- --ignored`. About two minutes on two cores.
#[test]
#[ignore = "takes minutes; run it after a change to the filter"]
fn a_hundred_million_random_blocks() {
    const COLS: usize = 1024;
    for (tile, rows, matrices) in [(Tile::Row16, 256, 763), (Tile::Square16, 256, 123)] {
        for (m, mode) in modes(tile).into_iter().enumerate() {
            (0..matrices).into_par_iter().for_each(|seed| {
                let x: Vec<f32> = (0..rows * COLS).map(|i| normal((m * matrices + seed) as u32, i)).collect();
                // What other rows of the tensor might have as their largest value.
                let amax = 5.0 * 1.7f32.powi(seed as i32 % 20);
                let expected = run(Implementation::Scalar, &x, COLS, &mode, amax);
                for implementation in Implementation::available() {
                    assert!(run(implementation, &x, COLS, &mode, amax) == expected, "{mode:?}, matrix {seed}");
                }
            });
        }
    }
}

/// 5·10⁶ random blocks of each search.
#[test]
#[ignore = "takes minutes; run it after a change to the filter"]
fn millions_of_random_blocks_are_searched() {
    const COLS: usize = 1024;
    for mode in searches() {
        (0..305).into_par_iter().for_each(|seed| {
            let x: Vec<f32> = (0..256 * COLS).map(|i| normal(9000 + seed, i)).collect();
            let amax = 5.0 * 1.7f32.powi(seed as i32 % 20);
            let expected = run(Implementation::Scalar, &x, COLS, &mode, amax);
            for implementation in Implementation::available() {
                assert!(run(implementation, &x, COLS, &mode, amax) == expected, "{mode:?}, matrix {seed}");
            }
        });
    }
}
