//! Products of FP8 and MXFP8 operands, with each other and with every other kind, in every
//! implementation: within the derived bound.

mod bounded;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
#[path = "gemm_fp8/gpu.rs"]
mod gpu;

use half::{bf16, f16};
use nvfp4_kernels::gemm::{Epilogue, Member, Operand, Product, gemm, grouped};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::fp8::{self, AmaxRule, Format, Mode, Quantized, Scales, Scaling, Side, Tile, View};
use nvfp4_spec::matrix::{self, Matrix};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{Element, GlobalScale, Rounding, Specials, gemm as spec};

/// Uniform values whose size varies from 16 to 16.
fn values<T: Element>(rows: usize, cols: usize, seed: u32) -> Vec<T> {
    let value = |i: usize| {
        let [a, b, ..] = philox4x32([i as u32, (i / 16) as u32, 0, 0], [seed, 5]);
        let size = philox4x32([(i / 16) as u32, 1, 0, 0], [seed, 5])[0] % 8;
        T::from_f32((a as f32 - b as f32) / 4294967296.0 / (1 << size) as f32)
    };
    (0..rows * cols).map(value).collect()
}

fn matrix(rows: usize, cols: usize, seed: u32) -> Matrix {
    Matrix::new(rows, cols, &values::<f32>(rows, cols, seed)).unwrap()
}

/// An FP8 operand of every tile and format, `rows` × K as products take it.
fn operands(rows: usize, k: usize, seed: u32) -> Vec<Quantized> {
    let any = AmaxRule::CURRENT;
    let scalings = [
        (Scaling::Tensor { scale: 371.3 }, Side::Row),
        (Scaling::Row128(any), Side::Row),
        (Scaling::Row128(AmaxRule::BLOCK), Side::Column),
        (Scaling::Square128(any), Side::Row),
        (Scaling::Square128(AmaxRule::BLOCK), Side::Column),
        (Scaling::Mx, Side::Row),
        (Scaling::Mx, Side::Column),
    ];
    let quantized = |(scaling, side): (Scaling, Side), format| {
        let x = match side {
            Side::Row => matrix(rows, k, seed),
            Side::Column => matrix(k, rows, seed),
        };
        fp8::quantize(&x, &Mode { format, scaling }, side)
    };
    scalings.into_iter().flat_map(|scaling| Format::ALL.map(|format| quantized(scaling, format))).collect()
}

fn nvfp4(rows: usize, k: usize, seed: u32, global: GlobalScale) -> matrix::Quantized {
    let (x, mode) = (matrix(rows, k, seed), nvfp4_spec::Mode { global, ..nvfp4_spec::Mode::default() });
    matrix::quantize(&x, &matrix::amax(&x, global, Specials::Kernel).unwrap(), &mode, Rounding::NearestEven).unwrap()
}

fn run<T: Element>(implementation: Implementation, a: Operand<'_>, b: Operand<'_>, product: &Product<'_, T>) -> Vec<T> {
    let mut out = vec![T::from_f32(77.0); a.rows() * b.rows()];
    gemm(implementation, a, b, product, &mut out).unwrap();
    out
}

/// An operand of kernels beside what the oracle takes.
type Pair<'a> = (Operand<'a>, spec::Operand<'a>);

fn pair<'a>(view: &View<'a>) -> Pair<'a> {
    (view.into(), view.into())
}

fn check<T: Element>(a: Pair<'_>, b: Pair<'_>, product: &Product<'_, T>) {
    for implementation in Implementation::available() {
        let out = run(implementation, a.0, b.0, product);
        bounded::check(&a.1, &b.1, product, &out, &format!("{implementation}, {:?} × {:?}", kind(&a.0), kind(&b.0)));
    }
}

fn kind(operand: &Operand<'_>) -> String {
    match operand {
        Operand::Nvfp4(_) => "nvfp4".to_string(),
        Operand::Fp8(view) => format!("{:?} {:?}", view.format, view.tile),
        Operand::Plain(x) => format!("{:?}", x.values().precision()),
    }
}

const SIZES: [(usize, usize, usize); 5] = [(1, 5, 16), (3, 9, 130), (17, 20, 33), (2, 40, 300), (130, 3, 257)];

