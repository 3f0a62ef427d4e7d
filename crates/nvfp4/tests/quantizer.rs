//! The builder over every combination of settings, and quantization against the rules.

use half::{bf16, f16};
use nvfp4::*;
use nvfp4_spec::matrix::{self, Matrix};
use nvfp4_spec::stochastic::{Random, Stream};
use nvfp4_spec::{Mode, Rounding as Rule};

const TILES: [Tile; 2] = [Tile::Row16, Tile::Square16];
const GLOBALS: [GlobalScale; 2] = [GlobalScale::PerTensor, GlobalScale::PerRow];
const ROUNDINGS: [Rounding; 2] = [Rounding::NearestEven, Rounding::Stochastic];
const TRANSFORMS: [Transform; 3] = [Transform::None, Transform::FixedSigns, Transform::Signs(Signs(0x1234))];
const DIRECTIONS: [Directions; 3] = [Directions::Row, Directions::Column, Directions::Both];
const SPECIALS: [Specials; 2] = [Specials::Kernel, Specials::Reference];
const PROFILES: [Profile; 4] =
    [Profile::TransformerEngine, Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo];

struct Settings {
    mode: Mode,
    rounding: Rounding,
    transform: Transform,
    directions: Directions,
}

impl Settings {
    fn builder(&self) -> QuantizerBuilder {
        Quantizer::builder()
            .tile(self.mode.tile)
            .global_scale(self.mode.global)
            .scale_rule(self.mode.rule)
            .rounding(self.rounding)
            .transform(self.transform)
            .directions(self.directions)
            .specials(self.mode.specials)
            .profile(self.mode.profile)
    }

    /// Why the settings are refused, if they are: the start of the message and the fix it names.
    fn refusal(&self) -> Option<(&'static str, &'static str)> {
        let four_over_six = matches!(self.mode.rule, ScaleRule::FourOverSix { .. });
        let search = self.mode.rule.is_search();
        let other_producer = self.mode.profile != Profile::TransformerEngine;
        if self.mode.tile == Tile::Square16 && self.mode.global == GlobalScale::PerRow {
            Some(("16×16 tiles with a per-row global scale", "use 1×16 tiles or a per-tensor global scale"))
        } else if four_over_six && self.rounding == Rounding::Stochastic {
            Some(("4over6 with stochastic rounding", "use nearest-even rounding or the rule `Six`"))
        } else if search && self.rounding == Rounding::Stochastic {
            Some(("a search of scales with stochastic rounding", "use nearest-even rounding or the rule `Six`"))
        } else if search && self.mode.tile == Tile::Square16 {
            Some(("a search of scales with 16×16 tiles", "use 1×16 tiles"))
        } else if self.mode.rule.is_modelopt() && self.mode.profile != Profile::ModelOpt {
            Some(("a search of ModelOpt's with another producer's profile", "use the profile `ModelOpt`"))
        } else if four_over_six && other_producer {
            Some(("4over6 with another producer's profile", "use the profile `TransformerEngine` or the rule `Six`"))
        } else if self.mode.specials == Specials::Reference && other_producer {
            Some(("the specials `Reference` with another producer's profile", "leave the specials at `Kernel`"))
        } else if self.transform != Transform::None && self.directions == Directions::Row {
            Some(("the Hadamard transform acts on the column direction", "use `Directions::Column`"))
        } else {
            None
        }
    }
}

fn all_settings() -> Vec<Settings> {
    let mut all = Vec::new();
    for rule in ScaleRule::ALL {
        for (tile, global) in TILES.into_iter().flat_map(|t| GLOBALS.map(|g| (t, g))) {
            for (specials, profile) in SPECIALS.into_iter().flat_map(|e| PROFILES.map(|p| (e, p))) {
                for (rounding, transform) in ROUNDINGS.into_iter().flat_map(|r| TRANSFORMS.map(|t| (r, t))) {
                    for directions in DIRECTIONS {
                        let mode = Mode { tile, global, rule, specials, profile };
                        all.push(Settings { mode, rounding, transform, directions });
                    }
                }
            }
        }
    }
    all
}

