//! Products of quantized matrices: `y = α·A·Bᵀ (+ bias) (+ β·C)`, both operands with blocks along
//! K. Source: numerics §0, §9, §9.1, §14.8.
//!
//! A product has two parts, each with two rules: how the terms of the sum are accumulated
//! ([`Accumulate`]), and in what order the global scales, α, the bias and β·C are applied
//! ([`Epilogue`]).
//!
//! A block's term is exact: 16 products of E2M1 values are a multiple of 1/4, two E4M3 scales a
//! multiple of 2⁻¹⁸, so the term is a multiple of 2⁻²⁰ with at most 20 significant bits. A K that
//! is no multiple of 16 ends in zeros.
//!
//! Any other pair is a sum of products of the operands' values ([`Operand`] says which those are),
//! and has a [`bound`]; one of FP8 tensor cores, which add in fewer bits, has that of its
//! [`Accumulator`].

mod accumulator;
mod bound;
mod operand;
mod output_scale;
mod sums;

pub use accumulator::{Accumulator, SPLIT};
pub use bound::{Interval, bound};
pub use operand::Operand;
pub use output_scale::OutputScale;
pub use sums::{Sums, TERM_UNIT};

use crate::{Element, Error, GlobalScale, Result, area, check_len, zeros};

/// How the block terms are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Accumulate {
    /// Exactly, then rounded once: independent of any order.
    #[default]
    Exact,
    /// In binary32, block after block, one rounding each (numerics §9).
    Reference,
}

/// In what order the factors are applied. Each step is one rounding in binary32.
///
/// Written for operands that store an amax. For a stored multiplier `g`, read `g` instead of amax
/// and 1 instead of 6E; for a divisor `g`, `fl(1/g)` and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// numerics §9: `y = fl(fl(fl(amaxA·amaxB) / 36·EA·EB) · acc)`, `·α`, `+ bias`, `+ fl(β·C)`,
    /// cast.
    Folded,
    /// numerics §9.1: `g = fl(fl(1/(36·EA·EB)) · acc)`; then `fl(g · fl(amaxA·amaxB))` if a side
    /// has a single amax, or `fl(fl(g · amaxA) · amaxB)` if both are per row; then `·α`, `+ bias`,
    /// cast, and `+ β·C` in the output type.
    RowScaled,
}

impl Epilogue {
    /// The epilogue that products use: row-scaled if either operand is.
    pub fn of(a: &Operand<'_>, b: &Operand<'_>) -> Self {
        match (a.global(), b.global()) {
            (GlobalScale::PerTensor, GlobalScale::PerTensor) => Epilogue::Folded,
            _ => Epilogue::RowScaled,
        }
    }
}

/// Everything about a product but its operands.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a, T> {
    /// How the terms are summed.
    pub accumulate: Accumulate,
    /// How precisely a GPU may add the products of FP8 operands.
    pub accumulator: Accumulator,
    /// In what order the factors are applied; `None` picks [`Epilogue::of`] the operands.
    pub epilogue: Option<Epilogue>,
    /// The caller's factor α.
    pub alpha: f32,
    /// One value per output column.
    pub bias: Option<&'a [f32]>,
    /// The matrix C and its factor β. A β of 0 leaves C unread, as in BLAS.
    pub add: Option<(&'a [T], f32)>,
}

impl<T> Product<'_, T> {
    /// Checks the product against the shapes of its operands, [M, K] and [N, K]; returns the number
    /// of outputs.
    pub fn check(&self, (m, k): (usize, usize), (n, other_k): (usize, usize)) -> Result<usize> {
        if k != other_k {
            return Err(Error::InnerLength { expected: k, got: other_k });
        }
        let outputs = area(m, n)?;
        if let Some(bias) = self.bias {
            check_len("bias", n, bias.len())?;
        }
        if let Some((c, _)) = self.add {
            check_len("C", outputs, c.len())?;
        }
        Ok(outputs)
    }
}

