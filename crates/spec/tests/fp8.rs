//! Facts that hold for every FP8 input, checked on random ones, and the formats against each other.

use nvfp4_spec::fp8::scale::mx_byte;
use nvfp4_spec::fp8::{
    self, AmaxRule, Format, Mode, ScaleValues, Scales, Scaling, Side, Tile, View, dequantize, matrix, quantize,
};
use nvfp4_spec::gemm;
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::{Precision, e4m3, e5m2, e8m0};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

const SIDES: [Side; 2] = [Side::Row, Side::Column];

/// Any number: ordinary ones, and any bits.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![8 => -4.0f32..4.0, 2 => any::<u32>().prop_map(f32::from_bits), 1 => Just(0.0), 1 => Just(-0.0)]
}

/// Matrices that straddle the edges of tiles.
fn matrix(value: impl Strategy<Value = f32>) -> impl Strategy<Value = Matrix> {
    let size = || prop_oneof![1..6usize, 30..35usize, 126..131usize];
    (size(), size(), vec(value, 131 * 131))
        .prop_map(|(rows, cols, data)| Matrix::new(rows, cols, &data[..rows * cols]).unwrap())
}

fn rule() -> impl Strategy<Value = AmaxRule> {
    let values = select(&[ScaleValues::Any, ScaleValues::PowersOfTwo][..]);
    (values, prop_oneof![Just(0.0), 0.0f32..2.0]).prop_map(|(values, epsilon)| AmaxRule { values, epsilon })
}

fn mode() -> impl Strategy<Value = Mode> {
    let scaling = prop_oneof![
        (0.01f32..100.0).prop_map(|scale| Scaling::Tensor { scale }),
        rule().prop_map(Scaling::Row128),
        rule().prop_map(Scaling::Square128),
        Just(Scaling::Mx),
        Just(Scaling::MxSquare),
    ];
    (select(&Format::ALL[..]), scaling).prop_map(|(format, scaling)| Mode { format, scaling })
}

