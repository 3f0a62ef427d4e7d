//! What tests on a GPU share.

use nvfp4::cuda::{Device, Gpu};
use nvfp4_spec::gemm::{Accumulator, bound};
use nvfp4_testing::{Need, missing};

/// The first GPU, if there is one.
pub fn gpu() -> Option<Gpu> {
    let device = Device::open(0).inspect_err(|reason| missing(Need::Gpu, reason)).ok()?;
    Some(Gpu::new(device).unwrap())
}

/// Holds a product's outputs against the exact ones of the CPU, within the bound of its sums.
pub fn check(got: &[f32], a: &nvfp4::Direction, b: &nvfp4::Direction, sums: Accumulator, what: &str) {
    let decode = |d: &nvfp4::Direction| d.dequantize::<f32>().unwrap();
    let (left, right, k) = (decode(a), decode(b), a.cols());
    let expected: Vec<f32> = nvfp4::matmul(a, b, &nvfp4::Product::default()).unwrap();
    // MXFP8's columns are decoded as they lie.
    let upright = |d: &nvfp4::Direction, values: Vec<f32>| match d {
        nvfp4::Direction::Fp8(f) if f.description().stored_shape() != (f.rows(), f.cols()) => {
            let (rows, cols) = (f.rows(), f.cols());
            (0..rows * cols).map(|i| values[i % cols * rows + i / cols]).collect()
        }
        _ => values,
    };
    let (left, right) = (upright(a, left), upright(b, right));
    // All outputs of small products, some of every row and column of large ones.
    let step = if got.len() > 1 << 20 { 61 } else { 1 };
    for (at, (got, expected)) in got.iter().zip(&expected).enumerate().step_by(step) {
        let (i, j) = (at / b.rows(), at % b.rows());
        let terms = left[i * k..][..k].iter().zip(&right[j * k..]);
        let magnitude: f64 = terms.map(|(l, r)| (f64::from(*l) * f64::from(*r)).abs()).sum();
        // The bound of either sum, and a few roundings of the scales after it.
        let allowed = sums.bound(k + 16, magnitude) + bound(k + 16, magnitude);
        let error = (f64::from(*got) - f64::from(*expected)).abs();
        assert!(error <= allowed, "{what} ({i}, {j}): {got} for {expected}");
    }
}
