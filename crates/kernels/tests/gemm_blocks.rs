//! What becomes of products on block-scaled tensor cores where the chip has none: the library refuses
//! them, and they go another way. Needs a GPU; without one the test is skipped.
//!
//! A program of its own, since what is asked for here holds for the whole process.
#![cfg(feature = "cuda")]

mod bounded;
mod device;
#[path = "gemm_gpu/operands.rs"]
mod operands;

use device::stream;
use nvfp4_kernels::cuda::{Pool, Stream};
use nvfp4_kernels::gemm::cuda::{
    Cublas, Product, ProductKind, Verdict, describe, gemm, known, try_on_any_chip, verdict,
};
use nvfp4_kernels::gemm::{self as on_host, Accumulator};
use nvfp4_kernels::quantize::Layout;
use nvfp4_kernels::{Implementation, Result};
use nvfp4_spec::GlobalScale::{PerRow, PerTensor};
use nvfp4_spec::fp8::{self, Format, Mode, Scaling, Side};
use nvfp4_spec::gemm as spec;
use nvfp4_spec::matrix::Matrix;
use nvfp4_testing::{Need, missing};
use operands::{Copied, per, quantized, run, same, values};

const M: usize = 144;
const N: usize = 128;
const K: usize = 256;

fn fp8_matrix(rows: usize, seed: u32, scaling: Scaling) -> fp8::Quantized {
    let x = Matrix::new(rows, K, &values::<f32>(rows, K, seed)).unwrap();
    fp8::quantize(&x, &Mode { format: Format::E4m3, scaling }, Side::Row)
}

#[test]
fn a_chip_without_the_units_refuses_and_products_go_another_way() {
    let Some(stream) = stream() else { return };
    let device = stream.device();
    if let Err(reason) = Cublas::open(device) {
        return missing(Need::Cublas, reason);
    }
    if device.portable() {
        return missing(Need::Cublas, "NVFP4_CUDA_PORTABLE is set");
    }
    let blocks = [ProductKind::Nvfp4, ProductKind::Nvfp4RowScaled, ProductKind::Mxfp8];
    let has_units = device.capability() >= (10, 0);
    if !has_units {
        assert!(blocks.iter().all(|&kind| verdict(device, kind) == Verdict::NotOnThisChip));
    }
    let quantized: Vec<_> =
        [PerTensor, PerRow].map(|global| (quantized(M, K, 1, per(global)), quantized(N, K, 2, per(PerTensor)))).into();
    let there: Vec<_> = quantized
        .iter()
        .map(|(a, b)| (Copied::new(&stream, a, Layout::Swizzled), Copied::new(&stream, b, Layout::Linear)))
        .collect();
    let multiply = |(a, b): &(Copied<'_>, Copied<'_>)| run::<f32>(&stream, a.view(), b.view(), &Product::default());
    let how =
        |(a, b): &(Copied<'_>, Copied<'_>)| describe(device, a.view(), b.view(), &Product::<f32>::default()).unwrap();
    let mx = [fp8_matrix(M, 3, Scaling::Mx), fp8_matrix(N, 4, Scaling::Mx)];
    let multiply_mx = || fp8_product(&mx, Accumulator::Precise);
    let before: Vec<_> = there.iter().map(|pair| (multiply(pair), how(pair))).collect();
    let mx_before = multiply_mx();
    if !has_units {
        assert!(blocks.iter().all(|&kind| known(device, kind).is_none()), "nothing is tried that is not there");
    }

    try_on_any_chip();
    // A capture cannot try anything: what is unknown goes another way, and stays unknown.
    let mut out = device.alloc::<f32>(M * N).unwrap();
    let (a, b) = &there[0];
    let mut queue = |stream: &Stream| -> Result<()> {
        gemm(stream, a.view(), b.view(), &Product::default(), out.slice_mut(), &Pool)
    };
    let graph = stream.capture(&mut queue).unwrap();
    if !has_units {
        assert_eq!(known(device, ProductKind::Nvfp4), None);
    }
    // SAFETY: everything that the graph uses is alive, and nothing else uses it.
    unsafe { graph.launch(&stream) }.unwrap();
    assert!(same(&stream.to_host(out.slice()).unwrap(), &before[0].0) || has_units);

    for ((pair, host), (expected, way)) in there.iter().zip(&quantized).zip(&before) {
        let out = multiply(pair);
        bounded::check(&(&host.0.view()).into(), &(&host.1.view()).into(), &spec::Product::default(), &out, way);
        assert!(same(&out, expected), "{way}");
        assert_eq!(&how(pair), way);
    }
    assert!(same(&multiply_mx(), &mx_before));
    for kind in blocks {
        let verdict = known(device, kind);
        println!("{kind}: {verdict:?}");
        assert!(has_units || matches!(verdict, Some(Verdict::Refused(_))), "{kind}: {verdict:?}");
    }

    // FP8 is tried too, and right where the chip has its units.
    if device.capability() >= (8, 9) {
        for (accumulator, kind) in
            [(Accumulator::Split, ProductKind::Fp8Split), (Accumulator::Fast, ProductKind::Fp8Fast)]
        {
            let operands =
                [fp8_matrix(M, 5, Scaling::Tensor { scale: 371.3 }), fp8_matrix(N, 6, Scaling::Tensor { scale: 99.5 })];
            let out = fp8_product(&operands, accumulator);
            let product = spec::Product { accumulator, ..spec::Product::default() };
            let [a, b] = operands.each_ref().map(|operand| spec::Operand::Fp8(operand.view()));
            bounded::check(&a, &b, &product, &out, "fp8");
            assert_eq!(known(device, kind), Some(Verdict::Used));
        }
    }
}

/// A product of host memory on the GPU.
fn fp8_product([a, b]: &[fp8::Quantized; 2], accumulator: Accumulator) -> Vec<f32> {
    let gpu: Implementation = "cuda".parse().unwrap();
    let product = on_host::Product { accumulator, ..on_host::Product::default() };
    let mut out = vec![77.0; M * N];
    on_host::gemm(gpu, &a.view(), &b.view(), &product, &mut out).unwrap();
    out
}
