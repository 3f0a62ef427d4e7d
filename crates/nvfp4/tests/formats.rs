//! Tensors in every format: bytes against the rules, what goes through unchanged, products of every pair, and what is refused.

use half::{bf16, f16};
use nvfp4::format::{Family, multiply};
use nvfp4::*;
use nvfp4_spec::fp8::{self, Mode, Scaling, View};
use nvfp4_spec::gemm as oracle;
use nvfp4_spec::matrix::{self, Matrix};
use proptest::prelude::*;

const ROWS: usize = 160;
const COLS: usize = 144;

/// Values over several powers of two, some of them −0.
fn values<T: Element>(len: usize, seed: usize) -> Vec<T> {
    let value = |i: usize| {
        let size = 2f32.powi((i / 16 * 7 + seed) as i32 % 9 - 4);
        let value = ((i * 7919 + seed * 104729) % 2003) as f32 / 1001.0 - 1.0;
        T::from_f32(if i % 37 == 5 { -0.0 } else { value * size })
    };
    (0..len).map(value).collect()
}

fn spec(text: &str) -> QuantSpec {
    text.parse().unwrap()
}

fn quantizer(text: &str, directions: Directions) -> Quantizer {
    Quantizer::with_scales(&spec(text), directions, |_| Some(371.3)).unwrap()
}

fn quantize(text: &str, seed: usize) -> QuantTensor {
    let x: Vec<f32> = values(ROWS * COLS, seed);
    quantizer(text, Directions::Both).quantize(&TensorRef::new(&x[..], &[ROWS, COLS]).unwrap()).unwrap()
}

/// FP8 specs, and how the rules make them of a matrix with this amax.
fn fp8_specs(amax: f32) -> Vec<(&'static str, Mode)> {
    let rule = |values, epsilon| fp8::AmaxRule { values, epsilon };
    let (any, powers) = (fp8::ScaleValues::Any, fp8::ScaleValues::PowersOfTwo);
    let tensor = |format, rule: fp8::AmaxRule| Mode {
        format,
        scaling: Scaling::Tensor { scale: rule.tensor_scale(amax, format) },
    };
    let (e4m3, e5m2) = (Fp8Code::E4m3, Fp8Code::E5m2);
    vec![
        ("fp8(e4m3)", tensor(e4m3, rule(any, 0.0))),
        ("fp8(e5m2, pow2-scale)", tensor(e5m2, rule(powers, 0.0))),
        ("fp8(e4m3, epsilon=100)", tensor(e4m3, rule(any, 100.0))),
        ("fp8-delayed(e5m2)", Mode { format: e5m2, scaling: Scaling::Tensor { scale: 371.3 } }),
        ("fp8-block(e4m3)", Mode { format: e4m3, scaling: Scaling::Row128(rule(powers, 0.0)) }),
        ("fp8-block(e5m2, any-scale, epsilon=0.5)", Mode { format: e5m2, scaling: Scaling::Row128(rule(any, 0.5)) }),
        ("fp8-block(e4m3, 128x128)", Mode { format: e4m3, scaling: Scaling::Square128(rule(powers, 0.0)) }),
        ("mxfp8(e4m3)", Mode { format: e4m3, scaling: Scaling::Mx }),
        ("mxfp8(e5m2)", Mode { format: e5m2, scaling: Scaling::Mx }),
        ("mxfp8(e4m3, 32x32)", Mode { format: e4m3, scaling: Scaling::MxSquare }),
        ("mxfp8(e5m2, 32x32)", Mode { format: e5m2, scaling: Scaling::MxSquare }),
    ]
}

/// A spec of every kind.
const SPECS: [&str; 14] = [
    "high-precision",
    "high-precision(bf16)",
    "fp8(e4m3)",
    "fp8(e5m2)",
    "fp8-delayed(e4m3)",
    "fp8-block(e4m3)",
    "fp8-block(e5m2, any-scale)",
    "fp8-block(e4m3, 128x128)",
    "mxfp8(e4m3)",
    "mxfp8(e5m2)",
    "mxfp8(e4m3, 32x32)",
    "nvfp4",
    "nvfp4(row-scaled)",
    "nvfp4(16x16)",
];

