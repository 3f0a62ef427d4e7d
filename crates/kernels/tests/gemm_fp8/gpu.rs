//! In the memory of a GPU. Without one, these are skipped.

use super::*;
use crate::device::stream;
use nvfp4_kernels::cuda::{Buffer, Plain, Slice, Stream, Values as Numbers};
use nvfp4_kernels::fp8::cuda::View as There;
use nvfp4_kernels::gemm::cuda::Cublas;
use nvfp4_kernels::gemm::{Accumulator, Stored, Units, cuda as on_gpu, units};
use nvfp4_spec::gemm::Accumulator::{Fast, Precise, Split};
use nvfp4_testing::{Need, missing};

/// A quantized matrix on the GPU.
struct Copied<'a> {
    host: &'a Quantized,
    codes: Buffer<u8>,
    scales: Scales<Buffer<f32>, Buffer<u8>>,
}

impl<'a> Copied<'a> {
    fn new(stream: &Stream, host: &'a Quantized) -> Self {
        let scales = match &host.scales {
            Scales::F32(scales) => Scales::F32(stream.to_device(scales).unwrap()),
            Scales::E8m0(scales) => Scales::E8m0(stream.to_device(scales).unwrap()),
        };
        Copied { host, codes: stream.to_device(&host.codes).unwrap(), scales }
    }

    fn view(&self) -> There<'_> {
        let Quantized { rows, cols, format, tile, .. } = *self.host;
        let scales = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice()),
        };
        There { rows, cols, format, tile, codes: self.codes.slice(), scales }
    }
}

#[test]
fn products_of_device_memory() {
    let Some(stream) = stream() else { return };
    let (m, n, k) = (130, 70, 300);
    let (left, right) = (operands(m, k, 1), operands(n, k, 2));
    for (a, b) in left.iter().zip(right.iter().rev()).chain(left.iter().zip(&right)) {
        let (a_there, b_there) = (Copied::new(&stream, a), Copied::new(&stream, b));
        let mut out = stream.to_device(&vec![77f32; m * n]).unwrap();
        let product = on_gpu::Product::default();
        let (left, right) = (a_there.view(), b_there.view());
        on_gpu::gemm(&stream, left, right, &product, out.slice_mut(), &nvfp4_kernels::cuda::Pool).unwrap();
        let out = stream.to_host(out.slice()).unwrap();
        bounded::check(&(&a.view()).into(), &(&b.view()).into(), &Product::default(), &out, "device memory");
    }
}

/// What is said of GPUs in general holds for this one.
#[test]
fn the_units_that_are_named_are_those_of_the_kernel() {
    let Some(stream) = stream() else { return };
    let (device, library) = (stream.device(), library(&stream));
    for (operand, accumulator) in
        operands(128, 128, 1).iter().flat_map(|operand| [Precise, Split, Fast].map(|sums| (operand, sums)))
    {
        // Squares beside squares, and two matrices of E5M2, are not what products of a layer have.
        if operand.tile == Tile::Square128 || operand.format == Format::E5m2 {
            continue;
        }
        let there = Copied::new(&stream, operand);
        let product = on_gpu::Product::<f32> { accumulator, ..Default::default() };
        let kernel = on_gpu::describe(device, there.view(), there.view(), &product).unwrap();
        let stored = match operand.tile {
            Tile::Tensor => Stored::Fp8,
            Tile::Row128 | Tile::Square128 => Stored::Fp8Block,
            Tile::Row32 | Tile::Column32 => Stored::Mxfp8,
        };
        let named = match units(stored, accumulator, device.capability()).unwrap() {
            Units::Fp8TensorCores if library => kernel.contains("FP8 tensor cores"),
            // Unless the chip's first products were not right.
            Units::BlockScaledTensorCores if library => kernel.contains("block-scaled") || kernel.contains("bf16"),
            _ => kernel.contains("bf16"),
        };
        assert!(named, "{stored:?} {accumulator:?}: {kernel}");
    }
}

