//! Rule files.

use crate::tools::*;
use nvfp4::recipe::*;

fn messages(text: &str) -> Vec<String> {
    unwrap_problems(Recipe::from_toml(text)).iter().map(Problem::to_string).collect()
}

#[test]
fn the_first_rule_that_fits_decides() {
    let recipe = Recipe::from_toml(
        r#"
name = "mine"
[[rule]]
path = "a.*"
slot = ["input", "weight"]
spec = "nvfp4"
[[rule]]
path = "a.**"
spec = "mxfp8"
[[rule]]
module = "attention"
preset = "current_scaling+attention"
[[rule]]
module = ["extension", "grouped"]
pass = "backward"
spec = "high-precision"
[[rule]]
slot = "router:logits"
spec = "fp8-block"
[default]
preset = "nvfp4"
"#,
    )
    .unwrap();
    let at = |path: &str, slot: Slot| {
        let decision = recipe.decide(&Role::new(Site::new(path, slot))).unwrap();
        format!("{} ({})", decision.spec, decision.because)
    };
    assert_eq!(recipe.name(), "mine");
    assert_eq!(at("a.b", LinearSlot::Input.into()), "nvfp4 (rule 1 (line 3))");
    assert_eq!(at("a.b", LinearSlot::GradOutput.into()), "mxfp8(e4m3) (rule 2 (line 7))");
    assert_eq!(at("a.b.c", LinearSlot::Input.into()), "mxfp8(e4m3) (rule 2 (line 7))");
    assert_eq!(at("x", AttentionSlot::DO.into()), "fp8(e5m2) (rule 3 (line 10))");
    assert_eq!(at("x", grouped(LinearSlot::GradOutput)), "high-precision (rule 4 (line 13))");
    assert_eq!(at("x", grouped(LinearSlot::Weight)), "nvfp4(16x16) (the default)");
    assert_eq!(at("x", extension(Pass::Forward).into()), "fp8-block(e4m3) (rule 5 (line 17))");
    assert_eq!(at("x", LinearSlot::Weight.into()), "nvfp4(16x16) (the default)");
}

#[test]
fn settings_of_a_file() {
    let recipe = Recipe::from_toml(
        r#"
backward = "dequantized"
[default]
preset = "nvfp4"
[nvfp4]
transform = "none"
gradients = "nearest"
weights = "1x16"
activations = "row-scaled"
four-over-six = "all"
bound-256 = "weights"
metric = "mse"
error = "fast"
[require]
attention = "high-precision"
"#,
    )
    .unwrap();
    assert_eq!(recipe.required_attention(), Some(AttentionPrecision::HighPrecision));
    assert_eq!(text(&recipe, LinearSlot::Weight), "nvfp4(4over6-mse-fast-256) / high-precision from row");
    assert_eq!(text(&recipe, LinearSlot::Input), "nvfp4(row-scaled, 4over6-mse-fast-448) / high-precision from row");
    plan(&zoo(), &recipe);
}

#[test]
fn all_errors_of_a_file_are_listed_with_their_lines() {
    let found = messages(
        r#"
title = "x"
backward = "sometimes"
[[rule]]
paths = "a"
path = []
slot = "wieght"
spec = "nvfp4(2d)"
[[rule]]
module = "conv"
pass = 3
[[rule]]
spec = "mxfp8"
preset = "mxfp8"
[nvfp4]
metric = "MSE"
[require]
attention = "nvfp4"
"#,
    );
    let starts = [
        "line 2: unknown key `title`; a rule file takes name, backward, rule, default, nvfp4, require",
        "line 3: backward: unknown value 'sometimes'; there are none, high-precision, dequantized",
        "line 5: unknown key `paths`; a rule takes path, module, slot, pass, spec, preset",
        "line 6: path: the list is empty; leave the key out to fit everything",
        "line 7: unknown slot 'wieght'; there are input, weight, output,",
        "line 8: 'nvfp4(2d)': unknown option '2d'; nvfp4 takes ",
        "line 9: a rule needs `spec` or `preset`",
        "line 10: unknown module 'conv'; there are linear, grouped, attention, extension",
        "line 11: pass: expected a text, got integer",
        "line 12: a rule has `spec` and `preset`; leave one out",
        "line 16: metric: unknown value 'MSE'; there are mae, mse",
        "line 18: attention: unknown value 'nvfp4'; there are high-precision, fp8, mxfp8",
        "line 19: there is no [default]",
    ];
    assert_eq!(found.len(), starts.len(), "{found:#?}");
    for (message, start) in found.iter().zip(starts) {
        assert!(message.starts_with(start), "{message}\nis not\n{start}");
    }
}

