//! Products in every implementation: on the CPU bit for bit where both operands are NVFP4; within
//! the derived bound where one is plain, and on a GPU.

mod bounded;

use half::bf16;
use nvfp4_kernels::gemm::{Accumulate, Epilogue, Member, Operand, Product, gemm, gemm_prepared, grouped, prepare};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::matrix::{self, Matrix, Quantized, View};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{Element, GlobalScale, Mode, Rounding};

/// Uniform values whose size varies from block to block.
fn values<T: Element>(rows: usize, cols: usize, seed: u32) -> Vec<T> {
    let value = |i: usize| {
        let [a, b, ..] = philox4x32([i as u32, (i / 16) as u32, 0, 0], [seed, 5]);
        let size = philox4x32([(i / 16) as u32, 1, 0, 0], [seed, 5])[0] % 8;
        T::from_f32((a as f32 - b as f32) / 4294967296.0 / (1 << size) as f32)
    };
    (0..rows * cols).map(value).collect()
}

fn quantized(rows: usize, cols: usize, seed: u32, global: GlobalScale) -> Quantized {
    let mode = Mode { global, ..Mode::default() };
    let x = Matrix::new(rows, cols, &values::<f32>(rows, cols, seed)).unwrap();
    let amax = matrix::amax(&x, global, mode.amax_specials()).unwrap();
    matrix::quantize(&x, &amax, &mode, Rounding::NearestEven).unwrap()
}

const GLOBALS: [GlobalScale; 2] = [GlobalScale::PerTensor, GlobalScale::PerRow];

fn product_of<T: Element>(
    implementation: Implementation,
    a: &View<'_>,
    b: &View<'_>,
    product: &Product<'_, T>,
) -> Vec<u32> {
    let mut out = vec![T::from_f32(77.0); a.rows * b.rows];
    gemm(implementation, a, b, product, &mut out).unwrap();
    out.into_iter().map(|y| if y.to_f32().is_nan() { u32::MAX } else { y.to_f32().to_bits() }).collect()
}

fn check<T: Element>(a: &View<'_>, b: &View<'_>, product: &Product<'_, T>) {
    let expected = product_of(Implementation::Scalar, a, b, product);
    for implementation in Implementation::available() {
        if implementation.is_gpu() && product.accumulate == Accumulate::Exact {
            check_bound(implementation, a.into(), b.into(), product);
            continue;
        }
        let got = product_of(implementation, a, b, product);
        assert!(got == expected, "{implementation}: {} × {} × {}, {product:?}", a.rows, b.rows, a.cols);
    }
}

/// The outputs of any operands against the bound.
fn check_bound<T: Element>(implementation: Implementation, a: Operand<'_>, b: Operand<'_>, product: &Product<'_, T>) {
    let mut out = vec![T::from_f32(77.0); a.rows() * b.rows()];
    gemm(implementation, a, b, product, &mut out).unwrap();
    let matrices = [a, b].map(|operand| match operand {
        Operand::Plain(x) => Some(x.to_matrix()),
        Operand::Nvfp4(_) | Operand::Fp8(_) => None,
    });
    fn spec<'a>(operand: Operand<'a>, matrix: &'a Option<Matrix>) -> nvfp4_spec::gemm::Operand<'a> {
        match (operand, matrix) {
            (Operand::Nvfp4(view), _) => (&view).into(),
            (Operand::Fp8(view), _) => (&view).into(),
            (Operand::Plain(_), matrix) => matrix.as_ref().unwrap().into(),
        }
    }
    bounded::check(&spec(a, &matrices[0]), &spec(b, &matrices[1]), product, &out, &implementation.to_string());
}

#[test]
fn every_shape_near_the_edges_of_tiles() {
    for (m, n, k) in [
        (1, 1, 16),
        (1, 17, 32),
        (2, 8, 48),
        (3, 9, 64),
        (4, 16, 16),
        (5, 15, 33),
        (6, 33, 31),
        (7, 7, 7),
        (13, 40, 128),
        (16, 100, 272),
        (20, 64, 1040),
        (1, 256, 4096),
        (6, 31, 1),
        (25, 3, 15),
        (2, 130, 4096),
    ] {
        let (a, b) = (quantized(m, k, 1, GlobalScale::PerTensor), quantized(n, k, 2, GlobalScale::PerTensor));
        for accumulate in [Accumulate::Exact, Accumulate::Reference] {
            check::<f32>(&a.view(), &b.view(), &Product { accumulate, ..Product::default() });
        }
    }
}

