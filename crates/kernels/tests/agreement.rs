//! Every implementation that this machine has, against the scalar one, bit for bit: all modes, all
//! input types, awkward shapes, strides and values. A test is a line of intent; the runner owns
//! loops and messages. Modes are checked in parallel: on a GPU most of the time goes into compiling
//! their kernels.

#[allow(dead_code)] // another test uses the rest
mod runner;

use nvfp4_kernels::Implementation;
use nvfp4_spec::{GlobalScale, Mode, Precision, Profile, Rounding, ScaleRule, Specials, Tile};
use nvfp4_testing::{Need, missing};
use rayon::prelude::*;
use runner::{Case, Fill, Runner};

/// Every legal mode of every profile.
fn modes() -> Vec<Mode> {
    let mut modes = Vec::new();
    for (tile, global) in [
        (Tile::Row16, GlobalScale::PerTensor),
        (Tile::Row16, GlobalScale::PerRow),
        (Tile::Square16, GlobalScale::PerTensor),
    ] {
        for specials in [Specials::Kernel, Specials::Reference] {
            modes.extend(ScaleRule::ALL.map(|rule| Mode { tile, global, rule, specials, ..Mode::default() }));
        }
        for profile in [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo] {
            for rule in ScaleRule::ALL {
                modes.push(Mode { tile, global, profile, rule, ..Mode::default() });
            }
        }
    }
    // The search of scales is not for square tiles.
    modes.retain(|mode| mode.check(&Rounding::<()>::NearestEven).is_ok());
    modes
}

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

/// Reports what the other tests did not compare, because this machine cannot run it.
#[test]
fn what_is_not_compared_is_said() {
    let mut needs = match cfg!(target_arch = "aarch64") {
        true => vec![("neon", Need::Neon)],
        false => vec![("avx2", Need::Avx2), ("avx512", Need::Avx512)],
    };
    if cfg!(feature = "cuda") {
        needs.push(("cuda", Need::Gpu));
    }
    for (name, need) in needs {
        if let Err(reason) = name.parse::<Implementation>() {
            missing(need, reason);
        }
    }
}

#[test]
fn every_mode_on_every_kind_of_values() {
    modes().into_par_iter().for_each(|mode| {
        for fill in Fill::ALL {
            for precision in PRECISIONS {
                Runner::new(Case { mode, precision, fill, ..Case::new(48, 80) }).check();
            }
        }
    });
}

#[test]
fn every_row_length_from_16_to_544() {
    for cols in (16..=544).step_by(16) {
        for (tile, rows) in [(Tile::Row16, 3), (Tile::Square16, 16)] {
            let mode = Mode { tile, ..Mode::default() };
            Runner::new(Case { mode, ..Case::new(rows, cols) }).check();
            // The same numbers as rows: every length of the column direction.
            Runner::new(Case { mode, ..Case::new(cols, rows) }).check();
        }
    }
}

#[test]
fn ragged_and_odd_shapes_in_every_mode() {
    let shapes = [(1, 1), (1, 15), (2, 17), (5, 33), (16, 31), (17, 16), (31, 47), (33, 18), (130, 19), (19, 530)];
    modes().into_par_iter().for_each(|mode| {
        for (i, (rows, cols)) in shapes.into_iter().enumerate() {
            let fill = if i % 2 == 0 { Fill::Special } else { Fill::Normal };
            Runner::new(Case { mode, precision: PRECISIONS[i % 3], fill, ..Case::new(rows, cols) }).check();
        }
    });
}