fn fp8_view(d: &Fp8Direction) -> View<'_> {
    let (rows, cols) = d.tile().along_k((d.rows(), d.cols()));
    View { rows, cols, format: d.code(), tile: d.tile(), codes: d.codes(), scales: d.scales() }
}

#[test]
fn fp8_has_the_bytes_of_the_rules_in_every_type_implementation_and_direction() {
    fn check<'a, T: Element>(x: &'a [T])
    where
        &'a [T]: Into<Values<'a>>,
    {
        let matrix = Matrix::new(ROWS, COLS, x).unwrap();
        let amax = matrix.data().iter().fold(0f32, |m, x| m.max(x.abs()));
        let tensor = TensorRef::new(x, &[4, ROWS / 4, COLS]).unwrap();
        for (text, mode) in fp8_specs(amax) {
            for implementation in Implementation::available() {
                let options = Options { implementation: Some(implementation), ..Options::default() };
                let q = quantizer(text, Directions::Both).quantize_with(&tensor, &options).unwrap();
                for (side, of) in [(Side::Row, fp8::Side::Row), (Side::Column, fp8::Side::Column)] {
                    let expected = fp8::quantize(&matrix, &mode, of);
                    let Direction::Fp8(d) = q.direction(side).unwrap() else { panic!("{text}") };
                    assert_eq!(fp8_view(d), expected.view(), "{implementation} {text} {side}");
                    let alone = if side == Side::Row { Directions::Row } else { Directions::Column };
                    let alone = quantizer(text, alone).quantize_with(&tensor, &options).unwrap();
                    assert_eq!(alone.direction(side).unwrap(), q.direction(side).unwrap());
                    assert!(alone.row().is_none() || alone.col().is_none());
                    // Decoded, the column direction comes transposed whatever the format.
                    let decoded: Vec<f32> = q.dequantize(side).unwrap();
                    let rule: Vec<f32> = fp8::dequantize(&expected.view()).unwrap();
                    let (rows, cols) = (d.rows(), d.cols());
                    assert_eq!((rows, cols), if side == Side::Row { (ROWS, COLS) } else { (COLS, ROWS) });
                    for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                        let at = if d.tile() == Fp8Tile::Column32 { c * rows + r } else { r * cols + c };
                        assert_eq!(decoded[r * cols + c].to_bits(), rule[at].to_bits());
                    }
                }
            }
        }
    }
    check::<f32>(&values(ROWS * COLS, 1));
    check::<bf16>(&values(ROWS * COLS, 2));
    check::<f16>(&values(ROWS * COLS, 3));
}

#[test]
fn strides_and_empty_tensors() {
    let x: Vec<bf16> = values(40 * 50 * 2, 1);
    let turned = TensorRef::strided(&x[..], &[50, 40], &[1, 50]).unwrap();
    let copy: Vec<bf16> = (0..50 * 40).map(|i| x[i / 40 + i % 40 * 50]).collect();
    let copy = TensorRef::new(&copy[..], &[50, 40]).unwrap();
    for text in SPECS {
        let quantizer = quantizer(text, Directions::Both);
        assert_eq!(quantizer.quantize(&turned).unwrap(), quantizer.quantize(&copy).unwrap(), "{text}");
        for shape in [[0, 7], [7, 0], [1 << 40, 0], [0, 1 << 40]] {
            let q = quantizer.quantize(&TensorRef::new(&[0f32; 0][..], &shape).unwrap());
            // A scale for each of so many rows would not fit.
            if text == "nvfp4(row-scaled)" && shape.contains(&(1 << 40)) {
                continue;
            }
            let q = q.unwrap();
            for side in [Side::Row, Side::Column] {
                assert_eq!(q.dequantize::<f32>(side).unwrap(), [0f32; 0], "{text} {shape:?}");
            }
        }
    }
}

