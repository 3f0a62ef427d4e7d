//! Complaints of reviewers upstream, and that they do not apply here. What other files test is named there.

use crate::tools::*;
use nvfp4::{Directions, GlobalScale, Quantizer, Side, TensorRef};
use nvfp4_recipe::*;

/// "The index modulo 3 decides whether it is a weight." See also roles.rs.
#[test]
fn no_position_has_a_meaning() {
    let fits = |order: [LinearSlot; 3]| order.map(|slot| text(&recipe("nvfp4"), slot));
    let [input, weight, grad] = fits([LinearSlot::Input, LinearSlot::Weight, LinearSlot::GradOutput]);
    assert_eq!(fits([LinearSlot::GradOutput, LinearSlot::Weight, LinearSlot::Input]), [grad, weight, input]);
    // In upstream's second position a QKV tensor gets the settings of a weight.
    let qkv = LegacyModule::DotProductAttention.order(Pass::Forward)[1].slot.clone();
    assert_eq!(text(&recipe("mxfp8+attention"), qkv.clone()), "mxfp8(e4m3)");
    assert_ne!(text(&recipe("nvfp4+attention"), qkv), text(&recipe("nvfp4"), LinearSlot::Weight));
}

/// "Row scaling is hidden in the quantizer, or guessed from the shape of an amax", and is called per-token.
#[test]
fn row_scaling_is_part_of_the_data() {
    let spec = spec("nvfp4(row-scaled)");
    let Format::Nvfp4(format) = spec.format(Side::Row) else { panic!("not NVFP4") };
    assert_eq!(format.global_scale(), GlobalScale::PerRow);
    // A tensor of one row says which it is, too.
    let x = [1f32; 16];
    let x = TensorRef::new(&x[..], &[1, 16]).unwrap();
    let row_scaled = Quantizer::new(format, Directions::Row).unwrap().quantize(&x).unwrap();
    let row = row_scaled.nvfp4(Side::Row).unwrap();
    assert_eq!((row.global(), row.stored().len()), (GlobalScale::PerRow, 1));
    assert!(matches!(
        Quantizer::default().quantize(&x).unwrap().nvfp4(Side::Row).unwrap().global(),
        GlobalScale::PerTensor
    ));
}

/// "Environment variables toggle what nobody sees": they are read when asked, into a typed recipe: see environment.rs and
/// defects.rs, d10.
///
/// "An output's role describes its producer, the consumer is unknown."
#[test]
fn a_role_has_owner_and_consumer() {
    let to = Site::new("b", LinearSlot::Input);
    let role = Role::handed_on(Site::new("a", LinearSlot::Output), Consumer::Sites(vec![to.clone()]));
    assert_eq!(role.owner.to_string(), "a:output");
    assert_eq!(role.consumer, Some(Consumer::Sites(vec![to])));
    assert_eq!(role.reader(), &Slot::Linear(LinearSlot::Input), "what is handed over is what the consumer reads");
}

/// "Two slots have the same role": see roles.rs, no_two_live_slots_are_alike, and
/// legacy_positions_that_are_read_are_the_live_slots for the slots that nobody reads.
///
/// "`is_gemm` takes similarity for granted": there is no such helper. A recipe matches the enum, and a user's module never passes
/// for a linear layer.
#[test]
fn users_modules_are_not_taken_for_linear_layers() {
    let recipe =
        Recipe::from_toml("[[rule]]\nmodule = 'linear'\nspec = 'nvfp4'\n[default]\nspec = 'high-precision'").unwrap();
    let named_input = ExtensionSlot::new("linear", "input", Pass::Forward).unwrap();
    assert_eq!(text(&recipe, named_input), "high-precision");
}

/// "A factory crashes on a role that is None": it gets a role, always; and one that fails is reported with the tensor.
#[test]
fn a_factory_that_fails_is_reported_for_every_tensor() {
    let recipe = Recipe::from_fn("fails", |role| match role.slot() {
        Slot::Linear(LinearSlot::Weight) => Ok("nvfp4(nonsense)".parse()?),
        _ => Ok(spec("mxfp8")),
    });
    let problems = problems(&model([Module::linear("a"), Module::linear("b")]), &recipe);
    assert_eq!(problems.len(), 2);
    let message = problems[1].to_string();
    assert!(
        message.starts_with("b:weight: the recipe has no spec for this tensor: 'nvfp4(nonsense)': unknown option"),
        "{message}"
    );
}

/// "A substring of the name finds attention's boundaries, and breaks": see attention.rs, hand_over_out_of_fp8_attention.
/// "`fp8_dpa` should follow from the quantizers": see attention.rs, modes and a_recipe_may_require_a_precision.
///
/// "The groups of cuDNN are not intuitive": attention has six tensors, by their names.
#[test]
fn attention_has_six_slots() {
    let names: Vec<String> =
        model([Module::attention("a")]).roles().iter().map(|role| role.slot().to_string()).collect();
    assert_eq!(names, ["qkv", "s", "o", "do", "dp", "dqkv"]);
}

