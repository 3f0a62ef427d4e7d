//! Twelve defects of TransformerEngine's recipes, each with a test of the opposite.

use crate::tools::*;
use nvfp4::Side;
use nvfp4_recipe::*;
use std::cell::RefCell;

fn fc() -> Model {
    model([Module::linear("fc")])
}

fn site(slot: LinearSlot) -> Site {
    Site::new("fc", slot)
}

/// A delayed request in one pass only crashes upstream: on registration, on recompute and on saving.
#[test]
fn d1_delayed_scaling_in_one_pass_only() {
    for (recipe, slot) in [
        (linear("fp8-delayed(e4m3)", "fp8", "fp8(e5m2)"), LinearSlot::Input),
        (linear("fp8", "fp8", "fp8-delayed(e5m2)"), LinearSlot::GradOutput),
    ] {
        let plan = plan(&fc(), &recipe);
        let mut states = States::new(&plan).unwrap();
        states.record(&site(slot), Side::Row, 7.0).unwrap();
        for pass in [Pass::Forward, Pass::Backward] {
            states.update(pass, &SingleProcess).unwrap();
        }
        assert_ne!(states.scales().get(&site(slot), Side::Row), Some(1.0));
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("recipe-d1-{}", slot.name()));
        states.save(&file).unwrap();
        assert_eq!(States::load(&file, &plan, AmaxRules::default()).unwrap().scales(), states.scales());
    }
}

/// Counts the groups that are reduced.
#[derive(Default)]
struct Groups(RefCell<Vec<Group>>);

