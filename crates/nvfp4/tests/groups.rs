//! Matrices in groups on a GPU, quantized and multiplied in one launch, against each group by itself on the CPU. Without a GPU every test
//! is skipped.
#![cfg(feature = "cuda")]

mod on_gpu;

use half::bf16;
use nvfp4::cuda::{Gpu, GroupedTensor, Groups, Input, Offset, Options, Product, Randomness, Values};
use nvfp4::format::Family;
use nvfp4::{Directions, QuantSpec, Quantizer, Rounding, Side, TensorRef};
use nvfp4_spec::gemm::Accumulator;
use on_gpu::{check, gpu};
use std::sync::Arc;

/// Of a matrix; kernels for whole panels take the second.
const WIDTHS: [usize; 2] = [208, 256];
const SIZES: [usize; 7] = [0, 5, 128, 0, 300, 77, 144];
const SEED: u64 = 5;
const OFFSET: u64 = 12;

fn values(len: usize, seed: usize) -> Vec<bf16> {
    let value = |i: usize| {
        let size = 2f32.powi((i / 4000 * 7 + seed) as i32 % 9 - 4);
        bf16::from_f32((((i * 7919 + seed * 104729) % 2003) as f32 / 1001.0 - 1.0) * size)
    };
    (0..len).map(value).collect()
}

/// Groups of these sizes: known now, and read from the GPU's memory.
fn both_kinds(gpu: &Gpu, sizes: &[usize]) -> [Arc<Groups>; 2] {
    let in_memory: Vec<u64> = sizes.iter().map(|&size| size as u64).collect();
    let in_memory = gpu.upload(&in_memory).unwrap();
    [gpu.groups(sizes).unwrap(), gpu.groups_in_memory(in_memory.slice(), sizes.iter().sum()).unwrap()]
}

fn quantizer(text: &str, directions: Directions) -> Quantizer {
    Quantizer::with_scales(&text.parse::<QuantSpec>().unwrap(), directions, |_| Some(371.3)).unwrap()
}

fn quantize(gpu: &Gpu, quantizer: &Quantizer, x: &[bf16], groups: &Arc<Groups>, cols: usize) -> GroupedTensor {
    let device = gpu.upload(x).unwrap();
    let input = Input::new(Values::Bf16(device.slice()), x.len() / cols, cols).unwrap();
    let stochastic = quantizer.rounding() == Rounding::Stochastic;
    let randomness = stochastic.then_some(Randomness { seed: SEED, offset: Offset::Value(OFFSET) });
    gpu.quantize_groups(quantizer, &input, groups, &Options { randomness, ..Default::default() }).unwrap().tensor
}

/// A group on the CPU, in one direction.
fn on_cpu(text: &str, side: Side, x: &[bf16], cols: usize, number: usize) -> nvfp4::Direction {
    let quantizer = quantizer(text, if side == Side::Row { Directions::Row } else { Directions::Column });
    let offset = OFFSET + 2 * number as u64;
    let stochastic = quantizer.rounding() == Rounding::Stochastic;
    let options = nvfp4::Options {
        randomness: stochastic.then_some(nvfp4::Randomness::At { seed: SEED, offset }),
        ..Default::default()
    };
    let tensor = quantizer.quantize_with(&TensorRef::new(x, &[x.len() / cols, cols]).unwrap(), &options).unwrap();
    tensor.direction(side).unwrap().clone()
}

#[test]
fn every_group_has_the_bits_of_a_tensor_by_itself() {
    let Some(gpu) = gpu() else { return };
    for text in [
        "nvfp4",
        "nvfp4(16x16)",
        "nvfp4(hadamard)",
        "nvfp4(row-scaled)",
        "nvfp4(row-scaled) / nvfp4(hadamard, stochastic)",
        "nvfp4(stochastic) / nvfp4(hadamard, stochastic)",
        "nvfp4(row-scaled, stochastic) / nvfp4(16x16)",
        "nvfp4(4over6-mae-strict-256) / nvfp4(hadamard)",
        "nvfp4(16x16, 4over6-mse-strict-256)",
        "fp8(e4m3)",
        "fp8(e5m2, pow2-scale)",
        "fp8-delayed(e4m3)",
        "fp8-block(e4m3)",
        "fp8-block(e4m3, 128x128)",
        "mxfp8(e4m3)",
        "mxfp8(e4m3, 32x32)",
        "mxfp8 / nvfp4(hadamard)",
    ] {
        for directions in [Directions::Row, Directions::Column, Directions::Both] {
            for (cols, groups) in WIDTHS.iter().flat_map(|cols| both_kinds(&gpu, &SIZES).map(|groups| (*cols, groups)))
            {
                check_bits(&gpu, text, directions, cols, &groups);
            }
        }
    }
}

