//! The backward override: a change of specs, for every recipe and every module.

use crate::tools::*;
use nvfp4::Side;
use nvfp4_recipe::*;

const RECIPES: [&str; 7] = [
    "current_scaling",
    "mxfp8",
    "float8_block_scaling",
    "nvfp4",
    "nvfp4_row_scaled",
    "nvfp4_4over6",
    "delayed_scaling",
];

#[test]
fn backward_override_recipe_matches_requested_mode() {
    assert_eq!(recipe("nvfp4").backward(), BackwardOverride::None);
    for mode in [BackwardOverride::None, BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
        assert_eq!(recipe("nvfp4").with_backward(mode).backward(), mode);
    }
}

/// The forward pass is that of the recipe, the backward pass is not quantized, in every module.
#[test]
fn forward_rows_stay_and_the_backward_pass_is_plain() {
    for name in RECIPES {
        let base = plan(&zoo(), &recipe(name));
        for (mode, source) in [
            (BackwardOverride::HighPrecision, ColumnSource::Original),
            (BackwardOverride::Dequantized, ColumnSource::RowDequantized),
        ] {
            let overridden = plan(&zoo(), &recipe(name).with_backward(mode));
            for (before, after) in base.entries().iter().zip(overridden.entries()) {
                assert_eq!(before.role, after.role);
                match after.role.pass() {
                    Pass::Backward => assert_eq!(after.spec, QuantSpec::HIGH_PRECISION),
                    Pass::Forward => {
                        assert_eq!(before.spec.format(Side::Row), after.spec.format(Side::Row));
                        assert_eq!(after.spec.format(Side::Column), Format::HIGH_PRECISION);
                        if before.spec.format(Side::Row) != Format::HIGH_PRECISION {
                            assert_eq!(after.spec.source(), source);
                        }
                    }
                }
            }
        }
    }
}

/// identity_reproduces_backward_override_high_precision_bitwise and …_dequantized_bitwise: the same specs said by hand.
#[test]
fn identity_reproduces_backward_override() {
    let fc = model([Module::linear("fc"), Module::grouped_linear("experts", 2)]);
    for (mode, from) in [(BackwardOverride::HighPrecision, ""), (BackwardOverride::Dequantized, " from row")] {
        for name in RECIPES {
            let row = |slot| recipe(name).spec(&Role::new(Site::new("x", slot))).unwrap().format(Side::Row);
            let [input, weight] =
                [LinearSlot::Input, LinearSlot::Weight].map(|slot| format!("{} / high-precision{from}", row(slot)));
            let by_hand = linear(&input, &weight, "high-precision");
            assert_eq!(plan(&fc, &recipe(name).with_backward(mode)), plan(&fc, &by_hand), "{name}");
        }
    }
}

/// TestZooHighPrecisionBackwardFactoryModuleCoverage: two examples are overrides of simpler recipes.
#[test]
fn zoo_factories_match_base_recipe() {
    let dequantized = |recipe: Recipe| plan(&zoo(), &recipe.with_backward(BackwardOverride::Dequantized));
    let mxfp8 = plan(&zoo(), &recipe("mxfp8_fwd_high_precision_bwd"));
    assert_eq!(
        mxfp8,
        dequantized(recipe("mxfp8")),
        "also grouped_linear_mxfp8_forward_identity_backward_matches_override"
    );
    let row_scaled = Nvfp4Training {
        activations: nvfp4::GlobalScale::PerRow,
        weights: nvfp4::Tile::Row16,
        ..Nvfp4Training::default()
    };
    assert_eq!(plan(&zoo(), &recipe("nvfp4_row_scaled_fwd_high_precision_bwd")), dequantized(row_scaled.into()));
}

#[test]
fn layernorm_mlp_runs_and_uses_dequantized_backward_roles() {
    let mut mlp = Model::new();
    mlp.nest("mlp", &LayerNormMlp);
    let plan = plan(&mlp, &recipe("nvfp4").with_backward(BackwardOverride::Dequantized));
    let of = |pass| plan.entries().iter().filter(move |entry| entry.role.pass() == pass);
    assert_eq!((of(Pass::Forward).count(), of(Pass::Backward).count()), (4, 2));
    assert!(of(Pass::Forward).all(|entry| entry.spec.source() == ColumnSource::RowDequantized));
}

/// quantize_op_respects_backward_override: a user's module too.
#[test]
fn quantize_op_respects_backward_override() {
    let op = model([Module::extension("q")
        .slot(extension(Pass::Forward))
        .slot(ExtensionSlot::new("router", "gradient", Pass::Backward).unwrap())]);
    let plan = plan(&op, &recipe("nvfp4").with_backward(BackwardOverride::HighPrecision));
    assert_eq!(plan.entries()[0].spec, spec("nvfp4 / high-precision"));
    assert_eq!(plan.entries()[1].spec, QuantSpec::HIGH_PRECISION);
}

#[test]
fn attention_forward_alone() {
    let core = model([Module::attention("core")]);
    for name in ["current_scaling+attention", "delayed_scaling+attention", "mxfp8+attention"] {
        for mode in [BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
            let mode = plan(&core, &recipe(name).with_backward(mode)).attention(&"core".into()).unwrap();
            assert_eq!(mode.backward, Some(AttentionPrecision::HighPrecision));
            assert_ne!(mode.forward, AttentionPrecision::HighPrecision);
        }
    }
}

/// linear_like_runtime_backward_override_switch_updates_ctx: none → override → none, each a change of plan.
#[test]
fn runtime_backward_override_switch_updates_ctx() {
    let base = plan(&zoo(), &recipe("nvfp4"));
    for mode in [BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
        let overridden = plan(&zoo(), &recipe("nvfp4").with_backward(mode));
        assert!(!base.diff(&overridden).is_empty());
        base.transition(&overridden).unwrap();
        overridden.transition(&base).unwrap();
        assert_eq!(base, plan(&zoo(), &recipe("nvfp4").with_backward(mode).with_backward(BackwardOverride::None)));
    }
}
