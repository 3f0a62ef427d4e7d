//! Shapes and buffers that do not fit: every entry point returns an error that names what was
//! expected, before it writes anything.

use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Error, Implementation, Input, Result, Values, amax, dequantize, fp8, gemm, gguf, swizzle};
use nvfp4_spec::fp8::{AmaxRule, Mode as Fp8Mode, Scales, Scaling, Side, Tile as Fp8Tile, View as Fp8View};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{Bound, Error as Rule, GlobalScale, Mode, Rounding, Specials, Tile};

fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// What every implementation answers, which must be the same.
fn all<T: PartialEq + std::fmt::Debug>(run: impl Fn(Implementation) -> T) -> T {
    let answer = run(Implementation::Scalar);
    for implementation in Implementation::available() {
        assert_eq!(run(implementation), answer, "{implementation}");
    }
    answer
}

/// Quantizes a 4 × 32 matrix along its rows into buffers of the given lengths.
fn quantize_into(codes: usize, scales: usize, amax: usize, mode: Mode, layout: Layout) -> Result<()> {
    all(|implementation| {
        let (x, mut codes, mut scales, mut amax) = ([1.0; 128], vec![0; codes], vec![0; scales], vec![0.0; amax]);
        let input = Input::new(Values::F32(&x), 4, 32)?;
        let rounding = Rounding::NearestEven;
        let amax = Amax::Compute(&mut amax);
        let row = Direction { mode, rounding, transform: None, layout, amax, codes: &mut codes, scales: &mut scales };
        quantize(implementation, &input, Some(row), None)
    })
}

#[test]
fn quantize_checks_every_buffer() {
    let (mode, linear) = (Mode::default(), Layout::Linear);
    assert_eq!(quantize_into(64, 8, 1, mode, linear), Ok(()));
    assert_eq!(message(quantize_into(63, 8, 1, mode, linear)), "codes: expected length 64, got 63");
    assert_eq!(message(quantize_into(64, 9, 1, mode, linear)), "scales: expected length 8, got 9");
    assert_eq!(message(quantize_into(64, 8, 1, mode, Layout::Swizzled)), "scales: expected length 512, got 8");
    assert_eq!(message(quantize_into(64, 8, 4, mode, linear)), "amax: expected length 1, got 4");
    let per_row = Mode { global: GlobalScale::PerRow, ..mode };
    assert_eq!(message(quantize_into(64, 8, 1, per_row, linear)), "amax: expected length 4, got 1");
}