impl Collective for Groups {
    fn max(&self, group: &Group, _: &mut [f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.borrow_mut().push(group.clone());
        Ok(())
    }
}

/// Two modules that differ only in their amax rule share a group upstream, and the later rule is applied to both.
#[test]
fn d2_groups_are_keyed_by_the_whole_configuration() {
    let recipe = Recipe::from_toml(
        r#"
[[rule]]
path = "recent"
spec = "fp8-delayed(e4m3, history=4, most-recent)"
[default]
spec = "fp8-delayed(e4m3, history=4)"
"#,
    )
    .unwrap();
    let mut inference = Model::for_inference();
    inference.add(Module::linear("recent")).add(Module::linear("max"));
    let mut states = States::new(&plan(&inference, &recipe)).unwrap();
    for amax in [8.0, 2.0] {
        for path in ["recent", "max"] {
            states.record(&Site::new(path, LinearSlot::Input), Side::Row, amax).unwrap();
        }
        let groups = Groups::default();
        states.update(Pass::Forward, &groups).unwrap();
        assert_eq!(groups.0.borrow().len(), 2);
    }
    let amax = |path: &str| 448.0 / states.scales().get(&Site::new(path, LinearSlot::Input), Side::Row).unwrap();
    assert_eq!((amax("recent"), amax("max")), (2.0, 8.0));
}

/// On a rebuild upstream gives the weight's history to the input, and keeps an old margin.
#[test]
fn d3_state_is_kept_by_tensor_and_configuration() {
    let on = |input: &str, weight: &str| plan(&fc(), &linear(input, weight, "fp8(e5m2)"));
    let weight_only = on("fp8", "fp8-delayed(e4m3)");
    let mut states = States::new(&weight_only).unwrap();
    states.record(&site(LinearSlot::Weight), Side::Row, 7.0).unwrap();
    states.update(Pass::Forward, &SingleProcess).unwrap();

    let mut moved = states.clone();
    moved.apply(&weight_only.transition(&on("fp8-delayed(e4m3)", "fp8")).unwrap()).unwrap();
    assert_eq!(moved.get(&site(LinearSlot::Input), Side::Row).unwrap().scale(), 1.0, "not the weight's 64");

    let margin = on("fp8", "fp8-delayed(e4m3, margin=3)");
    states.apply(&weight_only.transition(&margin).unwrap()).unwrap();
    let state = states.get(&site(LinearSlot::Weight), Side::Row).unwrap();
    assert_eq!((state.config().margin(), state.scale()), (3, 1.0));
}

/// The message about requests that differ names slot 0, whichever it was.
#[test]
fn d4_errors_name_the_tensor() {
    let problems = problems(&fc(), &linear("mxfp8", "nvfp4", "nvfp4"));
    let Problem::Product { path, left, right, .. } = &problems[0] else { panic!("{}", problems[0]) };
    assert_eq!((path.as_str(), left.slot.to_string().as_str()), ("fc", "input"));
    assert_eq!(right.slot, Slot::Linear(LinearSlot::Weight));
    let experts = crate::tools::problems(
        &model([Module::grouped_linear("e", 4)]),
        &Recipe::from_fn("expert 2", |role| {
            let odd = matches!(role.slot(), Slot::Grouped { slot: LinearSlot::Weight, expert: 2 });
            Ok(spec(if odd { "fp8-delayed(e4m3, margin=1)" } else { "fp8-delayed(e4m3)" }))
        }),
    );
    assert!(experts[0].to_string().starts_with("e:weight[2]: "), "{}", experts[0]);
}

/// Functions are compared by identity upstream, so one that is made per call differs from itself.
#[test]
fn d5_users_rules_are_compared_by_name() {
    let recipe = Recipe::from_fn("a rule made per call", |_| {
        let name: Name = String::from("mean").parse()?;
        Ok(QuantSpec::delayed(Delayed::new(Fp8Code::E4m3).with_amax(AmaxRule::Named(name))))
    });
    let experts = model([Module::grouped_linear("e", 4)]);
    assert_eq!(plan(&experts, &recipe), plan(&experts, &recipe));
    assert!(plan(&experts, &recipe).diff(&plan(&experts, &recipe)).is_empty());
}

/// A recipe of the same class with other settings keeps the old quantizers and cached weights upstream.
#[test]
fn d6_another_setting_is_another_plan() {
    let flat =
        Nvfp4Training { transform: nvfp4::Transform::None, weights: nvfp4::Tile::Row16, ..Nvfp4Training::default() };
    let (before, after) = (plan(&fc(), &recipe("nvfp4")), plan(&fc(), &flat.into()));
    assert_ne!(before, after);
    let transition = before.transition(&after).unwrap();
    assert_eq!(transition.diff().changes.len(), 3);
    assert_eq!(transition.stale_weights().count(), 1, "the cached weight goes too");
}

/// Recipes that differ in a tensor's parameters are equal upstream.
#[test]
fn d7_recipes_are_equal_only_if_everything_is() {
    let base = recipe("nvfp4");
    assert_eq!(base, Recipe::from(Nvfp4Training::default()));
    for other in [
        Recipe::from(Nvfp4Training { metric: nvfp4::Metric::Mse, ..Nvfp4Training::default() }),
        Recipe::from(Nvfp4Training { gradients: nvfp4::Rounding::NearestEven, ..Nvfp4Training::default() }),
        base.with_backward(BackwardOverride::Dequantized),
        base.require_attention(AttentionPrecision::Fp8),
        recipe("nvfp4+attention"),
        Recipe::from_fn("nvfp4", |role| recipe("nvfp4").spec(role)),
    ] {
        assert_ne!(base, other);
        assert_eq!(other, other.clone());
    }
    let file = |margin| Recipe::from_toml(&format!("[default]\nspec = 'fp8-delayed(e4m3, margin={margin})'")).unwrap();
    assert_eq!(file(1), file(1));
    assert_ne!(file(1), file(2));
}

/// Fusible operations look at the recipe's class only, so another function is ignored.
#[test]
fn d8_another_function_is_another_plan() {
    let one = Recipe::from_fn("one", |_| Ok(spec("mxfp8")));
    let other = Recipe::from_fn("other", |_| Ok(spec("fp8")));
    assert_ne!(one, other);
    assert_eq!(plan(&fc(), &one).diff(&plan(&fc(), &other)).changes.len(), 3);
}

/// Quantized parameters accept only the built-in recipe of their format.
#[test]
fn d9_any_recipe_goes_with_stored_weights() {
    let stored = || model([Module::linear("fc").weight_storage(WeightStorage::Quantized)]);
    let custom = Recipe::from_fn("by hand", |role| recipe("mxfp8").spec(role));
    let before = plan(&stored(), &custom);
    before.transition(&plan(&stored(), &recipe("mxfp8"))).unwrap();
}

/// Environment variables are read when the library is loaded, once.
#[test]
fn d10_the_environment_is_read_when_asked() {
    let value = RefCell::new("0");
    let read =
        || Recipe::from_vars(|name| (name == "NVTE_NVFP4_DISABLE_RHT").then(|| value.borrow().to_string())).unwrap();
    let before = read();
    value.replace("1");
    assert_ne!(before, read());
}

/// A variable writes into the caller's recipe.
#[test]
fn d11_a_recipe_never_changes() {
    let base = recipe("nvfp4_linear_fp8_dpa");
    let copy = base.clone();
    _ = base.with_backward(BackwardOverride::HighPrecision).require_attention(AttentionPrecision::HighPrecision);
    plan(&zoo(), &base);
    assert_eq!(base, copy);
    assert_eq!(base.required_attention(), None);
}

/// A recipe that quantizes nothing asks for FP8 hardware, and one that does is not checked for its own format.
#[test]
fn d12_a_device_is_asked_about_what_is_used() {
    let poor = [Family::Fp8, Family::Fp8Block, Family::Mxfp8, Family::Nvfp4]
        .into_iter()
        .fold(Capabilities::gpu(8, 0), Capabilities::without);
    let build = |name: &str, device: &Capabilities| Plan::build(&fc(), &recipe(name), device);
    assert!(build("high_precision", &poor).unwrap().execution().is_empty());
    for (name, family) in [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("current_scaling", "fp8")] {
        let custom = Recipe::from_fn("custom", move |role| recipe(name).spec(role));
        let problems = unwrap_problems(Plan::build(&fc(), &custom, &poor));
        assert_eq!(problems.len(), 3, "each tensor: {problems:?}");
        let message = problems[1].to_string();
        assert!(message.starts_with("fc:weight: ") && message.contains(&format!("needs {family}, which")), "{message}");
    }
    // No device refuses a format for what its hardware lacks, and none is said to use units that no kernel here uses.
    for (major, minor) in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let device = Capabilities::gpu(major, minor);
        let runs = |name: &str, family: Family| build(name, &device).unwrap().execution()[&family];
        let on = |units, has: bool| Execution::On(if has { units } else { Units::Bf16TensorCores });
        let fp8 = |has| on(Units::Fp8TensorCores, has);
        let blocks = on(Units::BlockScaledTensorCores, major >= 10);
        assert_eq!(runs("nvfp4", Family::Nvfp4), blocks);
        assert_eq!(runs("current_scaling", Family::Fp8), fp8((major, minor) >= (8, 9)));
        assert_eq!(runs("float8_block_scaling", Family::Fp8Block), fp8(major == 9));
        assert_eq!(runs("mxfp8", Family::Mxfp8), blocks);
    }
    let old = build("nvfp4", &Capabilities::gpu(7, 5)).unwrap();
    assert_eq!(old.execution()[&Family::Nvfp4], Execution::Software);
}
