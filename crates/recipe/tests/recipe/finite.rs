//! Recipes that refuse NaN and infinities.

use crate::tools::*;
use nvfp4::{Finite, Options, Quantizer, Randomness, TensorRef};
use nvfp4_recipe::*;

fn refusing(text: &str) -> Recipe {
    let recipe = Recipe::from_toml(&format!("finite = \"refuse\"\n[default]\npreset = \"{text}\"")).unwrap();
    assert_eq!(recipe.finite(), Finite::Refuse);
    recipe
}

/// Quantizes a tensor of a linear layer with a bad value at [1, 2], if there is one.
fn quantized(plan: &Plan, slot: LinearSlot, bad: Option<f32>) -> Result<nvfp4::QuantTensor> {
    let mut x: Vec<f32> = (0..128 * 128).map(|i| (i as f32 * 0.1).sin()).collect();
    x[128 + 2] = bad.unwrap_or(x[128 + 2]);
    let quantizer = plan.quantizer(&Site::new("fc", slot), &States::new(plan).unwrap().scales())?;
    let stochastic = quantizer.rounding() == nvfp4::Rounding::Stochastic;
    let randomness = stochastic.then_some(Randomness::At { seed: 1, offset: 0 });
    Ok(quantizer.quantize_with(&TensorRef::new(&x[..], &[128, 128])?, &Options { randomness, ..Options::default() })?)
}

#[test]
fn every_preset_refuses_in_what_it_quantizes_and_changes_no_byte() {
    let model = model([Module::linear("fc")]);
    for name in Preset::names() {
        let (keeps, refuses) = (plan(&model, &recipe(name)), plan(&model, &refusing(name)));
        assert_eq!((keeps.finite(), refuses.finite()), (Finite::Keep, Finite::Refuse));
        for slot in [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput] {
            let spec = refuses.spec(&Site::new("fc", slot)).unwrap();
            assert_eq!(
                quantized(&keeps, slot, None).unwrap(),
                quantized(&refuses, slot, None).unwrap(),
                "{name} {slot:?}"
            );
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(quantized(&keeps, slot, Some(bad)).is_ok(), "{name} {slot:?} {bad}");
                match quantized(&refuses, slot, Some(bad)) {
                    Ok(_) => assert_eq!(*spec, QuantSpec::HIGH_PRECISION, "{name} {slot:?} {bad}"),
                    Err(Error::Tensor(nvfp4::Error::NotFinite { index, .. })) => assert_eq!(index, [1, 2]),
                    Err(other) => panic!("{name}: {other}"),
                }
            }
        }
    }
}

#[test]
fn a_given_amax_is_looked_at_too() {
    let x = vec![1f32; 32 * 32];
    let x = TensorRef::new(&x[..], &[32, 32]).unwrap();
    for text in ["nvfp4", "fp8"] {
        let quantizer = Quantizer::new(spec(text), nvfp4::Directions::Row).unwrap();
        let options = Options { row_amax: Some(&[f32::INFINITY]), ..Options::default() };
        assert!(quantizer.quantize_with(&x, &options).is_ok());
        let refused = quantizer.with_finite(Finite::Refuse).quantize_with(&x, &options);
        assert!(matches!(refused, Err(nvfp4::Error::AmaxNotFinite { index: 0, .. })), "{text}");
    }
}

#[test]
fn plans_and_files_say_it() {
    let model = model([Module::linear("fc")]);
    let (keeps, refuses) = (plan(&model, &recipe("nvfp4")), plan(&model, &recipe("nvfp4").with_finite(Finite::Refuse)));
    let line = "NaN and infinities: refused in tensors that are quantized\n";
    assert_eq!(refuses.to_string(), format!("{keeps}{line}"));
    assert_eq!(
        (keeps.to_json()["finite"].as_str(), refuses.to_json()["finite"].as_str()),
        (Some("keep"), Some("refuse"))
    );
    assert_eq!(keeps.fingerprint(), refuses.fingerprint(), "the bytes of finite tensors are the same");
    assert_ne!(recipe("nvfp4"), recipe("nvfp4").with_finite(Finite::Refuse));
    let error = Recipe::from_toml("finite = \"no\"\n[default]\npreset = \"nvfp4\"").unwrap_err().to_string();
    assert!(error.contains("line 1: finite: unknown value 'no'; there are keep, refuse"), "{error}");
}
