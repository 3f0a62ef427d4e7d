//! Attention: its precision follows from the formats of its tensors.

use crate::tools::*;
use nvfp4_recipe::*;

fn attention(forward: &str, backward: &str) -> Recipe {
    let (forward, backward) = (spec(forward), spec(backward));
    Recipe::from_fn("attention", move |role| {
        Ok(match role.pass() {
            Pass::Forward => forward.clone(),
            Pass::Backward => backward.clone(),
        })
    })
}

fn core() -> Model {
    model([Module::attention("core")])
}

fn mode(recipe: &Recipe) -> String {
    plan(&core(), recipe).attention(&"core".into()).unwrap().to_string()
}

#[test]
fn custom_recipe_dpa_fp8() {
    let mut model = Model::new();
    model.nest("l", &TransformerLayer::default());
    let plan = plan(&model, &recipe("nvfp4_linear_fp8_dpa"));
    let path = "l.self_attention.core_attention";
    assert_eq!(plan.attention(&path.into()).unwrap().to_string(), "fp8");
    let states = States::new(&plan).unwrap();
    assert_eq!(states.len(), 2, "S and dP, one history each");
    for slot in AttentionSlot::ALL {
        let stateful = states.get(&Site::new(path, slot), nvfp4::Side::Row).is_some();
        assert_eq!(stateful, matches!(slot, AttentionSlot::S | AttentionSlot::DP), "{slot:?}");
    }
    let family = |site: Site| plan.spec(&site).unwrap().format(nvfp4::Side::Row).family();
    assert_eq!(family(Site::new("l.self_attention.proj", LinearSlot::Input)), Family::Nvfp4);
}

#[test]
fn custom_recipe_dpa_mxfp8() {
    let plan = plan(&core(), &recipe("mxfp8+attention"));
    assert_eq!(plan.attention(&"core".into()).unwrap().to_string(), "mxfp8");
    assert!(plan.entries().iter().all(|entry| entry.spec == spec("mxfp8")));
    assert!(States::new(&plan).unwrap().is_empty());
}

/// Without a request for attention nothing around it is quantized either: both ends of each edge stay plain.
#[test]
fn mxfp8_qfactory_uses_plain_bf16_mha_boundaries() {
    let mut model = Model::new();
    model.nest("a", &MultiheadAttention { hand_over: HandOver::IntoAttention, ..MultiheadAttention::default() });
    let plan = plan(&model, &recipe("mxfp8"));
    for site in [Site::new("a.linear_qkv", LinearSlot::Output), Site::new("a.proj", LinearSlot::GradInput)] {
        assert_eq!(plan.spec(&site), Some(&QuantSpec::HIGH_PRECISION));
    }
}

/// linear_dpa_linear_matches_native_env_recipe_bitwise, multihead_attention_matches_native_env_recipe_bitwise: around FP8
/// attention the linear layers are those of the recipe that the environment gives.
#[test]
fn linear_dpa_linear_matches_native_env_recipe() {
    let native = Recipe::from_vars(|_| None).unwrap();
    let (plan_, native) = (plan(&zoo(), &recipe("nvfp4_linear_fp8_dpa")), plan(&zoo(), &native));
    for (entry, native) in plan_.entries().iter().zip(native.entries()) {
        match entry.role.slot() {
            Slot::Attention(_) => assert_ne!(entry.spec, QuantSpec::HIGH_PRECISION),
            _ => assert_eq!(entry.spec, native.spec),
        }
    }
}

#[test]
fn modes() {
    assert_eq!(mode(&recipe("nvfp4")), "high-precision");
    assert_eq!(mode(&recipe("current_scaling+attention")), "fp8");
    assert_eq!(mode(&recipe("delayed_scaling+attention")), "fp8");
    assert_eq!(mode(&attention("fp8(e4m3)", "fp8-delayed(e5m2)")), "fp8", "current and delayed go together");
    assert_eq!(mode(&attention("fp8 / high-precision", "high-precision")), "fp8 forward, high-precision backward");
    assert_eq!(mode(&attention("mxfp8 / fp8", "fp8(e5m2)")), "mxfp8 forward, fp8 backward");
}