const ROWS: usize = 32;
const COLS: usize = 50;

/// Values over several exponents with −0, zeros and, where asked, NaN and infinities.
fn values() -> Vec<f32> {
    (0..ROWS * COLS)
        .map(|i| match i % 37 {
            0 => -0.0,
            1 => 0.0,
            k => ((i * 7919 % 1009) as f32 - 504.0) * 2f32.powi((k % 9) as i32 - 4),
        })
        .collect()
}

/// Every combination is refused with the reason and the fix, or gives in both directions the bytes of the rules.
#[test]
fn every_combination_of_settings_is_refused_with_its_fix_or_follows_the_rules() {
    let x = values();
    let tensor = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let matrix = Matrix::new(ROWS, COLS, &x).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for settings in all_settings() {
        let quantizer = match (settings.builder().build(), settings.refusal()) {
            (Ok(quantizer), None) => quantizer,
            (Err(error), Some((reason, fix))) => {
                let message = error.to_string();
                assert!(message.starts_with(reason) && message.contains(fix), "{message}");
                refused += 1;
                continue;
            }
            (Ok(_), Some((reason, _))) => panic!("accepted in spite of: {reason}"),
            (Err(error), None) => panic!("refused a combination that composes: {error}"),
        };
        accepted += 1;
        let stochastic = settings.rounding == Rounding::Stochastic;
        let randomness = stochastic.then_some(Randomness::At { seed: 5, offset: 8 });
        let q = quantizer.quantize_with(&tensor, &Options { randomness, ..Options::default() }).unwrap();
        let signs = match settings.transform {
            Transform::None => None,
            Transform::FixedSigns => Some(Signs::FIXED),
            Transform::Signs(signs) => Some(signs),
        };
        let sides = [
            (q.row(), Side::Row, matrix.clone(), Stream::row(5, 8), None),
            (q.col(), Side::Column, matrix::columns(&matrix, signs).unwrap(), Stream::column(5, 8), signs),
        ];
        for (direction, side, x, stream, rotation) in sides {
            assert_eq!(direction.is_some(), settings.directions.has(side));
            let Some(direction) = direction else { continue };
            let direction = direction.nvfp4().unwrap();
            let rule = if stochastic { Rule::Stochastic(Random::Stream(stream)) } else { Rule::NearestEven };
            let amax = matrix::amax(&x, settings.mode.global, settings.mode.amax_specials()).unwrap();
            let expected = matrix::quantize(&x, &amax, &settings.mode, rule).unwrap();
            assert_eq!((direction.codes(), direction.scales()), (&expected.codes[..], &expected.scales[..]));
            assert_eq!(direction.stored()[..], expected.stored[..]);
            assert_eq!((direction.global(), direction.unit()), (settings.mode.global, expected.unit));
            assert_eq!(direction.rotation(), rotation);
        }
    }
    // Tile and global scale: 3 of 4. Transform and directions: 7 of 9. TransformerEngine: 2 kinds of specials, each with the rule six in
    // 2 roundings and 8 variants of 4over6; three other producers: one kind of specials, the rule six, 2 roundings.
    // The search of scales: 1×16, nearest, both specials of one profile and three other profiles.
    // ModelOpt's two searches: 1×16, nearest, its profile.
    assert_eq!(accepted, 3 * 7 * (2 * (2 + 8) + 3 * 2) + 2 * 7 * (2 + 3) + 2 * 7 * 2);
    assert_eq!(accepted + refused, 12 * 4 * 8 * 6 * 3);
}

const FOUR_OVER_SIX: ScaleRule =
    ScaleRule::FourOverSix { metric: Metric::Mae, error: ErrorPath::Strict, bound: Bound::E256 };

fn refusal(builder: QuantizerBuilder) -> String {
    builder.build().unwrap_err().to_string()
}

#[test]
fn square_tiles_refuse_a_scale_per_row() {
    assert_eq!(
        refusal(Quantizer::builder().tile(Tile::Square16).global_scale(GlobalScale::PerRow)),
        "16×16 tiles with a per-row global scale: a tile spans 16 rows but has one block scale; \
         use 1×16 tiles or a per-tensor global scale"
    );
}

