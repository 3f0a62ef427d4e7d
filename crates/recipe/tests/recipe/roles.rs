//! Slots, sites and roles.

use crate::tools::*;
use nvfp4_recipe::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A model with everything live: quantized hand-overs, experts, a user's module.
fn connected() -> Model {
    let mut model = Model::new();
    let layer = TransformerLayer { kind: LayerKind::Decoder, hand_over: HandOver::Both };
    model.nest("layers.0", &layer).nest("layers.1", &layer);
    model.add(Module::grouped_linear("layers.1.experts", 4));
    model.add(Module::extension("layers.1.router").slot(extension(Pass::Forward)));
    model
}

#[test]
fn no_two_live_slots_are_alike() {
    let roles = connected().roles();
    let sites: BTreeSet<String> = roles.iter().map(|role| role.owner.to_string()).collect();
    assert_eq!(sites.len(), roles.len(), "two sites print alike");
    let texts: BTreeSet<String> = roles.iter().map(Role::to_string).collect();
    assert_eq!(texts.len(), roles.len());
}

#[test]
fn custom_recipe_factory_invocation_counts_and_cycling() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let recipe = Recipe::from_fn("counted", move |role| {
        counted.fetch_add(1, Ordering::Relaxed);
        recipe("mxfp8").spec(role)
    });
    plan(&model([Module::linear("fc")]), &recipe);
    assert_eq!(calls.swap(0, Ordering::Relaxed), 3, "input, weight, output gradient; no boundary is live");

    let mut handed_over = model([Module::linear("a"), Module::linear("b")]);
    handed_over.connect(Edge::new(Site::new("a", LinearSlot::Output), [Site::new("b", LinearSlot::Input)]));
    let plan_ = plan(&handed_over, &recipe);
    assert_eq!(calls.swap(0, Ordering::Relaxed), 7, "one more for the live boundary");
    // Asking the plan asks nobody else.
    plan_.alignment(&"a".into());
    plan_.to_json();
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// Nor does a forward pass: everything about attention follows from the plan. Also qkv_capabilities_reuse_canonical_quantizer and
/// inference_runs_once_per_quantizer_state_and_clears_stale_labels.
#[test]
fn mha_forward_does_not_probe_qfactory() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let inner = recipe("current_scaling+attention");
    let recipe = Recipe::from_fn("counted", move |role| {
        counted.fetch_add(1, Ordering::Relaxed);
        inner.spec(role)
    });
    let mut model = Model::new();
    model.nest("a", &MultiheadAttention { hand_over: HandOver::Both, ..MultiheadAttention::default() });
    let plan = plan(&model, &recipe);
    assert_eq!(calls.load(Ordering::Relaxed), model.roles().len(), "once per live slot");
    assert_eq!(plan.attention(&"a.core_attention".into()).unwrap().to_string(), "fp8");
    assert_eq!(calls.load(Ordering::Relaxed), model.roles().len());
}

#[test]
fn boundary_slots_are_live_only_where_an_edge_asks() {
    let slots = |model: &Model| -> Vec<String> { model.roles().iter().map(|role| role.slot().to_string()).collect() };
    let mut model = model([Module::linear("a"), Module::linear("b")]);
    assert_eq!(slots(&model), ["input", "weight", "grad_output", "input", "weight", "grad_output"]);
    model.connect(Edge::new(Site::new("a", LinearSlot::Output), [Site::new("b", LinearSlot::Input)]));
    model.connect(Edge::outside(Site::new("a", LinearSlot::GradInput)));
    assert_eq!(slots(&model)[..5], ["input", "weight", "grad_output", "output", "grad_input"]);
    let consumers: Vec<Option<Consumer>> = model.roles().into_iter().map(|role| role.consumer).collect();
    let to_b = Consumer::Sites(vec![Site::new("b", LinearSlot::Input)]);
    assert_eq!(consumers[..5], [None, None, None, Some(to_b), Some(Consumer::Unknown)]);
}

/// Each edge of an attention block wires one boundary, and both layers that consume dQKV in cross attention are named.
#[test]
fn update_output_quantizer_roles_wires_independent_boundaries() {
    let roles = |kind, hand_over| {
        let mut model = Model::new();
        model.nest("a", &MultiheadAttention { kind, hand_over });
        let handed = |role: &Role| matches!(role.consumer, Some(Consumer::Sites(_)));
        model.roles().iter().filter(|role| handed(role)).map(Role::to_string).collect::<Vec<_>>()
    };
    use AttentionKind::*;
    assert!(roles(SelfAttention, HandOver::None).is_empty());
    let into = ["a.linear_qkv:output → a.core_attention:qkv", "a.proj:grad_input → a.core_attention:do"];
    assert_eq!(roles(SelfAttention, HandOver::IntoAttention), into);
    assert_eq!(
        roles(SelfAttention, HandOver::Both),
        [into[0], "a.core_attention:o → a.proj:input", "a.core_attention:dqkv → a.linear_qkv:grad_output", into[1],]
    );
    assert!(
        roles(CrossAttention, HandOver::Both)
            .contains(&"a.core_attention:dqkv → a.linear_q:grad_output, a.linear_kv:grad_output".to_string())
    );
}

