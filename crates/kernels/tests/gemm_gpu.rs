//! Products in the memory of a GPU: every shape of kernel, prepared weights, graphs. Needs a GPU;
//! without one each test is skipped.
#![cfg(feature = "cuda")]

mod bounded;
mod device;
#[path = "gemm_gpu/operands.rs"]
mod operands;
#[path = "gemm_gpu/scratch.rs"]
mod scratch;

use device::stream;
use half::{bf16, f16};
use nvfp4_kernels::cuda::{Buffer, Error, Input, Plain, Pool, Recycled, Stream, Values};
use nvfp4_kernels::gemm::cuda::{
    By, Costs, Cublas, Member, Operand, PreparedWeight, Product, ProductKind, Verdict, Weights, describe, gemm,
    gemm_by, grouped, verdict,
};
use nvfp4_kernels::quantize::Layout;
use nvfp4_spec::gemm::{self as spec, Accumulate, Accumulator};
use nvfp4_spec::matrix::{Matrix, Quantized};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{Element, GlobalScale, Mode, Profile};
use operands::{Copied, per, quantized, run, same, values};
use std::collections::BTreeSet;

/// Sizes of both sides that take every shape of kernel, whole and ragged.
const SIZES: [(usize, usize, usize); 24] = [
    (1, 1, 16),
    (1, 64, 128),
    (3, 65, 48),
    (8, 200, 4096),
    (9, 130, 33),
    (16, 128, 256),
    (17, 8192, 64),
    (30, 100, 1040),
    (33, 70, 500),
    (64, 1024, 1024),
    (65, 66, 2000),
    (128, 63, 640),
    (129, 300, 512),
    (256, 8200, 128),
    (257, 129, 384),
    (300, 520, 96),
    (700, 1100, 64),
    (1, 8192, 7),
    (2, 3, 4096),
    (1100, 2100, 144),
    (16, 8192, 256),
    (50, 8192, 384),
    (256, 8192, 2048),
    (1000, 8200, 192),
];

/// Checks the corners and random outputs: all outputs would take the oracle minutes.
fn check_some<T: Element>(
    a: &spec::Operand<'_>,
    b: &spec::Operand<'_>,
    product: &spec::Product<'_, T>,
    out: &[T],
    name: &str,
) {
    let (m, n) = (a.rows(), b.rows());
    let chance = (0..400u32).map(|i| philox4x32([i, 3, 0, 0], [m as u32, n as u32]));
    let places = chance.map(|[x, y, ..]| (x as usize % m, y as usize % n));
    let corners = [(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)];
    bounded::check_at(a, b, product, corners.into_iter().chain(places), out, name);
}