fn check_bits(gpu: &Gpu, text: &str, directions: Directions, cols: usize, groups: &Arc<Groups>) {
    let x = values(groups.rows() * cols, 3);
    let got = quantize(gpu, &quantizer(text, directions), &x, groups, cols).to_host(gpu).unwrap();
    let mut rest = &x[..];
    for (number, (size, got)) in SIZES.iter().zip(got).enumerate() {
        let (mine, after) = rest.split_at(size * cols);
        rest = after;
        let what = format!("{text}, {directions:?}, {cols} columns, group {number}");
        for (side, got) in [(Side::Row, got.row), (Side::Column, got.col)] {
            assert_eq!(got.is_some(), directions.has(side), "{what}");
            let Some(got) = got else { continue };
            // MXFP8 lies as the matrix does; other columns are padded.
            let padded = side == Side::Column && got.family() != Family::Mxfp8;
            let rows = if padded { size.next_multiple_of(128) } else { *size };
            let mut mine = mine.to_vec();
            mine.resize(rows * cols, bf16::ZERO);
            assert_eq!(got, on_cpu(text, side, &mine, cols, number), "{what}, {side:?}");
        }
    }
}

/// Every product of a layer of experts, and an expert without tokens.
#[test]
fn products_of_groups_are_within_the_bound() {
    let Some(gpu) = gpu() else { return };
    for specs in [
        ["nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)"],
        ["nvfp4(row-scaled, hadamard)", "nvfp4(16x16)", "nvfp4(row-scaled, hadamard)"],
        ["fp8(e4m3)", "fp8(e4m3)", "fp8(e5m2)"],
        ["fp8-block(e4m3)", "fp8-block(e4m3, 128x128)", "fp8-block(e4m3)"],
        ["mxfp8(e4m3)", "mxfp8(e4m3, 32x32)", "mxfp8(e5m2)"],
    ] {
        check_layer(&gpu, specs, &SIZES, (256, WIDTHS[0]), Accumulator::Precise);
    }
}

const FP8: [[&str; 3]; 4] = [
    ["fp8(e4m3)", "fp8(e4m3)", "fp8(e5m2)"],
    ["fp8(e5m2)", "fp8(e4m3)", "fp8(e5m2)"],
    ["fp8-block(e4m3)", "fp8-block(e4m3, 128x128)", "fp8-block(e4m3)"],
    ["fp8-block(e5m2)", "fp8-block(e4m3)", "fp8-block(e5m2)"],
];

/// FP8's tensor cores add in fewer bits.
#[test]
fn reduced_products_of_groups_are_within_their_bound() {
    let Some(gpu) = gpu() else { return };
    for specs in FP8 {
        for (n, k) in [(256, WIDTHS[0]), (400, 512), (48, 144)] {
            check_layer(&gpu, specs, &SIZES, (n, k), Accumulator::Split);
        }
        check_layer(&gpu, specs, &[600, 0, 1, 513], (640, 1152), Accumulator::Split);
    }
}

/// Few bits are enough for sums of small whole numbers, whatever the scale of 128 of them is.
#[test]
fn reduced_products_of_whole_numbers_are_exact() {
    let Some(gpu) = gpu() else { return };
    let whole = |rows: usize, cols: usize, seed: usize| -> Vec<bf16> {
        let value = |i: usize| {
            let (row, col) = (i / cols, i % cols);
            let size = 1 << ((row / 128 + col / 128 * 3 + seed) % 5);
            bf16::from_f32((((i * 7919 + seed * 104729) % 5) as i32 - 2) as f32 * size as f32)
        };
        (0..rows * cols).map(value).collect()
    };
    let sizes = [256, 0, 384, 128];
    let (tokens, n, k) = (sizes.iter().sum::<usize>(), 384, 640);
    let data = [whole(tokens, k, 1), whole(4 * n, k, 2), whole(tokens, n, 3)];
    for specs in &FP8[2..] {
        for (what, got, a, b) in layer(&gpu, *specs, &data, &sizes, (n, k), Accumulator::Split) {
            let expected: Vec<f32> = nvfp4::matmul(&a, &b, &nvfp4::Product::default()).unwrap();
            assert!(got == expected, "{what}");
        }
    }
}

