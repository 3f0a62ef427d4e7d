//! Exit codes, which are the same for every command; what an interrupt gives is tested with conversions.

use std::process::Command;

#[test]
fn exit_codes_say_what_kind_of_end_it_was() {
    let rules = format!("{}/exit-rules.toml", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&rules, "[default]\npreset = 'nvfp4'\nspec = 'nvfp4'\n").unwrap();
    for (words, code) in [
        (vec!["modes"], 0),
        (vec!["--help"], 0),
        (vec!["recipe", "check", &rules], 1),
        (vec!["recipe", "explain", "nvfp4+attention"], 1),
        (vec![], 2),
        (vec!["frobnicate"], 2),
        (vec!["verify"], 2),
        (vec!["convert", "a", "b", "--to", "onnx"], 2),
        (vec!["verify", "nowhere"], 3),
        (vec!["convert", "nowhere", "out"], 3),
        (vec!["diff", "nowhere", "nowhere", "--bits"], 3),
        (vec!["conformance", "nowhere"], 3),
        (vec!["recipe", "check", "nowhere"], 3),
        (vec!["bench", "--size", "100"], 3),
        (vec!["tune", "--reset", "--dry-run"], 2),
        (vec!["tune", "--device", "cpu"], 3),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(&words).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn help_says_what_the_exit_codes_mean() {
    let output = Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("--help").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for code in ["0 done", "1 checks failed", "2 wrong usage", "3 error", "130 interrupted"] {
        assert!(text.contains(code), "{code}: {text}");
    }
}
