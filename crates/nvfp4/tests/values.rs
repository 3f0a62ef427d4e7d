//! Directions that are written as values for a product that comes right after: the values of their codes, and products with the same bits.
//! Without a GPU every test is skipped.
#![cfg(feature = "cuda")]

mod on_gpu;

use half::bf16;
use nvfp4::cuda::{
    Direction, DirectionValues, Factor, Gpu, Input, Observed, Offset, Options, Product, Randomness, Values,
};
use nvfp4::{Accumulator, Directions, QuantSpec, Quantizer, Rounding, Side, TensorRef};
use nvfp4_kernels::gemm::cuda::{By, gemm_by};
use nvfp4_spec::{e2m1, e4m3};
use on_gpu::{check, gpu};

fn elements(len: usize, seed: usize) -> Vec<bf16> {
    let value = |i: usize| {
        let size = 2f32.powi((i / 16 * 7 + seed) as i32 % 9 - 4);
        bf16::from_f32((((i * 7919 + seed * 104729) % 2003) as f32 / 1001.0 - 1.0) * size)
    };
    (0..len).map(value).collect()
}

fn quantizer(spec: &str, directions: Directions) -> Quantizer {
    Quantizer::new(spec.parse::<QuantSpec>().unwrap(), directions).unwrap()
}

fn quantized(gpu: &Gpu, x: &[bf16], cols: usize, spec: &str, values: Option<Directions>) -> Observed {
    let device = gpu.upload(x).unwrap();
    let input = Input::new(Values::Bf16(device.slice()), x.len() / cols, cols).unwrap();
    let quantizer = quantizer(spec, Directions::Both);
    let stochastic = quantizer.rounding() == Rounding::Stochastic;
    let randomness = stochastic.then_some(Randomness { seed: 5, offset: Offset::Value(12) });
    quantizer.observe_on(gpu, &input, &Options { randomness, values, ..Default::default() }).unwrap()
}

/// The bits of a direction's values without its global scale, times 2⁻⁷.
fn decoded(gpu: &Gpu, direction: &Direction) -> Vec<u16> {
    let Direction::Nvfp4(d) = direction else { panic!("NVFP4") };
    let host = |slice| gpu.stream().to_host::<u8>(slice).unwrap();
    let (codes, scales) = (host(d.codes().slice()), host(d.scales().slice()));
    let value = |at: usize| {
        let code = codes[at / 2] >> (4 * (at % 2)) & 15;
        bf16::from_f32(e2m1::decode(code) * e4m3::decode(scales[at / 16]) / 128.0).to_bits()
    };
    (0..2 * codes.len()).map(value).collect()
}

fn bits(gpu: &Gpu, values: &DirectionValues) -> Vec<u16> {
    gpu.stream().to_host(values.values().slice()).unwrap().into_iter().map(bf16::to_bits).collect()
}

/// Whole panels and ragged ones, few and many, tiles of both shapes, blocks that are computed by the rules.
#[test]
fn values_are_those_of_the_codes() {
    let Some(gpu) = gpu() else { return };
    let specs = [
        "nvfp4 / nvfp4(hadamard)",
        "nvfp4(16x16)",
        "nvfp4(stochastic) / nvfp4(hadamard, stochastic)",
        "nvfp4(4over6-mae-strict-256)",
    ];
    for (rows, cols) in [(256, 320), (160, 208), (2304, 4096)] {
        let mut x = elements(rows * cols, 3);
        // A block of zeros, and one of nothing but the smallest number.
        x[16..32].fill(bf16::ZERO);
        x[32..48].fill(bf16::from_bits(1));
        for spec in specs {
            let codes = quantized(&gpu, &x, cols, spec, None).tensor;
            let many = rows * cols > 1 << 20;
            let all = [Directions::Both, Directions::Row, Directions::Column];
            for &directions in if many { &all[..1] } else { &all[..] } {
                let made = quantized(&gpu, &x, cols, spec, Some(directions));
                for side in [Side::Row, Side::Column] {
                    let expected = decoded(&gpu, codes.direction(side).unwrap());
                    let got = match made.factor(side).unwrap() {
                        Factor::Values(values) => bits(&gpu, values),
                        Factor::Direction(direction) => decoded(&gpu, direction),
                    };
                    assert_eq!(matches!(made.factor(side).unwrap(), Factor::Values(_)), directions.has(side));
                    assert!(got == expected, "{spec}, {rows} × {cols}, {side:?} of {directions:?}");
                }
            }
        }
    }
}

/// An amax that a pass finds by parts is that of the CPU, and so is everything after it.
#[test]
fn matrices_of_every_size_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (rows, cols) in [(16, 16), (128, 64), (144, 80), (256, 320), (33, 48), (1024, 512)] {
        let x = elements(rows * cols, 7);
        for spec in ["nvfp4 / nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4"] {
            if rows % 16 != 0 && spec.contains("hadamard") {
                continue; // the transform runs along whole blocks
            }
            let got = quantized(&gpu, &x, cols, spec, None).tensor.to_host(&gpu).unwrap();
            let tensor = TensorRef::new(&x[..], &[rows, cols]).unwrap();
            assert_eq!(got, quantizer(spec, Directions::Both).quantize(&tensor).unwrap(), "{spec}, {rows} × {cols}");
        }
    }
}

