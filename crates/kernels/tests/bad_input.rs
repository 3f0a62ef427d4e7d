//! What the entry points say of shapes and buffers that do not fit: an error that names what was expected, before
//! anything is written.

use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Error, Implementation, Input, Result, Values, amax, dequantize, gemm, gguf, swizzle};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{Bound, Edge, Error as Rule, GlobalScale, Mode, Rounding, Tile};

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

/// Quantizes a 4 × 32 matrix in both directions with a setting for one of them, which every implementation must refuse
/// before it writes to either.
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
        let wanted = amax::Wanted { tensor: Some(&mut tensor), rows: Some(&mut rows), cols: Some(&mut cols) };
        amax::amax(implementation, &input, Edge::Kernel, wanted).unwrap();
        assert_eq!((tensor, rows, cols), (3.0, [3.0, 0.5], [1.0, 2.0, 3.0]));
        let wanted = amax::Wanted { rows: Some(&mut cols), ..Default::default() };
        assert_eq!(
            message(amax::amax(implementation, &input, Edge::Kernel, wanted)),
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