#[test]
fn an_inference_model_has_no_gradients() {
    let mut model = Model::for_inference();
    model.nest("l", &TransformerLayer { hand_over: HandOver::Both, ..TransformerLayer::default() });
    assert!(model.roles().iter().all(|role| role.pass() == Pass::Forward));
    let plan = plan(&model, &recipe("current_scaling+attention"));
    let mode = plan.attention(&"l.self_attention.core_attention".into()).unwrap();
    assert_eq!(mode, AttentionMode { forward: AttentionPrecision::Fp8, backward: None });
}

/// The quantizer of a layer that is not trained makes the row direction alone.
#[test]
fn te_linear_inference_workspace_rowwise_only() {
    use nvfp4::Directions::{Both, Column, Row};
    fn directions(model: &Model, recipe: &Recipe, slot: impl Into<Slot>) -> Option<nvfp4::Directions> {
        plan(model, recipe).directions(&Site::new("fc", slot))
    }
    let training = model([Module::linear("fc")]);
    let mut inference = Model::for_inference();
    inference.add(Module::linear("fc"));
    let nvfp4 = recipe("nvfp4");
    assert_eq!(directions(&training, &nvfp4, LinearSlot::Weight), Some(Both));
    assert_eq!(directions(&inference, &nvfp4, LinearSlot::Weight), Some(Row));
    assert_eq!(directions(&inference, &nvfp4, LinearSlot::GradOutput), None, "not quantized at all");
    let dequantized = nvfp4.with_backward(BackwardOverride::Dequantized);
    assert_eq!(directions(&training, &dequantized, LinearSlot::Input), Some(Row), "columns are decoded, not made");
    assert_eq!(directions(&training, &dequantized, LinearSlot::GradOutput), None);
    assert_eq!(directions(&training, &recipe("high_precision"), LinearSlot::Input), None);
    let backward = recipe("high_precision_fwd_mxfp8_bwd");
    assert_eq!(directions(&training, &backward, LinearSlot::Input), Some(Column));
    let experts = model([Module::grouped_linear("fc", 2)]);
    assert_eq!(directions(&experts, &nvfp4, grouped(LinearSlot::Input)), Some(Both));
}

/// Tensors that no product of a linear layer reads have codes too: attention's, those handed over, those of users' modules.
#[test]
fn directions_of_tensors_outside_linear_layers() {
    use nvfp4::Directions::{Both, Row};
    let mut model = Model::new();
    model.nest("a", &MultiheadAttention { hand_over: HandOver::Both, ..MultiheadAttention::default() });
    model.add(Module::linear("head")).connect(Edge::outside(Site::new("head", LinearSlot::Output)));
    model.add(Module::extension("router").slot(extension(Pass::Forward)));
    let plan_ = plan(&model, &recipe("mxfp8+attention"));
    let directions = |site: Site| plan_.directions(&site);
    assert_eq!(directions(Site::new("a.core_attention", AttentionSlot::Qkv)), Some(Both));
    assert_eq!(directions(Site::new("a.core_attention", AttentionSlot::DP)), Some(Row));
    assert_eq!(directions(Site::new("a.core_attention", AttentionSlot::DQkv)), Some(Both), "as linear_qkv reads it");
    assert_eq!(directions(Site::new("a.linear_qkv", LinearSlot::Output)), Some(Both), "as attention reads it");
    assert_eq!(directions(Site::new("head", LinearSlot::Output)), Some(Both));
    assert_eq!(directions(Site::new("router", extension(Pass::Forward))), Some(Both));
    assert_eq!(directions(Site::new("head", LinearSlot::GradInput)), None, "it has no role");
    let plain = plan(&model, &recipe("high_precision"));
    assert!(plain.entries().iter().all(|entry| plain.directions(&entry.role.owner).is_none()));
}

