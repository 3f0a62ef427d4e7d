//! Formats and specs: text, equality, what is refused when it is made.

use crate::tools::*;
use nvfp4::{GlobalScale, Precision, Quantizer, Rounding, ScaleRule, Side, Signs, Tile, Transform};
use nvfp4_recipe::*;
use std::collections::HashSet;

/// Formats of every family and option.
pub fn formats() -> Vec<Format> {
    let mut formats: Vec<Format> = [Stored::AsIs, Stored::Cast(Precision::F32), Stored::Cast(Precision::Bf16)]
        .into_iter()
        .map(Format::HighPrecision)
        .collect();
    for code in [Fp8Code::E4m3, Fp8Code::E5m2] {
        for step in [ScaleStep::Any, ScaleStep::PowersOfTwo] {
            for epsilon in [0.0, 1e-6, f32::MIN_POSITIVE] {
                let epsilon = Epsilon::new(epsilon).unwrap();
                formats.push(Format::Fp8(Fp8 { code, step, epsilon }));
                for tile in [BlockTile::Row128, BlockTile::Square128] {
                    formats.push(Format::Fp8Block(Fp8Block { code, tile, step, epsilon }));
                }
            }
        }
        for tile in [MxTile::Row32, MxTile::Square32] {
            formats.push(Format::Mxfp8(Mxfp8 { code, tile }));
        }
        for amax in [AmaxRule::Max, AmaxRule::MostRecent, AmaxRule::Named("mean".parse().unwrap())] {
            let delayed = Delayed::new(code).with_amax(amax);
            formats.push(Format::Delayed(delayed.clone()));
            let delayed = delayed.with_history(7).unwrap().with_margin(3).unwrap();
            formats.push(Format::Delayed(delayed.with_reduction(Reduction::Local)));
        }
    }
    for tile in [Tile::Row16, Tile::Square16] {
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            for rule in ScaleRule::ALL {
                for rounding in [Rounding::NearestEven, Rounding::Stochastic] {
                    for transform in [Transform::None, Transform::FixedSigns, Transform::Signs(Signs(0x1234))] {
                        let settings = Quantizer::builder().tile(tile).global_scale(global).scale_rule(rule);
                        let settings = settings.rounding(rounding).transform(transform);
                        formats.extend(Nvfp4::new(settings).ok().map(Format::Nvfp4));
                    }
                }
            }
        }
    }
    let plain = Quantizer::builder();
    for settings in [
        plain.specials(nvfp4::Specials::Reference),
        plain.profile(nvfp4::Profile::ModelOpt).layout(nvfp4::Layout::Swizzled),
        plain.profile(nvfp4::Profile::LlmCompressor).check_finite(),
        plain.profile(nvfp4::Profile::TorchAo),
    ] {
        formats.push(Format::Nvfp4(Nvfp4::new(settings).unwrap()));
    }
    formats.push(Format::Custom("my-format".parse().unwrap()));
    formats
}

#[test]
fn every_format_survives_its_text() {
    let formats = formats();
    let texts: HashSet<String> = formats.iter().map(Format::to_string).collect();
    assert_eq!(texts.len(), formats.len(), "two formats print alike");
    for format in &formats {
        assert_eq!(format.to_string().parse::<Format>().unwrap(), *format, "{format}");
    }
}

#[test]
fn every_split_survives_its_text_and_json() {
    let rotated = |format: &Format| matches!(format, Format::Nvfp4(format) if format.transform() != Transform::None);
    let formats: Vec<Format> = formats().into_iter().step_by(7).collect();
    for row in formats.iter().filter(|format| !rotated(format)) {
        for col in &formats {
            for source in [ColumnSource::Original, ColumnSource::RowDequantized] {
                let spec = QuantSpec::split(row.clone(), col.clone(), source).unwrap();
                assert_eq!(spec.to_string().parse::<QuantSpec>().unwrap(), spec);
                let json = serde_json::to_string(&spec).unwrap();
                assert_eq!(serde_json::from_str::<QuantSpec>(&json).unwrap(), spec);
            }
        }
    }
}

#[test]
fn specs_are_compared_and_hashed_by_value() {
    let specs: HashSet<QuantSpec> = ["nvfp4", "nvfp4(1x16)", "nvfp4( nearest , per-tensor )"].map(spec).into();
    assert_eq!(specs.len(), 1, "defaults may be written out");
    assert_ne!(spec("fp8-delayed(margin=1)"), spec("fp8-delayed"));
    assert_ne!(spec("fp8-delayed(most-recent)"), spec("fp8-delayed"));
    assert_ne!(spec("nvfp4 / nvfp4"), spec("nvfp4 / nvfp4 from row"));
    assert_eq!(spec("fp8(epsilon=-0)"), spec("fp8"), "−0 is no other epsilon");
}

