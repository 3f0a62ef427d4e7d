//! What a linear layer keeps of its input. TestHybridSaveOriginalInputPolicy.

use crate::tools::*;
use nvfp4_recipe::*;

fn fc(input: KeepInput) -> Model {
    model([Module::linear("fc").keep_input(input), Module::grouped_linear("experts", 2).keep_input(input)])
}

/// What both kinds of layers keep.
fn saved(input: KeepInput, recipe: &Recipe) -> Saved {
    let plan = plan(&fc(input), recipe);
    let [linear, experts] = ["fc", "experts"].map(|path| plan.saved_input(&path.into()).unwrap());
    assert_eq!(linear, experts);
    linear
}

#[test]
fn codes_unless_the_original_is_asked_for() {
    for name in ["nvfp4", "mxfp8", "current_scaling", "delayed_scaling", "mxfp8_fwd_nvfp4_bwd"] {
        assert_eq!(saved(KeepInput::Quantized, &recipe(name)), Saved::Column, "{name}");
    }
    for name in ["nvfp4", "mxfp8", "current_scaling", "mxfp8_fwd_nvfp4_bwd", "nvfp4_row_scaled"] {
        assert_eq!(saved(KeepInput::Original, &recipe(name)), Saved::Original, "{name}");
    }
    assert_eq!(saved(KeepInput::Quantized, &recipe("high_precision")), Saved::Original);
    let decoded = linear("high-precision / high-precision from row", "mxfp8", "mxfp8");
    assert_eq!(saved(KeepInput::Quantized, &decoded), Saved::Original, "there are no codes to decode");
}

#[test]
fn linear_builtin_delayed_scaling_rejects_save_original_input() {
    let problems = problems(&fc(KeepInput::Original), &recipe("delayed_scaling"));
    assert_eq!(problems.len(), 2);
    assert_eq!(
        problems[0].to_string(),
        "fc:input: the input is to be kept unquantized and quantized again in the backward pass, but fp8-delayed(e4m3) would \
         not give the same bytes. Make the column direction from the original, or keep the quantized input"
    );
}

#[test]
fn linear_custom_delayed_scaling_disables_save_original_input() {
    let plan = plan(&fc(KeepInput::PreferOriginal), &recipe("delayed_scaling"));
    assert_eq!(plan.saved_input(&"fc".into()), Some(Saved::Column));
    let warnings: Vec<String> = plan.warnings().iter().map(ToString::to_string).collect();
    assert_eq!(warnings[0], "fc:input: kept quantized, since fp8-delayed(e4m3) would not give the same bytes again");
    // grouped_linear_unsafe_custom_input_disables_save_original_input
    assert_eq!(plan.saved_input(&"experts".into()), Some(Saved::Column));
    assert_eq!(warnings.len(), 2);
}

#[test]
fn linear_save_original_input_veto_uses_saved_forward_quantized_input() {
    let unsafe_row = linear("nvfp4(stochastic) / mxfp8 from row", "nvfp4 / mxfp8", "mxfp8");
    assert_eq!(saved(KeepInput::PreferOriginal, &unsafe_row), Saved::Column);
    // A column direction from the original depends on nothing.
    let safe = linear("nvfp4(stochastic) / mxfp8", "nvfp4 / mxfp8", "mxfp8");
    assert_eq!(saved(KeepInput::Original, &safe), Saved::Original);
}

#[test]
fn linear_high_precision_override_skips_requantization_safety_veto() {
    let recipe = recipe("delayed_scaling").with_backward(BackwardOverride::HighPrecision);
    assert_eq!(saved(KeepInput::Original, &recipe), Saved::Original);
    assert_eq!(
        saved(KeepInput::Quantized, &recipe),
        Saved::Original,
        "backward_override_high_precision_forces_save_original_input"
    );
}

#[test]
fn backward_override_dequantized_ignores_save_original_input() {
    for name in ["current_scaling", "mxfp8", "float8_block_scaling", "nvfp4", "nvfp4_row_scaled", "nvfp4_4over6"] {
        let recipe = recipe(name).with_backward(BackwardOverride::Dequantized);
        for input in [KeepInput::Quantized, KeepInput::Original, KeepInput::PreferOriginal] {
            assert_eq!(saved(input, &recipe), Saved::Row, "{name}");
        }
    }
}

#[test]
fn nothing_is_kept_without_a_backward_pass() {
    let mut model = Model::for_inference();
    model.add(Module::linear("fc").keep_input(KeepInput::Original));
    assert_eq!(plan(&model, &recipe("delayed_scaling")).saved_input(&"fc".into()), None);
}