/// Whether products of FP8 go to cuBLASLt.
fn library(stream: &Stream) -> bool {
    let device = stream.device();
    if device.capability() < (8, 9) {
        missing(Need::Cublas, "FP8 tensor cores came with compute capability 8.9");
        return false;
    }
    match Cublas::open(device) {
        Ok(_) => !device.portable(),
        Err(reason) => {
            missing(Need::Cublas, reason);
            false
        }
    }
}

/// A product of device memory, and how it is computed.
fn multiply<T: Element + Plain>(
    stream: &Stream,
    (a, b): (&Quantized, &Quantized),
    product: &on_gpu::Product<'_, T>,
) -> (Vec<T>, String) {
    let (a_there, b_there) = (Copied::new(stream, a), Copied::new(stream, b));
    let (m, n) = (a.tile.along_k((a.rows, a.cols)).0, b.tile.along_k((b.rows, b.cols)).0);
    let mut out = stream.to_device(&vec![T::from_f32(77.0); m * n]).unwrap();
    let (a, b) = (a_there.view(), b_there.view());
    on_gpu::gemm(stream, a, b, product, out.slice_mut(), &nvfp4_kernels::cuda::Pool).unwrap();
    let how = on_gpu::describe(stream.device(), a, b, product).unwrap();
    (stream.to_host(out.slice()).unwrap(), how)
}

/// Checks the corners and random outputs: all of them would take the oracle minutes.
fn check_some<T: Element>((a, b): (&Quantized, &Quantized), product: &Product<'_, T>, out: &[T], how: &str) {
    let (a, b): (spec::Operand<'_>, spec::Operand<'_>) = ((&a.view()).into(), (&b.view()).into());
    let (m, n) = (a.rows(), b.rows());
    let chance = (0..300u32).map(|i| philox4x32([i, 3, 0, 0], [m as u32, n as u32]));
    let places = chance.map(|[x, y, ..]| (x as usize % m, y as usize % n));
    let corners = [(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)];
    bounded::check_at(&a, &b, product, corners.into_iter().chain(places), out, how);
}