#[test]
fn four_over_six_refuses_stochastic_rounding() {
    assert_eq!(
        refusal(Quantizer::builder().scale_rule(FOUR_OVER_SIX).rounding(Rounding::Stochastic)),
        "4over6 with stochastic rounding: the error to minimise would be random; \
         use nearest-even rounding or the rule `Six`"
    );
}

#[test]
fn four_over_six_refuses_other_producers() {
    assert_eq!(
        refusal(Quantizer::builder().scale_rule(FOUR_OVER_SIX).profile(Profile::ModelOpt)),
        "4over6 with another producer's profile: only TransformerEngine has the rule; \
         use the profile `TransformerEngine` or the rule `Six`"
    );
}

#[test]
fn other_producers_refuse_the_reference_specials() {
    assert_eq!(
        refusal(Quantizer::builder().specials(Specials::Reference).profile(Profile::TorchAo)),
        "the specials `Reference` with another producer's profile: it decides NaN and −0 itself; \
         leave the specials at `Kernel` or use the profile `TransformerEngine`"
    );
}

#[test]
fn the_hadamard_transform_refuses_the_row_direction_alone() {
    assert_eq!(
        refusal(Quantizer::builder().transform(Transform::FixedSigns)),
        "the Hadamard transform acts on the column direction, which is not asked for; \
         use `Directions::Column` or `Directions::Both`, or `Transform::None`"
    );
}

#[test]
fn the_three_input_types_are_converted_exactly() {
    let x: Vec<f32> = values().iter().map(|&x| f16::from_f32(bf16::from_f32(x / 64.0).to_f32()).to_f32()).collect();
    let (as_bf16, as_f16): (Vec<bf16>, Vec<f16>) = x.iter().map(|&x| (bf16::from_f32(x), f16::from_f32(x))).unzip();
    let quantizer = Quantizer::builder().directions(Directions::Both).build().unwrap();
    let shape = [ROWS, COLS];
    let exact: Vec<f32> = as_bf16.iter().map(|x| x.to_f32()).collect();
    let from_f32 = quantizer.quantize(&TensorRef::new(&exact[..], &shape).unwrap()).unwrap();
    assert_eq!(quantizer.quantize(&TensorRef::new(&as_bf16[..], &shape).unwrap()).unwrap(), from_f32);
    let exact: Vec<f32> = as_f16.iter().map(|x| x.to_f32()).collect();
    let from_f32 = quantizer.quantize(&TensorRef::new(&exact[..], &shape).unwrap()).unwrap();
    assert_eq!(quantizer.quantize(&TensorRef::new(&as_f16[..], &shape).unwrap()).unwrap(), from_f32);
}

#[test]
fn strided_inputs_give_the_bytes_of_their_contiguous_copy() {
    let x = values();
    let quantizer = Quantizer::builder().directions(Directions::Both).build().unwrap();
    let copy = |rows: usize, cols: usize, at: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..rows * cols).map(|i| at(i / cols, i % cols)).collect()
    };
    let cases = [
        (TensorRef::strided(&x[..], &[20, 30], &[COLS, 1]).unwrap(), copy(20, 30, &|r, c| x[r * COLS + c])),
        (TensorRef::strided(&x[..], &[COLS, ROWS], &[1, COLS]).unwrap(), copy(COLS, ROWS, &|r, c| x[c * COLS + r])),
    ];
    for (strided, contiguous) in cases {
        let contiguous = TensorRef::new(&contiguous[..], strided.shape()).unwrap();
        assert_eq!(quantizer.quantize(&strided).unwrap(), quantizer.quantize(&contiguous).unwrap());
    }
}

#[test]
fn leading_dimensions_are_flattened_into_rows() {
    let x = values();
    let flat = Quantizer::default().quantize(&TensorRef::new(&x[..], &[ROWS, COLS]).unwrap()).unwrap();
    let deep = Quantizer::default().quantize(&TensorRef::new(&x[..], &[4, 2, 4, COLS]).unwrap()).unwrap();
    assert_eq!((deep.shape(), deep.rows(), deep.row()), (&[4, 2, 4, COLS][..], ROWS, flat.row()));
    let vector = Quantizer::default().quantize(&TensorRef::new(&x[..COLS], &[COLS]).unwrap()).unwrap();
    assert_eq!((vector.rows(), vector.cols()), (1, COLS));
}