/// Every bit pattern of the upper half, NaN of every kind among them.
#[test]
fn high_precision_is_transparent_to_the_bit() {
    let patterns: Vec<u16> = (0..=u16::MAX).collect();
    let (brain, half): (Vec<bf16>, Vec<f16>) =
        (patterns.iter().map(|&b| bf16::from_bits(b)).collect(), patterns.iter().map(|&b| f16::from_bits(b)).collect());
    let wide: Vec<f32> = patterns.iter().map(|&b| f32::from_bits(u32::from(b) << 16 | 0x1234)).collect();
    let keep = quantizer("high-precision", Directions::Both);
    let shape = [256, 2, 128];
    let q = keep.quantize(&TensorRef::new(&brain[..], &shape).unwrap()).unwrap();
    let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
    assert_eq!(bits(&q.dequantize::<bf16>(Side::Row).unwrap()), patterns);
    let column = q.dequantize::<bf16>(Side::Column).unwrap();
    assert!((0..512 * 128).all(|i| column[i % 128 * 512 + i / 128].to_bits() == patterns[i]));
    assert_eq!(q.byte_len(), 2 * patterns.len(), "one buffer for both directions");
    let q = keep.quantize(&TensorRef::new(&half[..], &shape).unwrap()).unwrap();
    assert!(q.dequantize::<f16>(Side::Row).unwrap().iter().map(|x| x.to_bits()).eq(patterns.iter().copied()));
    let q = keep.quantize(&TensorRef::new(&wide[..], &shape).unwrap()).unwrap();
    let got: Vec<u32> = q.dequantize::<f32>(Side::Row).unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(got, wide.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
    // A cast to the type that a tensor has changes nothing either.
    let same = quantizer("high-precision(bf16)", Directions::Row);
    let q = same.quantize(&TensorRef::new(&brain[..], &shape).unwrap()).unwrap();
    assert_eq!(bits(&q.dequantize::<bf16>(Side::Row).unwrap()), patterns);
}

#[test]
fn a_cast_rounds_once() {
    let x: Vec<f32> = values(40, 1);
    let q =
        quantizer("high-precision(f16)", Directions::Row).quantize(&TensorRef::new(&x[..], &[5, 8]).unwrap()).unwrap();
    let Direction::Plain(d) = q.direction(Side::Row).unwrap() else { panic!() };
    let Values::F16(got) = d.values() else { panic!() };
    assert!(got.iter().zip(&x).all(|(y, x)| y.to_bits() == f16::from_f32(*x).to_bits()));
    assert_eq!(q.to_string(), "[5, 8] row: high-precision(f16)");
}

/// What the oracle takes for a direction, from what anyone can read of it.
enum Held<'a> {
    Nvfp4(matrix::View<'a>),
    Fp8(View<'a>),
    Plain(Matrix),
}

impl<'a> Held<'a> {
    fn new(direction: &'a Direction) -> Self {
        match direction {
            Direction::Nvfp4(d) => Held::Nvfp4(matrix::View {
                rows: d.rows(),
                cols: d.cols(),
                codes: d.codes(),
                scales: d.scales(),
                stored: d.stored(),
                global: d.global(),
                unit: d.unit(),
            }),
            Direction::Fp8(d) => Held::Fp8(fp8_view(d)),
            Direction::Plain(d) => {
                Held::Plain(Matrix::new(d.rows(), d.cols(), &direction.dequantize::<f32>().unwrap()).unwrap())
            }
        }
    }

    fn operand(&self) -> oracle::Operand<'_> {
        match self {
            Held::Nvfp4(view) => view.into(),
            Held::Fp8(view) => view.into(),
            Held::Plain(matrix) => matrix.into(),
        }
    }
}

/// A few outputs of a product against the exact sum.
fn check_product<T: Element>(a: &Direction, b: &Direction, product: &Product<'_, T>, out: &[T], what: &str) {
    let (a, b) = (Held::new(a), Held::new(b));
    let (a, b) = (a.operand(), b.operand());
    assert_eq!(out.len(), a.rows() * b.rows());
    let sums = oracle::Sums::new(&a, &b, Accumulate::Exact);
    for at in (0..out.len()).step_by(out.len() / 40 + 1) {
        let (i, j) = (at / b.rows(), at % b.rows());
        let interval = oracle::Interval::new((&a, i), (&b, j), product, &sums);
        assert!(interval.holds(out[at].to_f32()), "{what} ({i}, {j}): {:?} for {interval:?}", out[at]);
    }
}

/// Every pair of formats in the three products of a linear layer: what a plan allows is multiplied, what it refuses is refused.
#[test]
fn every_pair_of_formats() {
    let (mut multiplied, mut refused) = (0, 0);
    for (left, right) in SPECS.iter().flat_map(|a| SPECS.map(|b| (*a, b))) {
        // Square, so that every direction of one fits every direction of the other.
        let square = |text, seed| {
            let x: Vec<f32> = values(COLS * COLS, seed);
            quantizer(text, Directions::Both).quantize(&TensorRef::new(&x[..], &[COLS, COLS]).unwrap()).unwrap()
        };
        let (a, b) = (square(left, 1), square(right, 2));
        for (from, to) in [(Side::Row, Side::Row), (Side::Row, Side::Column), (Side::Column, Side::Column)] {
            let formats = (spec(left).format(from), spec(right).format(to));
            let (x, y) = (a.direction(from).unwrap(), b.direction(to).unwrap());
            let product = Product { alpha: 1.5, ..Product::<bf16>::default() };
            let what = format!("{left} {from} × {right} {to}");
            match multiply((&formats.0, from), (&formats.1, to)) {
                Ok(_) => {
                    multiplied += 1;
                    check_product(x, y, &product, &matmul(x, y, &product).unwrap(), &what);
                    if multiplied % 7 == 0 {
                        for implementation in Implementation::available() {
                            let out = matmul_with(implementation, x, y, &product).unwrap();
                            check_product(x, y, &product, &out, &format!("{implementation} {what}"));
                        }
                    }
                }
                Err(_) => {
                    refused += 1;
                    let message = matmul(x, y, &product).unwrap_err().to_string();
                    let (left, right) = (x.family(), y.family());
                    assert_eq!(
                        message,
                        format!(
                            "matmul: the left operand is {left}, the right operand {right}; a product reads one format, or one \
                             beside high precision: quantize both to one of these formats, or keep one of them in high precision"
                        ),
                        "{what}"
                    );
                    let grouped = matmul_grouped(&[(x, x), (x, y)], &product);
                    assert!(matches!(grouped, Err(Error::Formats { .. })), "{what}");
                }
            }
        }
    }
    assert_eq!((multiplied, refused), (3 * (2 * 14 + 12 * 2 + 9 + 9 + 9 + 9), 3 * (196 - 88)));
}

#[test]
fn plain_tensors_and_groups() {
    let x: Vec<bf16> = values(9 * COLS, 5);
    let x = TensorRef::new(&x[..], &[9, COLS]).unwrap();
    let kept = quantizer("high-precision", Directions::Row).quantize(&x).unwrap();
    let bias: Vec<f32> = values(ROWS, 6);
    let product = Product { bias: Some(&bias), ..Product::<f32>::default() };
    for text in SPECS {
        let w = quantize(text, 4);
        let y = matmul_plain(&x, w.row().unwrap(), &product).unwrap();
        assert_eq!(y, matmul(kept.row().unwrap(), w.row().unwrap(), &product).unwrap(), "{text}: kept as it is");
        check_product(kept.row().unwrap(), w.row().unwrap(), &product, &y, text);
        let pairs = [(w.row().unwrap(), w.row().unwrap()), (w.col().unwrap(), w.col().unwrap())];
        let grouped = matmul_grouped(&pairs, &Product::<f32>::default()).unwrap();
        for ((a, b), out) in pairs.into_iter().zip(&grouped) {
            assert_eq!(out, &matmul::<f32>(a, b, &Product::default()).unwrap(), "{text}");
        }
    }
}

#[test]
fn a_transformed_operand_meets_its_like_alone() {
    let (rotated, fp8, plain) = (quantize("nvfp4(hadamard)", 1), quantize("fp8", 2), quantize("high-precision", 2));
    let (col, product) = (Side::Column, Product::<f32>::default());
    let column = |q: &QuantTensor| q.direction(col).unwrap().clone();
    assert!(matmul(&column(&rotated), &column(&rotated), &product).is_ok());
    assert!(matches!(matmul(&column(&rotated), &column(&plain), &product), Err(Error::Rotation { .. })));
    assert!(matches!(matmul(&column(&rotated), &column(&fp8), &product), Err(Error::Formats { .. })));
    assert_eq!(rotated.to_string(), "[160, 144] row: nvfp4 column: nvfp4(hadamard)");
}

#[test]
fn split_specs_make_each_direction_as_it_would_be_alone() {
    let x: Vec<bf16> = values(ROWS * COLS, 3);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let both = |text: &str| quantizer(text, Directions::Both).quantize(&x).unwrap();
    for (row, col) in SPECS.iter().flat_map(|a| SPECS.map(|b| (*a, b))) {
        let split = both(&format!("{row} / {col}"));
        assert_eq!((split.row(), split.col()), (both(row).row(), both(col).col()), "{row} / {col}");
        let text = format!("{row} / {col} from row");
        let from_row = both(&text);
        assert_eq!(from_row.row(), both(row).row());
        let decoded: Vec<bf16> = from_row.dequantize(Side::Row).unwrap();
        let again = quantizer(col, Directions::Both).quantize(&TensorRef::new(&decoded[..], &[ROWS, COLS]).unwrap());
        assert_eq!(from_row.col(), again.unwrap().col(), "{text}");
        // The row direction is made for it even where it is not kept.
        let alone = quantizer(&text, Directions::Column).quantize(&x).unwrap();
        assert_eq!((alone.row(), alone.col()), (None, from_row.col()));
    }
}

#[test]
fn randomness_and_amaxes_go_where_they_are_used() {
    let x: Vec<f32> = values(ROWS * COLS, 3);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let drawn = Options { randomness: Some(Randomness::At { seed: 5, offset: 8 }), ..Options::default() };
    let mixed = quantizer("mxfp8 / nvfp4(stochastic)", Directions::Both);
    assert_eq!(mixed.rounding(), Rounding::Stochastic);
    let q = mixed.quantize_with(&x, &drawn).unwrap();
    let whole = quantizer("nvfp4(stochastic)", Directions::Both).quantize_with(&x, &drawn).unwrap();
    assert_eq!((q.row(), q.col()), (quantize("mxfp8", 3).row(), whole.col()));
    assert!(matches!(mixed.quantize(&x), Err(Error::NoRandomness)));
    assert!(matches!(quantizer("mxfp8", Directions::Row).quantize_with(&x, &drawn), Err(Error::UnusedRandomness)));

    fn amax<'a>(row: Option<&'a [f32]>, col: Option<&'a [f32]>) -> Options<'a> {
        Options { row_amax: row, col_amax: col, ..Options::default() }
    }
    let message = |text: &str, directions, options: &Options<'_>| {
        quantizer(text, directions).quantize_with(&x, options).unwrap_err().to_string()
    };
    let given = amax(Some(&[7.0]), None);
    let q = quantizer("fp8", Directions::Both).quantize_with(&x, &given).unwrap();
    let Direction::Fp8(d) = q.row().unwrap() else { panic!() };
    assert_eq!(d.scales().factor(0), 1.0 / 64.0);
    for format in ["high-precision", "fp8-delayed", "fp8-block", "mxfp8"] {
        let expected = format!("an amax was given for the row direction, but {format} takes none; drop it");
        assert_eq!(message(format, Directions::Both, &given), expected);
    }
    assert!(message("fp8", Directions::Column, &given).contains("for the row direction, which is not written"));
    let two = amax(Some(&[7.0]), Some(&[8.0]));
    assert_eq!(
        message("fp8", Directions::Both, &two),
        "one scale serves both directions, but the row amax is 7 and the column amax 8; give one of them"
    );
    assert_eq!(message("fp8", Directions::Row, &amax(Some(&[]), None)), "amax: expected length 1, got 0");
    assert!(message("fp8", Directions::Row, &amax(Some(&[-1.0]), None)).contains("expected a magnitude, got -1"));
}

