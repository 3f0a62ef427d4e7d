//! Another recipe in the middle of training.

use crate::tools::*;
use nvfp4::Side;
use nvfp4_recipe::*;

fn fc() -> Model {
    model([Module::linear("fc"), Module::grouped_linear("experts", 2)])
}

#[test]
fn dynamic_recipe_update() {
    let (before, after) = (plan(&fc(), &recipe("nvfp4")), plan(&fc(), &recipe("mxfp8")));
    let diff = before.diff(&after);
    assert_eq!(diff.changes.len(), 9);
    assert!(diff.to_string().starts_with("~ fc:input: nvfp4(hadamard) → mxfp8(e4m3)\n~ fc:weight: nvfp4(16x16) → "));
    let transition = before.transition(&after).unwrap();
    assert_eq!(transition.diff(), &diff);
    let stale: Vec<String> = transition.stale_weights().map(Site::to_string).collect();
    assert_eq!(stale, ["fc:weight", "experts:weight[0]", "experts:weight[1]"]);
}

/// TestHybridWeightWorkspaceCache, workspace_cache_invalidation_on_usage_change: a cached weight is worthless only if its own spec changed.
#[test]
fn quantizer_update() {
    let before = plan(&fc(), &recipe("nvfp4"));
    let rounded = Nvfp4Training { gradients: nvfp4::Rounding::NearestEven, ..Nvfp4Training::default() };
    let transition = before.transition(&plan(&fc(), &rounded.into())).unwrap();
    assert_eq!(transition.diff().changes.len(), 3, "the gradients");
    assert_eq!(transition.stale_weights().count(), 0);
    let flat = Nvfp4Training { weights: nvfp4::Tile::Row16, ..Nvfp4Training::default() };
    assert_eq!(before.transition(&plan(&fc(), &flat.into())).unwrap().stale_weights().count(), 3);
}

/// Edges that come and go are added and removed tensors.
#[test]
fn a_diff_has_both_sides() {
    let mut connected = model([Module::linear("a"), Module::linear("b")]);
    let plain = plan(&connected, &recipe("mxfp8"));
    connected.connect(Edge::new(Site::new("a", LinearSlot::Output), [Site::new("b", LinearSlot::Input)]));
    let connected = plan(&connected, &recipe("mxfp8"));
    assert_eq!(plain.diff(&connected).to_string(), "+ a:output: mxfp8(e4m3)\n");
    assert_eq!(connected.diff(&plain).to_string(), "- a:output: mxfp8(e4m3)\n");
    assert!(plain.diff(&plain).is_empty());
}

/// Also role_change_preserves_custom_delayed_scaling_state: for a preset and for a function, state stays where its spec does.
#[test]
fn role_change_preserves_delayed_scaling_state() {
    let custom = linear("fp8-delayed(e4m3)", "fp8-delayed(e4m3)", "fp8-delayed(e5m2)");
    for recipe in [recipe("delayed_scaling"), custom] {
        let mut connected = model([Module::linear("a"), Module::linear("b")]);
        let before = plan(&connected, &recipe);
        connected.connect(Edge::new(Site::new("a", LinearSlot::Output), [Site::new("b", LinearSlot::Input)]));
        let after = plan(&connected, &recipe);
        let mut states = States::new(&before).unwrap();
        for site in before.entries().iter().map(|entry| &entry.role.owner) {
            states.record(site, Side::Row, 7.0).unwrap();
        }
        states.update(Pass::Forward, &SingleProcess).unwrap();
        states.update(Pass::Backward, &SingleProcess).unwrap();
        let kept = states.clone();
        states.apply(&before.transition(&after).unwrap()).unwrap();
        assert_eq!(states.len(), kept.len() + 1, "the output of a");
        for site in before.entries().iter().map(|entry| &entry.role.owner) {
            assert_eq!(states.get(site, Side::Row), kept.get(site, Side::Row), "{site}");
        }
        let fresh = states.get(&Site::new("a", LinearSlot::Output), Side::Row).unwrap();
        assert_eq!((fresh.scale(), fresh.history()[1023]), (1.0, 0.0));
    }
}