/// "I don't understand how to write this function": a module lists its tensors, and the library makes roles of them.
#[test]
fn a_module_only_lists_its_tensors() {
    struct Gate;
    impl Quantizable for Gate {
        fn declare(&self, path: &ModulePath, model: &mut Model) {
            model.add(Module::linear(path.child("up"))).add(Module::extension(path).slot(extension(Pass::Forward)));
        }
    }
    let mut model = Model::new();
    model.nest("x.gate", &Gate);
    let roles: Vec<String> = model.roles().iter().map(Role::to_string).collect();
    assert_eq!(roles, ["x.gate.up:input", "x.gate.up:weight", "x.gate.up:grad_output", "x.gate:router:logits"]);
}

/// "The message names the wrong slot": a problem has the tensor as data. See also defects.rs, d4.
#[test]
fn problems_are_data() {
    let problems = problems(&model([Module::linear("m.fc")]), &linear("mxfp8", "nvfp4", "mxfp8"));
    let products: Vec<(&str, &str)> = problems
        .iter()
        .map(|problem| match problem {
            Problem::Product { path, product, .. } => (path.as_str(), product.as_ref()),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(products, [("m.fc", "fprop"), ("m.fc", "dgrad")], "all of them");
}

/// "Other consumers must refuse it": see consumers.rs. "The factory is probed repeatedly": see roles.rs.
///
/// What a plan prints: modules that differ in one number share lines, exceptions stand out, JSON has every tensor.
#[test]
fn a_plan_prints_what_every_layer_resolved_to() {
    let recipe = Recipe::from_toml(
        r#"
name = "ends"
[[rule]]
path = ["layers.0.**", "layers.5.**"]
spec = "high-precision"
[default]
preset = "nvfp4"
"#,
    )
    .unwrap();
    let mut model = Model::new();
    for layer in 0..6 {
        model.nest(format!("layers.{layer}"), &LayerNormMlp);
    }
    model.add(Module::grouped_linear("experts", 4)).add(Module::attention("core"));
    let plan = plan(&model, &recipe);
    assert_eq!(
        plan.to_string(),
        "\
MODULE          SLOT                        ROW                COLUMN                       BECAUSE OF
layers.0,5.fc1  input, weight, grad_output  high-precision     high-precision               rule 1 (line 3)
layers.0,5.fc2  input, weight, grad_output  high-precision     high-precision               rule 1 (line 3)
layers.1-4.fc1  input                       nvfp4              nvfp4(hadamard)              the default
                weight                      nvfp4(16x16)       nvfp4(16x16)                 the default
                grad_output                 nvfp4(stochastic)  nvfp4(hadamard, stochastic)  the default
layers.1-4.fc2  input                       nvfp4              nvfp4(hadamard)              the default
                weight                      nvfp4(16x16)       nvfp4(16x16)                 the default
                grad_output                 nvfp4(stochastic)  nvfp4(hadamard, stochastic)  the default
experts         input[0-3]                  nvfp4              nvfp4(hadamard)              the default
                weight[0-3]                 nvfp4(16x16)       nvfp4(16x16)                 the default
                grad_output[0-3]            nvfp4(stochastic)  nvfp4(hadamard, stochastic)  the default
core            qkv, s, o, do, dp, dqkv     high-precision     high-precision               the default
attention: high-precision in core
runs: nvfp4 in software
"
    );
    let json = plan.to_json();
    assert_eq!(json["tensors"].as_array().unwrap().len(), 6 * 6 + 12 + 6);
    assert_eq!(json["tensors"][6]["module"], "layers.1.fc1");
    assert_eq!(json["tensors"][6]["spec"], "nvfp4(hadamard)");
    assert_eq!(json["tensors"][6]["row"], "nvfp4");
    assert_eq!(json["attention"]["core"], "high-precision");
    assert_eq!(json["recipe"], "ends");
}

#[test]
fn a_plan_prints_hand_overs() {
    let mut model = Model::new();
    for layer in 0..2 {
        let attention = MultiheadAttention { hand_over: HandOver::Both, ..MultiheadAttention::default() };
        model.nest(format!("layers.{layer}"), &attention);
    }
    let plan = plan(&model, &recipe("mxfp8+attention"));
    let text = plan.to_string();
    assert!(text.contains("layers.0-1.proj"), "layers that hand over to their own neighbours are alike: {text}");
    assert!(text.contains("output → layers.0.core_attention:qkv"), "{text}");
    assert_eq!(plan.to_json()["tensors"][3]["consumer"][0], "layers.0.core_attention:qkv");
}
