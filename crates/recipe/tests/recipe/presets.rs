//! Presets: TransformerEngine's recipes and examples, tensor by tensor.

use crate::tools::*;
use nvfp4::{Bound, ErrorPath, GlobalScale, Metric, Rounding, ScaleRule, Side, Tile, Transform};
use nvfp4_recipe::*;

/// The specs of input, weight, output gradient and of a user's forward and backward tensor.
fn specs(name: &str, of: impl Fn(LinearSlot) -> Slot) -> [String; 5] {
    let recipe = recipe(name);
    let [input, weight, grad] =
        [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput].map(|slot| text(&recipe, of(slot)));
    let [forward, backward] = [Pass::Forward, Pass::Backward].map(|pass| text(&recipe, extension(pass)));
    [input, weight, grad, forward, backward]
}

fn check(name: &str, expected: [&str; 5]) {
    assert_eq!(specs(name, Slot::Linear), expected, "{name}");
    assert_eq!(specs(name, grouped), expected, "{name}, grouped");
}

#[test]
fn factory_matches_high_precision() {
    check("high_precision", ["high-precision"; 5]);
}

/// identity_recipe_matches_bf16_bitwise and hybrid_all_identity_matches_bf16_bitwise: nothing is quantized anywhere, so there is
/// nothing in which a model could differ from an unquantized one.
#[test]
fn identity_recipe_quantizes_nothing() {
    let split = linear("high-precision / high-precision", "high-precision / high-precision from row", "high-precision");
    for recipe in [recipe("high_precision"), recipe("high_precision+attention"), split] {
        let plan = plan(&zoo(), &recipe);
        assert!(plan.entries().iter().all(|entry| plan.directions(&entry.role.owner).is_none()));
        assert!(States::new(&plan).unwrap().is_empty());
        assert!(plan.execution().is_empty());
    }
}

#[test]
fn factory_matches_delayed_scaling() {
    let (e4m3, e5m2) = ("fp8-delayed(e4m3)", "fp8-delayed(e5m2)");
    check("delayed_scaling", [e4m3, e4m3, e5m2, e4m3, e5m2]);
    let Format::Delayed(config) = spec(e4m3).format(nvfp4::Side::Row) else { panic!("not delayed") };
    assert_eq!((config.history(), config.margin()), (1024, 0));
    assert_eq!((config.amax(), config.reduction()), (&AmaxRule::Max, Reduction::Max));
}

#[test]
fn factory_matches_current_scaling() {
    let (e4m3, e5m2) = ("fp8(e4m3)", "fp8(e5m2)");
    check("current_scaling", [e4m3, e4m3, e5m2, e4m3, e5m2]);
    let Format::Fp8(fp8) = spec(e4m3).format(nvfp4::Side::Row) else { panic!("not FP8") };
    assert_eq!((fp8.step, fp8.epsilon.value()), (ScaleStep::Any, 0.0));
}

#[test]
fn factory_matches_block_scaling() {
    let (row, square) = ("fp8-block(e4m3)", "fp8-block(e4m3, 128x128)");
    check("float8_block_scaling", [row, square, row, row, row]);
    let Format::Fp8Block(block) = spec(square).format(nvfp4::Side::Row) else { panic!("not a block format") };
    assert_eq!((block.tile, block.step), (BlockTile::Square128, ScaleStep::PowersOfTwo));
}

#[test]
fn factory_matches_mxfp8() {
    check("mxfp8", ["mxfp8(e4m3)"; 5]);
}

#[test]
fn factory_matches_nvfp4() {
    let other = "nvfp4(hadamard)";
    check("nvfp4", ["nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)", other, other]);
}

#[test]
fn fp8block_recipe_state_role_dispatch_forward() {
    let recipe = recipe("float8_block_scaling");
    assert_eq!(text(&recipe, LinearSlot::Weight), "fp8-block(e4m3, 128x128)");
    assert_eq!(text(&recipe, LinearSlot::Input), "fp8-block(e4m3)");
    assert_eq!(text(&recipe, LinearSlot::Output), "fp8-block(e4m3)");
}

