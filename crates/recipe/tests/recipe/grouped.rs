//! Experts of one layer have one spec per operand. TestHybridGroupedLinearValidation, as far as it is about specs.

use crate::tools::*;
use nvfp4_recipe::*;

/// Expert 1 of this slot gets another spec; the rest of the layer gets what lets every product pass.
fn problem(slot: LinearSlot, first: &str, other: &str) -> Option<String> {
    let (first, other) = (spec(first), spec(other));
    let recipe = Recipe::from_fn("experts", move |role| {
        Ok(match role.slot() {
            Slot::Grouped { slot: s, expert: 1 } if *s == slot => other.clone(),
            Slot::Grouped { slot: s, .. } if *s == slot => first.clone(),
            _ => QuantSpec::HIGH_PRECISION,
        })
    });
    let result = try_plan(&model([Module::grouped_linear("experts", 3)]), &recipe);
    result.err().map(|error| error.to_string())
}

#[test]
fn uniform_lists_validate() {
    for text in ["nvfp4", "mxfp8 / nvfp4", "fp8-delayed(e4m3)", "high-precision"] {
        assert_eq!(problem(LinearSlot::Input, text, text), None);
    }
}

#[test]
fn experts_that_differ_are_refused() {
    for (name, first, other) in [
        ("mixed_hybrid_and_plain_raises", "mxfp8 / nvfp4", "mxfp8"),
        ("none_plus_hybrid_raises", "high-precision", "mxfp8 / nvfp4"),
        ("mixed_identity_dtype_raises", "high-precision(bf16)", "high-precision(f32)"),
        // also grouped_linear_rejects_mixed_identity_weight_quantizers
        ("grouped_split_rejects_mixed_identity_and_quantized_operands", "high-precision", "nvfp4"),
        ("validation_rejects_mixed_columnwise_source_policies", "mxfp8 / nvfp4", "mxfp8 / nvfp4 from row"),
        ("validation_rejects_same_family_config_mismatch", "nvfp4", "nvfp4(row-scaled)"),
        ("experts with different flags", "nvfp4(stochastic)", "nvfp4"),
        ("delayed scaling with different margins", "fp8-delayed(e4m3)", "fp8-delayed(e4m3, margin=1)"),
    ] {
        for slot in [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput] {
            let message = problem(slot, first, other).expect(name);
            let (slot, first, other) = (slot.name(), spec(first), spec(other));
            let expected = format!("experts:{slot}[1]: the spec is {other}, but expert 0 has {first}; ");
            assert!(message.starts_with(&expected), "{name}: {message}");
            assert!(message.ends_with("Change recipe experts"), "{name}: {message}");
        }
    }
}

/// One configuration, but a history for each expert.
#[test]
fn distinct_delayed_scaling_state_is_allowed() {
    let plan = plan(&model([Module::grouped_linear("experts", 3)]), &recipe("delayed_scaling"));
    let mut states = States::new(&plan).unwrap();
    assert_eq!(states.len(), 9);
    let site = |expert| Site::new("experts", Slot::Grouped { slot: LinearSlot::Weight, expert });
    states.record(&site(1), nvfp4::Side::Row, 2.0).unwrap();
    let amax = |expert| states.get(&site(expert), nvfp4::Side::Row).unwrap().history()[0];
    assert_eq!([amax(0), amax(1), amax(2)], [0.0, 2.0, 0.0]);
}

/// custom_recipe_quantization_alignment_contract: what a layer's tokens are padded to follows from its formats, or is said.
#[test]
fn custom_recipe_quantization_alignment_contract() {
    let align = |recipe_: &str| plan(&model([Module::linear("fc")]), &recipe(recipe_)).alignment(&"fc".into()).unwrap();
    for (name, tokens) in [
        ("high_precision", 1),
        ("current_scaling", 16),
        ("nvfp4", 16),
        ("mxfp8", 32),
        ("mxfp8_fwd_nvfp4_bwd", 32),
        ("float8_block_scaling", 128),
    ] {
        assert_eq!(align(name), tokens, "{name}");
    }
    let said = Module::linear("fc").align(std::num::NonZeroUsize::new(64).unwrap());
    assert_eq!(plan(&model([said]), &recipe("nvfp4")).alignment(&"fc".into()), Some(64));
    let two = plan(&model([Module::linear("a"), Module::attention("b")]), &recipe("float8_block_scaling"));
    assert_eq!(two.alignment(&"b".into()), Some(1), "a layer is not padded for its neighbour");
    assert_eq!(two.alignment(&"c".into()), None);
}

#[test]
fn custom_recipe_automatic_padding_bad_splits() {
    let plan = plan(&model([Module::grouped_linear("experts", 2)]), &recipe("float8_block_scaling"));
    assert_eq!(plan.pad(&"experts".into(), &[17, 15, 0, 128]), Some(vec![128, 128, 0, 128]));
}