/// fp8_dpa_rejects_identity_quantizer_with_type_error, and other formats that attention does not read.
#[test]
fn fp8_dpa_rejects_identity_quantizer() {
    let one_plain = Recipe::from_fn("one plain", |role| {
        Ok(match role.slot() {
            Slot::Attention(AttentionSlot::O) => QuantSpec::HIGH_PRECISION,
            _ => spec("fp8"),
        })
    });
    assert_eq!(
        problems(&core(), &one_plain)[0].to_string(),
        "core: qkv is fp8(e4m3) but o is high-precision; each pass of attention runs in one precision. \
         Change recipe one plain"
    );
    for name in ["nvfp4+attention", "float8_block_scaling+attention", "nvfp4_1d_weight+attention"] {
        let problems = problems(&core(), &recipe(name));
        assert_eq!(problems.len(), 1);
        let message = problems[0].to_string();
        let start = "core: attention reads high precision, FP8 with one scale per tensor, or MXFP8, but qkv is ";
        assert!(message.starts_with(start), "{message}");
        assert!(message.ends_with(&format!("Change recipe {name}")), "{message}");
        for slot in AttentionSlot::ALL {
            assert!(message.contains(&format!("{} is ", slot.name())), "all tensors are listed: {message}");
        }
    }
    let backward_only = problems(&core(), &attention("high-precision / mxfp8", "mxfp8"))[0].to_string();
    assert_eq!(
        backward_only,
        "core: qkv is high-precision / mxfp8(e4m3) for the backward pass, but the forward pass is in high precision; attention \
         cannot be quantized backward alone. Quantize its forward tensors too, or leave its gradients in high precision: change \
         recipe attention"
    );
    // Every rule that has a part in it is named, once.
    let rules = "[[rule]]\nslot = ['qkv', 's']\nspec = 'nvfp4'\n[default]\nspec = 'fp8-block'";
    let message = problems(&core(), &Recipe::from_toml(rules).unwrap())[0].to_string();
    assert!(message.ends_with("dqkv is fp8-block(e4m3). Change rule 1 (line 1) or the default"), "{message}");
}

#[test]
fn a_recipe_may_require_a_precision() {
    let fp8 = recipe("current_scaling+attention");
    plan(&core(), &fp8.require_attention(AttentionPrecision::Fp8));
    assert_eq!(
        problems(&core(), &fp8.require_attention(AttentionPrecision::Mxfp8))[0].to_string(),
        "core: the recipe requires mxfp8 attention, but its specs give fp8 (qkv is fp8(e4m3), s is fp8(e4m3), o is fp8(e4m3)). \
         Change recipe current_scaling+attention or what is required"
    );
    // A model without attention has nothing to require.
    plan(&model([Module::linear("fc")]), &fp8.require_attention(AttentionPrecision::Mxfp8));
}

/// Upstream relabels O for the layer that consumes it, so this recipe gives it NVFP4 and attention fails. Here the owner stays
/// visible: O is FP8, and only the hand-over of FP8 to an NVFP4 layer is refused, when the plan is made.
#[test]
fn hand_over_out_of_fp8_attention() {
    let block = |hand_over| {
        let mut model = Model::new();
        model.nest("a", &MultiheadAttention { hand_over, ..MultiheadAttention::default() });
        model
    };
    let recipe_ = recipe("nvfp4_linear_fp8_dpa");
    let o = Site::new("a.core_attention", AttentionSlot::O);
    let into = plan(&block(HandOver::IntoAttention), &recipe_);
    assert_eq!(into.spec(&o), Some(&spec("fp8(e4m3)")));
    assert_eq!(into.spec(&Site::new("a.linear_qkv", LinearSlot::Output)), Some(&spec("fp8(e4m3)")));
    let messages: Vec<String> = problems(&block(HandOver::Both), &recipe_).iter().map(Problem::to_string).collect();
    assert_eq!(
        messages,
        [
            "a.core_attention:o → a.proj:input: the tensor is handed over as fp8(e4m3), but the consumer reads \
             nvfp4(hadamard). Change recipe nvfp4_linear_fp8_dpa, so that both have one spec, or drop the edge, so that it is \
             handed over in high precision",
            "a.core_attention:dqkv → a.linear_qkv:grad_output: the tensor is handed over as fp8(e5m2), but the consumer \
             reads nvfp4(hadamard, stochastic). Change recipe nvfp4_linear_fp8_dpa, so that both have one spec, or drop the \
             edge, so that it is handed over in high precision",
        ]
    );
    plan(&block(HandOver::Both), &recipe("current_scaling+attention"));
    plan(&block(HandOver::Both), &recipe("mxfp8+attention"));
}