#[test]
fn fp8block_recipe_state_role_dispatch_backward() {
    let recipe = recipe("float8_block_scaling");
    assert_eq!(text(&recipe, LinearSlot::GradOutput), "fp8-block(e4m3)");
    assert_eq!(text(&recipe, LinearSlot::GradInput), "fp8-block(e4m3)");
}

#[test]
fn nvfp4_recipe_state_role_dispatch_forward() {
    let recipe = recipe("nvfp4");
    assert_eq!(text(&recipe, LinearSlot::Output), "nvfp4(hadamard)");
    assert_eq!(text(&recipe, grouped(LinearSlot::Weight)), "nvfp4(16x16)");
}

#[test]
fn nvfp4_recipe_state_role_dispatch_backward() {
    let recipe = recipe("nvfp4");
    assert_eq!(text(&recipe, LinearSlot::GradOutput), "nvfp4(hadamard, stochastic)");
    assert_eq!(text(&recipe, LinearSlot::GradInput), "nvfp4(hadamard)");
}

/// nvfp4_recipe_state_supports_non_multiple_of_three, fp8block_recipe_state_supports_non_multiple_of_three: modules have as many
/// slots as they have.
#[test]
fn recipe_state_supports_non_multiple_of_three() {
    for name in ["nvfp4", "float8_block_scaling"] {
        let slots = [extension(Pass::Forward), ExtensionSlot::new("router", "bias", Pass::Forward).unwrap()];
        let module = slots.into_iter().fold(Module::extension("x"), Module::slot);
        assert_eq!(plan(&model([module]), &recipe(name)).entries().len(), 2);
    }
}

#[test]
fn zoo_high_precision_fwd_mxfp8_bwd() {
    let split = "high-precision / mxfp8(e4m3)";
    check("high_precision_fwd_mxfp8_bwd", [split, split, "mxfp8(e4m3)", split, split]);
}

#[test]
fn zoo_mxfp8_fwd_nvfp4_bwd() {
    let mxfp8 = "mxfp8(e4m3)";
    check(
        "mxfp8_fwd_nvfp4_bwd",
        ["mxfp8(e4m3) / nvfp4(hadamard)", "mxfp8(e4m3) / nvfp4 from row", "nvfp4(hadamard, stochastic)", mxfp8, mxfp8],
    );
}

/// TestNVFP41DWeightFactory: weights from the row direction, the rest as the base recipe.
#[test]
fn nvfp4_1d_weight_factory() {
    let other = "nvfp4(hadamard)";
    let weight = "nvfp4 / nvfp4 from row";
    check("nvfp4_1d_weight", ["nvfp4(hadamard)", weight, "nvfp4(hadamard, stochastic)", other, other]);
    // weight_quantizer_produces_both_nvfp4_storages
    let plan = plan(&model([Module::linear("fc")]), &recipe("nvfp4_1d_weight"));
    assert_eq!(plan.directions(&Site::new("fc", LinearSlot::Weight)), Some(nvfp4::Directions::Both));
}

/// TestMXFP8FwdHighPrecisionBwdFactory.
#[test]
fn mxfp8_fwd_high_precision_bwd_factory() {
    let split = "mxfp8(e4m3) / high-precision from row";
    check("mxfp8_fwd_high_precision_bwd", [split, split, "high-precision", "mxfp8(e4m3)", "mxfp8(e4m3)"]);
    // Forward and gradient roles can be quantized again with the same bytes.
    for slot in [LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput] {
        assert_eq!(spec(&text(&recipe("mxfp8_fwd_high_precision_bwd"), slot)).replay(), Replay::Same);
    }
}

/// TestComposerStyleFactory.
#[test]
fn grouped_linear_forward_roles_use_nvfp4_rowwise_mxfp8_columnwise() {
    let name = "nvfp4_row_scaled_fwd_mxfp8_bwd";
    let mxfp8 = "mxfp8(e4m3)";
    let (input, weight) = ("nvfp4(row-scaled) / mxfp8(e4m3) from row", "nvfp4 / mxfp8(e4m3) from row");
    assert_eq!(specs(name, grouped), [input, weight, mxfp8, mxfp8, mxfp8]);
    assert_eq!(specs(name, Slot::Linear), [mxfp8; 5], "regular_linear_forward_roles_fall_back_to_mxfp8");
}