#[test]
fn empty_tensors_are_valid() {
    let quantizer =
        Quantizer::builder().directions(Directions::Both).global_scale(GlobalScale::PerRow).build().unwrap();
    for shape in [[0, 16], [16, 0], [0, 0]] {
        let q = quantizer.quantize(&TensorRef::new(&[0.0f32; 0][..], &shape).unwrap()).unwrap();
        assert!(q.nvfp4(Side::Row).unwrap().codes().is_empty() && q.nvfp4(Side::Column).unwrap().scales().is_empty());
        assert_eq!(q.nvfp4(Side::Row).unwrap().stored().len(), shape[0]);
        assert_eq!(q.dequantize::<f32>(Side::Row).unwrap(), [0.0f32; 0]);
    }
}

#[test]
fn a_huge_dimension_without_elements_takes_no_time_and_no_memory() {
    for shape in [[1 << 62, 0], [0, 1 << 62]] {
        let x = TensorRef::new(&[0.0f32; 0][..], &shape).unwrap();
        for layout in [Layout::Linear, Layout::Swizzled] {
            let both = Quantizer::builder().directions(Directions::Both).layout(layout).check_finite();
            let mut q = both.build().unwrap().quantize(&x).unwrap();
            both.build().unwrap().update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
            for side in [Side::Row, Side::Column] {
                assert_eq!(q.dequantize::<f32>(side).unwrap(), [0.0f32; 0]);
            }
            for (start, end) in [(0, shape[0]), (shape[0] / 2, shape[0] / 2)] {
                assert_eq!(q.slice_rows(start, end).unwrap().rows(), end - start);
            }
        }
        let per_row = Quantizer::builder().global_scale(GlobalScale::PerRow).directions(Directions::Both).build();
        let message = per_row.unwrap().quantize(&x).unwrap_err().to_string();
        assert_eq!(message, format!("a matrix of {} × 0 elements is too large", 1u64 << 62), "a global scale per row");
    }
}

#[test]
fn a_repeated_value_that_claims_too_many_elements_is_refused() {
    let x = TensorRef::strided(&[1f32][..], &[1 << 30, 1 << 30], &[0, 0]).unwrap();
    for directions in DIRECTIONS {
        let quantizer = Quantizer::builder().directions(directions).check_finite().build().unwrap();
        let message = quantizer.quantize(&x).unwrap_err().to_string();
        assert_eq!(message, "a matrix of 1073741824 × 1073741824 elements is too large");
    }
}

#[test]
fn a_known_amax_is_used_and_its_length_checked() {
    let x = [1.0f32; 64];
    let x = TensorRef::new(&x[..], &[4, 16]).unwrap();
    let with = |amax| Options { row_amax: Some(amax), ..Options::default() };
    let q = Quantizer::default().quantize_with(&x, &with(&[2.0])).unwrap();
    assert_eq!(q.nvfp4(Side::Row).unwrap().stored()[..], [2.0]);
    let message = |amax| Quantizer::default().quantize_with(&x, &with(amax)).unwrap_err().to_string();
    assert_eq!(message(&[1.0; 4]), "amax: expected length 1, got 4");
    assert_eq!(message(&[-1.0]), "amax: expected a magnitude, got -1 at index 0");
}