/// Quantizes a 4 × 32 matrix in both directions with a setting for one of them, which every
/// implementation must refuse before it writes to either.
fn refused(amax: [&[f32]; 2], rounding: [Rounding<Random<'_>>; 2], mode: Mode) -> Error {
    let x = [1.0; 128];
    let input = Input::new(Values::F32(&x), 4, 32).unwrap();
    let run = |implementation| {
        let (mut row, mut col) = (([0xA5; 64], [0xA5; 8]), ([0xA5; 64], [0xA5; 32]));
        let direction = |i: usize, codes, scales| {
            let amax = Amax::Given(amax[i]);
            Direction { mode, rounding: rounding[i], transform: None, layout: Layout::Linear, amax, codes, scales }
        };
        let (first, second) = (direction(0, &mut row.0, &mut row.1), direction(1, &mut col.0, &mut col.1));
        let error = quantize(implementation, &input, Some(first), Some(second)).unwrap_err();
        assert_eq!((row, col), (([0xA5; 64], [0xA5; 8]), ([0xA5; 64], [0xA5; 32])), "{implementation}");
        error
    };
    let errors: Vec<Error> = Implementation::available().into_iter().map(run).collect();
    assert!(errors.iter().all(|error| *error == errors[0]));
    errors[0].clone()
}

#[test]
fn a_negative_amax_is_refused_before_anything_is_written() {
    let (nearest, per_row) = ([Rounding::NearestEven; 2], Mode { global: GlobalScale::PerRow, ..Mode::default() });
    let negative = refused([&[-2.0], &[1.0]], nearest, Mode::default());
    assert_eq!(negative.to_string(), "amax: expected a magnitude, got -2 at index 0");
    let mut columns = [1.0; 32];
    columns[30] = f32::NEG_INFINITY;
    let negative = refused([&[1.0; 4], &columns], nearest, per_row);
    assert_eq!(negative, Error::Rule(Rule::NegativeAmax { index: 30, value: f32::NEG_INFINITY }));
}

#[test]
fn random_bytes_of_another_length_are_refused_before_anything_is_written() {
    let bytes = |len| Rounding::Stochastic(Random::Bytes(&[7; 1024][..len]));
    // 4 rows of 2 blocks, 32 columns of 1 block.
    for (rounding, expected, got) in
        [([bytes(127), bytes(512)], 128, 127), ([bytes(128), bytes(513)], 512, 513), ([bytes(0), bytes(512)], 128, 0)]
    {
        let error = refused([&[1.0], &[1.0]], rounding, Mode::default());
        assert_eq!(error, Error::Rule(Rule::Length { what: "random bytes (16 per block)", expected, got }));
    }
}

#[test]
fn quantize_refuses_meaningless_modes() {
    let mode = Mode { tile: Tile::Square16, global: GlobalScale::PerRow, ..Mode::default() };
    assert!(matches!(quantize_into(64, 8, 4, mode, Layout::Linear), Err(Error::Rule(Rule::Combination(_)))));
}

#[test]
fn the_hadamard_transform_needs_a_multiple_of_16() {
    for implementation in Implementation::available() {
        let (x, mut codes, mut scales) = ([1.0; 8 * 16], [0; 16 * 4], [0; 16]);
        let col = Direction {
            mode: Mode::default(),
            rounding: Rounding::NearestEven,
            transform: Some(Signs::FIXED),
            layout: Layout::Linear,
            amax: Amax::Given(&[1.0]),
            codes: &mut codes,
            scales: &mut scales,
        };
        let input = Input::new(Values::F32(&x), 8, 16).unwrap();
        assert_eq!(
            message(quantize(implementation, &input, None, Some(col))),
            "the dimension that the Hadamard transform runs along: expected a multiple of 16, got 8"
        );
    }
}

#[test]
fn empty_matrices_quantize_to_nothing() {
    for implementation in Implementation::available() {
        for (rows, cols) in [(0, 0), (0, 40), (40, 0), (1 << 62, 0), (0, 1 << 62)] {
            let input = Input::new(Values::F32(&[]), rows, cols).unwrap();
            let mut amax = [7.0];
            let row = Direction {
                mode: Mode::default(),
                rounding: Rounding::NearestEven,
                transform: None,
                layout: Layout::Linear,
                amax: Amax::Compute(&mut amax),
                codes: &mut [],
                scales: &mut [],
            };
            assert_eq!(quantize(implementation, &input, Some(row), None), Ok(()));
            assert_eq!(amax, [0.0]);
        }
    }
}

#[test]
fn amax_checks_its_outputs() {
    for implementation in Implementation::available() {
        let input = Input::new(Values::F32(&[1.0, -2.0, 3.0, 0.5, 0.25, 0.125]), 2, 3).unwrap();
        let (mut tensor, mut rows, mut cols) = (0.0, [0.0; 2], [0.0; 3]);
        let outputs = amax::Outputs { tensor: Some(&mut tensor), rows: Some(&mut rows), cols: Some(&mut cols) };
        amax::amax(implementation, &input, Specials::Kernel, outputs).unwrap();
        assert_eq!((tensor, rows, cols), (3.0, [3.0, 0.5], [1.0, 2.0, 3.0]));
        let outputs = amax::Outputs { rows: Some(&mut cols), ..Default::default() };
        assert_eq!(
            message(amax::amax(implementation, &input, Specials::Kernel, outputs)),
            "row amax: expected length 2, got 3"
        );
    }
}

const VIEW: View<'static> = View {
    rows: 1,
    cols: 32,
    codes: &[0; 16],
    scales: &[0; 2],
    stored: &[1.0],
    global: GlobalScale::PerTensor,
    unit: Unit::Amax(Bound::E448),
};