#[test]
fn zoo_nvfp4_row_scaled_fwd_high_precision_bwd() {
    check(
        "nvfp4_row_scaled_fwd_high_precision_bwd",
        [
            "nvfp4(row-scaled) / high-precision from row",
            "nvfp4 / high-precision from row",
            "high-precision",
            "nvfp4",
            "nvfp4",
        ],
    );
}

#[test]
fn zoo_nvfp4_linear_fp8_dpa() {
    let other = "nvfp4(hadamard)";
    let expected = ["nvfp4(hadamard)", "nvfp4(16x16)", "nvfp4(hadamard, stochastic)", other, other];
    check("nvfp4_linear_fp8_dpa", expected);
    let recipe = recipe("nvfp4_linear_fp8_dpa");
    let attention = AttentionSlot::ALL.map(|slot| text(&recipe, slot));
    let delayed = |code: &str| format!("fp8-delayed({code}, history=1, most-recent)");
    let fp8 = |code: &str| format!("fp8({code})");
    assert_eq!(attention, [fp8("e4m3"), delayed("e4m3"), fp8("e4m3"), fp8("e5m2"), delayed("e5m2"), fp8("e5m2")]);
}

/// Every preset fits a model of every kind of module; this is where pairs that cannot be multiplied would show.
#[test]
fn every_preset_fits_every_module() {
    for name in Preset::names() {
        for backward in [BackwardOverride::None, BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
            plan(&zoo(), &recipe(name).with_backward(backward));
        }
    }
}

#[test]
fn presets_have_names() {
    for name in Preset::names() {
        for name in [name.to_string(), format!("{name}+attention")] {
            assert_eq!(name.parse::<Preset>().unwrap().to_string(), name);
        }
    }
    let error = "nvfp4+attentoin".parse::<Preset>().unwrap_err().to_string();
    assert!(
        error.starts_with("unknown preset 'nvfp4+attentoin'; there are high_precision, delayed_scaling,"),
        "{error}"
    );
}

/// A function of roles equals the preset that it spells out, layer by layer.
#[test]
fn custom_recipe_matches_current_scaling() {
    let recipe_ = Recipe::from_fn("by hand", |role| {
        let code = match role.slot() {
            Slot::Linear(LinearSlot::GradOutput) | Slot::Grouped { slot: LinearSlot::GradOutput, .. } => Fp8Code::E5m2,
            Slot::Attention(_) => return Ok(QuantSpec::HIGH_PRECISION),
            _ => Fp8Code::E4m3,
        };
        Ok(Format::Fp8(Fp8::new(code)).into())
    });
    // Linear, the norm and the MLP, and custom_recipe_grouped_linear_matches_current_scaling.
    assert_eq!(plan(&zoo(), &recipe_), plan(&zoo(), &recipe("current_scaling")));
}

/// custom_recipe_sanity and custom_recipe_sanity_modules_nvfp4: a recipe that matches roles serves all modules.
#[test]
fn custom_recipe_sanity() {
    for inner in ["nvfp4", "current_scaling"] {
        let inner = recipe(inner);
        let recipe = Recipe::from_fn("delegates", move |role| match role.slot() {
            Slot::Linear(_) | Slot::Grouped { .. } => inner.spec(role),
            Slot::Attention(_) | Slot::Extension(_) => Ok(QuantSpec::HIGH_PRECISION),
        });
        let plan = plan(&zoo(), &recipe);
        assert_eq!(plan.entries().len(), zoo().roles().len());
        assert!(plan.warnings().is_empty());
    }
}

/// What a recipe with switches of its own is called: by what is not as usual, in the words of a rule file.
#[test]
fn names_of_recipes_with_switches() {
    let flat =
        Nvfp4Training { transform: Transform::None, activations: GlobalScale::PerRow, ..Nvfp4Training::STANDARD };
    assert_eq!(Recipe::from(flat).name(), "nvfp4 with transform = none, activations = row-scaled");
    assert_eq!(Recipe::from(Nvfp4Training::default()).name(), "nvfp4");
}

