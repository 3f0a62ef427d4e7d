//! Which format each product reads.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use nvfp4::{Directions, Side, TensorRef};
use nvfp4_nn::*;
use nvfp4_recipe::{BackwardOverride, LinearSlot, QuantSpec, Recipe, Role, Slot};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// TestHybridThreeFormats: each product equals, bit for bit, that of the run in which its format is the only one.
#[test]
fn three_formats_route_each_product() {
    let formats = ["fp8", "mxfp8", "nvfp4", "fp8-block", "high-precision(bf16)"];
    for kind in ["linear", "layer norm linear"] {
        for fprop in formats {
            for dgrad in formats {
                for wgrad in formats {
                    let input = format!("{fprop} / {wgrad}");
                    let (weight, gradient) = (format!("{fprop} / {dgrad}"), format!("{dgrad} / {wgrad}"));
                    let mixed = Case::with(kind, &operands(&input, &weight, &gradient), 2).run();
                    let alone = |format: &str| Case::with(kind, &operands(format, format, format), 2).run();
                    let what = format!("{kind}: {fprop}, {dgrad}, {wgrad}");
                    assert!(mixed.y == alone(fprop).y, "{what}: y");
                    assert!(mixed.gradients["x"] == alone(dgrad).gradients["x"], "{what}: dx");
                    assert!(mixed.gradients["m.weight"] == alone(wgrad).gradients["m.weight"], "{what}: dw");
                }
            }
        }
    }
}

/// TestHybridGemmBitwiseIdentical: a split whose halves are one format is that format, with stochastic rounding too.
#[test]
fn a_split_of_one_format_is_that_format() {
    let pairs = [
        ("fp8", "fp8 / fp8", "fp8(e5m2)", "fp8(e5m2) / fp8(e5m2)"),
        ("mxfp8", "mxfp8 / mxfp8", "mxfp8", "mxfp8 / mxfp8"),
        ("fp8-block", "fp8-block / fp8-block", "fp8-block", "fp8-block / fp8-block"),
        (
            "nvfp4(hadamard)",
            "nvfp4 / nvfp4(hadamard)",
            "nvfp4(hadamard, stochastic)",
            "nvfp4(stochastic) / nvfp4(hadamard, stochastic)",
        ),
    ];
    for (whole, split, whole_gradient, split_gradient) in pairs {
        let weight = if whole.starts_with("nvfp4") { "nvfp4(16x16)" } else { whole };
        for kind in ["linear", "layer norm linear", "gelu mlp", "swiglu mlp", "grouped linear", "gpt layer"] {
            let one = Case::with(kind, &operands(whole, weight, whole_gradient), 3).run();
            let weights =
                if whole.starts_with("nvfp4") { "nvfp4(16x16) / nvfp4(16x16)".into() } else { split.to_string() };
            let two = Case::with(kind, &operands(split, &weights, split_gradient), 3).run();
            assert!(one == two, "{kind}: {whole}");
        }
    }
}

/// TestHybridGemmMixedFormat, TestHybridReversedDirection, TestHybridMixedWithNonHybrid: hybrids beside plain operands run.
#[test]
fn hybrids_beside_plain_operands() {
    for (input, weight, gradient) in [
        ("fp8 / nvfp4", "fp8 / nvfp4", "nvfp4"),
        ("nvfp4 / fp8", "nvfp4 / fp8", "fp8"),
        ("fp8 / nvfp4", "fp8", "fp8 / nvfp4"),
        ("fp8", "fp8 / mxfp8", "mxfp8 / fp8"),
        ("high-precision / nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4", "high-precision / nvfp4", "nvfp4"),
    ] {
        let mixed = Case::with("linear", &operands(input, weight, gradient), 3).run();
        assert!(mixed.y.iter().all(|y| f64::from_bits(*y).is_finite()), "{input}, {weight}, {gradient}");
    }
}

/// test_fwd_hp_bwd_fp8_forward_bitwise: a forward pass that is not quantized is that of high precision.
#[test]
fn a_plain_forward_pass_is_plain() {
    for kind in ["linear", "layer norm linear", "gelu mlp", "gpt layer"] {
        let plain = Case::with(kind, &recipe("high_precision"), 4).run();
        let backward = Case::with(kind, &recipe("high_precision_fwd_mxfp8_bwd"), 4).run();
        assert!(plain.y == backward.y && plain.gradients["x"] != backward.gradients["x"], "{kind}");
    }
}

/// What a spec's row direction decodes to.
fn seen(spec: &str, x: &Tensor) -> Tensor {
    let quantizer = nvfp4::Quantizer::new(spec.parse::<QuantSpec>().unwrap(), Directions::Row).unwrap();
    let values: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
    let q = quantizer.quantize(&TensorRef::new(&values[..], x.dims()).unwrap()).unwrap();
    Tensor::from_vec(q.dequantize::<f32>(Side::Row).unwrap(), x.shape(), &Device::Cpu).unwrap()
}