#[test]
fn wrong_texts_say_what_is_allowed() {
    for (text, message) in [
        (
            "",
            "'': unknown format ''; there are high-precision, fp8, fp8-delayed, fp8-block, mxfp8, nvfp4, custom(NAME)",
        ),
        ("nvfp5", "'nvfp5': unknown format 'nvfp5'; there are high-precision"),
        ("nvfp4(", "'nvfp4(': the bracket is not closed"),
        ("nvfp4)", "unknown format 'nvfp4)'"),
        ("mxfp8(e3m4)", "'mxfp8(e3m4)': unknown option 'e3m4'; mxfp8 takes e4m3, e5m2, 1x32, 32x32"),
        ("fp8(e4m3, e5m2)", "'fp8(e4m3, e5m2)': 'e4m3' and 'e5m2' cannot both be: leave one out"),
        ("fp8(e4m3, e4m3)", "'e4m3' and 'e4m3' cannot both be"),
        ("fp8(epsilon=x)", "epsilon needs a number, got 'x'"),
        ("fp8(epsilon=-1)", "epsilon: expected a finite number of at least 0, got -1"),
        ("fp8(epsilon=inf)", "epsilon: expected a finite number of at least 0, got inf"),
        ("fp8-delayed(history=0)", "history: expected 1 to 1048576 steps, got 0"),
        ("fp8-delayed(history=-1)", "history needs a whole number, got '-1'"),
        ("fp8-delayed(history=99999999999)", "history is far too large: 99999999999"),
        ("fp8(epsilon=nan)", "epsilon: expected a finite number of at least 0, got NaN"),
        ("fp8-delayed(margin=30)", "margin: expected at most 29, got 30"),
        ("fp8-delayed(margin=1000)", "margin: expected at most 29, got 1000"),
        ("fp8-delayed(max, amax=x)", "two amax rules: leave one out"),
        ("fp8-delayed(amax=a b)", "'a b' is not a name: use letters, digits, `_` and `-`"),
        ("nvfp4(hadamard=12)", "hadamard needs 16 signs as a hexadecimal number, as in 0xd7e8, got '12'"),
        ("nvfp4(hadamard, hadamard)", "'hadamard' and 'hadamard' cannot both be"),
        ("nvfp4(hadamard, hadamard=0x1)", "two Hadamard transforms: leave one out"),
        ("nvfp4(4over6)", "nvfp4 takes hadamard, hadamard=…, 1x16, 16x16"),
        ("nvfp4(4over6-mae-strict-256, six)", "cannot both be"),
        ("custom", "expected one name, as in custom(my-format)"),
        ("custom(a, b)", "expected one name"),
        ("nvfp4 / ", "unknown format ''"),
        ("nvfp4 / nvfp4 from col", "unknown format 'nvfp4 from col'"),
        ("nvfp4 / nvfp4 / nvfp4", "unknown format"),
    ] {
        let error = text.parse::<QuantSpec>().expect_err(text).to_string();
        assert!(error.contains(message), "{text}: {error}");
    }
}

/// What composes is allowed; what has no meaning is refused when it is written down, with the reason.
#[test]
fn illegal_combinations_are_refused_when_made() {
    for legal in [
        "nvfp4(row-scaled, hadamard)",
        "nvfp4(row-scaled, stochastic)",
        "nvfp4(row-scaled, hadamard, 4over6-mse-fast-448)",
        "nvfp4(hadamard, 4over6-mae-strict-256)",
        "nvfp4(16x16, stochastic)",
    ] {
        spec(legal);
    }
    for (illegal, reason) in [
        ("nvfp4(16x16, row-scaled)", "use 1×16 tiles or a per-tensor global scale"),
        ("nvfp4(stochastic, 4over6-mae-strict-256)", "use nearest-even rounding or the rule `Six`"),
        ("nvfp4(modelopt, 4over6-mae-strict-256)", "use the profile `TransformerEngine` or the rule `Six`"),
        ("nvfp4(torchao, reference-specials)", "leave the specials at `Kernel`"),
        ("nvfp4(hadamard) / nvfp4", "leave `hadamard` out of the row format"),
    ] {
        let error = illegal.parse::<QuantSpec>().expect_err(illegal).to_string();
        assert!(error.contains(reason), "{illegal}: {error}");
    }
}

