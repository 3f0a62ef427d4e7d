//! Experts are linear layers of their own, exactly.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use nvfp4_nn::*;
use nvfp4_recipe::{BackwardOverride, Recipe};

/// Grouped, and each expert alone on its tokens: outputs, gradients of the input, of weights and of biases.
fn check(recipe: &Recipe, splits: &[usize], scale: f64) {
    let experts = splits.len();
    let session = Session::new(13);
    let place = session.place(DType::F32, &Device::Cpu);
    let tokens: usize = splits.iter().sum();
    let x = place.parameter("x", (tokens, HIDDEN), Init::Normal(1.0)).unwrap();
    let grouped = GroupedLinear::new(&place.child("m"), experts as u32, HIDDEN, 48, Bias::With).unwrap();
    session.apply(recipe).unwrap();
    let y = grouped.routed(splits).forward(&x.var).unwrap();
    // Gradients that span many orders of magnitude, from one expert to the next.
    let dy = {
        let rows: Vec<f32> =
            splits.iter().enumerate().flat_map(|(e, n)| vec![(scale.powi(e as i32)) as f32; *n]).collect();
        weights_like(&y).broadcast_mul(&Tensor::from_vec(rows, (tokens, 1), &Device::Cpu).unwrap()).unwrap()
    };
    session.backward(&y.mul(&dy).unwrap().sum_all().unwrap()).unwrap();
    let found = session.gradients().unwrap();
    let dx = found.get(&x.var).unwrap();

    let mut start = 0;
    for (e, &n) in splits.iter().enumerate() {
        let parameter = |name: &str| session.parameters()[&format!("m.{e}.{name}")].clone();
        if n == 0 {
            assert!(found.get(&parameter("weight")).is_none(), "no tokens, no gradient");
            continue;
        }
        let alone = Session::new(13);
        let place = alone.place(DType::F32, &Device::Cpu);
        let rows = place.parameter("x", (n, HIDDEN), Init::Constant(0.0)).unwrap();
        let linear = Linear::new(&place.child("m"), HIDDEN, 48, Bias::With).unwrap();
        alone.apply(recipe).unwrap();
        rows.var.set(&x.var.narrow(0, start, n).unwrap().copy().unwrap()).unwrap();
        alone.parameters()["m.weight"].set(&parameter("weight").as_detached_tensor()).unwrap();
        // The layer alone asks for whole tiles; in a group that is done inside.
        let padded = session.plan().unwrap().pad(&"m".into(), &[n]).unwrap()[0];
        let input = rows.var.pad_with_zeros(0, 0, padded - n).unwrap();
        let expected = linear.forward(&input).unwrap().narrow(0, 0, n).unwrap();
        let weights = dy.narrow(0, start, n).unwrap();
        alone.backward(&expected.mul(&weights).unwrap().sum_all().unwrap()).unwrap();
        let gradients = alone.gradients().unwrap();

        let what = format!("expert {e} of {splits:?}, {recipe:?}");
        assert!(bits(&y.narrow(0, start, n).unwrap()) == bits(&expected), "{what}: y");
        assert!(bits(&dx.narrow(0, start, n).unwrap()) == bits(gradients.get(&rows.var).unwrap()), "{what}: dx");
        for name in ["weight", "bias"] {
            let own = gradients.get(&alone.parameters()[&format!("m.{name}")]).unwrap();
            assert!(bits(found.get(&parameter(name)).unwrap()) == bits(own), "{what}: {name}");
        }
        start += n;
    }
}

/// test_grouped_linear_row_scaled_quantized_backward, test_custom_recipe_grouped_linear_matches_current_scaling,
/// test_custom_recipe_automatic_padding_bad_splits, test_grouped_linear_backward_override_matches_reference.
///
/// Rounding to nearest everywhere: with stochastic rounding, layers that share a generator draw one after the other.
#[test]
fn grouped_equals_independent_layers() {
    let nearest =
        |activations: &str| operands(&format!("nvfp4({activations}hadamard)"), "nvfp4(16x16)", "nvfp4(hadamard)");
    let recipes = [
        nearest(""),
        nearest("row-scaled, "),
        nearest("4over6-mse-strict-256, "),
        recipe("current_scaling"),
        recipe("float8_block_scaling"),
        recipe("mxfp8"),
        operands("mxfp8", "mxfp8(32x32)", "mxfp8"),
        recipe("high_precision"),
        recipe("nvfp4_row_scaled").with_backward(BackwardOverride::HighPrecision),
        recipe("nvfp4_row_scaled").with_backward(BackwardOverride::Dequantized),
    ];
    for recipe in &recipes {
        for splits in [&SPLITS[..], &[17, 15], &[0, 0, 64], &[64, 0], &[1, 2, 3], &[16, 16, 16, 16]] {
            check(recipe, splits, 1.0);
        }
        check(recipe, &[16, 32, 16], 1e-8);
        check(recipe, &[16, 32, 16], 1e8);
    }
}

/// With one expert there is one order of draws, so stochastic rounding is the same too.
#[test]
fn one_expert_is_a_linear_layer_with_stochastic_rounding() {
    for preset in ["nvfp4", "nvfp4_row_scaled", "nvfp4_4over6"] {
        check(&recipe(preset), &[32], 1.0);
        check(&recipe(preset), &[19], 1.0);
    }
}

#[test]
fn no_tokens_at_all() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu);
    let grouped = GroupedLinear::new(&place.child("m"), 2, HIDDEN, 48, Bias::With).unwrap();
    session.apply(&recipe("nvfp4")).unwrap();
    let x = Tensor::zeros((0, HIDDEN), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(grouped.routed(&[0, 0]).forward(&x).unwrap().dims(), [0, 48]);
}

#[test]
fn splits_that_do_not_fit_are_refused() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu);
    let grouped = GroupedLinear::new(&place.child("m"), 2, HIDDEN, 48, Bias::With).unwrap();
    session.apply(&recipe("nvfp4")).unwrap();
    let x = Tensor::zeros((32, HIDDEN), DType::F32, &Device::Cpu).unwrap();
    let refused = |splits: &[usize]| grouped.routed(splits).forward(&x).unwrap_err().to_string();
    assert!(
        refused(&[32])
            .starts_with("m: expected a split for each of 2 experts, got 1; give 0 for an expert without tokens")
    );
    assert!(refused(&[16, 15]).starts_with("m: expected splits of 32 tokens, got 31; every token goes to one expert"));
}