#[test]
fn role_change_does_not_invalidate_when_role_unchanged() {
    let plan_ = plan(&fc(), &recipe("delayed_scaling"));
    let same = plan(&fc(), &recipe("delayed_scaling"));
    let mut states = States::new(&plan_).unwrap();
    // In the middle of a step: nothing is lost, so nothing is refused.
    states.record(&Site::new("fc", LinearSlot::Input), Side::Row, 7.0).unwrap();
    let before = states.get(&Site::new("fc", LinearSlot::Input), Side::Row).cloned();
    states.apply(&plan_.transition(&same).unwrap()).unwrap();
    assert_eq!(states.get(&Site::new("fc", LinearSlot::Input), Side::Row).cloned(), before);
}

#[test]
fn a_step_must_be_finished_before_its_state_goes() {
    let (before, after) = (plan(&fc(), &recipe("delayed_scaling")), plan(&fc(), &recipe("nvfp4")));
    let transition = before.transition(&after).unwrap();
    let mut states = States::new(&before).unwrap();
    let site = Site::new("fc", LinearSlot::Input);
    states.record(&site, Side::Row, 7.0).unwrap();
    let problems = unwrap_problems(states.apply(&transition));
    assert_eq!(
        problems[0].to_string(),
        "fc:input: an amax was recorded since the last update and would be lost; finish the step with `update` first"
    );
    assert_eq!(states.len(), 9, "nothing was touched");
    states.update(Pass::Forward, &SingleProcess).unwrap();
    states.apply(&transition).unwrap();
    assert!(states.is_empty());
}

/// check_for_weight_tensor_and_recipe_correspondence, hybrid_param_with_mismatched_recipe_raises: a weight that exists as codes
/// alone cannot change its format.
#[test]
fn check_for_weight_tensor_and_recipe_correspondence() {
    let stored = || {
        model([
            Module::linear("a").weight_storage(WeightStorage::Quantized),
            Module::linear("b"),
            Module::grouped_linear("c", 2).weight_storage(WeightStorage::Quantized),
        ])
    };
    let before = plan(&stored(), &recipe("nvfp4"));
    let messages: Vec<String> =
        unwrap_problems(before.transition(&plan(&stored(), &recipe("mxfp8")))).iter().map(Problem::to_string).collect();
    assert_eq!(
        messages,
        ["a:weight", "c:weight[0]", "c:weight[1]"].map(|site| format!(
            "{site}: the weight is stored as nvfp4(16x16) alone, so it cannot become mxfp8(e4m3) without loss. \
             Keep its spec, or load it in high precision first"
        ))
    );
    // A weight that is stored unquantized, in whatever type, loses nothing.
    let plain = linear("high-precision", "high-precision(bf16)", "high-precision");
    plan(&stored(), &plain).transition(&before).unwrap();
    // hybrid_param_with_matching_recipe_does_not_raise
    let same_weights =
        plan(&stored(), &Nvfp4Training { transform: nvfp4::Transform::None, ..Nvfp4Training::default() }.into());
    before.transition(&same_weights).unwrap();
}

#[test]
fn plans_of_two_models_have_no_transition() {
    let one = plan(&model([Module::linear("a")]), &recipe("nvfp4"));
    let other = plan(&model([Module::linear("b")]), &recipe("nvfp4"));
    let problems = unwrap_problems(one.transition(&other));
    assert_eq!(problems.len(), 2);
    assert!(problems[0].to_string().starts_with("a: only one of the two plans has this module"));
}

#[test]
fn fingerprints_follow_the_specs() {
    let base = plan(&zoo(), &recipe("nvfp4"));
    assert_eq!(base.fingerprint(), plan(&zoo(), &recipe("nvfp4")).fingerprint());
    let by_hand = Recipe::from_fn("another name", |role| recipe("nvfp4").spec(role));
    assert_eq!(base.fingerprint(), plan(&zoo(), &by_hand).fingerprint(), "whatever recipe they come from");
    assert_ne!(base.fingerprint(), plan(&zoo(), &recipe("nvfp4_row_scaled")).fingerprint());
    assert_eq!(plan(&model([Module::linear("fc")]), &recipe("nvfp4")).fingerprint(), 0x0051_e725_bdea_a377);
}