/// Types of outputs, as a bias.
trait Typed: Element + Plain {
    fn numbers(values: Slice<'_, Self>) -> Numbers<'_>;
}

impl Typed for f32 {
    fn numbers(values: Slice<'_, f32>) -> Numbers<'_> {
        Numbers::F32(values)
    }
}

impl Typed for bf16 {
    fn numbers(values: Slice<'_, bf16>) -> Numbers<'_> {
        Numbers::Bf16(values)
    }
}

impl Typed for f16 {
    fn numbers(values: Slice<'_, f16>) -> Numbers<'_> {
        Numbers::F16(values)
    }
}

/// Checks a product with all that may be added to it, in all types, and says how each was computed.
fn every_type(stream: &Stream, (a, b): (&Quantized, &Quantized), accumulator: Accumulator) -> Vec<String> {
    fn typed<T: Typed>(stream: &Stream, (a, b): (&Quantized, &Quantized), accumulator: Accumulator) -> [String; 2] {
        let (m, n) = (a.tile.along_k((a.rows, a.cols)).0, b.tile.along_k((b.rows, b.cols)).0);
        let (c, bias): (Vec<T>, Vec<T>) = (values(m, n, 6), values(1, n, 7));
        let wide: Vec<f32> = bias.iter().map(|x| x.to_f32()).collect();
        let (c_there, bias_there) = (stream.to_device(&c).unwrap(), stream.to_device(&bias).unwrap());
        [false, true].map(|all| {
            let product = on_gpu::Product {
                accumulator,
                alpha: if all { 1.7 } else { 1.0 },
                bias: all.then(|| T::numbers(bias_there.slice())),
                add: all.then(|| (c_there.slice(), 0.3)),
                epilogue: None,
            };
            let (out, how) = multiply(stream, (a, b), &product);
            let add = all.then_some((&c[..], 0.3));
            let (alpha, bias) = (product.alpha, all.then_some(&wide[..]));
            let oracle = Product { accumulator, alpha, bias, add, ..Product::default() };
            check_some((a, b), &oracle, &out, &how);
            how
        })
    }
    let mut how = typed::<f32>(stream, (a, b), accumulator).to_vec();
    how.extend(typed::<bf16>(stream, (a, b), accumulator));
    how.extend(typed::<f16>(stream, (a, b), accumulator));
    how
}

/// FP8 tensor cores, within the bound of their accumulators.
#[test]
fn nvidias_library_on_codes() {
    let Some(stream) = stream() else { return };
    if !library(&stream) {
        return;
    }
    // Operands of `operands`: tensors, 1×128 and 128×128, in both formats.
    let pairs = [(0, 0), (0, 1), (1, 0), (2, 6), (4, 8), (2, 4), (6, 2), (3, 2)];
    for (m, n, k) in [(16, 16, 128), (4, 32, 256), (36, 48, 1024), (256, 64, 4096)] {
        let (left, right) = (operands(m, k, 1), operands(n, k, 2));
        for ((a, b), accumulator) in pairs.into_iter().flat_map(|pair| [Split, Fast].map(|sums| (pair, sums))) {
            let how = every_type(&stream, (&left[a], &right[b]), accumulator);
            let codes = how.iter().filter(|how| how.contains("FP8 tensor cores")).count();
            // A bias in f32 is not the library's.
            assert!(stream.device().capability().0 != 9 || codes >= 5, "{m} × {n} × {k}, {a}, {b}: {how:#?}");
        }
    }
}

/// What the library does not take, at FP8 speed where Hopper's instruction is, else precisely.
#[test]
fn what_nvidias_library_refuses_goes_another_way() {
    let Some(stream) = stream() else { return };
    let own = stream.device().capability() == (9, 0) && !stream.device().portable();
    let (square, ragged) = (operands(16, 32, 1), operands(18, 40, 1));
    for (pair, whole) in [
        ((&square[1], &square[1]), true),
        ((&square[2], &square[0]), true),
        ((&ragged[0], &ragged[0]), false),
        ((&ragged[6], &ragged[6]), false),
    ] {
        let accumulator = if own && whole { Split } else { Precise };
        let (out, how) = multiply::<f32>(&stream, pair, &on_gpu::Product { accumulator: Fast, ..Default::default() });
        assert!(how.contains(if accumulator == Split { "wgmma" } else { "bf16" }), "{how}");
        let product = Product { accumulator, ..Product::default() };
        bounded::check(&(&pair.0.view()).into(), &(&pair.1.view()).into(), &product, &out, &how);
    }
}

/// The kernel of this crate on codes, at sizes that fill tiles and sizes that do not.
#[test]
fn codes_by_a_kernel_of_this_crate() {
    let Some(stream) = stream() else { return };
    if stream.device().capability() != (9, 0) || stream.device().portable() {
        return;
    }
    // Scales of rows on both sides, two squares, two of E5M2, and a tensor beside rows.
    let pairs = [(2, 2), (3, 2), (4, 5), (6, 6), (1, 1), (2, 0), (0, 6), (7, 3)];
    for (m, n, k) in [(1, 1, 16), (130, 70, 304), (300, 515, 656)] {
        let (left, right) = (operands(m, k, 1), operands(n, k, 2));
        for (a, b) in pairs {
            let how = every_type(&stream, (&left[a], &right[b]), Split);
            let codes = how.iter().filter(|how| how.contains("FP8 tensor cores")).count();
            assert!(codes == how.len(), "{m} × {n} × {k}, {a}, {b}: {how:#?}");
        }
    }
}

/// Every precise way, at sizes that fill tiles and sizes that do not.
#[test]
fn precise_products_of_every_tile() {
    let Some(stream) = stream() else { return };
    for (m, n, k) in [(64, 96, 256), (130, 72, 320), (37, 129, 130), (200, 144, 512), (1, 520, 96)] {
        let (left, right) = (operands(m, k, 1), operands(n, k, 2));
        for (i, a) in left.iter().enumerate() {
            let (out, how) = multiply::<f32>(&stream, (a, &right[i]), &on_gpu::Product::default());
            check_some((a, &right[i]), &Product::default(), &out, &how);
            assert!(how.contains("bf16") || how.contains("block-scaled"), "{how}");
        }
    }
    // Tensors, 1×128 with 128×128, MXFP8 in both directions.
    let (left, right) = (operands(136, 320, 1), operands(72, 320, 2));
    for (a, b) in [(0, 1), (2, 6), (10, 13), (12, 10)] {
        every_type(&stream, (&left[a], &right[b]), Precise);
    }
}

/// Values that bf16 does not have: scales of MXFP8 below its normal numbers, beside large ones.
#[test]
fn mxfp8_values_too_small_for_bf16() {
    let Some(stream) = stream() else { return };
    for (scaling, side) in [(Scaling::Mx, Side::Row), (Scaling::Mx, Side::Column)] {
        for (m, n, k) in [(64, 64, 256), (33, 40, 96)] {
            let quantized = |rows, seed, byte: fn(usize) -> u8| {
                let x = if side == Side::Row { matrix(rows, k, seed) } else { matrix(k, rows, seed) };
                let mut q = fp8::quantize(&x, &Mode { format: Format::E4m3, scaling }, side);
                let Scales::E8m0(scales) = &mut q.scales else { panic!("bytes") };
                scales.iter_mut().enumerate().for_each(|(i, scale)| *scale = byte(i));
                q
            };
            let small = quantized(m, 1, |i| (i % 7) as u8);
            let large = quantized(n, 2, |i| 200 + (i % 3) as u8);
            let (out, how) = multiply::<f32>(&stream, (&small, &large), &on_gpu::Product::default());
            bounded::check(&(&small.view()).into(), &(&large.view()).into(), &Product::default(), &out, &how);
        }
    }
}

/// The model of [`Accumulator`] on the chip: beside a product of 2⁸, one of 2⁻⁵ is kept and one
/// of 2⁻⁶ lost, unless a split accumulator took the first before.
#[test]
fn the_accumulator_keeps_thirteen_bits_below_the_largest() {
    let Some(stream) = stream() else { return };
    if !library(&stream) || stream.device().capability().0 != 9 {
        return;
    }
    let (m, k) = (512, 1024);
    let matrix = |values: Vec<f32>, rows| {
        let mode = Mode { format: Format::E4m3, scaling: Scaling::Tensor { scale: 1.0 } };
        fp8::quantize(&Matrix::new(rows, k, &values).unwrap(), &mode, Side::Row)
    };
    // Row i has the second number at column 1 + 2·i.
    let pair = |second: f32| {
        let value = |at: usize| match (at / k, at % k) {
            (_, 0) => 256.0,
            (row, column) if column == 1 + 2 * row => second,
            _ => 0.0,
        };
        matrix((0..m * k).map(value).collect(), m)
    };
    let ones = matrix(vec![1.0; 32 * k], 32);
    for (second, accumulator) in [0.03125f32, 0.015625].into_iter().flat_map(|x| [Split, Fast].map(|sums| (x, sums))) {
        let product = on_gpu::Product::<f32> { accumulator, ..Default::default() };
        let (out, how) = multiply(&stream, (&pair(second), &ones), &product);
        for row in 0..m {
            let apart = accumulator == Split && 1 + 2 * row >= spec::SPLIT;
            let expected = if second == 0.03125 || apart { 256.0 + second } else { 256.0 };
            assert_eq!(out[row * 32], expected, "{how}, {second}, row {row}");
        }
    }
}
