//! Attention by plan, and what is handed over around it.

use crate::cases::*;
use candle_core::{DType, Device, Module};
use nvfp4::Side;
use nvfp4_nn::*;
use nvfp4_recipe::{AttentionPrecision, AttentionSlot, HandOver, LinearSlot, Recipe, Site};

fn multihead(recipe: &Recipe, hand_over: HandOver) -> Result<Case> {
    let session = Session::new(3);
    let place = session.place(DType::F32, &Device::Cpu);
    let x = place.parameter("x", (2, 32, 64), Init::Normal(1.0))?;
    let config = MultiheadConfig {
        hidden: 64,
        heads: 4,
        groups: 2,
        mask: Mask::Causal,
        norm: Some(NormKind::RmsNorm),
        bias: Bias::With,
        hand_over,
    };
    let module: Box<dyn Module> = Box::new(MultiheadAttention::new(&place.child("m"), config)?);
    session.apply(recipe)?;
    Ok(Case { session, module, x })
}

/// In which arithmetic attention runs follows from the plan. test_custom_recipe_dpa_fp8, test_custom_recipe_dpa_mxfp8.
#[test]
fn precision_follows_from_the_plan() {
    for (preset, precision, states) in [
        ("nvfp4", AttentionPrecision::HighPrecision, 0),
        ("nvfp4_linear_fp8_dpa", AttentionPrecision::Fp8, 2),
        ("current_scaling+attention", AttentionPrecision::Fp8, 0),
        ("delayed_scaling+attention", AttentionPrecision::Fp8, 12),
        ("mxfp8+attention", AttentionPrecision::Mxfp8, 0),
    ] {
        let case = multihead(&recipe(preset), HandOver::None).unwrap();
        let mode = case.session.plan().unwrap().attention(&"m.core_attention".into()).unwrap();
        assert_eq!((mode.forward, mode.backward), (precision, Some(precision)), "{preset}");
        case.run();
        case.session.next_step().unwrap();
        assert_eq!(case.session.states().unwrap().unwrap().len(), states, "{preset}");
    }
}

/// What exists only inside attention takes its scale from the last step: S is at most 1, so its scale becomes 448 or more.
#[test]
fn scales_of_s_and_dp_come_from_the_last_step() {
    let case = multihead(&recipe("nvfp4_linear_fp8_dpa"), HandOver::None).unwrap();
    let scale = |slot| {
        let site = Site::new("m.core_attention", slot);
        case.session.states().unwrap().unwrap().get(&site, Side::Row).unwrap().scale()
    };
    assert_eq!((scale(AttentionSlot::S), scale(AttentionSlot::DP)), (1.0, 1.0));
    let first = case.run();
    case.session.next_step().unwrap();
    assert_eq!(scale(AttentionSlot::S), 448.0, "the first query sees one key");
    assert!(scale(AttentionSlot::DP) > 1.0);
    assert!(case.run().y != first.y);
}

/// test_update_output_quantizer_roles_wires_independent_boundaries: slots of hand-overs are live with an edge alone.
#[test]
fn boundaries_are_live_with_an_edge_alone() {
    let live = |hand_over| {
        let case = multihead(&recipe("current_scaling+attention"), hand_over).unwrap();
        let plan = case.session.plan().unwrap();
        let sites = [Site::new("m.linear_qkv", LinearSlot::Output), Site::new("m.proj", LinearSlot::GradInput)];
        sites.map(|site| plan.spec(&site).map(|spec| spec.to_string()))
    };
    assert_eq!(live(HandOver::None), [None, None]);
    let both = [Some("fp8(e4m3)".to_string()), Some("fp8(e5m2)".to_string())];
    assert_eq!(live(HandOver::IntoAttention), both);
    assert_eq!(live(HandOver::Both), both);
}

/// test_linear_dpa_linear_matches_native_env_recipe_bitwise: with a scale per tensor from the tensor itself, it makes no difference
/// whether a layer quantizes what it hands to attention or attention what it gets.
#[test]
fn handing_over_into_attention_changes_no_bit() {
    let recipe = recipe("current_scaling+attention");
    let [none, into] = [HandOver::None, HandOver::IntoAttention].map(|h| multihead(&recipe, h).unwrap().run());
    assert!(none == into);
}

/// While all delayed scales are 1, a tensor that is quantized twice has the codes of the first time: so at the first step it makes no
/// difference who quantizes, and every hand-over must be the same bits.
#[test]
fn hand_overs_are_the_codes_that_the_consumer_would_make() {
    let recipe = recipe("delayed_scaling+attention");
    let [none, into, both] =
        [HandOver::None, HandOver::IntoAttention, HandOver::Both].map(|h| multihead(&recipe, h).unwrap().run());
    assert!(none == into && none == both);
}