/// With many tokens all operands are decoded in one launch.
#[test]
fn products_of_large_groups_are_within_the_bound() {
    let Some(gpu) = gpu() else { return };
    let specs = ["nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)"];
    check_layer(&gpu, specs, &[1024, 0, 2000], (2048, 2048), Accumulator::Precise);
}

fn check_layer(gpu: &Gpu, specs: [&str; 3], sizes: &[usize], (n, k): (usize, usize), accumulator: Accumulator) {
    let (tokens, experts) = (sizes.iter().sum::<usize>(), sizes.len());
    let data = [values(tokens * k, 1), values(experts * n * k, 2), values(tokens * n, 3)];
    for (what, got, a, b) in layer(gpu, specs, &data, sizes, (n, k), accumulator) {
        check(&got, &a, &b, accumulator, &what);
    }
}

/// The three products of a layer, group after group, with sizes known and in the GPU's memory: what
/// it is, the outputs, and the operands.
fn layer(
    gpu: &Gpu,
    [input, weight, gradient]: [&str; 3],
    [x, w, dy]: &[Vec<bf16>; 3],
    sizes: &[usize],
    (n, k): (usize, usize),
    accumulator: Accumulator,
) -> Vec<(String, Vec<f32>, nvfp4::Direction, nvfp4::Direction)> {
    let weights = gpu.groups(&vec![n; sizes.len()]).unwrap();
    let mut all = Vec::new();
    for groups in both_kinds(gpu, sizes) {
        let spec = |text: &str| quantizer(text, Directions::Both);
        let x = quantize(gpu, &spec(input), x, &groups, k);
        let w = quantize(gpu, &spec(weight), w, &weights, k);
        let dy = quantize(gpu, &spec(gradient), dy, &groups, n);
        for ((a, a_side), (b, b_side)) in [
            ((&x, Side::Row), (&w, Side::Row)),
            ((&dy, Side::Row), (&w, Side::Column)),
            ((&dy, Side::Column), (&x, Side::Column)),
        ] {
            // Groups along K have whole tiles of 128.
            if b_side == Side::Column && a_side == Side::Row && !n.is_multiple_of(128) {
                continue;
            }
            let pick = |tensor: &GroupedTensor, side| -> Vec<nvfp4::Direction> {
                let groups = tensor.to_host(gpu).unwrap().into_iter();
                groups.map(|group| if side == Side::Row { group.row } else { group.col }.unwrap()).collect()
            };
            let (left, right) = (pick(a, a_side), pick(b, b_side));
            let len = left.iter().zip(&right).map(|(a, b)| a.rows() * b.rows()).sum();
            let mut out = gpu.upload(&vec![f32::NAN; len]).unwrap();
            let product = Product { accumulator, ..Default::default() };
            gpu.matmul_groups((a, a_side), (b, b_side), &product, out.slice_mut()).unwrap();
            let mut got: Vec<f32> = gpu.stream().to_host(out.slice()).unwrap();
            for (number, (a, b)) in left.into_iter().zip(right).enumerate() {
                let what =
                    format!("{input}, {weight}, {gradient}: {a_side:?} × {b_side:?}, group {number} of {sizes:?}");
                let after = got.split_off(a.rows() * b.rows());
                all.push((what, std::mem::replace(&mut got, after), a, b));
            }
        }
    }
    all
}

#[test]
fn groups_stay_within_the_matrix() {
    let Some(gpu) = gpu() else { return };
    let sizes = gpu.upload(&[3u64, u64::MAX, 4, 1 << 40, 7]).unwrap();
    let groups = gpu.groups_in_memory(sizes.slice(), 20).unwrap();
    assert_eq!(groups.read_sizes(gpu.stream()).unwrap(), [3, 0, 4, 13, 0]);
    assert_eq!(groups.padded_rows(), 640);
    let many = vec![3; 700];
    let groups = gpu.groups(&many).unwrap();
    assert_eq!((groups.rows(), groups.padded_rows()), (2100, 700 * 128));
}
