//! Outputs against exact sums.

use super::matrix::{Form, Matrix, Row};
use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_kernels::cuda::{Slice, Stream};
use nvfp4_spec::gemm::{Accumulate, Interval, Product, Sums};
use nvfp4_spec::philox::{philox4x32, words};

/// Outputs that are checked, beside the corners.
const SAMPLES: u64 = 200;

/// An error unless outputs of a product, chosen at random, are within their bounds. `out` has whole
/// rows of N.
pub fn check(
    stream: &Stream,
    (a, left): (&Matrix, Form),
    (b, right): (&Matrix, Form),
    out: Slice<'_, bf16>,
) -> Result<()> {
    let n = b.rows;
    for (i, j) in positions(out.len() / n, n) {
        let interval = interval(&a.row(stream, i, left)?, &b.row(stream, j, right)?);
        let got = stream.to_host(out.range(i * n + j..i * n + j + 1))?[0];
        let Interval { exact, allowed } = interval;
        ensure!(interval.holds(got.to_f32()), "output ({i}, {j}) is {got} instead of {exact} ± {allowed:.2e}");
    }
    Ok(())
}

/// The interval that an output in bf16 may be in.
fn interval(a: &Row, b: &Row) -> Interval {
    let (a, b) = (a.operand(), b.operand());
    Interval::new((&a, 0), (&b, 0), &Product::<bf16>::default(), &Sums::new(&a, &b, Accumulate::Exact))
}

/// The corners of an `m` × `n` matrix, and positions in it.
fn positions(m: usize, n: usize) -> Vec<(usize, usize)> {
    let random = (0..SAMPLES).map(|at| {
        let [low, high] = words(at);
        let [i, j, ..] = philox4x32([low, high, 0, 0x6E33], words((m * n) as u64));
        (i as usize % m, j as usize % n)
    });
    [(0, 0), (0, n - 1), (m - 1, 0), (m - 1, n - 1)].into_iter().chain(random).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::matrix::{Matrix, amax, dequantize, quantize};
    use nvfp4_spec::{GlobalScale, Mode, Rounding, Specials};

    #[test]
    fn positions_lie_in_the_matrix_and_are_not_all_the_same() {
        for (m, n) in [(1, 1), (1, 8192), (300, 7), (16384, 8192)] {
            let positions = positions(m, n);
            assert!(positions.iter().all(|&(i, j)| i < m && j < n));
            let distinct: std::collections::BTreeSet<_> = positions.iter().collect();
            assert!(distinct.len() > 100.min(m * n / 2), "{m} × {n}: {}", distinct.len());
        }
    }

    /// A plain sum of decoded values passes, and one that leaves its largest term out does not.
    #[test]
    fn right_outputs_alone_pass() {
        let k = 4096;
        let matrix = |seed| Matrix::new(1, k, &crate::normal::standard::<bf16>(1, k, seed).unwrap()).unwrap();
        let (x, w) = (matrix(1), matrix(2));
        let amax = amax(&w, GlobalScale::PerTensor, Specials::Kernel).unwrap();
        let w = quantize(&w, &amax, &Mode::default(), Rounding::NearestEven).unwrap();
        let decoded: Vec<f32> = dequantize(&w.view()).unwrap();
        let terms: Vec<f64> = x.data().iter().zip(&decoded).map(|(&x, &w)| f64::from(x) * f64::from(w)).collect();
        let sum: f64 = terms.iter().sum();
        let largest = terms.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
        let interval = interval(&Row::Bf16(x), &Row::Nvfp4(w));
        let [right, wrong] = [sum, sum - largest].map(|sum| bf16::from_f64(sum).to_f32());
        assert!(interval.holds(right) && !interval.holds(wrong), "{interval:?}, {right}, {wrong}");
        assert!(!interval.holds(f32::NAN), "what is written before a product runs does not pass");
    }
}