/// Codes that attention hands on are read as they are: the layer behind does not look at its input again, so its own amax plays no part.
#[test]
fn both_hand_overs_run_and_save_a_quantization() {
    for preset in ["current_scaling+attention", "delayed_scaling+attention", "mxfp8+attention"] {
        let case = multihead(&recipe(preset), HandOver::Both).unwrap();
        for _ in 0..2 {
            let outcome = case.run();
            let numbers = outcome.gradients.values().flatten().chain(&outcome.y);
            assert!(numbers.into_iter().all(|x| f64::from_bits(*x).is_finite()), "{preset}");
            case.session.next_step().unwrap();
        }
        if preset.starts_with("delayed") {
            // Handed over by attention's own scale; the consumer's saw nothing.
            let states = case.session.states().unwrap().unwrap();
            let amax = |path: &str, slot: nvfp4_recipe::Slot| {
                states.get(&Site::new(path, slot), Side::Row).unwrap().history().iter().fold(0f32, |m, x| m.max(*x))
            };
            assert!(amax("m.core_attention", AttentionSlot::O.into()) > 0.0);
            assert_eq!(amax("m.proj", LinearSlot::Input.into()), 0.0);
            assert_eq!(amax("m.linear_qkv", LinearSlot::GradOutput.into()), 0.0);
            assert_eq!(amax("m.core_attention", AttentionSlot::Qkv.into()), 0.0);
            assert!(amax("m.linear_qkv", LinearSlot::Output.into()) > 0.0);
        }
    }
}

/// test_fp8_dpa_rejects_identity_quantizer_with_type_error, and the recipe that upstream breaks with hand-overs: refused by the plan.
#[test]
fn plans_refuse_what_attention_cannot_read() {
    assert!(multihead(&recipe("nvfp4_linear_fp8_dpa"), HandOver::Both).is_err());
    assert!(multihead(&recipe("nvfp4+attention"), HandOver::None).is_err());
    multihead(&recipe("nvfp4_linear_fp8_dpa"), HandOver::IntoAttention).unwrap().run();
}

/// A query does not see later keys: a change of the last token changes no earlier output, in any precision but for a scale per tensor.
#[test]
fn causal() {
    for preset in ["high_precision", "nvfp4_linear_fp8_dpa"] {
        let case = Case::with("attention", &recipe(preset), 3);
        let before = values(&case.loss().0);
        let mut x = values(&case.x.var);
        // The other sign, so that the amax stays.
        let features = 12 * 16;
        x[(TOKENS - 1) * features..TOKENS * features].iter_mut().for_each(|x| *x = -*x);
        let x = candle_core::Tensor::from_vec(x, case.x.var.shape(), &Device::Cpu).unwrap();
        case.x.var.set(&x.to_dtype(DType::F32).unwrap()).unwrap();
        let after = values(&case.loss().0);
        let row = |t: usize| t * HIDDEN..(t + 1) * HIDDEN;
        assert_ne!(before[row(TOKENS - 1)], after[row(TOKENS - 1)], "{preset}");
        if preset == "high_precision" {
            assert_eq!(before[..row(TOKENS - 1).start], after[..row(TOKENS - 1).start]);
        }
    }
}

/// Groups of one head each are ordinary heads; a shared head of keys and values has the sum of its heads' gradients.
#[test]
fn shared_heads_are_repeated_heads() {
    for preset in ["high_precision", "current_scaling+attention", "mxfp8+attention"] {
        let shared = Case::with("grouped-query attention", &recipe(preset), 3);
        let all = Case::with("attention", &recipe(preset), 3);
        let packed = shared.x.var.as_detached_tensor();
        let part = |head: usize| packed.narrow(2, head * 16, 16).unwrap();
        let heads: Vec<_> = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7].into_iter().map(part).collect();
        all.x.var.set(&candle_core::Tensor::cat(&heads, 2).unwrap()).unwrap();
        let (one, two) = (shared.run(), all.run());
        assert!(one.y == two.y, "{preset}");
        if preset == "high_precision" {
            let gradient = |bits: &[u64], features: usize, token: usize, at: usize| {
                f64::from_bits(bits[token * features + at]) as f32
            };
            for token in 0..BATCH * TOKENS {
                for at in 0..16 {
                    let repeated = |head: usize| gradient(&two.gradients["x"], 192, token, head * 16 + at);
                    assert_eq!(gradient(&one.gradients["x"], 128, token, 4 * 16 + at), repeated(4) + repeated(5));
                }
            }
        }
    }
}

/// A direction that the backward pass alone reads has scales that move too.
#[test]
fn delayed_scales_of_columns() {
    let rules = "[[rule]]\nmodule = \"attention\"\nslot = [\"qkv\", \"s\"]\nspec = \"fp8-delayed(history=4) / fp8-delayed(history=8)\"\n\
                 [default]\npreset = \"delayed_scaling+attention\"\n";
    let case = Case::with("attention", &Recipe::from_toml(rules).unwrap(), 3);
    case.run();
    case.session.next_step().unwrap();
    let states = case.session.states().unwrap().unwrap();
    for slot in [AttentionSlot::Qkv, AttentionSlot::S] {
        let of = |side| states.get(&Site::new("m", slot), side).unwrap().clone();
        assert_eq!((of(Side::Row).history().len(), of(Side::Column).history().len()), (4, 8));
        assert!(of(Side::Row).scale() != 1.0 && of(Side::Row).scale() == of(Side::Column).scale(), "{slot:?}");
    }
}
