//! Rule files.

use crate::tools::*;
use nvfp4_recipe::*;

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
        format!("{} ({})", decision.spec, decision.reason)
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

/// Those of the default, but for what a file says.
#[test]
fn accumulators_of_a_file() {
    let of = |text: &str| Recipe::from_toml(text).unwrap().accumulators().to_string();
    for (preset, expected) in [
        ("current_scaling", "fprop fast, dgrad split, wgrad split"),
        ("float8_block_scaling", "fprop split, dgrad split, wgrad split"),
    ] {
        assert_eq!(of(&format!("[default]\npreset = '{preset}'")), expected);
        assert_eq!(preset.parse::<Recipe>().unwrap().accumulators().to_string(), expected);
    }
    let file = "[default]\npreset = 'current_scaling'\n[accumulators]\ndgrad = 'precise'";
    assert_eq!(of(file), "fprop fast, dgrad precise, wgrad split");
    let found = messages("[default]\nspec = 'fp8'\n[accumulators]\nfprop = 'slow'\ngrad = 'fast'");
    assert_eq!(found[0], "line 4: fprop: unknown value 'slow'; there are precise, split, fast");
    assert_eq!(found[1], "line 5: unknown key `grad`; [accumulators] takes fprop, dgrad, wgrad");
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
        "line 2: unknown key `title`; a rule file takes name, backward, finite, rule, default, nvfp4, accumulators, require",
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

/// What would have no effect is an error, and what only follows from another error is not listed.
#[test]
fn settings_that_nothing_has_are_errors() {
    let unused = "line 1: [nvfp4] has the switches of `preset = \"nvfp4\"`, which no rule and no [default] has; \
                  use that preset or leave [nvfp4] out";
    for default in ["spec = 'nvfp4'", "preset = 'mxfp8'", "preset = 'nvfp4_row_scaled'"] {
        assert_eq!(messages(&format!("[nvfp4]\nweights = '1x16'\n[default]\n{default}")), [unused]);
    }
    let detail = "[default]\npreset = 'nvfp4'\n[nvfp4]\nmetric = 'mse'\n";
    let message = "line 4: metric has no effect without 4over6; \
                   set `four-over-six` to weights, activations or all, or leave this out";
    assert_eq!(messages(detail), [message]);
    assert_eq!(messages(&format!("{detail}four-over-six = 'none'")), [message]);
    let typo = messages(&format!("{detail}four-over-six = 'weight'"));
    assert_eq!(typo.len(), 1, "{typo:?}");
    assert!(typo[0].starts_with("line 5: four-over-six: unknown value 'weight'"), "{typo:?}");
}

#[test]
fn paths_and_slots_that_nothing_can_fit_are_errors() {
    for path in ["", "layers.[0-3].**", "layers..fc", "layers.{0,1}", "a b", "layers.0/fc"] {
        let found = messages(&format!("[[rule]]\npath = '{path}'\nspec = 'mxfp8'\n[default]\npreset = 'nvfp4'"));
        assert!(found[0].starts_with(&format!("line 2: path: no module fits '{path}'; use names")), "{found:?}");
    }
    for slot in ["router:", ":logits", "a:b:c", "router:lo gits"] {
        let found = messages(&format!("[[rule]]\nslot = '{slot}'\nspec = 'mxfp8'\n[default]\npreset = 'nvfp4'"));
        assert!(
            found[0].starts_with(&format!("line 2: unknown slot '{slot}'; a user's slot is kind:slot")),
            "{found:?}"
        );
    }
}

#[test]
fn nesting_has_an_end() {
    for text in [
        format!("a = {}{}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("a = {}1{}", "{a=".repeat(100_000), "}".repeat(100_000)),
        format!("a{} = 1", ".a".repeat(100_000)),
    ] {
        assert!(messages(&text)[0].starts_with("line 1: "));
    }
    assert!(Model::from_config(&r#"{"text_config":"#.repeat(100_000)).unwrap_err().to_string().contains("recursion"));
}

#[test]
fn problems_of_a_file_name_it() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("recipe-named.toml");
    std::fs::write(&path, "[default]\nspec = 'nvfp5'").unwrap();
    let error = Recipe::from_file(&path).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}:2: 'nvfp5': unknown format", path.display())), "{error}");
}

/// Problems of many layers are few lines.
#[test]
fn layers_with_the_same_problem_share_a_line() {
    let recipe = Recipe::from_toml("[[rule]]\nslot = 'input'\nspec = 'mxfp8'\n[default]\npreset = 'nvfp4'").unwrap();
    let model = Model::from_config(r#"{"num_hidden_layers": 9}"#).unwrap();
    let error = try_plan(&model, &recipe).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!((lines[0], lines.len()), ("126 problems:", 1 + 2 * 7), "{error}");
    assert!(lines[1].starts_with("  model.layers.0-8.self_attn.q_proj fprop: input.row is mxfp8"), "{error}");
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
            "rule 1 (line 2, layers.*.mlp.fc1) decides nothing in this model: check its spelling and its place",
            "rule 3 (line 8, layers.0.layernorm_mlp.fc1) decides nothing in this model: check its spelling and its place",
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

    // Latent attention and a shared expert.
    let deepseek = r#"{"num_hidden_layers": 2, "n_routed_experts": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "mlp_only_layers": null, "num_experts": null}"#;
    let model = Model::from_config(deepseek).unwrap();
    let paths: Vec<&str> = model.modules().iter().map(|module| module.path().as_str()).collect();
    for name in ["self_attn.q_a_proj", "self_attn.kv_b_proj", "mlp.experts.down_proj", "mlp.shared_experts.up_proj"] {
        assert!(paths.contains(&format!("model.layers.1.{name}").as_str()), "{name} in {paths:?}");
    }
    assert!(!paths.contains(&"model.layers.1.self_attn.k_proj") && paths.contains(&"model.layers.0.mlp.up_proj"));
    let each = Model::from_config(r#"{"num_hidden_layers": 2, "num_experts": 2, "moe_layer_freq": [0, 1]}"#).unwrap();
    assert_eq!(each.modules().len(), 2 * 5 + 3 + 2);

    let text = r#"{"text_config": {"num_hidden_layers": 1, "n_routed_experts": 2, "first_k_dense_replace": 1}}"#;
    assert_eq!(Model::from_config(text).unwrap().modules().len(), 8);
    for (json, message) in [
        ("{}", "config.json: expected `num_hidden_layers`, a number of at most 4096"),
        (r#"{"num_hidden_layers": 99999}"#, "a number of at most 4096"),
        (
            r#"{"num_hidden_layers": 9, "num_experts": 99999}"#,
            "expected at most 65536 experts in all, got 9 layers of 99999",
        ),
        ("[", "config.json: "),
    ] {
        let error = Model::from_config(json).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