#[test]
fn specs_that_cannot_be_made_say_why() {
    let message = |text: &str| Quantizer::new(spec(text), Directions::Both).unwrap_err().to_string();
    assert_eq!(
        message("fp8-delayed(e4m3)"),
        "fp8-delayed(e4m3): its scale comes from earlier steps; give it with `Quantizer::with_scales`, or take the quantizer from a plan"
    );
    assert!(message("custom(mine)").starts_with("custom(mine): not a format of this library"));
    let zero =
        Quantizer::with_scales(&spec("fp8-delayed(e4m3)"), Directions::Row, |_| Some(0.0)).unwrap_err().to_string();
    assert_eq!(zero, "fp8-delayed(e4m3): expected a scale above 0, got 0");
    // A direction that is not made is not looked at.
    assert!(Quantizer::new(spec("mxfp8 / custom(mine)"), Directions::Row).is_ok());
    let swizzled = quantize("mxfp8", 1).with_layout(Layout::Swizzled).unwrap_err().to_string();
    assert_eq!(swizzled, "expected an nvfp4 direction, got mxfp8; quantize to nvfp4, or match on `Direction`");
    assert!(quantize("mxfp8", 1).with_layout(Layout::Linear).is_ok());
}

#[test]
fn updates_in_every_format() {
    let x: Vec<f32> = values(ROWS * COLS, 7);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    for text in SPECS {
        let quantizer = quantizer(text, Directions::Both);
        let fresh = quantizer.quantize(&x).unwrap();
        for before in ["mxfp8", "nvfp4", "high-precision"] {
            let mut q = quantize(before, 1);
            quantizer.update(&mut q, &x, &Options::default(), Update::Skip).unwrap();
            assert_eq!(q, quantize(before, 1));
            quantizer.update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
            assert_eq!(q, fresh, "{before} to {text}");
            q.keep(Directions::Column).unwrap();
            quantizer.update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
            assert_eq!((q.row(), q.col()), (None, fresh.col()));
        }
        let mut q = quantize("mxfp8", 1);
        let row = self::quantizer(text, Directions::Row);
        let error = row.update(&mut q, &x, &Options::default(), Update::Apply).unwrap_err();
        assert!(matches!(error, Error::NotProduced(Side::Column)));
        assert_eq!(q, quantize("mxfp8", 1));
    }
    // NVFP4's own quantizer takes over a tensor of another format too.
    let mut q = quantize("mxfp8", 1);
    let nvfp4 = Quantizer::builder().directions(Directions::Both).build().unwrap();
    nvfp4.update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
    assert_eq!(q, nvfp4.quantize(&x).unwrap());
}

