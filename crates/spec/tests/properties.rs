//! Facts that hold for every input, checked on random ones: the small formats, the layouts, whole
//! matrices, products and 4over6. Known answers are tested next to the code.

use nvfp4_spec::four_over_six::{self, candidate_scales, tile_error};
use nvfp4_spec::gemm::{Accumulate, Product, gemm};
use nvfp4_spec::matrix::{Matrix, Quantized, amax, columns, dequantize, quantize};
use nvfp4_spec::scale::{self, Global, Unit, inverse_scale};
use nvfp4_spec::tile::{self, Rows};
use nvfp4_spec::{BLOCK, Bound, ErrorPath, GlobalScale, Metric, Mode, Rounding, ScaleRule, Specials};
use nvfp4_spec::{e2m1, e4m3, gguf, philox::philox4x32, stochastic, swizzle};
use proptest::collection::vec;
use proptest::num::f32::{NEGATIVE, NORMAL, POSITIVE, SUBNORMAL, ZERO};
use proptest::prelude::*;
use proptest::sample::select;

const SPECIALS: [Specials; 2] = [Specials::Kernel, Specials::Reference];

const RULES: [ScaleRule; 3] = [
    ScaleRule::Six,
    ScaleRule::FourOverSix { metric: Metric::Mae, error: ErrorPath::Fast, bound: Bound::E448 },
    ScaleRule::FourOverSix { metric: Metric::Mse, error: ErrorPath::Strict, bound: Bound::E256 },
];

/// Finite values: of every exponent; or at most one ulp from a value of 2⁻¹⁷…2¹⁰ with four mantissa
/// bits, as every grid point and every tie of both formats is; or of the two formats' ranges.
fn finite() -> impl Strategy<Value = f32> {
    let near_tie = (0x6E0..0x890u32, 0..3u32).prop_map(|(n, ulps)| f32::from_bits((n << 19) + ulps - 1));
    let near_tie = prop_oneof![near_tie.clone(), near_tie.prop_map(|x| -x)];
    prop_oneof![POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO, near_tie, -8.0..8.0f32, -500.0..500.0f32]
}

/// Magnitudes 1…2 times 2⁻⁴…2⁰, or a zero of either sign.
fn value() -> impl Strategy<Value = f32> {
    let positive = prop_oneof![8 => (1.0..2.0f32, -4..=0).prop_map(|(m, e)| m * 2f32.powi(e)), 1 => Just(0.0)];
    prop_oneof![positive.clone(), positive.prop_map(|x| -x)]
}

/// Matrices whose blocks differ by up to 2²⁴, so that scale bytes of every size occur.
fn matrix() -> impl Strategy<Value = Matrix> {
    (1..=6usize, 1..=70usize, vec(value(), 6 * 70), vec(-12..=12, 6 * 5)).prop_map(|(rows, cols, values, exponents)| {
        let value = |i: usize| values[i] * 2f32.powi(exponents[i / cols * 5 + i % cols / BLOCK]);
        Matrix::new(rows, cols, &(0..rows * cols).map(value).collect::<Vec<_>>()).unwrap()
    })
}

fn scaled(x: &Matrix, exponent: i32) -> Matrix {
    let data: Vec<f32> = x.data().iter().map(|x| x * 2f32.powi(exponent)).collect();
    Matrix::new(x.rows(), x.cols(), &data).unwrap()
}