impl<T> Default for Product<'_, T> {
    fn default() -> Self {
        Product {
            accumulate: Accumulate::Exact,
            accumulator: Accumulator::Precise,
            epilogue: None,
            alpha: 1.0,
            bias: None,
            add: None,
        }
    }
}

/// The product of `a` [M, K] and `b` [N, K], transposed: [M, N], row-major.
///
/// A block scale that is NaN makes every output it takes part in NaN. Unless both operands are
/// NVFP4, the sum is computed in binary64, in which every product is exact, and rounded once.
/// Faster versions need only be within the [`bound`] of it, not equal to it.
///
/// ```
/// use nvfp4_spec::gemm::{Product, gemm};
/// use nvfp4_spec::matrix::{self, Matrix};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let x = Matrix::new(1, 16, &[6.0f32; 16])?;
/// let q = matrix::quantize(&x, &[6.0], &Mode::default(), Rounding::NearestEven)?;
/// assert_eq!(gemm::<f32>(&q.view(), &q.view(), &Product::default())?, [16.0 * 36.0]);
/// # Ok::<(), nvfp4_spec::Error>(())
/// ```
pub fn gemm<'a, T: Element>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    let (a, b) = (&a.into(), &b.into());
    let mut out: Vec<T> = zeros(check(a, b, product)?, a.rows(), b.rows())?;
    if out.is_empty() {
        return Ok(out);
    }
    let sums = Sums::new(a, b, product.accumulate);
    for (i, row) in out.chunks_exact_mut(b.rows()).enumerate() {
        for (j, y) in row.iter_mut().enumerate() {
            let c = product.add.filter(|&(_, beta)| beta != 0.0).map(|(c, beta)| (c[i * b.rows() + j], beta));
            let bias = product.bias.map(|bias| bias[j]);
            *y = OutputScale::new(product.epilogue, (a, i), (b, j)).finish(sums.sum(i, j), product.alpha, bias, c);
        }
    }
    Ok(out)
}