fn ordered(bits: u8) -> i32 {
    if bits & 0x80 == 0 { i32::from(bits) } else { -i32::from(bits & 0x7F) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn encoders_are_monotone_and_odd(x in any::<u32>(), y in any::<u32>(), format in select(&Format::ALL[..])) {
        let (x, y) = (f32::from_bits(x), f32::from_bits(y));
        prop_assume!(!x.is_nan() && !y.is_nan());
        let (low, high) = if x < y { (x, y) } else { (y, x) };
        prop_assert!(ordered(format.encode(low)) <= ordered(format.encode(high)));
        prop_assert_eq!(format.encode(-x), format.encode(x) ^ 0x80);
    }

    /// Up to the rounding of the quotient; powers of two reach more than half of it.
    #[test]
    fn a_scale_maps_the_amax_to_the_largest_value(
        bits in 1u32..0x7F80_0000,
        format in select(&Format::ALL[..]),
        values in select(&[ScaleValues::Any, ScaleValues::PowersOfTwo][..]),
    ) {
        let amax = f32::from_bits(bits);
        let scale = AmaxRule { values, epsilon: 0.0 }.tensor_scale(amax, format);
        let (reached, largest) = (f64::from(amax) * f64::from(scale), f64::from(format.max()));
        let ulp = f64::from(f32::EPSILON);
        prop_assert!(scale.is_finite() && reached <= largest * (1.0 + ulp));
        if (format.max() / amax).is_finite() {
            let least = if values == ScaleValues::Any { largest } else { largest / 2.0 };
            prop_assert!(reached >= least * (1.0 - ulp));
        }
        prop_assert!(values == ScaleValues::Any || scale.to_bits() & 0x007F_FFFF == 0);
    }

    #[test]
    fn an_mx_scale_is_the_smallest_power_that_reaches(bits in 0u32..0x7F80_0000, format in select(&Format::ALL[..])) {
        let amax = f32::from_bits(bits);
        let byte = mx_byte(amax, format);
        let reach = |byte: u8| f64::from(e8m0::decode(byte)) * f64::from(format.max());
        // One ulp above MAX · 2⁻¹²⁷ is the one magnitude that rounds down.
        prop_assert!(f64::from(amax) <= reach(byte) || byte == 0 && f64::from(amax.next_down()) <= reach(0));
        prop_assert!(byte == 0 || f64::from(amax) > reach(byte - 1));
        let quotient = f64::from(amax) / f64::from(e8m0::decode(byte));
        prop_assert_eq!(format.encode(amax * e8m0::reciprocal(byte)), format.encode(quotient as f32));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// The tile of every element, found by division, and its elements, found by search. Squares of
    /// MXFP8 hold several tiles; all elements of a square count.
    #[test]
    fn every_element_is_scaled_by_the_amax_of_its_tile(
        (x, mode) in (matrix(value()), mode()), side in select(&SIDES[..]),
    ) {
        let q = quantize(&x, &mode, side);
        let transposed = if mode.shape(side, (2, 1)) == (1, 2) { x.transpose() } else { x.clone() };
        prop_assert_eq!((q.rows, q.cols), (transposed.rows(), transposed.cols()));
        let (height, width) = q.tile.size(q.rows, q.cols);
        let across = q.cols.div_ceil(width);
        let mut amaxes = vec![0f32; q.scales.view().len()];
        for (i, &x) in transposed.data().iter().enumerate() {
            let (r, c) = (i / q.cols, i % q.cols);
            let side = if mode.scaling == Scaling::MxSquare { 32 } else { 1 };
            let sharing = |at: usize, len: usize| at / side * side..len.min((at / side + 1) * side);
            for r in sharing(r, q.rows).step_by(height) {
                for c in sharing(c, q.cols).step_by(width) {
                    let amax = &mut amaxes[r / height * across + c / width];
                    // NaN is not larger. (`max` of a signalling NaN is NaN on ARM.)
                    if x.abs() > *amax {
                        *amax = x.abs();
                    }
                }
            }
        }
        prop_assert_eq!(&matrix::amaxes(&x, &mode, side), &amaxes);
        let decoded: Vec<f32> = dequantize(&q.view()).unwrap();
        for (i, &x) in transposed.data().iter().enumerate() {
            let tile = (i / q.cols / height) * across + i % q.cols / width;
            let scale = mode.tile_scale(amaxes[tile], Precision::F32);
            let code = mode.format.encode(x * scale.multiplier);
            prop_assert_eq!(q.codes[i], code);
            let factor = match scale.stored {
                Scales::F32(inverse) => inverse,
                Scales::E8m0(byte) => e8m0::decode(byte),
            };
            prop_assert_eq!(q.scales.view().factor(tile).to_bits(), factor.to_bits());
            let value = mode.format.decode(code) * factor;
            prop_assert!(decoded[i].to_bits() == value.to_bits() || decoded[i].is_nan() && value.is_nan());
        }
    }

    /// With scales that are powers of two. An amax may be rounded down to where the next power
    /// fits; that only makes finer what was exact.
    #[test]
    fn quantizing_decoded_values_changes_nothing(
        (x, format) in (matrix(-4.0f32..4.0), select(&Format::ALL[..])),
        scaling in select(&[
            Scaling::Row128(AmaxRule::BLOCK), Scaling::Square128(AmaxRule::BLOCK), Scaling::Mx, Scaling::MxSquare,
        ][..]),
        side in select(&SIDES[..]),
    ) {
        let mode = Mode { format, scaling };
        let first = quantize(&x, &mode, side);
        let decoded = Matrix::new(first.rows, first.cols, &dequantize::<f32>(&first.view()).unwrap()).unwrap();
        // What the column direction writes is transposed already, but for MXFP8.
        let again = quantize(&decoded, &mode, if scaling.is_mx() { side } else { Side::Row });
        let back: Vec<f32> = dequantize(&again.view()).unwrap();
        prop_assert_eq!(&back[..], decoded.data());
    }

    #[test]
    fn types_are_rounded_once(x in matrix(value()), mode in mode()) {
        let q = quantize(&x, &mode, Side::Row);
        let wide: Vec<f32> = dequantize(&q.view()).unwrap();
        let bits = |x: half::f16| if x.is_nan() { 0x7E00 } else { x.to_bits() };
        let half: Vec<half::f16> = dequantize(&q.view()).unwrap();
        prop_assert!(half.iter().zip(&wide).all(|(&h, &w)| bits(h) == bits(half::f16::from_f32(w))));
    }
}

#[test]
fn the_two_formats_agree_where_both_are_exact() {
    for byte in 0..=e4m3::MAX_BYTE {
        let value = e4m3::decode(byte);
        if byte & 1 == 0 && value >= e4m3::MIN_NORMAL {
            assert_eq!(e5m2::decode(e5m2::encode(value)), value, "two mantissa bits are enough");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The oracle of a product: values that an operand decodes to, tiles along K, and a scale of
    /// the whole matrix on the sum.
    #[test]
    fn products_are_sums_of_products_of_decoded_values(
        a in matrix(-4.0f32..4.0),
        left in mode(),
        right in mode(),
        sides in (select(&SIDES[..]), select(&SIDES[..])),
    ) {
        let b = if sides.0 == sides.1 { a.clone() } else { a.transpose() };
        let (p, q) = (quantize(&a, &left, sides.0), quantize(&b, &right, sides.1));
        let shape = |q: &fp8::Quantized| q.tile.along_k((q.rows, q.cols));
        let ((m, k), (n, _)) = (shape(&p), shape(&q));
        let y = gemm::gemm::<f32>(&p.view(), &q.view(), &gemm::Product::default()).unwrap();
        let values = [&p, &q].map(|q| dequantize::<f32>(&q.view()).unwrap());
        let decoded = |q: &fp8::Quantized, values: &[f32], i: usize, k: usize| {
            f64::from(if q.tile == Tile::Column32 { values[k * q.cols + i] } else { values[i * q.cols + k] })
        };
        for (i, j) in [(0, 0), (m - 1, n - 1), (m / 2, 0)] {
            let terms: Vec<f64> = (0..k).map(|k| decoded(&p, &values[0], i, k) * decoded(&q, &values[1], j, k)).collect();
            let (sum, magnitude) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
            // A scale of the whole matrix is rounded into every decoded value, but only once into
            // the sum.
            let error = (f64::from(y[i * n + j]) - sum).abs();
            prop_assert!(error <= magnitude * 6.0 * 2f64.powi(-24), "{} for {sum}", y[i * n + j]);
        }
    }
}

/// The fields of a view are public: one without scales is an error when it is used, and has no
/// scale until then.
#[test]
fn a_view_without_scales_has_no_tensor_scale() {
    let view =
        View { rows: 1, cols: 2, format: Format::E4m3, tile: Tile::Tensor, codes: &[0; 2], scales: Scales::F32(&[]) };
    assert_eq!(view.tensor_scale(), None);
    assert!(view.check().is_err());
    assert_eq!(View { scales: Scales::F32(&[2.0]), ..view }.tensor_scale(), Some(2.0));
}