#[test]
fn global_scales_alpha_bias_and_c_in_every_type() {
    let (m, n, k) = (9, 21, 80);
    for (left, right) in GLOBALS.into_iter().flat_map(|l| GLOBALS.map(|r| (l, r))) {
        let (a, b) = (quantized(m, k, 3, left), quantized(n, k, 4, right));
        for (alpha, with_bias, beta, epilogue) in
            [(1.0, false, None, None), (1.7, true, Some(0.3), None), (-0.5, true, Some(0.0), Some(Epilogue::Folded))]
        {
            fn run<T: Element>(
                a: &Quantized,
                b: &Quantized,
                alpha: f32,
                bias: Option<&[f32]>,
                beta: Option<f32>,
                epilogue: Option<Epilogue>,
            ) {
                let c: Vec<T> = values(a.rows, b.rows, 6);
                let add = beta.map(|beta| (&c[..], beta));
                for accumulate in [Accumulate::Exact, Accumulate::Reference] {
                    check(
                        &a.view(),
                        &b.view(),
                        &Product { accumulate, epilogue, alpha, bias, add, ..Product::default() },
                    );
                }
            }
            let bias: Vec<f32> = values(1, n, 7);
            let bias = with_bias.then_some(&bias[..]);
            run::<f32>(&a, &b, alpha, bias, beta, epilogue);
            run::<bf16>(&a, &b, alpha, bias, beta, epilogue);
            run::<half::f16>(&a, &b, alpha, bias, beta, epilogue);
        }
    }
}

/// Any bytes as scales, NaN and negative ones among them, and any codes: scales so far apart that
/// binary64 is not enough.
#[test]
fn any_bytes_at_all() {
    let shapes = [(7, 19, 512), (1, 37, 1111), (4, 19, 2047), (9, 19, 2064), (13, 19, 33), (2, 9, 528), (3, 5, 70)];
    for (seed, (m, n, k)) in (0..42).zip(shapes.into_iter().cycle()) {
        let bytes = |len: usize, salt: u32| -> Vec<u8> {
            (0..len).map(|i| philox4x32([i as u32, salt, 0, 0], [seed, 9])[0] as u8).collect()
        };
        // Any at all, any but NaN, or within eight powers of two, where pairs of blocks are close
        // together and far apart.
        let usual = |byte: u8| match seed / 7 % 3 {
            0 => byte,
            1 if byte & 0x7F == 0x7F => 0x7E,
            1 => byte,
            _ => 0x38 + byte % 0x47,
        };
        let mut a = quantized(m, k, 1, GlobalScale::PerTensor);
        let mut b = quantized(n, k, 2, GlobalScale::PerRow);
        for (q, salt) in [(&mut a, 1), (&mut b, 2)] {
            (q.codes, q.scales) = (bytes(q.codes.len(), salt), bytes(q.scales.len(), salt + 10));
            q.scales.iter_mut().for_each(|s| *s = usual(*s));
        }
        for accumulate in [Accumulate::Exact, Accumulate::Reference] {
            check::<f32>(&a.view(), &b.view(), &Product { accumulate, ..Product::default() });
        }
    }
}

#[test]
fn plain_operands_are_within_the_bound() {
    for (m, n, k) in [(1, 5, 16), (3, 40, 96), (17, 33, 272), (2, 9, 30), (33, 20, 1024), (1, 64, 4096)] {
        let weights = quantized(n, k, 8, GlobalScale::PerRow);
        let wide: Vec<f32> = values(m, k, 9);
        let narrow: Vec<bf16> = values(m, k, 9);
        let half: Vec<half::f16> = values(m, k, 9);
        let other: Vec<bf16> = values(n, k, 10);
        let inputs = [Values::F32(&wide), Values::Bf16(&narrow), Values::F16(&half)];
        for x in inputs.map(|x| Input::new(x, m, k).unwrap()) {
            let plain = Input::new(Values::Bf16(&other), n, k).unwrap();
            for (a, b) in [
                (Operand::Plain(x), Operand::from(&weights.view())),
                (Operand::from(&weights.view()), Operand::Plain(x)),
                (Operand::Plain(x), Operand::Plain(plain)),
            ] {
                for implementation in Implementation::available() {
                    let product = Product { epilogue: Some(Epilogue::Folded), ..Product::<f32>::default() };
                    check_bound(implementation, a, b, &product);
                }
            }
        }
    }
}

