//! FP8 and MXFP8 in every implementation that this machine has, against the scalar one, bit for
//! bit: all scalings, all input types, awkward shapes, strides and values.

#[allow(dead_code)] // another test uses the rest
mod runner;

use nvfp4_kernels::Implementation;
use nvfp4_kernels::fp8::dequantize::dequantize_row;
use nvfp4_spec::Precision;
use nvfp4_spec::fp8::{AmaxRule, Format, Mode, Scales, Scaling, Tile, View};
use rayon::prelude::*;
use runner::fp8::{check_decoded, modes};
use runner::{Case, Fill, Runner};

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

#[test]
fn every_mode_on_every_kind_of_values() {
    modes().into_par_iter().for_each(|mode| {
        for fill in Fill::ALL {
            for precision in PRECISIONS {
                Runner::new(Case { precision, fill, ..Case::new(150, 290) }).check_fp8(&mode);
            }
        }
    });
}

#[test]
fn ragged_shapes_in_every_mode() {
    let shapes = [(1, 1), (1, 31), (2, 33), (5, 129), (31, 127), (33, 16), (129, 1), (130, 47), (257, 40), (3, 1000)];
    modes().into_par_iter().for_each(|mode| {
        for (i, (rows, cols)) in shapes.into_iter().enumerate() {
            let fill = if i % 2 == 0 { Fill::Special } else { Fill::Wide };
            Runner::new(Case { precision: PRECISIONS[i % 3], fill, ..Case::new(rows, cols) }).check_fp8(&mode);
        }
    });
}

#[test]
fn every_row_length_up_to_300() {
    let scalings = [Scaling::Tensor { scale: 3.0 }, Scaling::Row128(AmaxRule::CURRENT), Scaling::Mx, Scaling::MxSquare];
    (1..=300usize).into_par_iter().for_each(|n| {
        for scaling in scalings {
            let mode = Mode { format: Format::ALL[n % 2], scaling };
            let precision = PRECISIONS[n % 3];
            Runner::new(Case { precision, fill: Fill::Wide, ..Case::new(2, n) }).check_fp8(&mode);
            Runner::new(Case { precision, fill: Fill::Wide, ..Case::new(n, 2) }).check_fp8(&mode);
        }
    });
}

#[test]
fn shapes_of_several_panels_and_chunks() {
    modes().into_par_iter().for_each(|mode| {
        Runner::new(Case { fill: Fill::Wide, ..Case::new(390, 1100) }).check_fp8(&mode);
        Runner::new(Case { precision: Precision::F32, fill: Fill::Special, ..Case::new(1100, 130) }).check_fp8(&mode);
    });
    // Chunks of MXFP8 have 4096 columns.
    for scaling in [Scaling::Mx, Scaling::MxSquare] {
        Runner::new(Case { fill: Fill::Wide, ..Case::new(70, 4200) })
            .check_fp8(&Mode { format: Format::E4m3, scaling });
    }
}

#[test]
fn rows_further_apart_than_long_and_starting_anywhere() {
    for offset in 0..9 {
        for (precision, mode) in PRECISIONS.into_iter().zip(modes().into_iter().step_by(5)) {
            Runner::new(Case { precision, offset, gap: 2 * offset + 1, ..Case::new(140, 70) }).check_fp8(&mode);
        }
    }
}

/// Where products may be NaN or change their sign.
#[test]
fn scales_that_are_not_positive_numbers() {
    for scale in [0.0, -0.0, -2.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        for format in Format::ALL {
            let mode = Mode { format, scaling: Scaling::Tensor { scale } };
            Runner::new(Case { fill: Fill::Special, ..Case::new(40, 70) }).check_fp8(&mode);
        }
    }
}

