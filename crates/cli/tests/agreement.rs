//! `nvfp4 agreement` as a user runs it, on the CPU.

use serde_json::Value;
use std::process::{Command, Output};

fn agreement(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    let args = args.split(' ').filter(|arg| !arg.is_empty());
    // Hides the GPUs of a machine that has some.
    command.arg("agreement").args(args).env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
}

#[test]
fn fast_and_strict_nearly_always_agree() {
    // Ragged in both directions.
    let output = agreement("--shape 1000x1001 --seed 5 --json");
    assert!(output.stderr.is_empty(), "progress is for terminals");
    let table: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&table["rows"], &table["cols"], &table["seed"]), (&1000.into(), &1001.into(), &5.into()));
    let cells = table["results"].as_array().unwrap();
    assert_eq!(cells.len(), 3 * 2 * 2 * 2);
    let mut differing = 0;
    for cell in cells {
        let (equal, total) = (cell["equal"].as_u64().unwrap(), cell["total"].as_u64().unwrap());
        let expected = if cell["scaling"] == "tensor 2-D" { 63 * 63 } else { 1000 * 63 };
        assert_eq!(total, expected, "{cell}");
        let percent = cell["percent"].as_f64().unwrap();
        assert!(percent > 99.0 && equal <= total, "{cell}");
        assert!((percent - 100.0 * equal as f64 / total as f64).abs() < 1e-9, "{cell}");
        differing += total - equal;
    }
    assert!(differing > 0, "the two paths do differ at times");
    let labels = |key: &str| {
        let mut labels: Vec<String> = cells.iter().map(|c| c[key].to_string()).collect();
        labels.sort();
        labels.dedup();
        labels.len()
    };
    assert_eq!(["scaling", "bound", "type", "metric"].map(labels), [3, 2, 2, 2]);
}

#[test]
fn the_table_is_a_function_of_the_seed() {
    let [first, again, other] = ["7", "7", "8"].map(|seed| {
        let output = agreement(&format!("--shape 256x512 --seed {seed}"));
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    });
    assert_eq!(first, again);
    let table = |text: &str| text.lines().skip(1).map(String::from).collect::<Vec<_>>();
    assert_ne!(table(&first), table(&other));
    assert_eq!(first.lines().filter(|l| l.contains(" % ")).count(), 6, "{first}");
    assert_eq!(first.lines().filter(|l| l.ends_with(" 8192")).count(), 4, "{first}");
    assert_eq!(first.lines().filter(|l| l.ends_with(" 512")).count(), 2, "{first}");
}

#[test]
fn settings_that_do_not_work_are_errors() {
    for (args, code, message) in [
        ("--shape 4096", 2, "expected ROWSxCOLS, both at least 1, for example 4096x7168"),
        ("--shape 0x16", 2, "expected ROWSxCOLS"),
        ("--shape 16x", 2, "expected ROWSxCOLS"),
        ("--shape 16x16x16", 2, "expected ROWSxCOLS"),
        ("--shape=-1x16", 2, "expected ROWSxCOLS"),
        ("--shape 4294967297x1", 2, "expected at most 4294967296 elements"),
        ("--shape 18446744073709551615x2", 2, "expected at most 4294967296 elements"),
        ("--device tpu", 2, "expected cpu, cuda or cuda:N"),
        ("--device cuda --shape 16x16", 3, if cfg!(feature = "cuda") { "the CUDA driver " } else { "--features cuda" }),
    ] {
        let output = agreement(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args}: {text}");
        assert!(text.contains(message), "{args}: {text}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_gpu_the_doctor_is_named() {
    let text = String::from_utf8(agreement("--device cuda --shape 16x16").stderr).unwrap();
    assert!(text.ends_with("; `nvfp4 doctor` lists what is missing\n"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_runs_short_is_an_error() {
    // 8 GB of values in an address space of 4 GB.
    let limited = format!("ulimit -v 4000000; exec {} agreement --shape 65536x65536", env!("CARGO_BIN_EXE_nvfp4"));
    let output = Command::new("sh").args(["-c", &limited]).env("RAYON_NUM_THREADS", "2").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), &*text), (Some(3), "error: a matrix of 65536 × 65536 elements is too large\n"));
}