#[test]
fn groups_of_any_size_and_none() {
    let sizes = [3, 0, 17, 1, 0, 6];
    let k = 96;
    let operands: Vec<(Quantized, Quantized)> = (0..)
        .zip(sizes)
        .map(|(g, m)| (quantized(m, k, g, GlobalScale::PerRow), quantized(20, k, g + 50, GlobalScale::PerTensor)))
        .collect();
    for implementation in Implementation::available() {
        let mut outs: Vec<Vec<f32>> = sizes.iter().map(|m| vec![77.0; m * 20]).collect();
        let mut members: Vec<Member<'_, f32>> = operands
            .iter()
            .zip(&mut outs)
            .map(|((a, b), out)| Member {
                a: (&a.view()).into(),
                b: (&b.view()).into(),
                product: Product::default(),
                out,
            })
            .collect();
        grouped(implementation, &mut members).unwrap();
        for ((a, b), out) in operands.iter().zip(&outs) {
            if implementation.is_gpu() {
                let (a, b) = (&(&a.view()).into(), &(&b.view()).into());
                bounded::check(a, b, &Product::default(), out, "a group");
                continue;
            }
            let alone = product_of::<f32>(Implementation::Scalar, &a.view(), &b.view(), &Product::default());
            assert_eq!(out.iter().map(|y| y.to_bits()).collect::<Vec<u32>>(), alone, "{implementation}");
        }
    }
}

/// The weight gradient of an expert that got no tokens: K is 0.
#[test]
fn a_sum_of_nothing_is_zero() {
    let (a, b) = (quantized(5, 0, 1, GlobalScale::PerTensor), quantized(9, 0, 2, GlobalScale::PerTensor));
    for implementation in Implementation::available() {
        let mut out = vec![77f32; 45];
        gemm(implementation, &a.view(), &b.view(), &Product::default(), &mut out).unwrap();
        assert!(out.iter().all(|y| y.to_bits() == 0));
        let mut out = vec![77f32; 45];
        let plain = Input::new(Values::F32(&[]), 5, 0).unwrap();
        gemm(implementation, &plain, &b.view(), &Product::default(), &mut out).unwrap();
        assert!(out.iter().all(|y| y.to_bits() == 0), "with a plain operand");
        let mut out = vec![77f32; 45];
        let mut members =
            [Member { a: (&a.view()).into(), b: (&b.view()).into(), product: Product::default(), out: &mut out }];
        grouped(implementation, &mut members).unwrap();
        assert_eq!(out, [0.0; 45]);
    }
}

#[test]
fn one_wrong_member_is_refused_before_any_is_computed() {
    let (a, b, c) = (
        quantized(2, 32, 1, GlobalScale::PerTensor),
        quantized(3, 32, 2, GlobalScale::PerTensor),
        quantized(3, 48, 3, GlobalScale::PerTensor),
    );
    let (mut first, mut second) = (vec![77f32; 6], vec![77f32; 6]);
    let mut members = [
        Member { a: (&a.view()).into(), b: (&b.view()).into(), product: Product::default(), out: &mut first },
        Member { a: (&a.view()).into(), b: (&c.view()).into(), product: Product::default(), out: &mut second },
    ];
    let error = grouped(Implementation::best(), &mut members).unwrap_err();
    assert_eq!(error.to_string(), "matmul: expected K = 32, got K = 48");
    assert_eq!(first, [77.0; 6]);
}

/// bias, C and per-row scales beside a plain operand, from strided rows: sums that are exact in
/// binary32 make the rest exact too.
#[test]
fn a_plain_operand_has_the_epilogues_of_the_rule() {
    let (m, n, k) = (9, 37, 80);
    let weights = quantized(n, k, 4, GlobalScale::PerRow);
    // One value that is not zero in every row.
    let mut x = vec![bf16::ZERO; m * (k + 3)];
    (0..m).for_each(|i| x[i * (k + 3) + 7 * i % k] = bf16::from_f32(1.5));
    let (bias, c): (Vec<f32>, Vec<f32>) = (values(1, n, 7), values(m, n, 6));
    for rows in [1, 3, m] {
        let input = Input::strided(Values::Bf16(&x), rows, k, k + 3).unwrap();
        for epilogue in [None, Some(Epilogue::Folded), Some(Epilogue::RowScaled)] {
            let add = Some((&c[..rows * n], 0.3));
            let product = Product { epilogue, alpha: 1.7, bias: Some(&bias), add, ..Product::default() };
            let run = |implementation| {
                let mut out = vec![77f32; rows * n];
                gemm(implementation, &input, &weights.view(), &product, &mut out).unwrap();
                out
            };
            for implementation in Implementation::available() {
                assert_eq!(run(implementation), run(Implementation::Scalar), "{implementation} {epilogue:?}");
            }
        }
    }
}