/// TestUnwrapTensor: what a product reads of each direction.
#[test]
fn directions_of_a_spec() {
    let uniform = spec("nvfp4(hadamard, stochastic)");
    assert_eq!(uniform.format(Side::Row).to_string(), "nvfp4(stochastic)", "a transform acts on columns");
    assert_eq!(uniform.format(Side::Column).to_string(), "nvfp4(hadamard, stochastic)");
    assert_eq!(uniform.format(Side::Column).rotation(Side::Column), Some(Signs::FIXED));
    assert_eq!(uniform.format(Side::Column).rotation(Side::Row), None);
    let split = spec("mxfp8 / nvfp4(hadamard=0x00ff)");
    assert_eq!(split.format(Side::Row).to_string(), "mxfp8(e4m3)");
    assert_eq!(split.format(Side::Column).rotation(Side::Column), Some(Signs(0xff)));
}

/// Also copy_preserves_columnwise_source; invalid_columnwise_source_raises is in wrong_texts_say_what_is_allowed.
#[test]
fn default_columnwise_source_original() {
    assert_eq!(spec("mxfp8").source(), ColumnSource::Original);
    assert_eq!(spec("mxfp8 / nvfp4").source(), ColumnSource::Original);
    assert_eq!(spec("mxfp8 / nvfp4 from row").clone().source(), ColumnSource::RowDequantized, "a copy keeps it");
}

#[test]
fn a_format_makes_its_quantizers() {
    let format = Nvfp4::new(Quantizer::builder().transform(Transform::FixedSigns)).unwrap();
    for directions in [nvfp4::Directions::Row, nvfp4::Directions::Column, nvfp4::Directions::Both] {
        assert_eq!(Quantizer::new(format, directions).unwrap().directions(), directions);
    }
}

/// Specs are values: what is changed later is another spec.
#[test]
fn hybrid_storage_snapshots_parent_quantizer() {
    let delayed = Delayed::new(Fp8Code::E4m3);
    let spec = QuantSpec::delayed(delayed.clone());
    let changed = delayed.with_margin(2).unwrap();
    assert_eq!(spec, QuantSpec::delayed(Delayed::new(Fp8Code::E4m3)));
    assert_ne!(spec, QuantSpec::delayed(changed));
}

/// Upstream refuses a delayed request inside a hybrid; here it is a format like others.
#[test]
fn hybrid_quantizer_rejects_nested_quantizer_requests() {
    for text in ["fp8-delayed(e4m3) / nvfp4", "nvfp4 / fp8-delayed(e5m2)", "fp8-delayed(e4m3) / fp8-delayed(e4m3)"] {
        assert_eq!(spec(text).to_string(), text);
    }
}

#[test]
fn default_quantizer_is_requantization_safe() {
    for format in formats() {
        let text = format.to_string();
        let expected = match text.contains("stochastic") || text.contains("delayed") || text.contains("custom") {
            true => Replay::Differs,
            false => Replay::Same,
        };
        assert_eq!(format.replay(), expected, "{text}");
    }
}

/// Whether a column direction made later fits the row direction made before. Also
/// hybrid_requantization_safe_with_safe_sub_quantizers, hybrid_requantization_checks_requested_sub_quantizers and
/// hybrid_rowwise_source_requires_safe_rowwise_quantizer.
#[test]
fn requantization_and_wgrad_reconstruction_policy_matrix() {
    for (text, replay) in [
        ("nvfp4", Replay::Same),
        ("nvfp4(stochastic)", Replay::Same), // the column direction has random numbers of its own
        ("fp8(e4m3)", Replay::Same),
        ("fp8-delayed(e4m3)", Replay::Differs), // one scale for both directions, which moves on
        ("custom(x)", Replay::Differs),
        ("nvfp4(stochastic) / mxfp8", Replay::Same),
        ("fp8-delayed(e4m3) / mxfp8", Replay::Same),
        ("mxfp8 / nvfp4(stochastic) from row", Replay::Same),
        ("nvfp4(stochastic) / mxfp8 from row", Replay::Differs),
        ("fp8-delayed(e4m3) / mxfp8 from row", Replay::Differs),
        ("custom(x) / high-precision from row", Replay::Differs),
        ("high-precision / mxfp8 from row", Replay::Same),
    ] {
        assert_eq!(spec(text).replay(), replay, "{text}");
    }
}