#[test]
fn every_shape_of_kernel_with_every_kind_of_tokens() {
    let Some(stream) = stream() else { return };
    let mut kernels = BTreeSet::new();
    for (m, n, k) in SIZES {
        let (a, b) = (quantized(m, k, 1, per(GlobalScale::PerTensor)), quantized(n, k, 2, per(GlobalScale::PerTensor)));
        let (brain, half): (Vec<bf16>, Vec<f16>) = (values(m, k, 3), values(m, k, 3));
        let (a_there, b_there) = (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
        let prepared = PreparedWeight::new(&stream, &b_there.view(), &Pool).unwrap();
        kernels.insert(describe(stream.device(), a_there.view(), &prepared, &Product::<f32>::default()).unwrap());
        let (brain_there, half_there) = (stream.to_device(&brain).unwrap(), stream.to_device(&half).unwrap());
        let brain_there = Input::new(Values::Bf16(brain_there.slice()), m, k).unwrap();
        let half_there = Input::new(Values::F16(half_there.slice()), m, k).unwrap();
        let matrices = [Matrix::new(m, k, &brain).unwrap(), Matrix::new(m, k, &half).unwrap()];
        let cases: [(Operand<'_>, spec::Operand<'_>, &str); 3] = [
            (a_there.view().into(), (&a.view()).into(), "NVFP4"),
            (brain_there.into(), (&matrices[0]).into(), "bf16"),
            (half_there.into(), (&matrices[1]).into(), "f16"),
        ];
        for (operand, oracle, name) in cases {
            let out = run::<f32>(&stream, operand, &prepared, &Product::default());
            check_some(&oracle, &(&b.view()).into(), &spec::Product::default(), &out, name);
            // Weights that are prepared on the way give the same bits, and so does the same product
            // again. Large products go another way.
            let again = run::<f32>(&stream, operand, b_there.view(), &Product::default());
            let how = describe(stream.device(), operand, b_there.view(), &Product::<f32>::default()).unwrap();
            match how.contains("cuBLASLt") {
                true => check_some(&oracle, &(&b.view()).into(), &spec::Product::default(), &again, &how),
                false => assert!(same(&out, &again), "{name} {m} × {n} × {k}: {how}"),
            }
        }
    }
    println!("{} kernels: {kernels:#?}", kernels.len());
}

/// What measurements time computes the product; what a GPU or a product has no kernel for is an
/// error.
#[test]
fn every_way_that_is_asked_for_computes_the_product() {
    let Some(stream) = stream() else { return };
    let (m, n, k) = (70, 200, 272);
    let (a, b) = (quantized(m, k, 1, per(GlobalScale::PerTensor)), quantized(n, k, 2, per(GlobalScale::PerTensor)));
    let (a_there, b_there) = (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
    let prepared = PreparedWeight::new(&stream, &b_there.view(), &Pool).unwrap();
    let mut out = stream.to_device(&vec![77.0f32; m * n]).unwrap();
    let mut run = |by, weights: Weights<'_>| {
        stream.fill_bytes(out.slice_mut(), 0xFF).unwrap();
        gemm_by(&stream, by, (a_there.view(), weights), &Product::default(), out.slice_mut(), &Pool)?;
        Ok::<_, nvfp4_kernels::Error>(stream.to_host(out.slice()).unwrap())
    };
    let shapes = Costs::shipped(stream.device()).list(stream.device());
    let shapes = shapes.iter().filter(|cost| cost.name.starts_with("step ")).count();
    let clusters = stream.device().capability().0 >= 9 && !stream.device().portable();
    for number in 0..shapes {
        for split in [1, 2, 4, 8].into_iter().filter(|&split| split == 1 || clusters) {
            let by = By::Shape { number, split };
            for weights in [Weights::from(&prepared), b_there.view().into()] {
                let out = run(by, weights).unwrap();
                check_some(
                    &(&a.view()).into(),
                    &(&b.view()).into(),
                    &spec::Product::default(),
                    &out,
                    &format!("{by:?}"),
                );
            }
        }
    }
    for weights in [Weights::from(&prepared), b_there.view().into()] {
        let library = run(By::Library, weights);
        match Cublas::open(stream.device()).is_ok() && !stream.device().portable() {
            true => check_some(
                &(&a.view()).into(),
                &(&b.view()).into(),
                &spec::Product::default(),
                &library.unwrap(),
                "library",
            ),
            false => assert_eq!(library, Err(Error::NotThisWay.into())),
        }
    }
    for (by, weights) in [
        (By::Shape { number: shapes, split: 1 }, Weights::from(&prepared)),
        (By::Shape { number: 0, split: 3 }, (&prepared).into()),
        (By::Shape { number: 0, split: 16 }, (&prepared).into()),
    ] {
        assert_eq!(run(by, weights), Err(Error::NotThisWay.into()), "{by:?}");
    }
}

#[test]
fn global_scales_alpha_bias_and_c_in_every_type() {
    fn all<T: Element + Plain>(stream: &Stream, a: &Quantized, b: &Quantized) {
        let (m, n) = (a.rows, b.rows);
        let (a_there, b_there) = (Copied::new(stream, a, Layout::Linear), Copied::new(stream, b, Layout::Linear));
        let (bias, c): (Vec<f32>, Vec<T>) = (values(1, n, 7), values(m, n, 6));
        let (bias_there, c_there) = (stream.to_device(&bias).unwrap(), stream.to_device(&c).unwrap());
        for epilogue in [None, Some(spec::Epilogue::Folded), Some(spec::Epilogue::RowScaled)] {
            for (alpha, with_bias, beta) in
                [(1.0, false, None), (1.7, true, Some(0.3)), (-0.5, true, Some(0.0)), (2.0, false, Some(1.0))]
            {
                let product = Product {
                    epilogue,
                    accumulator: Accumulator::Precise,
                    alpha,
                    bias: with_bias.then(|| Values::F32(bias_there.slice())),
                    add: beta.map(|beta| (c_there.slice(), beta)),
                };
                let oracle = spec::Product {
                    accumulate: Accumulate::Exact,
                    accumulator: Accumulator::Precise,
                    epilogue,
                    alpha,
                    bias: with_bias.then_some(&bias[..]),
                    add: beta.map(|beta| (&c[..], beta)),
                };
                let out = run(stream, a_there.view(), b_there.view(), &product);
                bounded::check(&(&a.view()).into(), &(&b.view()).into(), &oracle, &out, "NVFP4 × NVFP4");
            }
        }
    }
    let Some(stream) = stream() else { return };
    let globals = [GlobalScale::PerTensor, GlobalScale::PerRow];
    // In the last two A has more rows, so the operands are swapped.
    for (m, n, k) in [(5, 67, 80), (40, 130, 272), (300, 257, 272), (520, 256, 256)] {
        for (left, right) in globals.into_iter().flat_map(|l| globals.map(|r| (l, r))) {
            let (a, b) = (quantized(m, k, 3, per(left)), quantized(n, k, 4, per(right)));
            all::<f32>(&stream, &a, &b);
            all::<bf16>(&stream, &a, &b);
            all::<f16>(&stream, &a, &b);
        }
    }
}

/// Shapes that block-scaled units take where the chip has them, with linear and swizzled scales.
#[test]
fn whole_blocks_with_scales_in_either_order() {
    let Some(stream) = stream() else { return };
    for (seed, (m, n, k)) in (0..).zip([(1, 16, 32), (130, 48, 96), (128, 128, 256), (300, 272, 1056)]) {
        for (left, right) in
            [(GlobalScale::PerTensor, GlobalScale::PerTensor), (GlobalScale::PerRow, GlobalScale::PerTensor)]
        {
            let (a, b) = (quantized(m, k, seed, per(left)), quantized(n, k, seed + 9, per(right)));
            for (a_layout, b_layout) in [(Layout::Linear, Layout::Swizzled), (Layout::Swizzled, Layout::Swizzled)] {
                let (a_there, b_there) = (Copied::new(&stream, &a, a_layout), Copied::new(&stream, &b, b_layout));
                let out = run::<bf16>(&stream, a_there.view(), b_there.view(), &Product::default());
                let how =
                    describe(stream.device(), a_there.view(), b_there.view(), &Product::<bf16>::default()).unwrap();
                let kind = if left == GlobalScale::PerRow { ProductKind::Nvfp4RowScaled } else { ProductKind::Nvfp4 };
                let used = verdict(stream.device(), kind) == Verdict::Used;
                assert_eq!(how.contains("block-scaled"), used, "{how}");
                check_some(&(&a.view()).into(), &(&b.view()).into(), &spec::Product::default(), &out, &how);
            }
        }
    }
}

/// The operand with more rows is the one that is prepared.
#[test]
fn either_side_is_brought_into_order() {
    let Some(stream) = stream() else { return };
    for (m, n, k) in [(257, 256, 256), (700, 300, 528), (2100, 1030, 1040), (5000, 512, 576)] {
        let (a, b) = (quantized(m, k, 1, per(GlobalScale::PerRow)), quantized(n, k, 2, per(GlobalScale::PerTensor)));
        let (a_there, b_there) = (Copied::new(&stream, &a, Layout::Swizzled), Copied::new(&stream, &b, Layout::Linear));
        let kernel = describe(stream.device(), a_there.view(), b_there.view(), &Product::<bf16>::default()).unwrap();
        assert!(kernel.starts_with("swapped: ") || kernel.contains("block-scaled"), "{kernel}");
        let out = run::<bf16>(&stream, a_there.view(), b_there.view(), &Product::default());
        check_some(&(&a.view()).into(), &(&b.view()).into(), &spec::Product::default(), &out, &kernel);
        let other = run::<bf16>(&stream, b_there.view(), a_there.view(), &Product::default());
        check_some(&(&b.view()).into(), &(&a.view()).into(), &spec::Product::default(), &other, "the other way round");
    }
}

#[test]
fn other_meanings_of_the_global_scale_and_swizzled_scales() {
    let Some(stream) = stream() else { return };
    for profile in [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo] {
        let mode = Mode { profile, ..Mode::default() };
        let (a, b) = (quantized(20, 192, 1, mode), quantized(150, 192, 2, mode));
        let linear = (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
        let swizzled = (Copied::new(&stream, &a, Layout::Swizzled), Copied::new(&stream, &b, Layout::Swizzled));
        let out = run::<f32>(&stream, linear.0.view(), linear.1.view(), &Product::default());
        bounded::check(&(&a.view()).into(), &(&b.view()).into(), &spec::Product::default(), &out, "profile");
        assert!(
            same(&out, &run::<f32>(&stream, swizzled.0.view(), swizzled.1.view(), &Product::default())),
            "{profile:?}"
        );
    }
}

/// Any bytes as scales, NaN and negative ones among them, and any codes.
#[test]
fn any_bytes_at_all() {
    let Some(stream) = stream() else { return };
    for (seed, (m, n, k)) in
        [(7, 70, 512), (1, 200, 1111), (20, 90, 2047), (70, 19, 33), (130, 80, 272)].into_iter().enumerate()
    {
        for keep_nan in [true, false] {
            let bytes = |len: usize, salt: u32| -> Vec<u8> {
                (0..len).map(|i| philox4x32([i as u32, salt, 0, 0], [seed as u32, 9])[0] as u8).collect()
            };
            let mut a = quantized(m, k, 1, per(GlobalScale::PerTensor));
            let mut b = quantized(n, k, 2, per(GlobalScale::PerRow));
            for (q, salt) in [(&mut a, 1), (&mut b, 2)] {
                (q.codes, q.scales) = (bytes(q.codes.len(), salt), bytes(q.scales.len(), salt + 10));
                // NaN in a few positions only; otherwise every output would be NaN.
                let nan =
                    |i: usize, s: u8| if s & 0x7F == 0x7F && !(keep_nan && i.is_multiple_of(97)) { 0x7E } else { s };
                q.scales.iter_mut().enumerate().for_each(|(i, s)| *s = nan(i, *s));
                if keep_nan {
                    q.scales[0] = 0x7F;
                }
            }
            let (a_there, b_there) =
                (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
            let out = run::<f32>(&stream, a_there.view(), b_there.view(), &Product::default());
            bounded::check(&(&a.view()).into(), &(&b.view()).into(), &spec::Product::default(), &out, "any bytes");
        }
    }
}

/// Misaligned rows with gaps: the copy engine supports neither.
#[test]
fn tokens_that_lie_anywhere() {
    let Some(stream) = stream() else { return };
    let b = quantized(130, 100, 2, per(GlobalScale::PerTensor));
    let b_there = Copied::new(&stream, &b, Layout::Linear);
    for (start, stride) in [(0, 100), (1, 101), (8, 104), (3, 128), (0, 177)] {
        let (m, k) = (21, 100);
        let all: Vec<bf16> = values(1, start + m * stride, 3);
        let there = stream.to_device(&all).unwrap();
        let x = Input::strided(Values::Bf16(there.slice().range(start..all.len())), m, k, stride).unwrap();
        let rows: Vec<bf16> = (0..m).flat_map(|i| all[start + i * stride..][..k].to_vec()).collect();
        let matrix = Matrix::new(m, k, &rows).unwrap();
        let out = run::<f32>(&stream, x, b_there.view(), &Product::default());
        bounded::check(&(&matrix).into(), &(&b.view()).into(), &spec::Product::default(), &out, "tokens anywhere");
    }
}

/// Outputs that begin at an odd element, between others that stay as they are.
#[test]
fn outputs_that_lie_anywhere() {
    let Some(stream) = stream() else { return };
    let (a, b) = (quantized(10, 64, 1, per(GlobalScale::PerTensor)), quantized(66, 64, 2, per(GlobalScale::PerTensor)));
    let (a_there, b_there) = (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
    let expected = run::<bf16>(&stream, a_there.view(), b_there.view(), &Product::default());
    let mut out = stream.to_device(&vec![bf16::from_f32(77.0); 662]).unwrap();
    let place = out.slice_mut().range(1..661);
    gemm(&stream, a_there.view(), b_there.view(), &Product::default(), place, &Pool).unwrap();
    let got = stream.to_host(out.slice()).unwrap();
    assert_eq!([got[0], got[661]], [bf16::from_f32(77.0); 2]);
    assert!(same(&got[1..661], &expected));
}

#[test]
fn groups_of_any_size_and_none() {
    let Some(stream) = stream() else { return };
    let (sizes, n, k) = ([3, 0, 140, 1, 0, 40], 96, 192);
    let operands: Vec<(Quantized, Quantized)> = (0..)
        .zip(sizes)
        .map(|(g, m)| {
            (quantized(m, k, g, per(GlobalScale::PerRow)), quantized(n, k, g + 50, per(GlobalScale::PerTensor)))
        })
        .collect();
    let there: Vec<_> = operands
        .iter()
        .map(|(a, b)| (Copied::new(&stream, a, Layout::Linear), Copied::new(&stream, b, Layout::Linear)))
        .collect();
    let mut outs: Vec<Buffer<f32>> = sizes.iter().map(|m| stream.to_device(&vec![77.0; m * n]).unwrap()).collect();
    let mut members: Vec<Member<'_, f32>> = there
        .iter()
        .zip(&mut outs)
        .map(|((a, b), out)| Member {
            a: a.view().into(),
            b: b.view().into(),
            product: Product::default(),
            out: out.slice_mut(),
        })
        .collect();
    grouped(&stream, &mut members, &Pool).unwrap();
    drop(members);
    for ((a, b), out) in operands.iter().zip(&outs) {
        let out = stream.to_host(out.slice()).unwrap();
        bounded::check(&(&a.view()).into(), &(&b.view()).into(), &spec::Product::default(), &out, "a group");
    }
}

/// The weight gradient of an expert that got no tokens: K is 0.
#[test]
fn a_sum_of_nothing_is_zero() {
    let Some(stream) = stream() else { return };
    let (a, b) = (quantized(5, 0, 1, per(GlobalScale::PerTensor)), quantized(9, 0, 2, per(GlobalScale::PerTensor)));
    let (a_there, b_there) = (Copied::new(&stream, &a, Layout::Linear), Copied::new(&stream, &b, Layout::Linear));
    let out = run::<f32>(&stream, a_there.view(), b_there.view(), &Product::default());
    assert!(out.iter().all(|y| y.to_bits() == 0));
}

#[test]
fn what_prepared_weights_cannot_be_multiplied_by_is_refused() {
    let Some(stream) = stream() else { return };
    let b = quantized(9, 32, 2, per(GlobalScale::PerTensor));
    let b_there = Copied::new(&stream, &b, Layout::Linear);
    let prepared = PreparedWeight::new(&stream, &b_there.view(), &Pool).unwrap();
    let x = stream.to_device(&values::<f32>(4, 32, 1)).unwrap();
    let x = Input::new(Values::F32(x.slice()), 4, 32).unwrap();
    let mut out = stream.device().alloc::<f32>(36).unwrap();
    let mut attempt = |x: Input<'_>, len: usize| {
        let out = out.slice_mut().range(0..len);
        gemm(&stream, x, &prepared, &Product::default(), out, &Pool).unwrap_err().to_string()
    };
    assert!(attempt(x, 36).starts_with("prepared weights: expected NVFP4, bf16 or f16"), "{}", attempt(x, 36));
    assert_eq!(attempt(x, 35), "output: expected length 36, got 35");
    let short = stream.to_device(&values::<f32>(4, 16, 1)).unwrap();
    let short = Input::new(Values::F32(short.slice()), 4, 16).unwrap();
    assert_eq!(attempt(short, 36), "matmul: expected K = 16, got K = 32");
}

/// Weights that were brought into order right before a product, in memory that had others: the
/// product reads them, not what was there before.
#[test]
fn a_product_reads_the_weights_that_were_prepared_right_before_it() {
    let Some(stream) = stream() else { return };
    let (n, k) = (2048, 4096);
    let kinds = [1, 2].map(|seed| quantized(n, k, seed, per(GlobalScale::PerTensor)));
    let there = kinds.each_ref().map(|b| Copied::new(&stream, b, Layout::Linear));
    for m in [1, 16, 64] {
        let x = stream.to_device(&values::<bf16>(m, k, 3)).unwrap();
        let x = Input::new(Values::Bf16(x.slice()), m, k).unwrap();
        let expected = there.each_ref().map(|b| run::<f32>(&stream, x, b.view(), &Product::default()));
        // The memory is the same in every turn.
        let memory = Recycled::default();
        let mut outs: Vec<[Buffer<f32>; 2]> =
            (0..8).map(|_| [(); 2].map(|()| stream.to_device(&vec![77.0f32; m * n]).unwrap())).collect();
        stream.synchronize().unwrap();
        for (turn, [on_the_way, before]) in outs.iter_mut().enumerate() {
            let weights = there[turn % 2].view();
            gemm(&stream, x, weights, &Product::default(), on_the_way.slice_mut(), &memory).unwrap();
            let prepared = PreparedWeight::new(&stream, &weights, &memory).unwrap();
            gemm(&stream, x, &prepared, &Product::default(), before.slice_mut(), &memory).unwrap();
        }
        for (turn, outs) in outs.iter().enumerate() {
            for (out, how) in outs.iter().zip(["on the way", "before"]) {
                let got = stream.to_host(out.slice()).unwrap();
                assert!(same(&got, &expected[turn % 2]), "{m} tokens, turn {turn}, prepared {how}");
            }
        }
    }
}

/// Many products in a graph, each of which reads what the one before wrote: dependent launches must
/// not break the order.
#[test]
fn products_in_a_graph_wait_for_each_other() {
    let Some(stream) = stream() else { return };
    let (m, n) = (8, 512);
    let b = quantized(n, n, 2, per(GlobalScale::PerTensor));
    let b_there = Copied::new(&stream, &b, Layout::Linear);
    let prepared = PreparedWeight::new(&stream, &b_there.view(), &Pool).unwrap();
    let x: Vec<bf16> = values(m, n, 3);
    let mut buffers: Vec<Buffer<bf16>> = (0..20).map(|_| stream.to_device(&vec![bf16::ZERO; m * n]).unwrap()).collect();
    stream.upload(&x, buffers[0].slice_mut()).unwrap();
    let mut chain = |stream: &Stream| -> nvfp4_kernels::Result<()> {
        for i in 1..buffers.len() {
            let (before, after) = buffers.split_at_mut(i);
            let input = Input::new(Values::Bf16(before[i - 1].slice()), m, n).unwrap();
            gemm(stream, input, &prepared, &Product::default(), after[0].slice_mut(), &Pool)?;
        }
        Ok(())
    };
    chain(&stream).unwrap();
    stream.synchronize().unwrap();
    let graph = stream.capture(&mut chain).unwrap();
    let expected: Vec<Vec<bf16>> = buffers.iter().map(|buffer| stream.to_host(buffer.slice()).unwrap()).collect();
    for (i, pair) in expected.windows(2).enumerate() {
        let there = stream.to_device(&pair[0]).unwrap();
        let input = Input::new(Values::Bf16(there.slice()), m, n).unwrap();
        assert!(same(&run::<bf16>(&stream, input, &prepared, &Product::default()), &pair[1]), "product {i}");
    }
    for round in 0..20 {
        buffers[1..].iter_mut().for_each(|buffer| stream.fill_bytes(buffer.slice_mut(), 0xFF).unwrap());
        // SAFETY: everything that the graph uses is alive, and only this stream uses it.
        unsafe { graph.launch(&stream) }.unwrap();
        let got: Vec<Vec<bf16>> = buffers.iter().map(|buffer| stream.to_host(buffer.slice()).unwrap()).collect();
        assert!(got.iter().zip(&expected).all(|(a, b)| same(a, b)), "round {round}");
    }
}
