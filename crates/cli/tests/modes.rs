//! `nvfp4 modes` as a new user runs it.

use std::process::{Command, Output, Stdio};

fn modes(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("modes").args(args).output().unwrap()
}

#[test]
fn prints_a_row_per_mode_with_sensible_figures() {
    let output = modes(&["--rows", "64", "--cols", "128"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("1×16") || l.starts_with("16×16")).collect();
    assert_eq!(rows.len(), 18, "{text}");
    for row in rows {
        let figures: Vec<f64> = row.split_whitespace().rev().take(4).map(|f| f.parse().unwrap()).collect();
        let [_, bits, sqnr, relerr] = figures[..] else { panic!("{row}") };
        assert!((4.5..5.0).contains(&bits) && (10.0..30.0).contains(&sqnr) && (0.05..0.3).contains(&relerr), "{row}");
    }
}

#[test]
fn a_reader_that_closes_the_pipe_early_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["modes", "--rows", "64", "--cols", "64"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

#[test]
fn sizes_that_do_not_work_are_errors() {
    for (args, message) in [
        (["--rows", "0"], "--rows and --cols must be at least 1"),
        (["--rows", "40"], "--rows: the Hadamard transform needs a multiple of 16, got 40"),
        (["--rows", "many"], "invalid value 'many'"),
        (["--cols", "262145"], "--rows and --cols: expected at most 268435456 elements, got 1024 × 262145"),
        (["--cols", "18446744073709551615"], "elements, got 1024 × 18446744073709551615"),
    ] {
        let output = modes(&args);
        assert!(!output.status.success());
        assert!(String::from_utf8(output.stderr).unwrap().contains(message));
    }
}
