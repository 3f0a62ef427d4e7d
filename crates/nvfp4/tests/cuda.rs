//! Tensors in the memory of a GPU against those of the CPU: the same bits, and products within their bound. Without a GPU every test
//! is skipped.
#![cfg(feature = "cuda")]

mod on_gpu;

use half::{bf16, f16};
use nvfp4::cuda::{Gpu, Input, Offset, Options, Owned, Product, QuantTensor, Randomness, Stream, Values, finite};
use nvfp4::{Directions, Error, Finite, Profile, QuantSpec, Quantizer, Rounding, Side, TensorRef, Transform};
use nvfp4_kernels::cuda::time_interleaved;
use nvfp4_spec::gemm::{self, Accumulate, Accumulator, Interval, Operand, Sums};
use nvfp4_spec::matrix::Matrix;
use on_gpu::{check, gpu};

const ROWS: usize = 160;
const COLS: usize = 208;

fn values(len: usize, seed: usize) -> Vec<bf16> {
    let value = |i: usize| {
        let size = 2f32.powi((i / 16 * 7 + seed) as i32 % 9 - 4);
        bf16::from_f32((((i * 7919 + seed * 104729) % 2003) as f32 / 1001.0 - 1.0) * size)
    };
    (0..len).map(value).collect()
}

/// Specs without directions in high precision.
const SPECS: &[&str] = &[
    "nvfp4",
    "nvfp4(16x16)",
    "nvfp4(hadamard)",
    "nvfp4(row-scaled)",
    "nvfp4(4over6-mae-strict-256)",
    "nvfp4(hadamard, stochastic)",
    "fp8(e4m3)",
    "fp8(e5m2, pow2-scale)",
    "fp8-delayed(e4m3)",
    "fp8-block(e4m3)",
    "fp8-block(e4m3, 128x128)",
    "mxfp8(e4m3)",
    "mxfp8(e4m3, 32x32)",
    "mxfp8(e5m2, 32x32) / mxfp8",
    "mxfp8 / nvfp4(hadamard)",
    "nvfp4(row-scaled) / mxfp8 from row",
    "nvfp4 / nvfp4 from row",
    "nvfp4(4over6-mae-strict-256) / nvfp4(hadamard)",
    "nvfp4(row-scaled) / nvfp4(hadamard, stochastic)",
];

#[test]
fn every_spec_has_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let x = values(ROWS * COLS, 3);
    let device = gpu.upload(&x).unwrap();
    let input = Input::new(Values::Bf16(device.slice()), ROWS, COLS).unwrap();
    let tensor = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    for text in SPECS {
        for directions in [Directions::Row, Directions::Column, Directions::Both] {
            let quantizer =
                Quantizer::with_scales(&text.parse::<QuantSpec>().unwrap(), directions, |_| Some(371.3)).unwrap();
            let stochastic = quantizer.rounding() == Rounding::Stochastic;
            let on_cpu = nvfp4::Options {
                randomness: stochastic.then_some(nvfp4::Randomness::At { seed: 5, offset: 12 }),
                ..Default::default()
            };
            let on_gpu = Options {
                randomness: stochastic.then_some(Randomness { seed: 5, offset: Offset::Value(12) }),
                ..Default::default()
            };
            let expected = quantizer.observe(&tensor, &on_cpu).unwrap();
            let got = quantizer.observe_on(&gpu, &input, &on_gpu).unwrap();
            let amax = |memory: &Option<nvfp4::cuda::Memory>| {
                memory.as_ref().map(|memory| gpu.stream().to_host::<f32>(memory.slice()).unwrap()[0])
            };
            assert_eq!(amax(&got.row_amax), expected.row_amax, "{text} {directions:?}");
            assert_eq!(amax(&got.col_amax), expected.col_amax, "{text} {directions:?}");
            assert_eq!(got.tensor.to_host(&gpu).unwrap(), expected.tensor, "{text} {directions:?}");
            assert_eq!(got.tensor.byte_len(), expected.tensor.byte_len());
            let again = expected.tensor.to_gpu(&gpu).unwrap().to_host(&gpu).unwrap();
            assert_eq!(again, expected.tensor, "{text}: there and back");
        }
    }
}