#[test]
fn slices_keep_their_bytes_and_blocks_stay_whole() {
    for (text, of) in SPECS.into_iter().zip([1, 1, 1, 1, 1, 128, 128, 128, 32, 32, 32, 16, 16, 16]) {
        let q = quantize(text, 1);
        let (row, col) = (q.dequantize::<f32>(Side::Row).unwrap(), q.dequantize::<f32>(Side::Column).unwrap());
        for (start, end) in [(0, ROWS), (of, ROWS), (0, of), (of, of)] {
            let slice = q.slice_rows(start, end).unwrap();
            assert_eq!(slice.dequantize::<f32>(Side::Row).unwrap(), row[start * COLS..end * COLS], "{text}");
            let expected: Vec<f32> = col.chunks(ROWS).flat_map(|c| &c[start..end]).copied().collect();
            assert_eq!(slice.dequantize::<f32>(Side::Column).unwrap(), expected, "{text} {start}..{end}");
            let parts = QuantTensor::from_parts(slice.shape(), slice.row().cloned(), slice.col().cloned()).unwrap();
            assert_eq!(parts, slice);
        }
        if of > 1 {
            let message = q.slice_rows(0, of / 2).unwrap_err().to_string();
            let side = if text.contains("128x128") { Side::Row } else { Side::Column };
            assert_eq!(
                message,
                format!(
                    "rows 0..{} cut a block of the {side} direction; slice at multiples of {of} or drop that direction first",
                    of / 2
                )
            );
        }
    }
    let shared = quantize("high-precision", 1);
    assert_eq!(shared.slice_rows(3, 9).unwrap().byte_len(), 4 * 6 * COLS, "parts share their buffer too");
}