#[test]
fn codes_and_scale_bytes_survive_the_round_trip() {
    for code in 0..16 {
        assert_eq!(e2m1::encode(e2m1::decode(code), Specials::Kernel), code);
        // The reference specials drop the sign of −0.
        assert_eq!(e2m1::encode(e2m1::decode(code), Specials::Reference), if code == 8 { 0 } else { code });
    }
    for byte in (0..=e4m3::MAX_BYTE).flat_map(|b| [b, b | 0x80]) {
        assert_eq!(e4m3::encode(e4m3::decode(byte)), byte);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn encoders_are_monotone(a in finite(), b in finite()) {
        let (a, b) = (a.min(b), a.max(b));
        for specials in SPECIALS {
            prop_assert!(e2m1::decode(e2m1::encode(a, specials)) <= e2m1::decode(e2m1::encode(b, specials)));
        }
        prop_assert!(e4m3::decode(e4m3::encode(a)) <= e4m3::decode(e4m3::encode(b)));
    }

    #[test]
    fn e2m1_saturates_beyond_5_and_errs_by_at_most_half_a_step_up_to_6(x in finite()) {
        for code in SPECIALS.map(|specials| e2m1::encode(x, specials)) {
            let saturated = if x > 0.0 { 7 } else { 15 };
            prop_assert!(code < 16 && (x.abs() <= 5.0 || code == saturated));
            let error = (f64::from(e2m1::decode(code)) - f64::from(x)).abs();
            prop_assert!(x.abs() > 6.0 || error <= f64::from(stochastic::grid_step(x.abs())) / 2.0);
        }
    }

    #[test]
    fn e4m3_saturates_from_432_and_errs_by_at_most_a_sixteenth_or_half_the_smallest_step(x in finite()) {
        let saturated = if x > 0.0 { 0x7E } else { 0xFE };
        prop_assert!(x.abs() < 432.0 || e4m3::encode(x) == saturated);
        let error = (f64::from(e4m3::decode(e4m3::encode(x))) - f64::from(x)).abs();
        let bound = if x.abs() < e4m3::MIN_NORMAL { 2f64.powi(-10) } else { f64::from(x.abs()) / 16.0 };
        prop_assert!(x.abs() > e4m3::MAX || error <= bound);
    }

    #[test]
    fn stochastic_rounding_picks_a_neighbour_and_grows_with_the_random_byte(x in finite(), r in 0..255u8) {
        let clamped = x.abs().min(e2m1::MAX);
        let lower = e2m1::MAGNITUDES.into_iter().rfind(|&m| m <= clamped).unwrap();
        let upper = e2m1::MAGNITUDES.into_iter().find(|&m| m >= clamped).unwrap();
        for specials in SPECIALS {
            let rounded = [r, r + 1].map(|r| e2m1::decode(stochastic::encode(x, r, specials)));
            prop_assert!(rounded.iter().all(|&y| y == lower.copysign(x) || y == upper.copysign(x)));
            prop_assert!(rounded[0].abs() <= rounded[1].abs());
        }
    }

    /// Under one key Philox is a bijection.
    #[test]
    fn philox_keeps_counters_apart(a in any::<[u32; 4]>(), b in any::<[u32; 4]>(), key in any::<[u32; 2]>()) {
        prop_assert!(a == b || philox4x32(a, key) != philox4x32(b, key));
        for i in 0..4 {
            let one_word: [u32; 4] = std::array::from_fn(|j| if i == j { b[j] } else { a[j] });
            prop_assert!(a == one_word || philox4x32(a, key) != philox4x32(one_word, key));
        }
    }

    #[test]
    fn packing_keeps_the_low_four_bits(even in any::<u8>(), odd in any::<u8>()) {
        prop_assert_eq!(e2m1::unpack(e2m1::pack(even, odd)), [even & 15, odd & 15]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn swizzling_pads_with_zeros_and_is_undone(rows in 0..300usize, cols in 0..20usize, data in vec(0..=255u8, 6000)) {
        let (scales, sum) = (&data[..rows * cols], |bytes: &[u8]| bytes.iter().map(|&b| u64::from(b)).sum::<u64>());
        let swizzled = swizzle::swizzle(scales, rows, cols).unwrap();
        prop_assert_eq!(swizzled.len(), rows.div_ceil(128) * cols.div_ceil(4) * 512);
        prop_assert_eq!(sum(&swizzled), sum(scales));
        prop_assert_eq!(swizzle::unswizzle(&swizzled, rows, cols).unwrap(), scales);
    }

    #[test]
    fn gguf_packing_is_undone(
        (rows, blocks) in (0..4usize, 0..4usize),
        (codes, scales) in (vec(any::<u8>(), 9 * 32), vec(0..0x7Fu8, 9 * 4)),
    ) {
        let (codes, scales) = (&codes[..rows * blocks * 32], &scales[..rows * blocks * 4]);
        let packed = gguf::pack(codes, scales, rows, blocks * 64).unwrap();
        prop_assert_eq!(packed.len(), rows * blocks * 36);
        prop_assert_eq!(gguf::unpack(&packed, rows, blocks * 64).unwrap(), (codes.to_vec(), scales.to_vec()));
    }

    /// A scale byte of 4 or more is at most 1/7 above the scale asked for, so the largest element
    /// lands above 5 and gets the code of 6: the decoded block asks for the same byte, and no
    /// condition on the codes is needed. Byte 1 may come from half its value; its largest code is
    /// then 3, and the decoded block asks for byte 0.
    #[test]
    fn quantizing_decoded_values_gives_the_same_bytes(
        (x, exponent, specials) in (matrix(), -60..=60, select(&SPECIALS[..])),
        global in select(&[GlobalScale::PerTensor, GlobalScale::PerRow][..]),
    ) {
        let (x, mode) = (scaled(&x, exponent), Mode { specials, global, ..Mode::default() });
        let first = quantize(&x, &amax(&x, global, specials).unwrap(), &mode, Rounding::NearestEven).unwrap();
        let decoded = Matrix::new(x.rows(), x.cols(), &dequantize::<f32>(&first.view()).unwrap()).unwrap();
        let second = quantize(&decoded, &first.stored, &mode, Rounding::NearestEven).unwrap();
        for (r, c) in (0..x.rows()).flat_map(|r| (0..x.cols()).map(move |c| (r, c))) {
            let scales = [&first, &second].map(|q| q.view().scale_row(r)[c / BLOCK]);
            let codes = [&first, &second].map(|q| e2m1::code_at(q.view().code_row(r), c));
            // Code 8 decodes to −0, whose sign the reference specials drop.
            let expected = if specials == Specials::Reference && codes[0] == 8 { 0 } else { codes[0] };
            prop_assert!(scales[0] < 4 || (scales[1], codes[1]) == (scales[0], expected), "{scales:?} {codes:?}");
        }
    }

    #[test]
    fn with_per_row_scales_a_matrix_can_be_cut_between_any_rows(x in matrix(), rule in select(&RULES[..])) {
        let mode = Mode { rule, global: GlobalScale::PerRow, ..Mode::default() };
        let bytes = |rows, data: &[f32]| {
            let x = Matrix::new(rows, x.cols(), data).unwrap();
            let q = quantize(&x, &amax(&x, mode.global, mode.specials).unwrap(), &mode, Rounding::NearestEven).unwrap();
            [q.codes, q.scales]
        };
        for cut in 0..=x.rows() {
            let (top, bottom) = x.data().split_at(cut * x.cols());
            let (top, bottom) = (bytes(cut, top), bytes(x.rows() - cut, bottom));
            prop_assert_eq!([0, 1].map(|i| [&top[i][..], &bottom[i]].concat()), bytes(x.rows(), x.data()));
        }
    }

    /// The exponents are small enough that no squared error underflows.
    #[test]
    fn a_power_of_two_changes_only_the_amax(
        (x, exponent, rule, specials) in (matrix(), -12..=12, select(&RULES[..]), select(&SPECIALS[..])),
    ) {
        let mode = Mode { rule, specials, ..Mode::default() };
        let quantize = |x: &Matrix| quantize(x, &amax(x, mode.global, specials).unwrap(), &mode, Rounding::NearestEven).unwrap();
        let (p, q) = (quantize(&x), quantize(&scaled(&x, exponent)));
        prop_assert_eq!(q.stored[0], p.stored[0] * 2f32.powi(exponent));
        prop_assert_eq!((q.codes, q.scales), (p.codes, p.scales));
    }

    #[test]
    fn columns_twice_is_the_matrix(x in matrix()) {
        prop_assert_eq!(columns(&columns(&x, None).unwrap(), None).unwrap(), x);
    }
}

/// An operand whose global factor is 1.
fn operand(rows: usize, cols: usize, codes: Vec<u8>, scales: Vec<u8>, bound: Bound) -> Quantized {
    Quantized {
        rows,
        cols,
        codes,
        scales,
        stored: vec![bound.six_e()],
        global: GlobalScale::PerTensor,
        unit: Unit::Amax(bound),
    }
}

/// A pair of operands of random bytes. With an odd K the last high nibbles are random too, and
/// nobody may look at them.
fn operands() -> impl Strategy<Value = [Quantized; 2]> {
    let scale = (0..=e4m3::MAX_BYTE, prop_oneof![Just(0), Just(0x80)]).prop_map(|(magnitude, sign)| magnitude | sign);
    let bytes = || (1..=4usize, vec(any::<u8>(), 4 * 100), vec(scale.clone(), 4 * 13));
    (0..=200usize, bytes(), bytes()).prop_map(|(k, a, b)| {
        [(a, Bound::E448), (b, Bound::E256)].map(|((rows, mut codes, mut scales), bound)| {
            codes.truncate(rows * k.div_ceil(2));
            scales.truncate(rows * k.div_ceil(BLOCK));
            operand(rows, k, codes, scales, bound)
        })
    })
}

/// The code value and the block scale of an element.
fn factors(q: &Quantized, r: usize, k: usize) -> [f32; 2] {
    [e2m1::decode(e2m1::code_at(q.view().code_row(r), k)), e4m3::decode(q.view().scale_row(r)[k / BLOCK])]
}

fn exact_dot(a: &Quantized, i: usize, b: &Quantized, j: usize) -> f32 {
    let units = |k| {
        let ([x, sx], [y, sy]) = (factors(a, i, k), factors(b, j, k));
        [2.0 * x, 2.0 * y, 512.0 * sx, 512.0 * sy].map(|f| f as i128).iter().product::<i128>()
    };
    (0..a.cols).map(units).sum::<i128>() as f32 * 2f32.powi(-20)
}

fn reference_dot(a: &Quantized, i: usize, b: &Quantized, j: usize) -> f32 {
    (0..a.cols).step_by(BLOCK).fold(0.0, |sum, first| {
        let codes = (first..a.cols.min(first + BLOCK)).map(|k| factors(a, i, k)[0] * factors(b, j, k)[0]);
        sum + codes.sum::<f32>() * factors(a, i, first)[1] * factors(b, j, first)[1]
    })
}

/// 2¹⁷ blocks of the largest term, more than an `i64` holds, then half an ulp of their sum and one
/// unit of 2⁻²⁰. A second rounding anywhere would lose the unit and resolve the tie downwards.
#[test]
fn a_long_sum_is_exact_to_the_last_unit() {
    let blocks = 1 << 17;
    let codes = [vec![0x77; 8 * blocks], vec![0x66; 4], vec![0; 4], vec![0x01], vec![0; 7]].concat();
    let scales = [vec![e4m3::MAX_BYTE; blocks], vec![e4m3::encode(64.0), 0x01]].concat();
    let a = operand(1, (blocks + 2) * BLOCK, codes, scales, Bound::E448);
    let largest = (blocks * BLOCK * 36 * 448 * 448) as f32;
    assert_eq!(gemm::<f32>(&a.view(), &a.view(), &Product::default()), Ok(vec![largest.next_up()]));
}

fn check_choice<const H: usize>(
    tile: &Rows<f32, H>,
    global: &Global,
    metric: Metric,
    error: ErrorPath,
    specials: Specials,
) {
    let candidates = candidate_scales(scale::amax(tile.as_flattened(), specials), global, specials).map(|scale| {
        let inverse = inverse_scale(scale, global, specials);
        tile::Quantized { scale, codes: tile::encode(tile, inverse, specials) }
    });
    let chosen = four_over_six::quantize(tile, global, metric, error, specials);
    let total = |q| tile_error(tile, q, global, metric, error);
    assert!(candidates.contains(&chosen));
    assert!(candidates.iter().all(|other| total(&chosen) <= total(other)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn sums_are_an_integer_rounded_once_or_a_loop_in_binary32([a, b] in operands()) {
        let product = |accumulate| gemm(&a.view(), &b.view(), &Product { accumulate, ..Product::default() }).unwrap();
        let (exact, reference): (Vec<f32>, Vec<f32>) = (product(Accumulate::Exact), product(Accumulate::Reference));
        for (i, j) in (0..a.rows).flat_map(|i| (0..b.rows).map(move |j| (i, j))) {
            prop_assert_eq!(exact[i * b.rows + j].to_bits(), exact_dot(&a, i, &b, j).to_bits());
            prop_assert_eq!(reference[i * b.rows + j].to_bits(), reference_dot(&a, i, &b, j).to_bits());
        }
    }

    /// The global amax is larger than the tile's, up to where scale bytes underflow.
    #[test]
    fn four_over_six_keeps_the_smaller_error(
        (values, exponent, bound) in (vec(value(), 256), 1..20, select(&[Bound::E448, Bound::E256][..])),
        metric in select(&[Metric::Mae, Metric::Mse][..]),
        error in select(&[ErrorPath::Strict, ErrorPath::Fast][..]),
        specials in select(&SPECIALS[..]),
    ) {
        let global = Global::new(2f32.powi(exponent), bound, specials);
        let tile: Rows<f32, 16> = std::array::from_fn(|r| std::array::from_fn(|i| values[r * BLOCK + i]));
        check_choice(&tile, &global, metric, error, specials);
        for row in tile {
            check_choice(&[row], &global, metric, error, specials);
        }
    }
}