/// test_linear_like_backward_override_matches_reference: the forward pass is the quantized one; the backward pass is candle's, with the
/// original operands or with what the forward pass saw. Shapes of two to four dimensions, and rows that fill no block.
#[test]
fn backward_overrides_match_a_backward_pass_by_hand() {
    let specs = [
        ("fp8", "fp8"),
        ("mxfp8", "mxfp8"),
        ("fp8-block", "fp8-block(128x128)"),
        ("nvfp4", "nvfp4(16x16)"),
        ("nvfp4(row-scaled)", "nvfp4(16x16)"),
        ("nvfp4(4over6-mae-strict-448)", "nvfp4(16x16, 4over6-mae-strict-256)"),
    ];
    let shapes: [&[usize]; 4] = [&[32, 64], &[7, 64], &[2, 3, 64], &[2, 2, 5, 64]];
    for (input, weight) in specs {
        for shape in shapes {
            for mode in [BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
                let session = Session::new(5);
                let place = session.place(DType::F32, &Device::Cpu);
                let x = place.parameter("x", shape, Init::Normal(1.0)).unwrap();
                let linear = Linear::new(&place.child("m"), 64, 48, Bias::With).unwrap();
                let base = operands(input, weight, "nvfp4(stochastic)");
                let base = if input.starts_with("nvfp4") { base } else { operands(input, weight, input) };
                session.apply(&base).unwrap();
                let quantized = bits(&linear.forward(&x.var).unwrap());
                session.apply(&base.with_backward(mode)).unwrap();
                let y = linear.forward(&x.var).unwrap();
                let what = format!("{input}, {shape:?}, {mode:?}");
                assert!(bits(&y) == quantized, "{what}: y");
                session.backward(&y.mul(&weights_like(&y)).unwrap().sum_all().unwrap()).unwrap();

                let tokens = x.var.elem_count() / 64;
                let dy = weights_like(&y).reshape((tokens, 48)).unwrap();
                let rows = x.var.detach().reshape((tokens, 64)).unwrap();
                let w = linear.weight().detach();
                let (rows, w) = match mode {
                    BackwardOverride::Dequantized => (seen(input, &rows), seen(weight, &w)),
                    _ => (rows, w),
                };
                let found = session.gradients().unwrap();
                let gradient = |name: &str| bits(found.get(&session.parameters()[name]).unwrap());
                assert!(gradient("x") == bits(&dy.matmul(&w).unwrap()), "{what}: dx");
                let dw = rows.t().unwrap().matmul(&dy).unwrap().t().unwrap();
                assert!(gradient("m.weight") == bits(&dw), "{what}: dw");
                assert!(gradient("m.bias") == bits(&dy.sum(0).unwrap()), "{what}: db");
            }
        }
    }
}

/// test_identity_reproduces_backward_override_*_bitwise, TestZooHighPrecisionBackwardFactoryModuleCoverage,
/// test_grouped_linear_mxfp8_forward_identity_backward_matches_override: an override is a recipe that says the same in its specs.
#[test]
fn overrides_are_specs() {
    for kind in ["linear", "layer norm linear", "gelu mlp", "grouped linear", "gpt layer"] {
        let preset = Case::with(kind, &recipe("mxfp8_fwd_high_precision_bwd"), 6).run();
        let overridden = recipe("mxfp8").with_backward(BackwardOverride::Dequantized);
        assert!(preset == Case::with(kind, &overridden, 6).run(), "{kind}");
        for (mode, ending) in [(BackwardOverride::HighPrecision, ""), (BackwardOverride::Dequantized, " from row")] {
            let overridden = recipe("nvfp4_row_scaled").with_backward(mode);
            let spec = |format: &str| format!("{format} / high-precision{ending}");
            let input = spec("nvfp4(row-scaled)");
            let specs = operands(&input, &spec("nvfp4(16x16)"), "high-precision");
            assert!(Case::with(kind, &overridden, 6).run() == Case::with(kind, &specs, 6).run(), "{kind}, {mode:?}");
        }
    }
}

/// test_linear_backward_override_*_save_original_input: what is kept is one direction's codes, or the input itself.
#[test]
fn what_is_kept_of_an_input() {
    let tokens = BATCH * TOKENS;
    let (codes, plain) = (tokens * HIDDEN / 2 + tokens * HIDDEN / 16 + 4, 4 * tokens * HIDDEN);
    for (recipe, bytes) in [
        (recipe("nvfp4"), codes),
        (recipe("nvfp4").with_backward(BackwardOverride::Dequantized), codes),
        (recipe("nvfp4").with_backward(BackwardOverride::HighPrecision), plain),
        (all("high-precision(bf16)"), plain / 2),
    ] {
        for kind in ["linear", "layer norm linear"] {
            let case = Case::with(kind, &recipe, 1);
            let (y, _) = case.loss();
            assert_eq!(case.session.kept_bytes(), bytes, "{kind}, {recipe:?}");
            drop(y);
            assert_eq!(case.session.kept_bytes(), 0, "nothing is kept when the graph is gone");
        }
    }
}

