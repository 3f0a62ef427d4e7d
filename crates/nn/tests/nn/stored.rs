//! Weights that exist as codes between steps, with masters in high precision. TestHybridQuantizedModelInit, as far as it is about values.

use crate::cases::*;
use candle_core::{DType, Device};
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4::{Side, load, save};
use nvfp4_nn::*;

fn layer(storage: Storage, seed: u64, preset: &str) -> Case {
    let session = Session::new(seed);
    let place = session.place(DType::F32, &Device::Cpu);
    let x = place.parameter("x", (2, 16, 32), Init::Normal(1.0)).unwrap();
    let module = TransformerLayer::new(&place.child("m").with_storage(storage), LayerConfig::gpt(32, 2)).unwrap();
    session.apply(&recipe(preset)).unwrap();
    Case { session, module: Box::new(module), x }
}

/// How weights are stored changes nothing in what is computed, over several steps.
#[test]
fn storage_changes_no_result() {
    for preset in presets() {
        let [masters, codes] = [Storage::Masters, Storage::MastersAndCodes].map(|storage| {
            let case = layer(storage, 3, &preset);
            let config = ParamsAdamW { lr: 0.01, ..Default::default() };
            let mut optimizer = AdamW::new(case.session.parameters(), config).unwrap();
            let steps = (0..3).map(|_| {
                let outcome = case.run();
                optimizer.step(&case.session.gradients().unwrap()).unwrap();
                case.session.next_step().unwrap();
                outcome
            });
            steps.collect::<Vec<_>>()
        });
        assert!(masters == codes, "{preset}");
    }
}

/// Codes are there before the first pass and after each step; masters and biases are not touched by them.
#[test]
fn codes_are_always_there() {
    let case = layer(Storage::MastersAndCodes, 3, "nvfp4");
    let stored = case.session.stored_weights().unwrap();
    let names: Vec<&str> = stored.keys().map(String::as_str).collect();
    let expected = [
        "m.layernorm_mlp.fc1.weight",
        "m.layernorm_mlp.fc2.weight",
        "m.self_attention.linear_qkv.weight",
        "m.self_attention.proj.weight",
    ];
    assert_eq!(names, expected);
    for (name, codes) in &stored {
        assert_eq!(codes.shape(), case.session.parameters()[name].dims());
        assert!(codes.row().is_some() && codes.col().is_some());
    }
    let weight = case.session.parameters()[expected[0]].clone();
    weight.set(&(weight.as_detached_tensor() * 3.0).unwrap()).unwrap();
    assert!(case.session.stored_weights().unwrap() == stored);
    case.session.next_step().unwrap();
    assert!(case.session.stored_weights().unwrap()[expected[0]] != stored[expected[0]]);
    assert!(layer(Storage::Masters, 3, "nvfp4").session.stored_weights().unwrap().is_empty());
}

/// A model runs from its codes alone: another run that takes them over has the same outputs, and masters that stand for them.
#[test]
fn codes_in_a_file() {
    let from = layer(Storage::MastersAndCodes, 3, "nvfp4");
    let file = std::env::temp_dir().join(format!("nvfp4-nn-weights-{}.safetensors", std::process::id()));
    let stored = from.session.stored_weights().unwrap();
    save(&file, stored.iter().map(|(name, codes)| (name.as_str(), codes))).unwrap();
    assert!(load(&file).unwrap() == stored);
    let to = layer(Storage::MastersAndCodes, 4, "nvfp4");
    to.x.var.set(&from.x.var.as_detached_tensor().copy().unwrap()).unwrap();
    let [a, b] = [&from, &to].map(|case| bits(&case.loss().0));
    assert!(a != b);
    to.session.load_weights(&file).unwrap();
    let [a, b] = [&from, &to].map(|case| bits(&case.module.forward(&case.x.var).unwrap()));
    assert!(a == b);
    for (name, codes) in &stored {
        let decoded: Vec<f64> = codes.dequantize::<f32>(Side::Row).unwrap().into_iter().map(f64::from).collect();
        assert!(values(&to.session.parameters()[name]) == decoded);
    }
    let other = layer(Storage::MastersAndCodes, 4, "mxfp8");
    let message = other.session.load_weights(&file).unwrap_err().to_string();
    assert!(
        message.contains("expected [128, 32] row: mxfp8(e4m3)") && message.contains("got [128, 32] row: nvfp4"),
        "{message}"
    );
    std::fs::remove_file(&file).unwrap();
}

/// Codes that are there between steps do not stand in the way of another recipe: delayed scaling hears of a weight when a pass reads it.
#[test]
fn another_recipe_between_steps() {
    let case = layer(Storage::MastersAndCodes, 3, "delayed_scaling");
    case.session.apply(&recipe("nvfp4")).unwrap();
    case.session.apply(&recipe("delayed_scaling")).unwrap();
    case.run();
    assert!(case.session.apply(&recipe("nvfp4")).unwrap_err().to_string().contains("an amax was recorded"));
    case.session.next_step().unwrap();
    case.session.apply(&recipe("nvfp4")).unwrap();
}

/// A recipe whose codes cannot be made of stored weights is refused, and the one before stays.
#[test]
fn a_recipe_that_does_not_fit_stored_weights() {
    let session = Session::new(3);
    let place = session.place(DType::F64, &Device::Cpu).with_storage(Storage::MastersAndCodes);
    Linear::new(&place.child("m"), 32, 32, Bias::With).unwrap();
    session.apply(&recipe("high_precision")).unwrap();
    assert!(session.apply(&recipe("nvfp4")).unwrap_err().to_string().contains("F64"));
    assert_eq!(session.plan().unwrap().recipe(), "high_precision");
}
