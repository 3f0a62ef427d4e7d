//! Another recipe in mid-training.

use crate::cases::*;
use nvfp4::Side;
use nvfp4_recipe::{BackwardOverride, LinearSlot, Recipe, Site};

/// After a switch a session does what a new one does with the same parameters: test_dynamic_recipe_update, test_quantizer_update,
/// test_linear_like_runtime_backward_override_switch_updates_ctx (none, each mode, none).
#[test]
fn a_switched_session_is_a_new_one_with_the_same_parameters() {
    let nearest = operands("nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard)");
    let recipes: Vec<Recipe> = vec![
        nearest.clone(),
        nearest.with_backward(BackwardOverride::HighPrecision),
        nearest.clone(),
        nearest.with_backward(BackwardOverride::Dequantized),
        recipe("mxfp8"),
        recipe("high_precision"),
        recipe("current_scaling"),
        recipe("float8_block_scaling"),
        nearest,
    ];
    for kind in ["linear", "layer norm linear", "gelu mlp", "grouped linear", "gpt layer"] {
        let case = Case::with(kind, &recipes[0], 3);
        for (i, recipe) in recipes.iter().enumerate() {
            case.session.apply(recipe).unwrap();
            assert!(case.run() == Case::with(kind, recipe, 3).run(), "{kind}, recipe {i}");
            case.session.drop_gradients().unwrap(); // weights' codes stay where their spec does
        }
    }
}

/// test_role_change_preserves_delayed_scaling_state: a tensor whose delayed scaling is the same keeps its history, others begin anew.
#[test]
fn delayed_state_is_kept_where_it_fits() {
    let delayed = "fp8-delayed(history=4)";
    let case = Case::with("linear", &operands(delayed, delayed, "fp8-delayed(e5m2, history=4)"), 3);
    case.run();
    case.session.next_step().unwrap();
    let state = |slot| case.session.states().unwrap().unwrap().get(&Site::new("m", slot), Side::Row).cloned();
    let (input, weight) = (state(LinearSlot::Input), state(LinearSlot::Weight));
    assert!(input.as_ref().unwrap().scale() != 1.0);
    case.session.apply(&operands(delayed, "fp8-delayed(history=8)", "fp8(e5m2)")).unwrap();
    assert_eq!(state(LinearSlot::Input), input);
    assert_ne!(state(LinearSlot::Weight), weight);
    assert_eq!((state(LinearSlot::Weight).unwrap().scale(), state(LinearSlot::GradOutput)), (1.0, None));
    case.run();
}

/// In the middle of a step a change that would lose amaxes is refused, and nothing is changed.
#[test]
fn a_switch_within_a_step_that_loses_amaxes_is_refused() {
    let case = Case::with("linear", &recipe("delayed_scaling"), 3);
    case.run();
    assert!(case.session.apply(&recipe("nvfp4")).is_err());
    assert_eq!(case.session.plan().unwrap().recipe(), "delayed_scaling");
    case.session.next_step().unwrap();
    case.session.apply(&recipe("nvfp4")).unwrap();
    case.run();
}

/// A recipe that comes between a forward pass and its backward pass is refused there; the same recipe again is none.
#[test]
fn a_switch_between_the_passes_is_refused() {
    let case = Case::with("linear", &recipe("nvfp4"), 3);
    let (_, loss) = case.loss();
    case.session.apply(&recipe("mxfp8")).unwrap();
    let message = case.session.backward(&loss).unwrap_err().to_string();
    assert!(message.starts_with("m: its forward pass had the recipe 'nvfp4', but now it is 'mxfp8'"), "{message}");
    case.session.apply(&recipe("nvfp4")).unwrap();
    case.session.backward(&loss).unwrap();
}