#[test]
fn dequantize_checks_both_sides() {
    for implementation in Implementation::available() {
        let run = |view: View, len| dequantize::dequantize::<f32>(implementation, &view, &mut vec![0.0; len]);
        assert_eq!(run(VIEW, 32), Ok(()));
        assert_eq!(message(run(VIEW, 31)), "output: expected length 32, got 31");
        assert_eq!(message(run(View { scales: &[0], ..VIEW }, 32)), "scales: expected length 2, got 1");
        assert_eq!(message(run(View { stored: &[], ..VIEW }, 32)), "global scale: expected length 1, got 0");
        let huge = View { rows: usize::MAX, ..VIEW };
        assert!(matches!(run(huge, 32), Err(Error::Rule(Rule::TooLarge { .. }))));
    }
}

#[test]
fn gemm_checks_operands_and_output() {
    for implementation in Implementation::available() {
        let run =
            |b: View, len| gemm::gemm::<f32>(implementation, &VIEW, &b, &gemm::Product::default(), &mut vec![0.0; len]);
        assert_eq!(run(VIEW, 1), Ok(()));
        assert_eq!(message(run(VIEW, 2)), "output: expected length 1, got 2");
        let shorter = View { cols: 16, codes: &[0; 8], scales: &[0; 1], ..VIEW };
        assert_eq!(message(run(shorter, 1)), "matmul: expected K = 32, got K = 16");
    }
}

#[test]
fn layouts_check_their_buffers() {
    for implementation in Implementation::available() {
        let swizzle = |from, to| swizzle::swizzle(implementation, &vec![1; from], 2, 3, &mut vec![0; to]);
        assert_eq!(swizzle(6, 512), Ok(()));
        assert_eq!(message(swizzle(5, 512)), "scales: expected length 6, got 5");
        assert_eq!(message(swizzle(6, 6)), "swizzled scales: expected length 512, got 6");
        let unswizzle = |from, to| swizzle::unswizzle(implementation, &vec![1; from], 2, 3, &mut vec![0; to]);
        assert_eq!(message(unswizzle(512, 7)), "scales: expected length 6, got 7");
        assert_eq!(message(unswizzle(511, 6)), "swizzled scales: expected length 512, got 511");
        let pack = |cols, to| gguf::pack(implementation, &[0; 32], &[0; 4], 1, cols, &mut vec![0; to]);
        assert_eq!(pack(64, 36), Ok(()));
        assert_eq!(message(pack(64, 35)), "GGUF data: expected length 36, got 35");
        assert_eq!(message(pack(60, 36)), "columns of a GGUF matrix: expected a multiple of 64, got 60");
        let unpack = |scales| gguf::unpack(implementation, &[0; 36], 1, 64, &mut [0; 32], &mut vec![0; scales]);
        assert_eq!(unpack(4), Ok(()));
        assert_eq!(message(unpack(5)), "scales: expected length 4, got 5");
    }
}

const FP8: nvfp4_spec::fp8::Format = nvfp4_spec::fp8::Format::E4m3;