/// Elements of a block that are far apart, or not finite, beside others that are not.
#[test]
fn bf16_of_any_exponent_is_within_the_bound() {
    let (m, n, k) = (13, 21, 200);
    let weights = quantized(n, k, 3, GlobalScale::PerTensor);
    let word = |i: usize| philox4x32([i as u32, 7, 0, 0], [1, 2]);
    // From one element in 64 that is far below its neighbours, which takes one path, to all of them.
    for rarely in [64, 8, 1] {
        let value = |i: usize| {
            let [a, b, c, _] = word(i);
            let exponent = if a % rarely == 0 { 1 + b % 230 } else { 120 + b % 6 };
            bf16::from_bits((c as u16 & 0x807F) | (exponent as u16) << 7)
        };
        let mut x: Vec<bf16> = (0..m * k).map(value).collect();
        for implementation in Implementation::available() {
            let input = Input::new(Values::Bf16(&x), m, k).unwrap();
            check_bound::<f32>(implementation, (&input).into(), (&weights.view()).into(), &Product::default());
        }
        // Rows whose every element is tiny, zero, infinite or NaN.
        for (i, bits) in [0x0080, 0x0000, 0x8000, 0x7F80, 0x7FC0].into_iter().enumerate() {
            x[(2 * i + 1) * k..][..k].fill(bf16::from_bits(bits));
        }
        let input = Input::new(Values::Bf16(&x), m, k).unwrap();
        let mut expected = vec![0f32; m * n];
        gemm(Implementation::Scalar, &input, &weights.view(), &Product::default(), &mut expected).unwrap();
        for implementation in Implementation::available() {
            let mut out = vec![0f32; m * n];
            gemm(implementation, &input, &weights.view(), &Product::default(), &mut out).unwrap();
            for (at, (got, expected)) in out.into_iter().zip(&expected).enumerate() {
                assert_eq!(got.is_finite(), expected.is_finite(), "{implementation}, {at}: {got} for {expected}");
                assert_eq!(got.is_nan(), expected.is_nan(), "{implementation}, {at}: {got} for {expected}");
            }
        }
    }
}

/// Few rows with a weight that was prepared: the same bits, or within the same bound.
#[test]
fn prepared_weights_give_the_same_products() {
    for (m, n, k) in [(1, 1, 16), (1, 9, 30), (2, 8, 48), (3, 40, 96), (4, 33, 272), (1, 70, 1040), (5, 24, 64)] {
        let a = quantized(m, k, 1, GlobalScale::PerRow);
        let x: Vec<bf16> = values(m, k, 5);
        let x = Input::new(Values::Bf16(&x), m, k).unwrap();
        let mut weights = vec![quantized(n, k, 2, GlobalScale::PerRow), quantized(n, k, 3, GlobalScale::PerTensor)];
        // Scales that have no integers: too far apart, negative, NaN.
        for bytes in [[0x01, 0x7E], [0x38, 0xB8], [0x38, 0x7F]] {
            let mut far = quantized(n, k, 4, GlobalScale::PerTensor);
            far.scales.iter_mut().zip(bytes.into_iter().cycle()).for_each(|(to, byte)| *to = byte);
            weights.push(far);
        }
        for implementation in Implementation::available().into_iter().filter(|i| !i.is_gpu()) {
            for w in &weights {
                let (view, product) = (w.view(), Product::<f32>::default());
                let prepared = prepare(implementation, &view).unwrap();
                let of = |a: Operand<'_>| {
                    let mut out = vec![77f32; m * n];
                    gemm_prepared(implementation, a, &view, prepared.as_deref(), &product, &mut out).unwrap();
                    out
                };
                let bits = |y: &f32| if y.is_nan() { u32::MAX } else { y.to_bits() };
                let got: Vec<u32> = of((&a.view()).into()).iter().map(bits).collect();
                assert_eq!(got, product_of(Implementation::Scalar, &a.view(), &view, &product), "{implementation}");
                let matrix = x.to_matrix();
                bounded::check(&(&matrix).into(), &(&view).into(), &product, &of((&x).into()), "prepared");
            }
        }
    }
    for (n, k) in [(3, 0), (0, 16)] {
        let (a, w) = (quantized(1, k, 1, GlobalScale::PerTensor), quantized(n, k, 2, GlobalScale::PerTensor));
        let (view, mut out) = (w.view(), vec![77f32; n]);
        let prepared = prepare(Implementation::best(), &view).unwrap();
        let product = Product::default();
        gemm_prepared(Implementation::best(), &a.view(), &view, prepared.as_deref(), &product, &mut out).unwrap();
        assert!(out.iter().all(|y| y.to_bits() == 0));
    }
    let w = quantized(8, 32, 1, GlobalScale::PerTensor);
    let a = quantized(1, 32, 2, GlobalScale::PerTensor);
    let implementation = Implementation::best();
    if prepare(implementation, &w.view()).unwrap().is_some() {
        let (view, mut out) = (w.view(), [0f32; 8]);
        let short = gemm_prepared(implementation, &a.view(), &view, Some(&[0; 5]), &Product::default(), &mut out);
        assert!(short.unwrap_err().to_string().contains("prepared weight"));
    }
}