/// linear_fwd_bwd_matches_vanilla_{fp8,mxfp8,block_fp8,nvfp4}, linear_fwd_bwd_all_roles_hybrid, TestHybridAllModules: the format of
/// each direction said by itself is the same quantization, in every module.
#[test]
fn a_split_of_one_format_is_that_format() {
    for name in ["current_scaling", "mxfp8", "float8_block_scaling", "nvfp4", "nvfp4_row_scaled", "nvfp4_4over6"] {
        let vanilla = plan(&zoo(), &recipe(name));
        let split = Recipe::from_fn("split", move |role| {
            let spec = recipe(name).spec(role)?;
            Ok(QuantSpec::split(spec.format(Side::Row), spec.format(Side::Column), ColumnSource::Original)?)
        });
        let split = plan(&zoo(), &split);
        assert_eq!(vanilla.execution(), split.execution());
        for (one, other) in vanilla.entries().iter().zip(split.entries()) {
            assert_eq!(one.role, other.role);
            for side in [Side::Row, Side::Column] {
                assert_eq!(one.spec.format(side), other.spec.format(side), "{}", one.role);
            }
            assert_eq!(vanilla.directions(&one.role.owner), split.directions(&one.role.owner));
            assert_eq!(vanilla.saved_input(one.role.path()), split.saved_input(one.role.path()));
        }
    }
}

/// 4 scopes × 4 bounds × 2 metrics.
#[test]
fn nvfp4_row_scaled_quantizer_roles() {
    let scopes = [Scope::None, Scope::Weights, Scope::Activations, Scope::All];
    let has = |scope: Scope, weight: bool| match scope {
        Scope::None => false,
        Scope::Weights => weight,
        Scope::Activations => !weight,
        Scope::All => true,
    };
    for four_over_six in scopes {
        for bound_256 in scopes {
            for metric in [Metric::Mae, Metric::Mse] {
                let activations = GlobalScale::PerRow;
                let recipe = Recipe::from(Nvfp4Training {
                    activations,
                    four_over_six,
                    bound_256,
                    metric,
                    ..Nvfp4Training::default()
                });
                let check = |slot: Slot, weight: bool, gradient: bool| {
                    let spec = recipe.spec(&Role::new(Site::new("m", slot))).unwrap();
                    let QuantSpec::Uniform(Format::Nvfp4(format)) = spec else { panic!("not NVFP4: {spec}") };
                    let scale = if weight || gradient { GlobalScale::PerTensor } else { GlobalScale::PerRow };
                    assert_eq!(format.global_scale(), scale, "row-scaled on forward tensors but weights only");
                    let rule = match !gradient && has(four_over_six, weight) {
                        false => ScaleRule::Six,
                        true => ScaleRule::FourOverSix {
                            metric,
                            error: ErrorPath::Strict,
                            bound: if has(bound_256, weight) { Bound::E256 } else { Bound::E448 },
                        },
                    };
                    let settings = format.settings().scale_rule(rule).build().unwrap();
                    assert_eq!(settings, format.settings().build().unwrap(), "{four_over_six:?} {bound_256:?}");
                };
                for of in [Slot::Linear, grouped] {
                    check(of(LinearSlot::Input), false, false);
                    check(of(LinearSlot::Weight), true, false);
                    check(of(LinearSlot::Output), false, false);
                    check(of(LinearSlot::GradOutput), false, true);
                    check(of(LinearSlot::GradInput), false, true);
                }
                plan(&zoo(), &recipe);
            }
        }
    }
}

#[test]
fn switches_of_nvfp4_training() {
    let off = Recipe::from(Nvfp4Training {
        transform: Transform::None,
        gradients: Rounding::NearestEven,
        weights: Tile::Row16,
        ..Nvfp4Training::default()
    });
    for slot in LinearSlot::ALL {
        assert_eq!(text(&off, slot), "nvfp4");
    }
    assert_eq!(text(&recipe("nvfp4_row_scaled"), LinearSlot::Input), "nvfp4(row-scaled, hadamard)");
    assert_eq!(text(&recipe("nvfp4_4over6"), LinearSlot::Weight), "nvfp4(16x16, 4over6-mae-strict-256)");
}