#[test]
fn every_tile_and_format_with_every_other() {
    for (m, n, k) in SIZES {
        let (left, right) = (operands(m, k, 1), operands(n, k, 2));
        for (a, b) in left.iter().flat_map(|a| right.iter().map(move |b| (a, b))) {
            check::<f32>(pair(&a.view()), pair(&b.view()), &Product::default());
        }
    }
}

#[test]
fn beside_plain_and_nvfp4_operands_on_either_side() {
    for (m, n, k) in SIZES {
        let plain = matrix(n, k, 3);
        let (brain, half): (Vec<bf16>, Vec<f16>) = (values(n, k, 3), values(n, k, 3));
        let matrices = [Matrix::new(n, k, &brain).unwrap(), Matrix::new(n, k, &half).unwrap()];
        let inputs = [Values::F32(plain.data()), Values::Bf16(&brain), Values::F16(&half)];
        let inputs = inputs.map(|values| Input::new(values, n, k).unwrap());
        let quantized = nvfp4(n, k, 4, GlobalScale::PerRow);
        let others: [Pair<'_>; 4] = [
            ((&inputs[0]).into(), (&plain).into()),
            ((&inputs[1]).into(), (&matrices[0]).into()),
            ((&inputs[2]).into(), (&matrices[1]).into()),
            ((&quantized.view()).into(), (&quantized.view()).into()),
        ];
        for (q, other) in operands(m, k, 5).iter().flat_map(|q| others.map(|other| (q, other))) {
            check::<f32>(pair(&q.view()), other, &Product::default());
            check::<f32>(other, pair(&q.view()), &Product::default());
        }
    }
}

#[test]
fn epilogues_in_every_type() {
    fn all<T: Element>(a: Pair<'_>, b: Pair<'_>) {
        let (m, n) = (a.0.rows(), b.0.rows());
        let (c, bias): (Vec<T>, Vec<f32>) = (values(m, n, 6), values(1, n, 7));
        for epilogue in [None, Some(Epilogue::Folded), Some(Epilogue::RowScaled)] {
            let add = Some((&c[..], 0.3));
            check(a, b, &Product { epilogue, alpha: 1.7, bias: Some(&bias), add, ..Product::default() });
        }
    }
    let (left, right) = (operands(9, 80, 1), operands(21, 80, 2));
    for (a, b) in left.iter().zip(right.iter().rev()) {
        all::<f32>(pair(&a.view()), pair(&b.view()));
        all::<bf16>(pair(&a.view()), pair(&b.view()));
        all::<f16>(pair(&a.view()), pair(&b.view()));
    }
}

/// Vectors decode E4M3 under a scale that is 2⁸ times larger. Where that is beyond binary32 they
/// decode otherwise: here in one row of the first panel, halfway through K.
#[test]
fn scales_at_the_end_of_the_range() {
    let (m, n, k) = (7, 70, 300usize);
    let across = k.div_ceil(fp8::MX_BLOCK);
    // Codes below 2⁻⁵, so that values stay finite.
    let byte = |i: usize, seed| philox4x32([i as u32, 0, 0, 0], [seed, 9])[0] as u8 & 0x87;
    let codes = |rows: usize, seed| -> Vec<u8> { (0..rows * k).map(|i| byte(i, seed)).collect() };
    let (left, right) = (codes(m, 1), codes(n, 2));
    let (small, mut large) = (vec![27; m * across], vec![127; n * across]);
    large[3 * across + 4] = 250;
    let (format, tile) = (Format::E4m3, Tile::Row32);
    let a = View { rows: m, cols: k, format, tile, codes: &left, scales: Scales::E8m0(&small) };
    let b = View { rows: n, codes: &right, scales: Scales::E8m0(&large), ..a };
    check::<f32>(pair(&a), pair(&b), &Product::default());
}