#[test]
fn profiles_and_given_amaxes_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let x = values(ROWS * COLS, 4);
    let device = gpu.upload(&x).unwrap();
    let input = Input::new(Values::Bf16(device.slice()), ROWS, COLS).unwrap();
    let tensor = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let profiles = [Profile::TransformerEngine, Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo];
    for profile in profiles {
        let quantizer = Quantizer::builder().profile(profile).directions(Directions::Both).build().unwrap();
        let got = gpu.quantize(&quantizer, &input, &Options::default()).unwrap();
        assert_eq!(got.to_host(&gpu).unwrap(), quantizer.quantize(&tensor).unwrap(), "{profile:?}");
        let amax = gpu.upload(&[3.5f32]).unwrap();
        let given = Options { row_amax: Some(amax.slice()), col_amax: Some(amax.slice()), ..Default::default() };
        let on_cpu = nvfp4::Options { row_amax: Some(&[3.5]), col_amax: Some(&[3.5]), ..Default::default() };
        let got = gpu.quantize(&quantizer, &input, &given).unwrap();
        assert_eq!(got.to_host(&gpu).unwrap(), quantizer.quantize_with(&tensor, &on_cpu).unwrap(), "{profile:?} given");
    }
}

#[test]
fn scales_of_earlier_steps_may_lie_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let x = values(ROWS * COLS, 5);
    let device = gpu.upload(&x).unwrap();
    let input = Input::new(Values::Bf16(device.slice()), ROWS, COLS).unwrap();
    let tensor = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let (row, col) = (gpu.upload(&[3.7f32]).unwrap(), gpu.upload(&[0.3f32]).unwrap());
    for spec in ["fp8-delayed(e4m3)", "fp8-delayed(e4m3) / fp8-delayed(e5m2)", "mxfp8 / fp8-delayed(e4m3)"] {
        let parsed: QuantSpec = spec.parse().unwrap();
        // Made with other scales, which those of the call take the place of.
        let quantizer = Quantizer::with_scales(&parsed, Directions::Both, |_| Some(1.0)).unwrap();
        let kept = Options { row_scale: Some(row.slice()), col_scale: Some(col.slice()), ..Default::default() };
        let got = quantizer.observe_on(&gpu, &input, &kept).unwrap().tensor.to_host(&gpu).unwrap();
        let scale = |side| if side == Side::Row { Some(3.7) } else { Some(0.3) };
        let expected = Quantizer::with_scales(&parsed, Directions::Both, scale).unwrap().quantize(&tensor).unwrap();
        assert_eq!(got, expected, "{spec}");
    }
}

/// The three products of a layer. On the CPU NVFP4's are exact, so the GPU's outputs are held against the bound of the sums.
#[test]
fn products_of_a_layer_are_within_the_bound() {
    let Some(gpu) = gpu() else { return };
    for [input, weight, gradient] in [
        ["nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)"],
        ["nvfp4(row-scaled, hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)"],
        [
            "nvfp4(hadamard, 4over6-mae-strict-256)",
            "nvfp4(16x16, 4over6-mae-strict-256)",
            "nvfp4(hadamard, stochastic)",
        ],
        ["mxfp8(e4m3)", "mxfp8(e4m3)", "mxfp8(e4m3)"],
        ["mxfp8(e4m3)", "mxfp8(e4m3, 32x32)", "mxfp8(e5m2)"],
        ["fp8(e4m3)", "fp8(e4m3)", "fp8(e5m2)"],
    ] {
        let (m, n, k) = (96, 64, 160);
        let (x, w, dy) = (values(m * k, 1), values(n * k, 2), values(m * n, 3));
        let quantize = |values: &[bf16], rows: usize, cols: usize, spec: &str| {
            let quantizer = Quantizer::new(spec.parse::<QuantSpec>().unwrap(), Directions::Both).unwrap();
            let device = gpu.upload(values).unwrap();
            let matrix = Input::new(Values::Bf16(device.slice()), rows, cols).unwrap();
            let randomness = (quantizer.rounding() == Rounding::Stochastic)
                .then_some(Randomness { seed: 1, offset: Offset::Value(0) });
            gpu.quantize(&quantizer, &matrix, &Options { randomness, ..Default::default() }).unwrap()
        };
        let (x, w, dy) = (quantize(&x, m, k, input), quantize(&w, n, k, weight), quantize(&dy, m, n, gradient));
        for ((a, a_side), (b, b_side)) in [
            ((&x, Side::Row), (&w, Side::Row)),
            ((&dy, Side::Row), (&w, Side::Column)),
            ((&dy, Side::Column), (&x, Side::Column)),
        ] {
            let (a, b) = (a.direction(a_side).unwrap(), b.direction(b_side).unwrap());
            let mut out = gpu.alloc::<f32>(a.rows() * b.rows()).unwrap();
            gpu.matmul(a, b, &Product::default(), out.slice_mut()).unwrap();
            let got: Vec<f32> = gpu.stream().to_host(out.slice()).unwrap();
            let (a, b) = (a.to_host(&gpu).unwrap(), b.to_host(&gpu).unwrap());
            check(&got, &a, &b, Accumulator::Precise, &format!("{input}, {weight}, {a_side:?} × {b_side:?}"));
        }
    }
}