#[test]
fn files_that_are_not_toml() {
    assert!(messages("[[rule]\nspec = 'a'\n")[0].starts_with("line 1: "));
    assert_eq!(messages("a = 1\na = 2\n[default]\nspec = 'mxfp8'").len(), 1);
    assert!(messages("rule = 3\n[default]\nspec = 'mxfp8'")[0].contains("[[rule]], with two brackets"));
    assert!(messages("rule = [3]\n[default]\nspec = 'mxfp8'")[0].contains("expected a table for a rule, got integer"));
    assert!(messages("default = 3")[0].contains("expected a table for [default], got integer"));
    assert!(messages("\u{0}")[0].starts_with("line 1: "));
    assert!(messages("")[0].contains("there is no [default]"));
}

#[test]
fn a_rule_that_decides_nothing_is_a_warning() {
    let recipe = Recipe::from_toml(
        r#"
[[rule]]
path = "layers.*.mlp.fc1"
spec = "mxfp8"
[[rule]]
path = "layers.0.layernorm_mlp.**"
spec = "mxfp8"
[[rule]]
path = "layers.0.layernorm_mlp.fc1"
spec = "nvfp4"
[default]
preset = "mxfp8"
"#,
    )
    .unwrap();
    let warnings: Vec<String> = plan(&zoo(), &recipe).warnings().iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "rule 1 (line 2, layers.*.mlp.fc1) decides nothing: check its spelling and its place",
            "rule 3 (line 8, layers.0.layernorm_mlp.fc1) decides nothing: check its spelling and its place",
        ]
    );
}

#[test]
fn a_missing_file_is_an_error() {
    let error = Recipe::from_file(std::path::Path::new("no-such-recipe.toml")).unwrap_err().to_string();
    assert!(error.starts_with("no-such-recipe.toml: "), "{error}");
}

#[test]
fn models_from_config_files() {
    let model = Model::from_config(
        r#"{"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 6, "decoder_sparse_step": 2,
            "mlp_only_layers": [3]}"#,
    )
    .unwrap();
    let paths: Vec<&str> = model.modules().iter().map(|module| module.path().as_str()).collect();
    assert!(
        paths.contains(&"model.layers.1.mlp.experts.gate_up_proj") && paths.contains(&"model.layers.3.mlp.up_proj")
    );
    assert!(!paths.contains(&"model.layers.0.mlp.experts.down_proj"));
    let plan = plan(&model, &recipe("nvfp4"));
    assert!(plan.to_string().contains("model.layers.0-3.self_attn.q_proj"), "{plan}");
    assert!(plan.to_string().contains("weight[0-5]"), "{plan}");

    let text = r#"{"text_config": {"num_hidden_layers": 1, "n_routed_experts": 2, "first_k_dense_replace": 1}}"#;
    assert_eq!(Model::from_config(text).unwrap().modules().len(), 8);
    for (json, message) in [
        ("{}", "config.json: expected `num_hidden_layers`, a number of at most 4096"),
        (r#"{"num_hidden_layers": 99999}"#, "a number of at most 4096"),
        (
            r#"{"num_hidden_layers": 9, "num_experts": 99999}"#,
            "expected at most 262144 experts in all, got 9 layers of 99999",
        ),
        ("[", "config.json: "),
    ] {
        let error = Model::from_config(json).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