/// Shapes around the sizes of panels, chunks and strips, modes and values, drawn at random; a seed
/// and nothing else.
#[test]
fn anything_with_anything() {
    let modes = modes();
    (0..150).into_par_iter().for_each(|i| {
        let [a, b, c, d] = nvfp4_spec::philox::philox4x32([i, 0, 0, 0], [2026, 11]);
        let pick = |word: u32, n: usize| word as usize % n;
        let near = [1, 15, 33, 64, 255, 256, 257, 511, 512, 513, 530];
        let case = Case {
            mode: modes[pick(a, modes.len())],
            col_mode: (a >> 20 & 1 == 1).then(|| modes[pick(b, modes.len())]),
            precision: PRECISIONS[pick(b >> 8, 3)],
            fill: Fill::ALL[pick(b >> 16, 6)],
            offset: pick(c >> 16, 5),
            gap: pick(c >> 20, 40),
            swizzled: d >> 30 == 0,
            ..Case::new(near[pick(c, 11)], near[pick(d, 11)])
        };
        Runner::new(case).check();
    });
}

#[test]
fn shapes_of_several_panels_and_chunks() {
    for (rows, cols) in [(600, 48), (272, 1056), (48, 1200), (520, 530)] {
        for (tile, global) in [
            (Tile::Row16, GlobalScale::PerTensor),
            (Tile::Row16, GlobalScale::PerRow),
            (Tile::Square16, GlobalScale::PerTensor),
        ] {
            Runner::new(Case { mode: Mode { tile, global, ..Mode::default() }, ..Case::new(rows, cols) }).check();
        }
    }
}

#[test]
fn rows_further_apart_than_long_and_starting_anywhere() {
    for offset in 0..9 {
        for precision in PRECISIONS {
            Runner::new(Case { precision, offset, gap: 2 * offset + 1, ..Case::new(35, 70) }).check();
        }
    }
}

#[test]
fn amaxes_that_are_given_and_wrong() {
    modes().into_par_iter().for_each(|mode| {
        for amax in [0.0, 1e-45, 1e-30, 0.01, 1e30, f32::MAX, f32::INFINITY, f32::NAN] {
            Runner::new(Case { mode, amax: Some(amax), fill: Fill::Wide, ..Case::new(32, 48) }).check();
        }
    });
}

#[test]
fn directions_that_differ_in_everything() {
    for fill in [Fill::Normal, Fill::Special] {
        modes().into_par_iter().enumerate().for_each(|(i, mode)| {
            let col_mode = Some(modes()[(7 * i + 11) % modes().len()]);
            Runner::new(Case { mode, col_mode, fill, ..Case::new(48, 80) }).check();
        });
    }
}

#[test]
fn the_number_of_threads_does_not_matter() {
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| Runner::new(Case::new(700, 700)).check());
    }
}

#[test]
fn scales_swizzled_on_the_way() {
    // Ragged blocks; whole ones with padding of rows, of columns and of both; none.
    for (rows, cols) in [(130, 100), (300, 1040), (16, 16), (144, 64), (256, 80), (272, 1056), (128, 64), (256, 1024)] {
        for (tile, global) in [
            (Tile::Row16, GlobalScale::PerTensor),
            (Tile::Row16, GlobalScale::PerRow),
            (Tile::Square16, GlobalScale::PerTensor),
        ] {
            let mode = Mode { tile, global, ..Mode::default() };
            Runner::new(Case { mode, swizzled: true, ..Case::new(rows, cols) }).check();
        }
    }
}

#[test]
fn every_scale_byte_decodes() {
    runner::check_scale_bytes();
}

#[test]
fn products_of_any_bytes() {
    for (m, n, k) in [(1, 1, 1), (3, 9, 33), (7, 20, 48), (13, 40, 300)] {
        runner::check_product(m, n, k);
    }
}

#[test]
fn layouts_there_and_back() {
    runner::check_layouts();
}

#[test]
fn amax_of_tensor_rows_and_columns() {
    for fill in Fill::ALL {
        for precision in PRECISIONS {
            for (rows, cols) in [(1, 1), (3, 17), (64, 64), (600, 530)] {
                runner::check_amax(&Case { precision, fill, ..Case::new(rows, cols) });
            }
        }
    }
}

#[test]
fn the_transform_along_rows_alone_and_in_quantization() {
    for precision in PRECISIONS {
        for fill in [Fill::Normal, Fill::Special] {
            runner::check_hadamard(&Case { precision, fill, gap: 3, ..Case::new(37, 96) });
        }
    }
}