#[test]
fn directions_from_parts_are_checked() {
    let part = |tile, codes: usize, scales| {
        let about = Fp8Description { rows: 4, cols: 40, code: Fp8Code::E4m3, tile };
        let part: Result<Fp8Direction> = Fp8Direction::from_parts(about, vec![0; codes], scales);
        part.unwrap_err().to_string()
    };
    assert_eq!(part(Fp8Tile::Row32, 159, Fp8Scales::E8m0(vec![0; 8])), "codes: expected length 160, got 159");
    assert_eq!(part(Fp8Tile::Row32, 160, Fp8Scales::E8m0(vec![0; 9])), "scales: expected length 8, got 9");
    assert_eq!(part(Fp8Tile::Column32, 160, Fp8Scales::E8m0(vec![0; 9])), "scales: expected length 8, got 9");
    assert!(part(Fp8Tile::Row32, 160, Fp8Scales::F32(vec![0.0; 8])).starts_with("tiles of 32 have E8M0 scales"));
    assert!(part(Fp8Tile::Tensor, 160, Fp8Scales::E8m0(vec![0; 1])).contains("give scales of that kind"));
    let plain = PlainDirection::from_parts(4, 40, Elements::F32(vec![0.0; 159]), Orientation::RowMajor).unwrap_err();
    assert_eq!(plain.to_string(), "elements: expected length 160, got 159");
    let column = quantize("mxfp8", 1).col().cloned();
    let error = QuantTensor::from_parts(&[COLS, ROWS], column, None).unwrap_err().to_string();
    assert!(error.starts_with("the row direction has MXFP8 tiles of the other direction"), "{error}");
    assert!(matches!(quantize("fp8", 1).nvfp4(Side::Row), Err(Error::NotNvfp4 { got: Family::Fp8 })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any values in any format: quantized the same by every implementation, saved and loaded, sliced, and multiplied within the bound.
    #[test]
    fn any_tensor_in_any_format(
        which in 0..SPECS.len(),
        rows in 1usize..70,
        cols in 1usize..200,
        seed in 0usize..1000,
        power in -20i32..20,
    ) {
        let text = SPECS[which];
        let x: Vec<f32> = values::<f32>(rows * cols, seed).iter().map(|x| x * 2f32.powi(power)).collect();
        let tensor = TensorRef::new(&x[..], &[rows, cols]).unwrap();
        let quantizer = quantizer(text, Directions::Both);
        let q = quantizer.quantize(&tensor).unwrap();
        let scalar = Options { implementation: Some(Implementation::Scalar), ..Options::default() };
        prop_assert_eq!(&quantizer.quantize_with(&tensor, &scalar).unwrap(), &q);

        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("any-{which}.safetensors"));
        save(&path, [("x", &q)]).unwrap();
        prop_assert_eq!(load(&path).unwrap().remove("x"), Some(q.clone()));

        let cut = rows / 128 * 128;
        prop_assert_eq!(q.slice_rows(0, rows).unwrap(), q.clone());
        prop_assert!(q.slice_rows(cut, rows).is_ok());

        for side in [Side::Row, Side::Column] {
            let d = q.direction(side).unwrap();
            let out = matmul(d, d, &Product::<f32>::default()).unwrap();
            check_product(d, d, &Product::default(), &out, text);
        }
    }
}