/// What a capture works on.
struct Captured {
    gpu: Gpu,
    x: Owned<bf16>,
    y: Owned<f32>,
}

impl Captured {
    /// Quantizes x, and multiplies what it quantized.
    fn record(&mut self, _: &Stream, text: &str) -> nvfp4::Result<()> {
        let quantizer = Quantizer::new(text.parse::<QuantSpec>()?, Directions::Row)?;
        let input = Input::new(Values::Bf16(self.x.slice()), ROWS, COLS)?;
        let q = self.gpu.quantize(&quantizer, &input, &Options::default())?;
        let row = q.direction(Side::Row)?;
        self.gpu.matmul(row, row, &Product::default(), self.y.slice_mut())
    }
}

/// Tensors that a capture makes belong to its graph, and each replay makes them anew.
#[test]
fn a_capture_may_quantize_and_multiply_what_it_quantized() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().clone();
    let (x, y) = (gpu.upload(&values(ROWS * COLS, 3)).unwrap(), gpu.alloc::<f32>(ROWS * ROWS).unwrap());
    let mut work = Captured { gpu, x, y };
    for text in ["nvfp4", "fp8(e4m3)", "mxfp8(e4m3)"] {
        work.record(&stream, text).unwrap();
        let once = stream.to_host(work.y.slice()).unwrap();
        // Captures the work, and replays it.
        time_interleaved(&stream, &mut work, &[text], 3, Captured::record).unwrap();
        assert_eq!(stream.to_host(work.y.slice()).unwrap(), once, "{text}");
    }
}

#[test]
fn what_a_gpu_does_not_do_is_refused() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.upload(&values(ROWS * COLS, 5)).unwrap();
    let input = Input::new(Values::Bf16(x.slice()), ROWS, COLS).unwrap();
    let careful = Quantizer::builder().finite(Finite::Refuse).build().unwrap();
    assert!(matches!(gpu.quantize(&careful, &input, &Options::default()), Err(Error::FiniteOnGpu)));
    let plain = Quantizer::new("high-precision".parse::<QuantSpec>().unwrap(), Directions::Row).unwrap();
    assert!(matches!(plain.observe_on(&gpu, &input, &Options::default()), Err(Error::PlainOnGpu)));
    let stochastic = Quantizer::builder().rounding(Rounding::Stochastic).build().unwrap();
    assert!(matches!(gpu.quantize(&stochastic, &input, &Options::default()), Err(Error::NoRandomness)));
    assert!(Randomness::try_from(nvfp4::Randomness::Bytes { row: &[], col: &[] }).is_err());
}

/// Elements of any two types are multiplied as they are.
#[test]
fn products_of_plain_elements_are_within_the_bound() {
    let Some(gpu) = gpu() else { return };
    let (m, n, k) = (65, 130, COLS + 3);
    let wide = |of: &[bf16]| of.iter().map(|x| x.to_f32() * 1.1).collect::<Vec<f32>>();
    let (x, w) = (wide(&values(m * k, 1)), wide(&values(n * k, 2)));
    fn types(values: &[f32]) -> (Vec<bf16>, Vec<f16>) {
        (values.iter().map(|&x| bf16::from_f32(x)).collect(), values.iter().map(|&x| f16::from_f32(x)).collect())
    }
    let (x16, w16) = (types(&x), types(&w));
    let of = |brain: &[bf16], half: &[f16], wide: &[f32], rows| {
        [Matrix::new(rows, k, wide), Matrix::new(rows, k, brain), Matrix::new(rows, k, half)].map(Result::unwrap)
    };
    let (left, right) = (of(&x16.0, &x16.1, &x, m), of(&w16.0, &w16.1, &w, n));
    let there = |wide: &[f32], of: &(Vec<bf16>, Vec<f16>)| {
        (gpu.upload(wide).unwrap(), gpu.upload(&of.0).unwrap(), gpu.upload(&of.1).unwrap())
    };
    let (x, w) = (there(&x, &x16), there(&w, &w16));
    fn inputs(of: &(Owned<f32>, Owned<bf16>, Owned<f16>), rows: usize, k: usize) -> [Input<'_>; 3] {
        let values = [Values::F32(of.0.slice()), Values::Bf16(of.1.slice()), Values::F16(of.2.slice())];
        values.map(|values| Input::new(values, rows, k).unwrap())
    }
    for (x, left) in inputs(&x, m, k).iter().zip(&left) {
        for (w, right) in inputs(&w, n, k).iter().zip(&right) {
            let mut out = gpu.alloc::<f32>(m * n).unwrap();
            gpu.matmul_plain_by_plain(x, w, &Product::default(), out.slice_mut()).unwrap();
            let (a, b) = (Operand::Plain(left), Operand::Plain(right));
            let (sums, product) = (Sums::new(&a, &b, Accumulate::Exact), gemm::Product::<f32>::default());
            for (at, got) in gpu.stream().to_host(out.slice()).unwrap().into_iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let interval = Interval::new((&a, i), (&b, j), &product, &sums);
                let types = (x.values().precision(), w.values().precision());
                assert!(interval.holds(got), "{types:?} ({i}, {j}): {got} for {interval:?}");
            }
        }
    }
    let mut out = gpu.alloc::<f32>(m * n).unwrap();
    let (x, w) = (inputs(&x, m, k)[0], inputs(&w, n * k, 1)[0]);
    assert!(gpu.matmul_plain_by_plain(&x, &w, &Product::default(), out.slice_mut()).is_err());
}