#[test]
fn an_amax_for_a_direction_that_is_not_written_is_refused() {
    let x = [1.0f32; 256];
    let x = TensorRef::new(&x[..], &[16, 16]).unwrap();
    let row_amax = Options { row_amax: Some(&[2.0]), ..Options::default() };
    let col_amax = Options { col_amax: Some(&[2.0]), ..Options::default() };
    let quantize = |directions, options| {
        let quantizer = Quantizer::builder().directions(directions).build().unwrap();
        quantizer.quantize_with(&x, options)
    };
    assert_eq!(
        quantize(Directions::Row, &col_amax).unwrap_err().to_string(),
        "an amax was given for the column direction, which is not written; ask for that direction or drop the amax"
    );
    assert!(matches!(quantize(Directions::Column, &row_amax), Err(Error::UnusedAmax(Side::Row))));
    for (directions, options) in
        [(Directions::Row, &row_amax), (Directions::Column, &col_amax), (Directions::Both, &row_amax)]
    {
        assert!(quantize(directions, options).is_ok());
    }
    // An update writes the directions that the tensor holds.
    let mut q = quantize(Directions::Both, &row_amax).unwrap();
    q.keep(Directions::Column).unwrap();
    let both = Quantizer::builder().directions(Directions::Both).build().unwrap();
    let refused = both.update(&mut q, &x, &row_amax, Update::Apply);
    assert!(matches!(refused, Err(Error::UnusedAmax(Side::Row))));
}

#[test]
fn a_given_amax_that_is_not_finite_is_refused_only_by_check_finite() {
    let x = [1.0f32; 512];
    let x = TensorRef::new(&x[..], &[16, 32]).unwrap();
    let both = Quantizer::builder().directions(Directions::Both).global_scale(GlobalScale::PerRow);
    let mut amax = [1.0; 32];
    amax[7] = f32::NAN;
    let options = Options { col_amax: Some(&amax), ..Options::default() };
    assert_eq!(
        both.check_finite().build().unwrap().quantize_with(&x, &options).unwrap_err().to_string(),
        "the column direction's amax: expected finite values, got NaN at index 7"
    );
    let kept = both.build().unwrap().quantize_with(&x, &options).unwrap();
    let decoded: Vec<f32> = kept.dequantize(Side::Column).unwrap();
    assert!((0..512).all(|i| decoded[i].is_nan() == (i / 16 == 7)), "column 7 alone is NaN");
    let infinite = Options { row_amax: Some(&[f32::INFINITY; 16]), ..Options::default() };
    let refused = both.check_finite().build().unwrap().quantize_with(&x, &infinite);
    assert!(matches!(refused, Err(Error::AmaxNotFinite { side: Side::Row, index: 0, .. })));
}

#[test]
fn stochastic_rounding_takes_randomness_and_nearest_rounding_refuses_it() {
    let x = values();
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let stochastic = Quantizer::builder().rounding(Rounding::Stochastic).build().unwrap();
    assert!(matches!(stochastic.quantize(&x), Err(Error::NoRandomness)));
    let options = Options { randomness: Some(Generator::new(1).draw().unwrap()), ..Options::default() };
    assert!(matches!(Quantizer::default().quantize_with(&x, &options), Err(Error::UnusedRandomness)));
    let bytes = Options { randomness: Some(Randomness::Bytes { row: &[0; 3], col: &[] }), ..Options::default() };
    let message = stochastic.quantize_with(&x, &bytes).unwrap_err().to_string();
    assert_eq!(message, "random bytes (16 per block): expected length 2048, got 3");
}

#[test]
fn explicit_bytes_equal_the_stream_that_they_were_taken_from() {
    let x = values();
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let quantizer = Quantizer::builder().rounding(Rounding::Stochastic).directions(Directions::Both).build().unwrap();
    let bytes = |stream: Stream, blocks: u64| -> Vec<u8> { (0..blocks).flat_map(|b| stream.block(b)).collect() };
    let (row, col) = (bytes(Stream::row(3, 4), 32 * 4), bytes(Stream::column(3, 4), 50 * 2));
    let quantize = |randomness| {
        quantizer.quantize_with(&x, &Options { randomness: Some(randomness), ..Options::default() }).unwrap()
    };
    let from_seed = quantize(Randomness::At { seed: 3, offset: 4 });
    assert_eq!(quantize(Randomness::Bytes { row: &row, col: &col }), from_seed);
    let streams = Randomness::Streams { row: Stream::row(3, 4), col: Stream::column(3, 4) };
    assert_eq!(quantize(streams), from_seed);
}

