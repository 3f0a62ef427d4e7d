//! `nvfp4 recipe explain` and `nvfp4 recipe check`.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn recipe(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.arg("recipe").args(args).envs(variables.iter().copied()).output().unwrap()
}

/// The text of standard output, or of standard error for a status other than 0.
fn text(args: &[&str], status: i32) -> String {
    let output = recipe(args, &[]);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(status), "{out}{err}");
    match status {
        0 => {
            assert_eq!(err, "");
            out
        }
        _ => {
            assert_eq!(out, "");
            err
        }
    }
}

fn file(name: &str, text: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("recipe-{name}"));
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_string()
}

const GOOD: &str = "[[rule]]\npath = '**.down_proj'\nspec = 'high-precision'\n[default]\npreset = 'nvfp4'\n";

#[test]
fn explain_prints_what_every_layer_resolves_to() {
    let table = text(&["explain", "nvfp4"], 0);
    assert!(table.starts_with("MODULE "), "{table}");
    assert!(table.contains("weight[0-7]"), "{table}");
    assert!(table.ends_with("runs: nvfp4 in software\n"), "{table}");

    let config = file("config.json", r#"{"num_hidden_layers": 3}"#);
    let rules = file("good.toml", GOOD);
    let table = text(&["explain", &rules, "--model", &config], 0);
    assert!(table.contains("model.layers.0-2.mlp.down_proj"), "{table}");
    assert!(table.contains("rule 1 (line 1)"), "{table}");

    let json: Value = serde_json::from_str(&text(&["explain", &rules, "--model", &config, "--json"], 0)).unwrap();
    assert_eq!(json["tensors"].as_array().unwrap().len(), 3 * (7 * 3 + 6));
    assert_eq!(json["tensors"][1]["spec"], "nvfp4(16x16)");

    let diff = text(&["explain", &rules, "--model", &config, "--against", "nvfp4"], 0);
    assert_eq!(diff.lines().count(), 3, "layers that change alike share a line: {diff}");
    assert!(diff.starts_with("~ model.layers.0-2.mlp.down_proj:input: nvfp4(hadamard) → high-precision\n"), "{diff}");
    assert_eq!(text(&["explain", "nvfp4", "--against", "nvfp4"], 0), "no difference\n");
    for (recipe, runs) in [
        ("nvfp4", "nvfp4 on block-scaled tensor cores\n"),
        ("mxfp8", "mxfp8 on block-scaled tensor cores\n"),
        ("current_scaling", "fp8 on FP8 tensor cores\nsums of FP8 on a GPU: fprop fast, dgrad split, wgrad split\n"),
    ] {
        let table = text(&["explain", recipe, "--gpu", "10.0"], 0);
        assert!(table.ends_with(&format!("runs: {runs}")), "{table}");
    }
}

#[test]
fn explain_reads_the_environment_when_asked() {
    let table = |variables: &[(&str, &str)]| {
        let output = recipe(&["explain", "env"], variables);
        (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
    };
    let (status, text) = table(&[("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1"), ("NVTE_NVFP4_DISABLE_RHT", "1")]);
    assert!(status == Some(0) && text.contains("nvfp4(row-scaled)") && !text.contains("hadamard"), "{text}");
    let (status, text) = table(&[("NVTE_NVFP4_4OVER6", "some"), ("NVTE_USE_FAST_MATH", "x")]);
    assert_eq!(status, Some(1));
    assert_eq!(
        text,
        "error: NVTE_NVFP4_4OVER6: unknown value 'some'; allowed are none, weights, activations, all\n\
         error: NVTE_USE_FAST_MATH: unknown value 'x'; allowed are 0, 1\n"
    );
    // A preset is what its name says, whatever the environment.
    let output = recipe(&["explain", "nvfp4"], &[("NVTE_NVFP4_DISABLE_RHT", "1")]);
    assert!(String::from_utf8(output.stdout).unwrap().contains("hadamard"));
}

#[test]
fn a_recipe_that_does_not_fit_is_refused_with_1() {
    let errors = text(&["explain", "nvfp4+attention"], 1);
    assert!(errors.starts_with("error: layers.0.self_attention.core_attention: attention reads "), "{errors}");
    let output = recipe(&["explain", "nvfp4+attention", "--json"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["errors"].as_array().unwrap().len(), 1);
}

#[test]
fn check_lists_all_errors_and_exits_with_1() {
    let bad = file("bad.toml", "[[rule]]\nslot = 'wieght'\nspec = 'nvfp5'\n[[rule]]\n[defualt]\n");
    let errors = text(&["check", &bad], 1);
    let starts = [":2: unknown slot", ":3: 'nvfp5'", ":4: a rule needs", ":5: unknown key"];
    for (line, start) in errors.lines().zip(starts) {
        assert!(line.starts_with(&format!("error: {bad}{start}")), "{errors}");
    }
    assert_eq!(errors.lines().count(), 5, "the last one is the missing default: {errors}");

    let mixed = file("mixed.toml", "[[rule]]\nslot = 'input'\nspec = 'mxfp8'\n[default]\npreset = 'nvfp4'\n");
    let errors = text(&["check", &mixed], 1);
    // fprop and wgrad of four linear layers and of the experts
    assert_eq!(errors.lines().count(), 10, "{errors}");
    assert!(errors.lines().all(|line| line.contains("rule 1 (line 1) for input")), "{errors}");
}

#[test]
fn check_accepts_a_good_file() {
    let rules = file("accepted.toml", GOOD);
    assert!(
        text(&["check", &rules], 0).ends_with(": no errors, 42 tensors\n"),
        "rules for other models are no mistake"
    );
    let config = file("check.json", r#"{"num_hidden_layers": 1, "num_experts": 2}"#);
    let accepted = text(&["check", &rules, "--model", &config], 0);
    assert!(accepted.ends_with("\n") && !accepted.contains("warning"), "{accepted}");
    let unused = file("unused.toml", &GOOD.replace("down_proj", "dwon_proj"));
    let warned = text(&["check", &unused, "--model", &config], 0);
    assert!(warned.starts_with("warning: rule 1 (line 1, **.dwon_proj) decides nothing"), "{warned}");
    let json: Value = serde_json::from_str(&text(&["check", &unused, "--model", &config, "--json"], 0)).unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1);
}

#[test]
fn formats_of_your_own_are_accepted_by_name() {
    let rules = "[[rule]]\nmodule = 'attention'\nspec = 'high-precision'\n[default]\nspec = 'custom(mine)'\n";
    let rules = file("custom.toml", rules);
    assert!(text(&["check", &rules], 1).contains("hint: --custom mine"));
    text(&["check", &rules, "--custom", "mine"], 0);
}

#[test]
fn what_cannot_be_read_is_an_error() {
    for (args, message) in [
        (
            &["explain", "nvfp5"][..],
            "error: nvfp5: no such file, and unknown preset 'nvfp5'; there are high_precision,",
        ),
        (&["explain", "absent.toml"], "error: absent.toml: "),
        (&["check", "absent.toml"], "error: absent.toml: "),
        (&["explain", "nvfp4", "--model", "absent.json"], "error: --model absent.json: "),
    ] {
        let error = text(args, 3);
        assert!(error.starts_with(message), "{error}");
        assert!(error.matches("os error").count() <= 1, "a cause is said once: {error}");
    }
    let config = file("empty.json", "{}");
    assert!(text(&["explain", "nvfp4", "--model", &config], 3).contains("expected `num_hidden_layers`"));
}