/// Every boundary between two codes and its neighbours, of both signs, at several scales.
#[test]
fn ties_of_both_formats() {
    let mut values = Vec::new();
    for format in Format::ALL {
        for code in 0..0x7F {
            let middle = (format.decode(code) + format.decode(code + 1)) / 2.0;
            if middle.is_finite() {
                values
                    .extend([middle, middle.next_up(), middle.next_down()].map(|x| if code % 2 == 0 { x } else { -x }));
            }
        }
    }
    let cols = values.len();
    for power in [-140, -126, -60, 0, 3, 100] {
        let scaled: Vec<f32> = values.iter().map(|x| (f64::from(*x) * 2f64.powi(power)) as f32).collect();
        for precision in PRECISIONS {
            let runner = Runner::of(Case { precision, ..Case::new(1, cols) }, scaled.clone());
            modes().iter().for_each(|mode| runner.check_fp8(mode));
            let undo = Scaling::Tensor { scale: (2f64.powi(-power) as f32).min(f32::MAX) };
            for format in Format::ALL {
                runner.check_fp8(&Mode { format, scaling: undo });
            }
        }
    }
}

/// Every bf16 and f16 number in blocks of its own size.
#[test]
fn every_16_bit_input() {
    for precision in [Precision::Bf16, Precision::F16] {
        let values = (0..=u16::MAX).map(|bits| match precision {
            Precision::Bf16 => half::bf16::from_bits(bits).to_f32(),
            _ => half::f16::from_bits(bits).to_f32(),
        });
        let runner = Runner::of(Case { precision, ..Case::new(256, 256) }, values.collect());
        modes().par_iter().for_each(|mode| runner.check_fp8(mode));
    }
}

#[test]
fn every_code_with_every_scale_decodes() {
    let (rows, cols) = (256, 256);
    let codes: Vec<u8> = (0..rows * cols).map(|i| ((i % 256) ^ (i / 256)) as u8).collect();
    let numbers = [0.0, -1.5, 1e-45, 1e-38, 0.1, 448.0, 1e35, 2e36, f32::MAX, f32::INFINITY, f32::NAN];
    for format in Format::ALL {
        for tile in Tile::ALL {
            let count = tile.scale_count(rows, cols).unwrap();
            let bytes: Vec<u8> = (0..count).map(|i| (i + i / 256) as u8).collect();
            check_decoded(&View { rows, cols, format, tile, codes: &codes, scales: Scales::E8m0(&bytes) });
            for shift in 0..numbers.len() {
                let scales: Vec<f32> = (0..count).map(|i| numbers[(i + shift) % numbers.len()]).collect();
                check_decoded(&View { rows, cols, format, tile, codes: &codes, scales: Scales::F32(&scales) });
            }
            let quiet = f32::from_bits(0x7FFF_FFFF);
            let scales = vec![quiet; count];
            check_decoded(&View { rows, cols, format, tile, codes: &codes, scales: Scales::F32(&scales) });
        }
    }
}

/// One row by itself: every code under every scale, in tiles of any width.
#[test]
fn a_row_of_any_width_of_tiles_decodes() {
    let numbers = [0.0, -1.5, 1e-45, 1e-38, 0.1, 448.0, 1e35, f32::INFINITY, f32::NAN, 2e36, f32::MAX];
    let codes: Vec<u8> = (0..=u8::MAX).cycle().take(1000).collect();
    for (format, implementation) in
        Format::ALL.into_iter().flat_map(|format| Implementation::available().into_iter().map(move |i| (format, i)))
    {
        for width in [1, 2, 15, 16, 17, 32, 128, 250, 1000, usize::MAX] {
            // The last two are too large for vectors, so that whole rows go both ways.
            for numbers in [&numbers[..9], &numbers] {
                let scales: Vec<f32> = numbers.iter().copied().cycle().take(1000usize.div_ceil(width)).collect();
                let mut out = vec![77.0; codes.len()];
                let wide = width.try_into().unwrap();
                dequantize_row(implementation, format, &codes, wide, &scales, &mut out).unwrap();
                for (i, (&code, found)) in codes.iter().zip(out).enumerate() {
                    let expected = format.decode(code) * scales[i / width];
                    let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                    assert!(same, "{implementation}, {format:?}, width {width}, at {i}: {found}, not {expected}");
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_does_not_matter() {
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| modes().iter().for_each(|mode| Runner::new(Case::new(400, 200)).check_fp8(mode)));
    }
}