#[test]
fn custom_recipe_quantization_targets() {
    // Layers put together at different levels: names reach all of them.
    let mut model = zoo();
    model.nest("mlp", &LayerNormMlp).add(Module::linear("head"));
    let recipe = Recipe::from_fn("by name", |role| {
        let path = role.path().as_str();
        let name = match role.slot() {
            Slot::Attention(_) => "high_precision",
            Slot::Grouped { .. } => "nvfp4",
            _ if path.starts_with("layers.0.") => "mxfp8",
            _ if path.ends_with(".fc1") => "current_scaling",
            _ if path == "head" => "high_precision",
            _ => "float8_block_scaling",
        };
        recipe(name).spec(role)
    });
    let plan = plan(&model, &recipe);
    let family = |path: &str, slot: Slot| plan.spec(&Site::new(path, slot)).unwrap().format(nvfp4::Side::Row).family();
    let input = || Slot::Linear(LinearSlot::Input);
    assert_eq!(family("layers.0.layernorm_mlp.fc1", input()), Family::Mxfp8);
    assert_eq!(family("layers.1.layernorm_mlp.fc1", input()), Family::Fp8);
    assert_eq!(family("layers.1.inter_attention.linear_kv", input()), Family::Fp8Block);
    assert_eq!(family("mlp.fc1", input()), Family::Fp8);
    assert_eq!(family("head", input()), Family::HighPrecision);
    assert_eq!(family("layers.1.experts", grouped(LinearSlot::Weight)), Family::Nvfp4);
}

#[test]
fn grouped_linear_module_type_dispatch() {
    let role = |slot| Role::new(Site::new("x.experts", slot));
    let linear = role(Slot::Linear(LinearSlot::Weight)).legacy();
    let experts = role(grouped(LinearSlot::Weight)).legacy();
    assert_eq!((linear.module_type.as_str(), linear.tensor_type.as_str()), ("linear", "weight"));
    assert_eq!((experts.module_type.as_str(), experts.tensor_type.as_str()), ("grouped_linear", "weight"));
    assert_eq!(experts.name, "x.experts");
    assert_eq!(text(&recipe("nvfp4_row_scaled_fwd_mxfp8_bwd"), LinearSlot::Weight), "mxfp8(e4m3)");
    assert_eq!(
        text(&recipe("nvfp4_row_scaled_fwd_mxfp8_bwd"), grouped(LinearSlot::Weight)),
        "nvfp4 / mxfp8(e4m3) from row"
    );
}

/// A role reaches the recipe as the model said it; one of a user's module too. Also
/// slot_role_passes_unknown_tensor_type_through_unchanged and slot_role_supports_module_type_only_role.
#[test]
fn slot_role_passes_real_role_through_unchanged() {
    let mut model = connected();
    model.add(Module::extension("x").slot(ExtensionSlot::new("conv", "patches", Pass::Forward).unwrap()));
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let roles = Arc::clone(&seen);
    let recipe = Recipe::from_fn("seen", move |role| {
        roles.lock().unwrap().push(role.clone());
        Ok(QuantSpec::HIGH_PRECISION)
    });
    plan(&model, &recipe);
    assert_eq!(*seen.lock().unwrap(), model.roles());
    let legacy = seen.lock().unwrap().last().unwrap().legacy();
    assert_eq!((legacy.module_type.as_str(), legacy.tensor_type.as_str()), ("conv", "patches"));
}

#[test]
fn legacy_names_of_handed_over_tensors_are_the_consumers() {
    let mut model = Model::new();
    model.nest("a", &MultiheadAttention { hand_over: HandOver::Both, ..MultiheadAttention::default() });
    let legacy = |site: Site| {
        let role = model.roles().into_iter().find(|role| role.owner == site).unwrap().legacy();
        [role.module_type, role.tensor_type, role.name].join("|")
    };
    assert_eq!(legacy(Site::new("a.linear_qkv", LinearSlot::Output)), "dpa|qkv|a.core_attention");
    assert_eq!(legacy(Site::new("a.proj", LinearSlot::GradInput)), "dpa|do|a.core_attention");
    assert_eq!(legacy(Site::new("a.core_attention", AttentionSlot::O)), "linear|input|a.proj");
    assert_eq!(legacy(Site::new("a.core_attention", AttentionSlot::DQkv)), "linear|grad_output|a.linear_qkv");
    let alone = Role::handed_on(Site::new("a.core_attention", AttentionSlot::O), Consumer::HighPrecision).legacy();
    assert_eq!((alone.module_type.as_str(), alone.name.as_str()), ("", "a.core_attention.dpa_output"));
    let outside = Role::handed_on(Site::new("fc", LinearSlot::Output), Consumer::Unknown).legacy();
    assert_eq!((outside.module_type.as_str(), outside.tensor_type.as_str()), ("", ""));
}