/// The scale of a whole matrix is applied to sums of codes, which here are exact: the same bits
/// everywhere, and those of the formula.
#[test]
fn a_scale_of_the_whole_matrix_is_applied_to_the_sum() {
    let (a, b) = (operands(4, 64, 1), operands(5, 64, 2));
    let (a, b) = (&a[0], &b[0]);
    let (Scales::F32(left), Scales::F32(right)) = (&a.scales, &b.scales) else { panic!("one 32-bit scale") };
    let value = |q: &Quantized, i: usize| q.format.decode(q.codes[i]);
    let mut one = a.clone();
    one.codes.iter_mut().enumerate().for_each(|(i, code)| *code = if i % 64 == 7 { *code } else { 0 });
    let expected: Vec<f32> =
        (0..20).map(|at| left[0] * right[0] * (value(&one, at / 5 * 64 + 7) * value(b, at % 5 * 64 + 7))).collect();
    for implementation in Implementation::available() {
        let out = run::<f32>(implementation, (&one.view()).into(), (&b.view()).into(), &Product::default());
        assert_eq!(out, expected, "{implementation}");
    }
}

/// MXFP8's column direction is the row direction of the transposed matrix, so products give the
/// same bits.
#[test]
fn a_column_direction_is_taken_transposed() {
    let (x, other) = (matrix(70, 9, 1), matrix(5, 70, 2));
    let mode = Mode { format: Format::E4m3, scaling: Scaling::Mx };
    let (col, row) = (fp8::quantize(&x, &mode, Side::Column), fp8::quantize(&x.transpose(), &mode, Side::Row));
    let other = fp8::quantize(&other, &mode, Side::Row);
    assert_eq!((col.tile, row.tile), (Tile::Column32, Tile::Row32));
    for implementation in Implementation::available() {
        let product =
            |q: &Quantized| run::<f32>(implementation, (&q.view()).into(), (&other.view()).into(), &Product::default());
        assert_eq!(product(&col), product(&row), "{implementation}");
    }
}

#[test]
fn nan_codes_and_nan_scales_make_their_outputs_nan() {
    for q in operands(3, 40, 1) {
        let mut nan = q.clone();
        // Row 1 as products take it.
        let at = if q.tile == Tile::Column32 { 5 * q.cols + 1 } else { q.cols + 5 };
        nan.codes[at] = 0x7F;
        for implementation in Implementation::available() {
            let out = run::<f32>(implementation, (&nan.view()).into(), (&q.view()).into(), &Product::default());
            let found: Vec<bool> = out.iter().map(|y| y.is_nan()).collect();
            assert_eq!(found, [false, false, false, true, true, true, false, false, false], "{implementation}");
        }
    }
}

#[test]
fn groups_and_sums_of_nothing() {
    let sizes = [3, 0, 17];
    let operands: Vec<(Quantized, Quantized)> =
        (0..).zip(sizes).map(|(g, m)| (operands(m, 96, g).remove(11), operands(20, 96, g + 50).remove(12))).collect();
    for implementation in Implementation::available() {
        let mut outs: Vec<Vec<f32>> = sizes.iter().map(|m| vec![77.0; m * 20]).collect();
        let members = operands.iter().zip(&mut outs).map(|((a, b), out)| Member {
            a: (&a.view()).into(),
            b: (&b.view()).into(),
            product: Product::default(),
            out,
        });
        grouped(implementation, &mut members.collect::<Vec<Member<'_, f32>>>()).unwrap();
        for ((a, b), out) in operands.iter().zip(&outs) {
            bounded::check(&(&a.view()).into(), &(&b.view()).into(), &Product::default(), out, "a group");
        }
        for empty in crate::operands(5, 0, 1) {
            let out = run::<f32>(implementation, (&empty.view()).into(), (&empty.view()).into(), &Product::default());
            assert!(out.iter().all(|y| y.to_bits() == 0), "{implementation} {:?}", empty.tile);
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_errors() {
    let (a, other) = (operands(3, 40, 1), operands(3, 48, 2));
    for implementation in Implementation::available() {
        let message = |a: View<'_>, b: View<'_>| {
            gemm::<f32>(implementation, &a, &b, &Product::default(), &mut [0.0; 9]).unwrap_err().to_string()
        };
        for (a, other) in a.iter().zip(&other) {
            assert_eq!(message(a.view(), other.view()), "matmul: expected K = 40, got K = 48");
            let short = View { codes: &a.codes[1..], ..a.view() };
            assert_eq!(message(short, a.view()), "codes: expected length 120, got 119");
            let scaleless = View { scales: Scales::F32(&[]), ..a.view() };
            assert!(message(a.view(), scaleless).starts_with("scales: expected length "), "{:?}", a.tile);
        }
    }
}