/// Neither products with plain elements nor prepared weights undo a Hadamard transform.
#[test]
fn a_transformed_weight_beside_plain_elements_is_refused_by_every_product() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.upload(&values(ROWS * COLS, 5)).unwrap();
    let input = Input::new(Values::Bf16(x.slice()), ROWS, COLS).unwrap();
    let rotated = Quantizer::builder().directions(Directions::Column).transform(Transform::FixedSigns).build().unwrap();
    let rotated = gpu.quantize(&rotated, &input, &Options::default()).unwrap();
    let weight = rotated.direction(Side::Column).unwrap();
    let x = Input::new(Values::Bf16(x.slice()), COLS, ROWS).unwrap();
    let (mut out, product) = (gpu.alloc::<f32>(COLS * COLS).unwrap(), Product::default());
    let refused = |result: nvfp4::Result<()>| assert!(matches!(result, Err(Error::Rotation { .. })), "{result:?}");
    refused(gpu.matmul_plain(&x, weight, &product, out.slice_mut()));
    refused(gpu.matmul_by_plain(weight, &x, &product, out.slice_mut()));
    refused(gpu.prepare(weight).map(drop));
}

/// What cannot be a tensor on the CPU is none on a GPU either.
#[test]
fn parts_that_do_not_fit_are_refused_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.upload(&values(ROWS * COLS, 5)).unwrap();
    let input = Input::new(Values::Bf16(x.slice()), ROWS, COLS).unwrap();
    let column = |spec: &str| {
        let quantizer = Quantizer::new(spec.parse::<QuantSpec>().unwrap(), Directions::Column).unwrap();
        quantizer.observe_on(&gpu, &input, &Options::default()).unwrap().tensor.into_directions().1
    };
    let made = |row, col| QuantTensor::from_parts(&[COLS, ROWS], row, col).map(drop);
    assert!(matches!(made(column("nvfp4(hadamard)"), None), Err(Error::RotatedRow)));
    assert!(matches!(made(column("mxfp8"), None), Err(Error::MxTile(Side::Row))));
    assert!(matches!(made(None, None), Err(Error::NoDirection)));
    assert!(matches!(made(None, column("nvfp4")), Err(Error::OtherShape { .. })));
}

#[test]
fn the_first_number_that_is_not_finite() {
    let Some(gpu) = gpu() else { return };
    let found = |values: Values<'_>| {
        let mut found = gpu.upload(&[finite::ALL_FINITE]).unwrap();
        finite::first_not_finite(gpu.stream(), values, found.slice_mut()).unwrap();
        finite::decode(gpu.stream().to_host::<u64>(found.slice()).unwrap()[0])
    };
    // In pieces of whole and of odd lengths, and from places that are not aligned.
    for len in [0usize, 1, 7, 8, 1000, 4096 * 300 + 5] {
        for (start, at) in [(0, len / 2), (1, len.saturating_sub(2)), (3, 0)] {
            let len = len + start;
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut x = vec![1.5f32; len];
                for i in [at + start, len.saturating_sub(1)].into_iter().filter(|&i| i < len && start < len) {
                    x[i] = bad;
                }
                let there = gpu.upload(&x).unwrap();
                let expected = TensorRef::new(&x[start..], &[len - start]).unwrap().first_not_finite();
                let same = |found: Option<(usize, f32)>, what: &str| {
                    let found = found.map(|(at, value)| (vec![at], value.to_bits()));
                    let expected = expected.clone().map(|(at, value)| (at, value.to_bits()));
                    assert_eq!(found, expected, "{what}, {len} from {start}");
                };
                same(found(Values::F32(there.slice().range(start..len))), "f32");
                let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
                same(found(Values::Bf16(gpu.upload(&narrow).unwrap().slice().range(start..len))), "bf16");
                let narrow: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
                same(found(Values::F16(gpu.upload(&narrow).unwrap().slice().range(start..len))), "f16");
            }
        }
    }
}