/// Quantizes a 40 × 130 matrix to FP8 in one direction, into buffers of the given lengths that
/// start as a pattern. A refusal leaves the pattern.
fn quantize_fp8(scaling: Scaling, side: Side, codes: usize, scales: Scales<usize, usize>) -> Result<()> {
    all(|implementation| {
        let x = [1.0; 40 * 130];
        let input = Input::new(Values::F32(&x), 40, 130)?;
        let (mut codes, mut wide, mut bytes, mut amax) = (vec![0xA5; codes], vec![], vec![], -1.0);
        let scales = match scales {
            Scales::F32(len) => {
                wide.resize(len, -1.0);
                Scales::F32(&mut wide[..])
            }
            Scales::E8m0(len) => {
                bytes.resize(len, 0xA5);
                Scales::E8m0(&mut bytes[..])
            }
        };
        let direction = Some(fp8::quantize::Direction { codes: &mut codes, scales });
        let (row, col) = if side == Side::Row { (direction, None) } else { (None, direction) };
        let outputs = fp8::quantize::Outputs { row, col, amax: Some(&mut amax) };
        let result = fp8::quantize::quantize(implementation, &input, &Fp8Mode { format: FP8, scaling }, outputs);
        let untouched =
            codes.iter().chain(&bytes).all(|&b| b == 0xA5) && wide.iter().chain([&amax]).all(|&x| x == -1.0);
        assert_eq!(result.is_err(), untouched, "{implementation}");
        result
    })
}

#[test]
fn fp8_quantization_checks_every_buffer() {
    let (tensor, rule) = (Scaling::Tensor { scale: 2.0 }, AmaxRule::BLOCK);
    let (wide, bytes) = (Scales::F32, Scales::E8m0);
    for (scaling, side, scales, count) in [
        (tensor, Side::Row, wide as fn(usize) -> Scales<usize, usize>, 1),
        (tensor, Side::Column, wide, 1),
        (Scaling::Row128(rule), Side::Row, wide, 80),
        (Scaling::Row128(rule), Side::Column, wide, 130),
        (Scaling::Square128(rule), Side::Row, wide, 2),
        (Scaling::Square128(rule), Side::Column, wide, 2),
        (Scaling::Mx, Side::Row, bytes, 200),
        (Scaling::Mx, Side::Column, bytes, 260),
        (Scaling::MxSquare, Side::Row, bytes, 200),
        (Scaling::MxSquare, Side::Column, bytes, 260),
    ] {
        let run = |codes, scales| quantize_fp8(scaling, side, codes, scales);
        assert_eq!(run(5200, scales(count)), Ok(()));
        assert_eq!(message(run(5199, scales(count))), "codes: expected length 5200, got 5199");
        let expected = format!("scales: expected length {count}, got {}", count + 1);
        assert_eq!(message(run(5200, scales(count + 1))), expected);
    }
    for scaling in [Scaling::Mx, Scaling::MxSquare] {
        let wrong = quantize_fp8(scaling, Side::Row, 5200, Scales::F32(200));
        assert_eq!(message(wrong), "MXFP8 has E8M0 scales: give a buffer of bytes for them");
    }
    let wrong = quantize_fp8(tensor, Side::Row, 5200, Scales::E8m0(1));
    assert!(message(wrong).starts_with("only MXFP8 has E8M0 scales: give a buffer of 32-bit numbers"));
}

#[test]
fn empty_matrices_quantize_to_no_codes_of_fp8() {
    for implementation in Implementation::available() {
        for (rows, cols) in [(0, 0), (0, 40), (40, 0), (1 << 62, 0), (0, 1 << 62)] {
            let input = Input::new(Values::F32(&[]), rows, cols).unwrap();
            let mode = Fp8Mode { format: FP8, scaling: Scaling::Tensor { scale: 4.0 } };
            let (mut scale, mut amax) = ([7.0], 7.0);
            let row = fp8::quantize::Direction { codes: &mut [], scales: Scales::F32(&mut scale) };
            let outputs = fp8::quantize::Outputs { row: Some(row), col: None, amax: Some(&mut amax) };
            assert_eq!(fp8::quantize::quantize(implementation, &input, &mode, outputs), Ok(()));
            assert_eq!((scale, amax), ([0.25], 0.0));
            for scaling in [Scaling::Mx, Scaling::MxSquare] {
                let mode = Fp8Mode { scaling, ..mode };
                let direction = || Some(fp8::quantize::Direction { codes: &mut [], scales: Scales::E8m0(&mut []) });
                let outputs = fp8::quantize::Outputs { row: direction(), col: direction(), amax: None };
                assert_eq!(fp8::quantize::quantize(implementation, &input, &mode, outputs), Ok(()));
            }
        }
    }
}

