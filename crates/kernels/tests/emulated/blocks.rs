//! The kernels before and after block-scaled products, built by the host's compiler, against `spec`,
//! bit for bit. Needs g++ but no GPU.

use super::*;
use crate::cuda::{Plain, Slice, Values as Numbers};
use crate::dequantize::cuda::View;
use crate::emulated::Emulated;
use crate::fp8::cuda::View as Fp8View;
use crate::gemm::cuda::{Product, Weights};
use half::{bf16, f16};
use nvfp4_spec::gemm::{self as spec, Epilogue, OutputScale};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Bound, Element, fp8, matrix};

/// Host memory that starts at a multiple of 16 bytes.
struct Memory<T> {
    words: Vec<u128>,
    len: usize,
    of: std::marker::PhantomData<T>,
}

impl<T: Plain> Memory<T> {
    fn new(values: &[T]) -> Self {
        let len = values.len();
        let words = vec![0; size_of_val(values).div_ceil(16)];
        let mut memory = Memory { words, len, of: std::marker::PhantomData };
        memory.values_mut().copy_from_slice(values);
        memory
    }

    fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: the words have room for that many elements, for which any bits are a value.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }

    fn slice(&self) -> Slice<'_, T> {
        // SAFETY: memory of the host, which only an emulated kernel is given.
        unsafe { Slice::from_raw(self.words.as_ptr() as u64, self.len) }
    }
}

fn random(i: usize, key: u32) -> u32 {
    philox4x32([i as u32, key, 0, 0], [3, 11])[0]
}

const MARK: u32 = 0x1234_5678;

/// The scales of both operands as the kernel leaves them, its factors, and whether it left the mark.
fn arranged(kernel: &Emulated, a: &Side<'_>, b: &Side<'_>, product: &Product<'_, f32>) -> (Vec<u8>, [f32; 2], bool) {
    let output = Output::new(&a.operand, &Weights::Operand(b.operand), product, ALIGNED);
    let mut to = Memory::new(&vec![0xA5u8; a.scratch().unwrap()]);
    let mut other = Memory::new(&vec![0xA5u8; b.scratch().unwrap()]);
    let (mut factors, mut mark) = (Memory::new(&[0f32; 2]), Memory::new(&[0u32]));
    let addresses = [to.values_mut().as_mut_ptr() as u64, other.values_mut().as_mut_ptr() as u64];
    let condition = Condition { at: mark.values_mut().as_mut_ptr() as u64, mark: MARK };
    let at = factors.values_mut().as_mut_ptr() as u64;
    let params = Params::new((a, addresses[0]), (b, addresses[1]), &output, at, condition).unwrap();
    kernel.run(params.groups(), THREADS as u32, &params);
    let factors = factors.values_mut();
    (to.values_mut().to_vec(), [factors[0], factors[1]], mark.values_mut()[0] == MARK)
}

fn nvfp4<'a>(q: &matrix::Quantized, parts: &'a (Memory<u8>, Memory<u8>, Memory<f32>), layout: Layout) -> Side<'a> {
    let (codes, scales, stored) = (parts.0.slice(), parts.1.slice(), parts.2.slice());
    let matrix::Quantized { rows, cols, global, unit, .. } = *q;
    Side::of(Operand::Nvfp4(View { rows, cols, codes, scales, layout, stored, global, unit })).unwrap()
}

fn quantized(rows: usize, cols: usize, global: GlobalScale, key: u32) -> matrix::Quantized {
    let bytes = |len: usize, key| (0..len).map(|i| random(i, key) as u8).collect::<Vec<u8>>();
    let scales = bytes(rows * cols / BLOCK, key + 1).iter().map(|byte| byte % 0x7F).collect();
    let stored = (0..global.count(rows)).map(|i| 3.0 + (i % 13) as f32).collect();
    let unit = Unit::Amax(Bound::E448);
    matrix::Quantized { rows, cols, codes: bytes(rows * cols / 2, key), scales, stored, global, unit }
}

#[test]
fn scales_of_nvfp4_in_tiles_and_the_factors_of_a_product() {
    let (_, function, text) = source(Format::Nvfp4);
    let Some(kernel) = Emulated::build(function, &text) else { return };
    let product = Product { alpha: 1.7, ..Product::default() };
    for (rows, cols) in [(1, 32), (5, 288), (128, 64), (130, 96), (300, 128)] {
        let q = quantized(rows, cols, GlobalScale::PerTensor, 1);
        let other = quantized(16, cols, GlobalScale::PerTensor, 5);
        let parts =
            |q: &matrix::Quantized, scales: &[u8]| (Memory::new(&q.codes), Memory::new(scales), Memory::new(&q.stored));
        let tiles = |scales: &[u8], rows| swizzle::swizzle(scales, rows, cols / BLOCK).unwrap();
        let other_parts = parts(&other, &tiles(&other.scales, 16));
        let b = nvfp4(&other, &other_parts, Layout::Swizzled);
        let linear = parts(&q, &q.scales);
        let (got, factors, odd) = arranged(&kernel, &nvfp4(&q, &linear, Layout::Linear), &b, &product);
        assert!(got == tiles(&q.scales, rows) && !odd, "{rows} × {cols}");
        assert_eq!(factors, [3.0 * 3.0 / (2688.0 * 2688.0) * 1.7, 0.0]);

        // One negative scale, wherever it lies.
        for at in [0, q.scales.len() - 1] {
            let mut scales = q.scales.clone();
            scales[at] |= 0x80;
            let (linear, swizzled) = (parts(&q, &scales), parts(&q, &tiles(&scales, rows)));
            assert!(arranged(&kernel, &nvfp4(&q, &linear, Layout::Linear), &b, &product).2);
            assert!(arranged(&kernel, &nvfp4(&q, &swizzled, Layout::Swizzled), &b, &product).2);
            assert!(arranged(&kernel, &b, &nvfp4(&q, &linear, Layout::Linear), &product).2 || rows % 16 != 0);
        }
    }
}