#[test]
fn custom_recipe_ops_linear_2_1_layout() {
    let count = |module: LegacyModule| [Pass::Forward, Pass::Backward].map(|pass| module.order(pass).len());
    assert_eq!(count(LegacyModule::BasicLinear(1)), [2, 1]);
    assert_eq!(count(LegacyModule::BasicLinear(4)), [8, 4]);
    assert_eq!(count(LegacyModule::Linear), [3, 2]);
    assert_eq!(count(LegacyModule::LayerNormMlp), [6, 4]);
    assert_eq!(count(LegacyModule::GroupedLinear(5)), [15, 10]);
    assert_eq!(count(LegacyModule::DotProductAttention), [9, 6]);
}

/// TransformerEngine's positions without those that nobody reads are exactly our slots.
#[test]
fn legacy_positions_that_are_read_are_the_live_slots() {
    let read = |module: LegacyModule| -> BTreeSet<String> {
        let slots = [Pass::Forward, Pass::Backward].into_iter().flat_map(|pass| module.order(pass));
        slots.filter(|slot| slot.read == Read::Always).map(|slot| format!("{}:{}", slot.part, slot.slot)).collect()
    };
    let ours = |model: &Model, base: &str| -> BTreeSet<String> {
        let part = |role: &Role| role.path().as_str().trim_start_matches(base).trim_start_matches('.').to_string();
        model.roles().iter().map(|role| format!("{}:{}", part(role), role.slot())).collect()
    };
    assert_eq!(read(LegacyModule::Linear), ours(&model([Module::linear("x")]), "x"));
    assert_eq!(read(LegacyModule::GroupedLinear(3)), ours(&model([Module::grouped_linear("x", 3)]), "x"));
    assert_eq!(read(LegacyModule::DotProductAttention), ours(&model([Module::attention("x")]), "x"));
    let mut mlp = Model::new();
    mlp.nest("x", &LayerNormMlp);
    assert_eq!(read(LegacyModule::LayerNormMlp), ours(&mlp, "x"));
}

/// What position 0, 1, 2 used to mean agrees with what the slots say; nothing else depends on positions.
#[test]
fn nvfp4_and_fp8block_recipe_state_positional_fallback_matches_explicit_roles() {
    for name in ["nvfp4", "float8_block_scaling"] {
        let recipe = recipe(name);
        let specs = |pass| -> Vec<String> {
            LegacyModule::Linear.order(pass).into_iter().map(|slot| text(&recipe, slot.slot)).collect()
        };
        let [input, weight, output] = <[String; 3]>::try_from(specs(Pass::Forward)).unwrap();
        assert_eq!(input, output, "{name}: an output is quantized as an input");
        assert_ne!(input, weight);
        assert_eq!(specs(Pass::Backward)[0], text(&recipe, LinearSlot::GradOutput));
    }
}

#[test]
fn wrong_models_are_refused_with_everything_that_is_wrong() {
    let twice = ExtensionSlot::new("k", "s", Pass::Backward).unwrap();
    let stranger = Operand::new(ExtensionSlot::new("k", "t", Pass::Forward).unwrap(), nvfp4::Side::Row);
    let mut model = model([
        Module::linear("a"),
        Module::linear("a"),
        Module::linear("b c"),
        Module::linear(""),
        Module::extension("x")
            .slot(ExtensionSlot::new("k", "s", Pass::Forward).unwrap())
            .slot(twice)
            .product(Product::new("p", stranger.clone(), stranger)),
        Module::linear("u").used(AttentionSlot::O, Use::Copy),
    ]);
    model.connect(Edge::new(Site::new("a", LinearSlot::Input), [Site::new("nowhere", LinearSlot::Input)]));
    let problems: Vec<String> = problems(&model, &recipe("mxfp8")).iter().map(Problem::to_string).collect();
    for expected in [
        "a: two modules have this path, so their tensors cannot be told apart; rename one",
        "'b c' is not a module path: use names of letters, digits, `_` and `-`, joined by dots",
        "'' is not a module path: use names of letters, digits, `_` and `-`, joined by dots",
        "x:k:s: the module lists this slot twice; rename one",
        "x:k:t: a product names this tensor, which the model does not have; add the slot to the module",
        "u:o: a use names this tensor, which the model does not have; name a slot of this module",
        "nowhere:input: the end of an edge names this tensor, which the model does not have; \
         end at a tensor that its module reads",
    ] {
        assert!(
            problems.iter().any(|problem| problem == expected),
            "{expected}\nis not among\n{}",
            problems.join("\n")
        );
    }
    assert!(problems.iter().any(|problem| problem.starts_with("a:input: the start of an edge names this tensor")));
}