#[test]
fn column_only_equals_the_column_half_of_both() {
    let x = values();
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let builder = Quantizer::builder().rounding(Rounding::Stochastic).transform(Transform::FixedSigns);
    let options = Options { randomness: Some(Randomness::At { seed: 1, offset: 0 }), ..Options::default() };
    let quantize = |d| builder.directions(d).build().unwrap().quantize_with(&x, &options).unwrap();
    assert_eq!(quantize(Directions::Column).col(), quantize(Directions::Both).col());
}

#[test]
fn check_finite_refuses_with_the_index_of_the_first_bad_value() {
    let mut x = values();
    (x[3 * COLS + 7], x[20 * COLS]) = (f32::NAN, f32::INFINITY);
    let tensor = TensorRef::new(&x[..], &[2, 16, COLS]).unwrap();
    let strict = Quantizer::builder().check_finite().build().unwrap();
    assert_eq!(
        strict.quantize(&tensor).unwrap_err().to_string(),
        "input: expected finite values, got NaN at index [0, 3, 7]"
    );
    assert!(Quantizer::default().quantize(&tensor).is_ok(), "the default keeps the profile's behaviour");
}

#[test]
fn swizzled_scales_are_the_linear_ones_rearranged() {
    let x = values();
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let both = Quantizer::builder().directions(Directions::Both);
    let linear = both.build().unwrap().quantize(&x).unwrap();
    let swizzled = both.layout(Layout::Swizzled).build().unwrap().quantize(&x).unwrap();
    assert_eq!(swizzled.nvfp4(Side::Row).unwrap().scales().len(), 512);
    assert_eq!(swizzled.clone().with_layout(Layout::Linear).unwrap(), linear);
    assert_eq!(linear.clone().with_layout(Layout::Swizzled).unwrap(), swizzled);
    assert_eq!(swizzled.dequantize::<f32>(Side::Column).unwrap(), linear.dequantize::<f32>(Side::Column).unwrap());
    assert_eq!(swizzled.matmul::<f32>(&swizzled).unwrap(), linear.matmul::<f32>(&linear).unwrap());
}

/// The relative error of standard normal numbers in 32,768 blocks: the search finds more than 4over6.
#[test]
fn each_way_to_choose_scales_has_its_error() {
    let unit = |w: u32| (f64::from(w) + 0.5) / 4294967296.0;
    let normal = |i: u32| {
        let [a, b, ..] = nvfp4_spec::philox::philox4x32([i, 0, 0, 0], [3, 4]);
        ((-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos()) as f32
    };
    let x: Vec<f32> = (0..32_768 * 16).map(normal).collect();
    let tensor = TensorRef::new(&x[..], &[512, 1024]).unwrap();
    let four = ScaleRule::FourOverSix { metric: Metric::Mse, error: ErrorPath::Strict, bound: Bound::E256 };
    for (rule, profile, least, most) in [
        (ScaleRule::Six, Profile::ModelOpt, 0.0945, 0.0960),
        (four, Profile::TransformerEngine, 0.0865, 0.0880),
        (ScaleRule::Mse, Profile::ModelOpt, 0.0805, 0.0818),
        (ScaleRule::Mse, Profile::TransformerEngine, 0.0805, 0.0818),
        (ScaleRule::ModelOptMse, Profile::ModelOpt, 0.0805, 0.0818),
        (ScaleRule::ModelOptFourOverSix, Profile::ModelOpt, 0.0865, 0.0880),
    ] {
        let quantizer = Quantizer::builder().scale_rule(rule).profile(profile).build().unwrap();
        let back: Vec<f32> = quantizer.quantize(&tensor).unwrap().dequantize(Side::Row).unwrap();
        let squares = |f: &dyn Fn(usize) -> f32| (0..x.len()).map(|i| f64::from(f(i)).powi(2)).sum::<f64>();
        let error = (squares(&|i| back[i] - x[i]) / squares(&|i| x[i])).sqrt();
        assert!((least..=most).contains(&error), "{rule:?}, {profile:?}: {error}");
        println!("{rule:?}, {profile:?}: {error:.4}");
    }
}
