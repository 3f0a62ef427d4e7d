//! `nvfp4 bench` as a user runs it. Speed itself is not tested.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("bench").args(args).output().unwrap()
}

/// The names are an interface: others compare runs by them.
const NAMES: [&str; 18] = [
    "amax",
    "quantize 1x16 amax-given",
    "quantize 1x16",
    "quantize 1x16 row-scaled",
    "quantize 16x16",
    "quantize 1x16 both",
    "quantize 1x16 4over6-mae-strict",
    "quantize 1x16 4over6-mae-fast",
    "quantize 1x16 4over6-mse-strict",
    "quantize 1x16 4over6-mse-fast",
    "quantize 16x16 4over6-mae-strict",
    "quantize 16x16 4over6-mae-fast",
    "quantize 16x16 4over6-mse-strict",
    "quantize 16x16 4over6-mse-fast",
    "quantize 1x16 stochastic",
    "quantize 1x16 hadamard-column",
    "dequantize bf16",
    "dequantize f32",
];

#[test]
fn json_has_a_row_per_operation() {
    let output = bench(&["--size", "64", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, NAMES);
    for key in ["ms", "gbps", "copies"] {
        assert!(rows.iter().all(|row| row[key].as_f64().unwrap() > 0.0), "{key}");
    }
}

#[test]
fn a_filter_and_one_thread_and_the_scalar_implementation() {
    let output = bench(&["--size", "32", "--filter", "dequantize", "--threads", "1", "--implementation", "scalar"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("32 × 32 bf16, scalar, 1 thread\n"), "{text}");
    assert_eq!(text.lines().count(), 4, "{text}");
}

#[test]
fn settings_that_do_not_work_are_errors() {
    for (args, message) in [
        (["--size", "100"], "--size: expected a multiple of 16 up to 32768, got 100"),
        (["--size", "0"], "--size: expected a multiple of 16 up to 32768, got 0"),
        (["--filter", "fry"], "--filter: no operation's name contains 'fry'"),
    ] {
        let output = bench(&args);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8(output.stderr).unwrap().contains(message));
    }
}