#[test]
fn scales_of_mxfp8_in_both_directions() {
    let (_, function, text) = source(Format::Mxfp8);
    let Some(kernel) = Emulated::build(function, &text) else { return };
    for ((rows, k), tile) in [(16, 32), (48, 288), (128, 128), (144, 160)]
        .into_iter()
        .flat_map(|size| [(size, Tile::Row32), (size, Tile::Column32)])
    {
        let across = k / MX_BLOCK;
        let transposed = |bytes: &[u8]| match tile {
            Tile::Column32 => (0..bytes.len()).map(|i| bytes[i % rows * (bytes.len() / rows) + i / rows]).collect(),
            _ => bytes.to_vec(),
        };
        let run = |codes: &[u8], scales: &[u8]| {
            let (codes, scales) = (Memory::new(&transposed(codes)), Memory::new(&transposed(scales)));
            let (rows, cols) = if tile == Tile::Column32 { (k, rows) } else { (rows, k) };
            let scales = Scales::E8m0(scales.slice());
            let view = Fp8View { rows, cols, format: fp8::Format::E4m3, tile, codes: codes.slice(), scales };
            let side = Side::of(Operand::Fp8(view)).unwrap();
            arranged(&kernel, &side, &side, &Product::default())
        };
        let codes: Vec<u8> = (0..rows * k).map(|i| random(i, 7) as u8 | 1).collect();
        let scales: Vec<u8> = (0..rows * across).map(|i| (17 + random(i, 8) % 238) as u8).collect();
        let (got, factors, odd) = run(&codes, &scales);
        assert!(got == swizzle::swizzle(&scales, rows, across).unwrap() && !odd, "{rows} × {k} {tile:?}");
        assert_eq!(factors, [1.0, 0.0]);

        // A block whose values may be subnormal, unless all of them are zero.
        let last = scales.len() - 1;
        let small = [&scales[..last], &[16]].concat();
        assert!(run(&codes, &small).2);
        let zeros = [&codes[..codes.len() - MX_BLOCK], &[0x80; MX_BLOCK]].concat();
        assert!(!run(&zeros, &small).2, "{rows} × {k} {tile:?}");
    }
}

/// Global scales of A and B, the epilogue, whether there are a bias and β·C, and the element that
/// outputs start at.
type Finish = (GlobalScale, GlobalScale, Option<Epilogue>, bool, usize);

/// Compares in one type.
fn check_finish<T: Element + Plain>(cases: &[Finish]) {
    let (m, n, k) = (7, 528, 32);
    for &(left, right, epilogue, all, start) in cases {
        let (a, b) = (quantized(m, k, left, 1), quantized(n, k, right, 5));
        let parts = |q: &matrix::Quantized| (Memory::new(&q.codes), Memory::new(&q.scales), Memory::new(&q.stored));
        let (a_parts, b_parts) = (parts(&a), parts(&b));
        let sides = (nvfp4(&a, &a_parts, Layout::Linear), nvfp4(&b, &b_parts, Layout::Linear));
        let numbers = |len: usize, key: u32| -> Vec<f32> {
            (0..len).map(|i| (random(i, key) as f32 / 4294967296.0 - 0.5) * 40.0).collect()
        };
        let (sums, bias) = (numbers(m * n, 2), numbers(n, 3));
        let c: Vec<T> = numbers(m * n, 4).into_iter().map(T::from_f32).collect();
        let (sums_there, bias_there, c_there) = (Memory::new(&sums), Memory::new(&bias), Memory::new(&c));
        let product = Product {
            epilogue,
            alpha: 1.7,
            bias: all.then(|| Numbers::F32(bias_there.slice())),
            add: all.then(|| (c_there.slice(), 0.3)),
            ..Product::default()
        };
        let mut out = Memory::new(&vec![T::from_f32(77.0); m * n + 2]);
        let at = out.values_mut()[start..].as_mut_ptr() as u64;
        let output = Output::new(&sides.0.operand, &Weights::Operand(sides.1.operand), &product, at);
        let (_, function, text) = finish_source(output.kind);
        let Some(kernel) = Emulated::build(function, &text) else { return };
        let (params, groups) = FinishParams::new(&output, (m, n), sums_there.slice().address()).unwrap();
        kernel.run(groups, THREADS as u32, &params);
        let (a, b) = (spec::Operand::Nvfp4(a.view()), spec::Operand::Nvfp4(b.view()));
        for (at, got) in out.values_mut()[start..start + m * n].iter().enumerate() {
            let scale = OutputScale::new(epilogue, (&a, at / n), (&b, at % n));
            let (bias, c) = (all.then(|| bias[at % n]), all.then(|| (c[at], 0.3)));
            let expected: T = scale.finish(sums[at], 1.7, bias, c);
            assert_eq!(got.to_f32().to_bits(), expected.to_f32().to_bits(), "{:?}, {at}", output.kind);
        }
    }
}

#[test]
fn outputs_from_sums_are_those_of_the_rule() {
    use Epilogue::{Folded, RowScaled};
    use GlobalScale::{PerRow, PerTensor};
    check_finish::<f32>(&[(PerRow, PerTensor, None, false, 0), (PerTensor, PerTensor, None, true, 1)]);
    check_finish::<bf16>(&[(PerRow, PerRow, None, true, 0), (PerRow, PerTensor, Some(Folded), true, 1)]);
    check_finish::<f16>(&[(PerTensor, PerRow, None, true, 0), (PerTensor, PerTensor, Some(RowScaled), false, 1)]);
}
