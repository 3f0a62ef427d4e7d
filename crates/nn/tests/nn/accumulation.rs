//! Micro-batches: weights are quantized once, gradients add up.

use crate::cases::*;
use candle_core::Tensor;
use nvfp4_recipe::Recipe;

/// The gradients of two micro-batches, each scaled, in one step or in two sessions.
fn weighted(case: &Case, weight: f64) {
    let (_, loss) = case.loss();
    case.session.backward(&(loss * weight).unwrap()).unwrap();
}

fn single(kind: &str, recipe: &Recipe, weight: f64) -> std::collections::BTreeMap<String, Vec<u64>> {
    let case = Case::with(kind, recipe, 3);
    weighted(&case, weight);
    case.gradients()
}

/// The sum of two steps' gradients, in binary32 and in that order, whatever the format of the product that is added to.
#[test]
fn gradients_of_micro_batches_add_up() {
    for kind in KINDS {
        for preset in [
            "high_precision",
            "current_scaling",
            "float8_block_scaling",
            "mxfp8",
            "nvfp4_row_scaled_fwd_high_precision_bwd",
        ] {
            let recipe = recipe(preset);
            let case = Case::with(kind, &recipe, 3);
            weighted(&case, 1.0);
            weighted(&case, -0.3);
            let (first, second) = (single(kind, &recipe, 1.0), single(kind, &recipe, -0.3));
            for (name, sum) in case.gradients() {
                let pairs = first[&name].iter().zip(&second[&name]);
                let number = |bits: &u64| f64::from_bits(*bits) as f32;
                let expected: Vec<u64> = pairs.map(|(a, b)| f64::from(number(a) + number(b)).to_bits()).collect();
                assert!(sum == expected, "{kind}, {preset}: {name}");
            }
        }
    }
}

/// NVFP4 without random numbers: the sum is added in the product's own pass.
#[test]
fn products_of_codes_add_to_what_is_there() {
    let recipe = operands("nvfp4(row-scaled, hadamard)", "nvfp4(16x16)", "nvfp4(hadamard)");
    let case = Case::with("linear", &recipe, 3);
    weighted(&case, 1.0);
    weighted(&case, -0.3);
    let (first, second) = (single("linear", &recipe, 1.0), single("linear", &recipe, -0.3));
    let number = |bits: &u64| f64::from_bits(*bits) as f32;
    let pairs = first["m.weight"].iter().zip(&second["m.weight"]);
    let expected: Vec<u64> = pairs.map(|(a, b)| f64::from(number(a) + number(b)).to_bits()).collect();
    assert!(case.gradients()["m.weight"] == expected);
}

/// TestHybridWeightWorkspaceCache: codes of weights are made at the first read of a step and serve all micro-batches.
#[test]
fn weights_are_quantized_once_per_step() {
    let case = Case::with("linear", &operands("nvfp4", "nvfp4(stochastic)", "nvfp4"), 3);
    assert_eq!(case.session.cached_bytes(), 0);
    let outputs: Vec<Vec<u64>> = (0..3).map(|_| case.run().y).collect();
    let (weights, scales) = (48 * HIDDEN, 48 * HIDDEN / 16);
    assert_eq!(case.session.cached_bytes(), 2 * (weights / 2 + scales + 4), "both directions");
    assert!(outputs.iter().all(|y| *y == outputs[0]));
    case.session.next_step().unwrap();
    assert_eq!(case.session.cached_bytes(), 0);
    assert!(case.run().y != outputs[0], "drawn anew");
    assert_eq!(case.session.generator().consumed(), 0, "weights draw from the step's number");
}

/// A change of the weight within a step is not seen before the next.
#[test]
fn the_next_step_reads_the_new_weight() {
    let case = Case::with("linear", &recipe("nvfp4"), 3);
    let before = bits(&case.loss().0);
    let weight = case.session.parameters()["m.weight"].clone();
    weight.set(&(weight.as_detached_tensor() * 2.0).unwrap()).unwrap();
    assert!(bits(&case.loss().0) == before);
    case.session.next_step().unwrap();
    let after = bits(&case.loss().0);
    assert!(after != before);
    let fresh = Case::with("linear", &recipe("nvfp4"), 3);
    let copy: Tensor = weight.as_detached_tensor().copy().unwrap();
    fresh.session.parameters()["m.weight"].set(&copy).unwrap();
    assert!(bits(&fresh.loss().0) == after);
}

/// Delayed scaling: amaxes of all micro-batches count as one, and scales move at the end of the step alone. test_custom_recipe_ds_multi_step.
#[test]
fn delayed_scales_move_between_steps() {
    use nvfp4::Side;
    use nvfp4_recipe::{LinearSlot, Site};
    let case = Case::with("linear", &recipe("delayed_scaling"), 3);
    let scale = |slot| case.session.states().unwrap().unwrap().get(&Site::new("m", slot), Side::Row).unwrap().scale();
    let outputs: Vec<Vec<u64>> = (0..2).map(|_| case.run().y).collect();
    assert_eq!(outputs[0], outputs[1]);
    for slot in [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput] {
        assert_eq!(scale(slot), 1.0);
    }
    case.session.next_step().unwrap();
    let amax = values(&case.x.var).iter().fold(0f64, |m, x| m.max(x.abs())) as f32;
    assert_eq!(scale(LinearSlot::Input), 448.0 / amax);
    assert_eq!(scale(LinearSlot::GradOutput), 57344.0, "the loss weighs by at most 1");
    assert!(case.run().y != outputs[0]);
    // A held-out batch leaves no trace.
    let before =
        case.session.states().unwrap().unwrap().get(&Site::new("m", LinearSlot::Input), Side::Row).unwrap().clone();
    case.session
        .evaluate(|| {
            case.loss();
            nvfp4_nn::Result::Ok(())
        })
        .unwrap();
    assert_eq!(
        *case.session.states().unwrap().unwrap().get(&Site::new("m", LinearSlot::Input), Side::Row).unwrap(),
        before
    );
}

/// test_custom_recipe_mixed_ds_and_stateless: only the tensor that asks has state.
#[test]
fn only_tensors_that_ask_have_state() {
    let case = Case::with("linear", &operands("fp8-delayed(history=4)", "fp8", "fp8(e5m2)"), 3);
    for _ in 0..3 {
        case.run();
        case.session.next_step().unwrap();
    }
    assert_eq!(case.session.states().unwrap().unwrap().len(), 1);
}

/// What delayed scaling saw in a step that is left out does not count; the weight's codes stay, and their amax counts in the step that is made.
#[test]
fn a_step_that_is_left_out_moves_no_scale() {
    use nvfp4::Side;
    use nvfp4_recipe::{LinearSlot, Site};
    let [left_out, without] = [true, false].map(|leave_out| {
        let case = Case::with("linear", &recipe("delayed_scaling"), 3);
        if leave_out {
            let good = case.x.var.as_detached_tensor().copy().unwrap();
            case.x.var.set(&(&good / 0.0).unwrap()).unwrap();
            let (_, loss) = case.loss();
            case.session.backward(&loss).unwrap_err();
            case.session.drop_gradients().unwrap();
            case.x.var.set(&good).unwrap();
        }
        case.run();
        case.session.next_step().unwrap();
        let states = case.session.states().unwrap().unwrap();
        [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput]
            .map(|slot| states.get(&Site::new("m", slot), Side::Row).unwrap().clone())
    });
    assert_eq!(left_out, without);
    assert!(without.iter().all(|state| state.scale() != 1.0));
}
