//! Operations that statistics of inputs decide about are the rules as written, however they are
//! divided.

use nvfp4_kernels::weighted::{self, Weighting};
use nvfp4_kernels::{Input, gptq};
use nvfp4_spec::gptq::{DAMPING, Order};
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::weighted::{by_columns, by_hessian};
use nvfp4_spec::{BLOCK, Mode, Precision, Profile, ScaleRule, e2m1};

/// Numbers from -1 to 1.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / 8388608.0 - 1.0
    };
    (0..count).map(next).collect()
}

/// The mean of `x·xᵀ` over generated inputs that depend on each other.
fn hessian(columns: usize, seed: u32) -> Vec<f32> {
    let tokens = 2 * columns;
    let (own, shared) = (numbers(tokens * columns, seed), numbers(tokens * 4, seed + 1));
    let x = |t: usize, c: usize| f64::from(0.4 * own[t * columns + c] + shared[t * 4 + c % 4]) * (1 + c % 3) as f64;
    let mean = |i: usize, j: usize| (0..tokens).map(|t| x(t, i) * x(t, j)).sum::<f64>() / tokens as f64;
    (0..columns * columns).map(|at| mean(at / columns, at % columns) as f32).collect()
}

fn mode(rule: ScaleRule) -> Mode {
    Mode { profile: Profile::ModelOpt, rule, ..Mode::default() }
}

#[test]
fn weighted_rows_are_those_of_the_rules() {
    let (rows, cols) = (9, 48);
    let (mut values, weights) = (numbers(rows * cols, 1), numbers(cols, 2).iter().map(|w| w * w).collect::<Vec<f32>>());
    // Blocks of zeros, tiny ones, ones with an outlier, and what is not finite.
    values[..16].fill(0.0);
    values[16..32].iter_mut().for_each(|x| *x *= 1e-9);
    values[40] = 1.0;
    values[100] = -0.0;
    (values[200], values[250]) = (f32::NAN, f32::NEG_INFINITY);
    let hessians: Vec<f32> = (0..cols / BLOCK).flat_map(|i| hessian(BLOCK, i as u32 + 3)).collect();
    let x = Input::new((&values[..]).into(), rows, cols).unwrap();
    for (rule, weighting) in
        [(ScaleRule::Mse, Weighting::Columns(&weights)), (ScaleRule::ModelOptMse, Weighting::Hessians(&hessians))]
    {
        let (mode, mut codes, mut scales) = (mode(rule), vec![0; rows * cols / 2], vec![0; rows * cols / BLOCK]);
        weighted::quantize(&x, 1.0, &mode, weighting, &mut codes, &mut scales).unwrap();
        let scaling = Scaling::new(1.0, &mode, Precision::F32);
        for (i, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let at = i % (cols / BLOCK);
            let expected = match weighting {
                Weighting::Columns(weights) => by_columns(block, &weights.as_chunks().0[at], &scaling),
                Weighting::Hessians(all) => by_hessian(block, &all.as_chunks().0.as_chunks().0[at], &scaling),
            };
            let found: Vec<u8> = (0..BLOCK).map(|j| e2m1::code_at(&codes, i * BLOCK + j)).collect();
            assert_eq!((scales[i], &found[..]), (expected.scale, &expected.codes[0][..]), "{mode:?}, block {i}");
        }
        assert!(
            weighted::quantize(&x, 1.0, &mode, Weighting::Columns(&weights[1..]), &mut codes, &mut scales).is_err()
        );
    }
}

#[test]
fn factors_and_codes_are_those_of_the_rules() {
    for (rows, cols) in [(40, 16), (3, 80), (33, 208)] {
        let (values, hessian) = (numbers(rows * cols, 5), hessian(cols, 6));
        let (x, mode) = (Input::new((&values[..]).into(), rows, cols).unwrap(), mode(ScaleRule::Six));
        let scaling = Scaling::new(1.0, &mode, Precision::F32);
        let scales: Vec<u8> = (0..rows * cols / BLOCK).map(|i| 0x70 + (i * 7 % 15) as u8).collect();
        for by in [Order::Natural, Order::Activation] {
            let rule = nvfp4_spec::gptq::factor(&hessian, cols, DAMPING, by).unwrap();
            let factor = gptq::factor(hessian.clone(), cols, DAMPING, by).unwrap().unwrap();
            assert!(rule == factor, "the factor of {cols} columns, {by:?}");
            let mut codes = vec![0; rows * cols / 2];
            gptq::codes(&x, 1.0, &mode, &factor, &scales, &mut codes).unwrap();
            for r in 0..rows {
                let scales = &scales[r * cols / BLOCK..][..cols / BLOCK];
                let expected = nvfp4_spec::gptq::codes(&values[r * cols..][..cols], scales, &scaling, &rule);
                let found: Vec<u8> = (0..cols).map(|c| e2m1::code_at(&codes, r * cols + c)).collect();
                assert_eq!(found, expected, "row {r} of {rows} × {cols}, {by:?}");
            }
        }
        let mut broken = hessian.clone();
        broken[1] = 1e9;
        assert!(gptq::factor(broken, cols, DAMPING, Order::Natural).unwrap().is_none());
        assert!(gptq::factor(hessian[1..].to_vec(), cols, DAMPING, Order::Natural).is_err());
    }
}