#[test]
fn fp8_decoding_checks_both_sides() {
    let scales = Scales::E8m0(&[127; 6][..]);
    let view = Fp8View { rows: 3, cols: 40, format: FP8, tile: Fp8Tile::Row32, codes: &[0x38; 120], scales };
    for implementation in Implementation::available() {
        let run = |view: Fp8View, len| {
            let mut out = vec![0f32; len];
            fp8::dequantize::dequantize(implementation, &view, &mut out).map(|()| out)
        };
        assert_eq!(run(view, 120), Ok(vec![1.0; 120]));
        assert_eq!(message(run(view, 119)), "output: expected length 120, got 119");
        assert_eq!(message(run(Fp8View { codes: &[0; 121], ..view }, 120)), "codes: expected length 120, got 121");
        let message_of_tile = |tile| message(run(Fp8View { tile, ..view }, 120));
        assert_eq!(message_of_tile(Fp8Tile::Tensor), "scales: expected length 1, got 6");
        assert_eq!(message_of_tile(Fp8Tile::Column32), "scales: expected length 40, got 6");
        let huge = run(Fp8View { rows: usize::MAX, ..view }, 120);
        assert!(matches!(huge, Err(Error::Rule(Rule::TooLarge { .. }))));
        let empty = Fp8View { rows: usize::MAX, cols: 0, codes: &[], scales: Scales::E8m0(&[]), ..view };
        assert_eq!(run(empty, 0), Ok(vec![]));
    }
}

/// NaN, infinities, zeros and subnormals at known positions, with a known scale.
#[test]
fn fp8_of_values_that_are_no_ordinary_numbers() {
    let x = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-45, -1e-45, f32::MIN, 3.0];
    for implementation in Implementation::available() {
        let input = Input::new(Values::F32(&x), 1, 10).unwrap();
        let quantized = |scaling: Scaling| {
            let (mut codes, mut wide, mut bytes) = ([0xA5; 10], [-1.0], [0xA5]);
            let scales = if scaling.is_mx() { Scales::E8m0(&mut bytes[..]) } else { Scales::F32(&mut wide[..]) };
            let row = Some(fp8::quantize::Direction { codes: &mut codes, scales });
            let outputs = fp8::quantize::Outputs { row, ..Default::default() };
            fp8::quantize::quantize(implementation, &input, &Fp8Mode { format: FP8, scaling }, outputs).unwrap();
            (codes, wide[0], bytes[0])
        };
        let codes = [0x7F, 0x7F, 0x7E, 0xFE, 0x00, 0x80, 0x00, 0x80, 0xFE, 0x44];
        assert_eq!(quantized(Scaling::Tensor { scale: 1.0 }), (codes, 1.0, 0xA5), "{implementation}");
        assert_eq!(quantized(Scaling::Row128(AmaxRule::BLOCK)), (codes, 1.0, 0xA5), "{implementation}");
        assert_eq!(quantized(Scaling::Square128(AmaxRule::CURRENT)), (codes, 1.0, 0xA5), "{implementation}");
        let beside_infinity = [0x7F, 0x7F, 0x7E, 0xFE, 0x00, 0x80, 0x00, 0x80, 0xC0, 0x00];
        for scaling in [Scaling::Mx, Scaling::MxSquare] {
            assert_eq!(quantized(scaling), (beside_infinity, -1.0, 254), "{implementation}");
        }
    }
}