/// Two maxima of one pass do not meet: one column alone has numbers, which the transform adds up.
#[test]
fn the_amax_after_the_transform_is_the_same_each_time() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols) = (16, 256);
    for column in [70, 130, 250] {
        let mut x = vec![bf16::ZERO; rows * cols];
        x[column..].iter_mut().step_by(cols).for_each(|x| *x = bf16::ONE);
        let tensor = TensorRef::new(&x[..], &[rows, cols]).unwrap();
        let stored = |d: &nvfp4::Direction| d.nvfp4().unwrap().stored().to_vec();
        let expected = quantizer("nvfp4(hadamard)", Directions::Both).quantize(&tensor).unwrap();
        let expected = [Side::Row, Side::Column].map(|side| stored(expected.direction(side).unwrap()));
        assert!(expected[0] != expected[1]);
        for round in 0..1000 {
            let made = quantized(&gpu, &x, cols, "nvfp4(hadamard)", None).tensor;
            let got = [Side::Row, Side::Column].map(|side| {
                let Direction::Nvfp4(d) = made.direction(side).unwrap() else { panic!("NVFP4") };
                gpu.stream().to_host(d.stored().slice()).unwrap()
            });
            assert_eq!(got, expected, "round {round}, column {column}");
        }
    }
}

#[test]
fn products_of_values_have_the_bits_of_products_of_decoded_codes() {
    let Some(gpu) = gpu() else { return };
    // The last one is not aligned for the library: another way computes it, within the bound.
    for (m, n, k) in [(256, 192, 320), (128, 64, 512), (96, 33, 64)] {
        let (x, w) = (elements(m * k, 1), elements(n * k, 2));
        let made = |values| (quantized(&gpu, &x, k, "nvfp4", values), quantized(&gpu, &w, k, "nvfp4(16x16)", values));
        let (left, right) = made(None);
        let (left_values, right_values) = made(Some(Directions::Row));
        let (a, b) = (left.tensor.direction(Side::Row).unwrap(), right.tensor.direction(Side::Row).unwrap());
        let (Direction::Nvfp4(a_codes), Direction::Nvfp4(b_codes)) = (a, b) else { panic!("NVFP4") };
        let bias = gpu.upload(&elements(n, 3)).unwrap();
        let product = Product { alpha: 0.75, bias: Some(Values::Bf16(bias.slice())), ..Product::default() };
        let mut out = gpu.alloc::<bf16>(m * n).unwrap();
        let (operands, memory) = ((a_codes.view(), b_codes.view()), nvfp4::cuda::Pool);
        let by_library = gemm_by(gpu.stream(), By::Library, operands, &product, out.slice_mut(), &memory);
        let expected = by_library.is_ok().then(|| gpu.stream().to_host(out.slice()).unwrap());
        assert_eq!(expected.is_some(), n % 8 == 0 && gpu.stream().device().capability().0 < 10);
        let (a_values, b_values) = (left_values.factor(Side::Row).unwrap(), right_values.factor(Side::Row).unwrap());
        for (what, a, b) in [
            ("values", a_values, b_values),
            ("values and codes", a_values, b.into()),
            ("codes and values", a.into(), b_values),
        ] {
            gpu.matmul(a, b, &product, out.slice_mut()).unwrap();
            let got = gpu.stream().to_host(out.slice()).unwrap();
            assert!(expected.as_ref().is_none_or(|expected| got == *expected), "{what}, {m} × {n} × {k}");
            let mut plain = gpu.alloc::<f32>(m * n).unwrap();
            gpu.matmul(a, b, &Product::default(), plain.slice_mut()).unwrap();
            let plain = gpu.stream().to_host(plain.slice()).unwrap();
            check(&plain, &left_of(&gpu, &left), &left_of(&gpu, &right), Accumulator::Precise, what);
        }
    }
}

/// The row direction on the host.
fn left_of(gpu: &Gpu, made: &Observed) -> nvfp4::Direction {
    made.tensor.to_host(gpu).unwrap().into_directions().0.unwrap()
}

/// Formats that have no values are never written so, nor are products that a kernel computes from codes.
#[test]
fn values_are_for_products_that_read_them() {
    let Some(gpu) = gpu() else { return };
    let like = |spec: &str| {
        let x = [0f32; 256];
        let made = quantizer(spec, Directions::Row).quantize(&TensorRef::new(&x[..], &[16, 16]).unwrap()).unwrap();
        made.into_directions().0.unwrap()
    };
    let prefers = |a: &str, b: &str, sizes| gpu.prefers_values((&like(a), &like(b)), sizes);
    let many = (8192, 8192, 8192);
    assert!(!prefers("mxfp8(e4m3)", "mxfp8(e4m3)", many) && !prefers("nvfp4(row-scaled)", "nvfp4", many));
    assert!(!prefers("nvfp4", "nvfp4(16x16)", (1, 8192, 8192)));
    assert_eq!(prefers("nvfp4", "nvfp4(16x16)", many), gpu.stream().device().capability().0 == 9);
}