/// test_linear_save_original_input_policy_is_bitwise_exact, with the policy that plans have: an input that is kept as it is, where its
/// column direction can be made again, gives the same gradients.
#[test]
fn an_input_kept_as_it_is_gives_the_same_gradients() {
    use nvfp4_recipe::KeepInput;
    let stochastic = operands("nvfp4(hadamard, stochastic)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)");
    let cases =
        [(recipe("mxfp8"), true), (recipe("nvfp4"), true), (stochastic, true), (recipe("delayed_scaling"), false)];
    for (preset, original) in &cases {
        let run = |keep| {
            let session = Session::new(5);
            let place = session.place(DType::F32, &Device::Cpu);
            let x = place.parameter("x", (32, 64), Init::Normal(1.0)).unwrap();
            let linear = Linear::keeping(&place.child("m"), 64, 48, Bias::With, keep).unwrap();
            session.apply(preset)?;
            let module: Box<dyn Module> = Box::new(linear);
            let case = Case { session, module, x };
            let (_y, loss) = case.loss();
            let kept = case.session.kept_bytes();
            case.session.backward(&loss).unwrap();
            Result::Ok((case.gradients(), kept))
        };
        let (codes, _) = run(KeepInput::Quantized).unwrap();
        let (preferred, kept) = run(KeepInput::PreferOriginal).unwrap();
        assert!(codes == preferred, "{preset:?}");
        assert_eq!(kept == 4 * 32 * 64, *original, "{preset:?}");
        assert_eq!(run(KeepInput::Original).is_ok(), *original, "{preset:?}: a plan refuses what cannot be made again");
    }
}

/// test_custom_recipe_matches_current_scaling, test_factory_matches_*: a function that gives the specs of a preset is that preset.
#[test]
fn a_function_of_roles_is_the_preset() {
    for preset in presets() {
        let same: Recipe = recipe(&preset);
        let function = Recipe::from_fn("the same", move |role: &Role| same.spec(role));
        for kind in ["linear", "gelu mlp", "grouped linear", "gpt layer"] {
            let (a, b) = (Case::with(kind, &recipe(&preset), 7).run(), Case::with(kind, &function, 7).run());
            assert!(a == b, "{kind}, {preset}");
        }
    }
}

/// test_custom_recipe_factory_invocation_counts_and_cycling, test_mha_forward_does_not_probe_qfactory,
/// test_layernorm_mlp_runs_and_uses_dequantized_backward_roles: once per tensor and plan, never in a pass.
#[test]
fn recipes_are_asked_once_per_tensor() {
    for (kind, tensors) in [("linear", 3), ("gelu mlp", 6), ("grouped linear", 12), ("gpt layer", 4 * 3 + 6)] {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let function = Recipe::from_fn("counted", move |_: &Role| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(QuantSpec::HIGH_PRECISION)
        });
        let case = Case::with(kind, &function, 7);
        case.run();
        assert_eq!(count.load(Ordering::Relaxed), tensors, "{kind}");
    }
}

/// test_custom_recipe_quantization_targets, test_grouped_linear_module_type_dispatch: rules by path and kind reach their layers.
#[test]
fn rules_by_path_reach_their_layer() {
    let rules = Recipe::from_toml(
        "[[rule]]\npath = \"**.fc2\"\nspec = \"mxfp8\"\n[[rule]]\nmodule = \"attention\"\nspec = \"high-precision\"\n\
         [default]\nspec = \"high-precision\"\n",
    );
    let case = Case::with("gpt layer", &rules.unwrap(), 1);
    let plan = case.session.plan().unwrap();
    let coded: Vec<&str> = plan
        .entries()
        .iter()
        .filter(|entry| entry.spec != QuantSpec::HIGH_PRECISION)
        .map(|entry| entry.role.path().as_str())
        .collect();
    assert_eq!(coded, ["m.layernorm_mlp.fc2"; 3]);
    let (_y, loss) = case.loss();
    assert_eq!(case.session.kept_by_module().keys().map(|path| path.as_str()).collect::<Vec<_>>(), ["m.layernorm_mlp"]);
    case.session.backward(&loss).unwrap();
    assert!(plan.entries().iter().any(|entry| matches!(entry.role.slot(), Slot::Linear(LinearSlot::Weight))));
}