/// The number of outputs, if everything fits.
pub fn check<T>(a: &Operand<'_>, b: &Operand<'_>, product: &Product<'_, T>) -> Result<usize> {
    a.check()?;
    b.check()?;
    product.check((a.rows(), a.cols()), (b.rows(), b.cols()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Matrix;
    use crate::matrix::{self, Quantized};
    use crate::{Mode, Rounding, Specials};
    use half::bf16;

    fn quantized(rows: usize, cols: usize, global: GlobalScale) -> Quantized {
        let data: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 257) as f32 / 16.0 - 8.0).collect();
        let x = Matrix::new(rows, cols, &data).unwrap();
        let mode = Mode { global, ..Mode::default() };
        matrix::quantize(&x, &matrix::amax(&x, global, mode.specials).unwrap(), &mode, Rounding::NearestEven).unwrap()
    }

    #[test]
    fn equals_the_product_of_the_decoded_values_in_f64() {
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            let (a, b) = (quantized(3, 50, global), quantized(5, 50, GlobalScale::PerTensor));
            let y = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
            let decode = |q: &Quantized| matrix::dequantize::<f32>(&q.view()).unwrap();
            let (da, db) = (decode(&a), decode(&b));
            for (i, j) in (0..3).flat_map(|i| (0..5).map(move |j| (i, j))) {
                let products = (0..50).map(|k| f64::from(da[i * 50 + k]) * f64::from(db[j * 50 + k]));
                let (exact, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                // Each decoded value carries 3 roundings, the product a handful more.
                assert!((f64::from(y[i * 5 + j]) - exact).abs() <= magnitude * 12.0 * 2f64.powi(-24));
            }
        }
    }

    #[test]
    fn a_nan_scale_makes_its_outputs_nan() {
        let (mut a, b) = (quantized(2, 32, GlobalScale::PerTensor), quantized(2, 32, GlobalScale::PerTensor));
        a.scales[3] = 0x7F;
        for accumulate in [Accumulate::Exact, Accumulate::Reference] {
            let product = Product { accumulate, ..Product::default() };
            let y = gemm::<f32>(&a.view(), &b.view(), &product).unwrap();
            assert_eq!(y.map_nan(), [false, false, true, true]);
        }
    }

    trait MapNan {
        fn map_nan(&self) -> Vec<bool>;
    }
    impl MapNan for Vec<f32> {
        fn map_nan(&self) -> Vec<bool> {
            self.iter().map(|x| x.is_nan()).collect()
        }
    }

    #[test]
    fn alpha_bias_and_c_in_the_order_of_each_epilogue() {
        let (a, b) = (quantized(2, 64, GlobalScale::PerRow), quantized(3, 64, GlobalScale::PerTensor));
        let (bias, c) = ([0.5, -1.0, 2.0], [bf16::from_f32(3.25); 6]);
        let plain = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
        let add = Some((&c[..], 0.3));
        let y = gemm(&a.view(), &b.view(), &Product { alpha: 1.7, bias: Some(&bias), add, ..Product::default() });
        let expected: Vec<bf16> = (0..6)
            .map(|i| {
                let y = bf16::from_f32(plain[i] * 1.7 + bias[i % 3]);
                bf16::from_f32(y.to_f32() + bf16::from_f32(0.3 * 3.25).to_f32())
            })
            .collect();
        assert_eq!(y.unwrap(), expected);

        let folded = Product { epilogue: Some(Epilogue::Folded), ..Product::default() };
        let plain = gemm::<f32>(&a.view(), &b.view(), &folded).unwrap();
        let y = gemm(&a.view(), &b.view(), &Product { alpha: 1.7, bias: Some(&bias), add, ..folded.cast() });
        let expected: Vec<bf16> =
            (0..6).map(|i| bf16::from_f32(plain[i] * 1.7 + bias[i % 3] + 0.3f32 * 3.25)).collect();
        assert_eq!(y.unwrap(), expected);
    }

    impl Product<'_, f32> {
        /// The same choices for another output type.
        fn cast<T>(&self) -> Product<'static, T> {
            Product { accumulate: self.accumulate, epilogue: self.epilogue, ..Product::default() }
        }
    }

    /// 1 + β·C, where β·C is just above half an ulp of bf16 at 1: rounded to bf16 first, it is
    /// exactly half.
    #[test]
    fn beta_times_c_is_rounded_to_the_output_type_in_the_row_scaled_epilogue_only() {
        let (zero, half_ulp) = (quantized(1, 0, GlobalScale::PerTensor), 1.0 / 256.0);
        let add = Some((&[bf16::ONE][..], half_ulp * (1.0 + 1.0 / 512.0)));
        let product = |epilogue| Product { epilogue: Some(epilogue), bias: Some(&[1.0]), add, ..Product::default() };
        let y = |epilogue| gemm::<bf16>(&zero.view(), &zero.view(), &product(epilogue)).unwrap()[0].to_f32();
        assert_eq!([y(Epilogue::RowScaled), y(Epilogue::Folded)], [1.0, 1.0 + 2.0 * half_ulp]);
    }

    #[test]
    fn outputs_by_the_rule_lie_within_their_intervals_and_others_do_not() {
        let c: Vec<bf16> = (0..15).map(|i| bf16::from_f32(i as f32 - 7.0)).collect();
        for (global, add) in
            [GlobalScale::PerTensor, GlobalScale::PerRow].into_iter().flat_map(|g| [(g, None), (g, Some(0.3))])
        {
            let (a, b) = (quantized(3, 50, global), quantized(5, 50, GlobalScale::PerTensor));
            let (a, b): (Operand<'_>, Operand<'_>) = ((&a.view()).into(), (&b.view()).into());
            let product = Product { add: add.map(|beta| (&c[..], beta)), bias: Some(&[0.5; 5]), ..Product::default() };
            let sums = Sums::new(&a, &b, Accumulate::Exact);
            for (at, y) in gemm(a, b, &product).unwrap().iter().enumerate() {
                let interval = Interval::new((&a, at / 5), (&b, at % 5), &product, &sums);
                assert!(interval.holds(y.to_f32()), "{y} {interval:?}");
                let beyond = (interval.exact + interval.allowed * 1.001) as f32;
                assert!(!interval.holds(beyond) && !interval.holds(f32::NAN));
            }
        }
    }

    #[test]
    fn two_divisors_of_tiny_tensors_do_not_overflow() {
        // The divisors are 2688/7e-17 = 3.8e19 each, their product would be 1.5e39.
        let mode = Mode { profile: crate::Profile::LlmCompressor, ..Mode::default() };
        let operand = |rows: usize, global| {
            let data: Vec<f32> = (0..rows * 32).map(|i| 7e-17 * ((i * 31 % 15) as f32 - 7.0) / 7.0).collect();
            let x = Matrix::new(rows, 32, &data).unwrap();
            let mode = Mode { global, ..mode };
            matrix::quantize(&x, &matrix::amax(&x, global, Specials::Reference).unwrap(), &mode, Rounding::NearestEven)
        };
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            let (a, b) = (operand(2, global).unwrap(), operand(3, global).unwrap());
            let y = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
            let decode = |q: &Quantized| matrix::dequantize::<f32>(&q.view()).unwrap();
            let (da, db) = (decode(&a), decode(&b));
            for (i, j) in (0..2).flat_map(|i| (0..3).map(move |j| (i, j))) {
                let exact: f64 = (0..32).map(|k| f64::from(da[i * 32 + k]) * f64::from(db[j * 32 + k])).sum();
                let got = f64::from(y[i * 3 + j]);
                // The product of two factors of 2.6e-20 is subnormal, with 19 bits.
                assert!(exact.abs() > 1e-33 && (got - exact).abs() <= exact.abs() * 1e-5, "{got:e} {exact:e}");
            }
        }
    }

    #[test]
    fn beta_zero_leaves_c_unread() {
        let (a, b) = (quantized(2, 16, GlobalScale::PerTensor), quantized(2, 16, GlobalScale::PerTensor));
        let add = Some((&[f32::NAN; 4][..], 0.0));
        let y = gemm(&a.view(), &b.view(), &Product { add, ..Product::default() });
        assert_eq!(y, gemm(&a.view(), &b.view(), &Product::default()));
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let (a, b) = (quantized(2, 32, GlobalScale::PerTensor), quantized(3, 48, GlobalScale::PerTensor));
        let message = |product| gemm::<f32>(&a.view(), &a.view(), &product).unwrap_err().to_string();
        assert_eq!(
            gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap_err().to_string(),
            "matmul: expected K = 32, got K = 48"
        );
        assert_eq!(message(Product { bias: Some(&[0.0]), ..Product::default() }), "bias: expected length 2, got 1");
        assert_eq!(message(Product { add: Some((&[0.0], 1.0)), ..Product::default() }), "C: expected length 4, got 1");
    }

    #[test]
    fn empty_operands_give_empty_or_zero_products() {
        let (none, some) = (quantized(0, 32, GlobalScale::PerTensor), quantized(2, 32, GlobalScale::PerTensor));
        assert_eq!(gemm::<f32>(&none.view(), &some.view(), &Product::default()), Ok(vec![]));
        let empty_k = quantized(2, 0, GlobalScale::PerRow);
        assert_eq!(gemm::<f32>(&empty_k.view(), &empty_k.view(), &Product::default()), Ok(vec![0.0; 4]));
    }

    #[test]
    fn operands_without_elements_may_claim_any_number_of_rows() {
        let operand = |rows| Quantized { rows, ..quantized(0, 0, GlobalScale::PerTensor) };
        let product = |a, b| gemm::<f32>(&operand(a).view(), &operand(b).view(), &Product::default());
        assert_eq!([product(1 << 62, 0), product(0, 1 << 62)], [Ok(vec![]), Ok(vec![])]);
        assert_eq!(product(1 << 30, 1 << 30), Err(Error::TooLarge { rows: 1 << 30, cols: 1 << 30 }));
        assert_eq!(product(1 << 62, 4), Err(Error::TooLarge { rows: 1 << 62, cols: 4 }));
    }
}
