//! The smallest shapes of every path, in buffers of exactly their size: valgrind reports any access
//! out of bounds.
//!
//! `cargo test -p nvfp4-kernels --test memory` runs it plainly; `.ci/run` runs the same program
//! under valgrind.

#[allow(dead_code)] // another test uses the rest
mod runner;

use nvfp4_spec::{Bound, ErrorPath, GlobalScale, Metric, Mode, Precision, ScaleRule, Tile};
use runner::{Case, Fill, Runner};

#[test]
fn small_shapes_touch_their_own_memory_only() {
    let four_over_six = ScaleRule::FourOverSix { metric: Metric::Mse, error: ErrorPath::Strict, bound: Bound::E256 };
    let plain = Mode::default();
    let modes = [
        plain,
        Mode { global: GlobalScale::PerRow, ..plain },
        Mode { tile: Tile::Square16, ..plain },
        Mode { rule: four_over_six, ..plain },
    ];
    for mode in modes {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            for (rows, cols) in [(1, 1), (3, 17), (16, 16), (17, 33), (32, 48)] {
                Runner::new(Case { mode, precision, fill: Fill::Special, ..Case::new(rows, cols) }).check();
            }
        }
    }
    Runner::new(Case { offset: 3, gap: 5, swizzled: true, ..Case::new(19, 35) }).check();
    // Panels of the GPU that lie within the matrix.
    for mode in [plain, Mode { tile: Tile::Square16, rule: four_over_six, ..plain }] {
        Runner::new(Case { mode, ..Case::new(128, 64) }).check();
    }
    for (m, n, k) in [(1, 1, 1), (3, 9, 33), (7, 20, 48)] {
        runner::check_product(m, n, k);
    }
    for mode in runner::fp8::modes().iter().step_by(3) {
        for (precision, (rows, cols)) in [
            (Precision::F32, (1, 1)),
            (Precision::Bf16, (3, 33)),
            (Precision::F16, (17, 31)),
            (Precision::Bf16, (130, 20)),
            // Whole units and whole panels of the GPU.
            (Precision::Bf16, (34, 48)),
            (Precision::F16, (128, 128)),
        ] {
            Runner::new(Case { precision, fill: Fill::Special, ..Case::new(rows, cols) }).check_fp8(mode);
        }
    }
    runner::check_hadamard(&Case::new(5, 48));
    runner::check_amax(&Case::new(5, 37));
    runner::check_layouts();
}
