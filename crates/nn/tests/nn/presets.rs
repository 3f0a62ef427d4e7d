//! Every module under every preset.

use crate::cases::*;
use nvfp4_recipe::{BackwardOverride, Plan, TransformerLayer};

/// test_custom_recipe_sanity and its like, TestHybridAllModules: two steps, all numbers finite, every parameter with a gradient that is
/// not zero everywhere.
#[test]
fn every_module_under_every_preset_is_finite() {
    for kind in KINDS {
        for preset in presets() {
            let overrides = [BackwardOverride::None, BackwardOverride::HighPrecision, BackwardOverride::Dequantized];
            for backward in overrides {
                let case = Case::with(kind, &recipe(&preset).with_backward(backward), 31);
                for step in 0..2 {
                    let Outcome { y, gradients } = case.run();
                    let all = std::iter::once(("y".to_string(), y)).chain(gradients);
                    for (name, numbers) in all {
                        let numbers: Vec<f64> = numbers.into_iter().map(f64::from_bits).collect();
                        let what = format!("{kind}, {preset}, {backward:?}, step {step}: {name}");
                        assert!(numbers.iter().all(|x| x.is_finite()), "{what}");
                        assert!(numbers.iter().any(|x| *x != 0.0), "{what}");
                    }
                    let unused = if kind == "grouped linear" { 2 } else { 0 };
                    assert_eq!(case.gradients().len() + unused, case.session.parameters().len(), "{kind}");
                    case.session.next_step().unwrap();
                }
            }
        }
    }
}

/// What modules declare is what recipes are written against: the layer of `nvfp4_recipe`, tensor by tensor.
#[test]
fn modules_declare_what_recipes_know() {
    let case = Case::new("gpt layer", candle_core::DType::F32, 0);
    let mut model = nvfp4_recipe::Model::new();
    model.nest("m", &TransformerLayer::default());
    assert_eq!(case.session.model().roles(), model.roles());
    let plan = Plan::build(&model, &recipe("nvfp4"), &nvfp4_recipe::Capabilities::software()).unwrap();
    case.session.apply_plan(plan).unwrap();
}

/// The row-scaled recipe is not the plain one, and 4over6 is neither.
#[test]
fn presets_differ_where_they_should() {
    let y = |preset: &str| Case::with("linear", &recipe(preset), 1).run().y;
    let distinct: std::collections::BTreeSet<Vec<u64>> =
        ["high_precision", "nvfp4", "nvfp4_row_scaled", "nvfp4_4over6", "mxfp8", "current_scaling"].map(y).into();
    assert_eq!(distinct.len(), 6);
}
