//! `nvfp4 bench` as a user runs it. Speed itself is not tested.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("bench").args(args).output().unwrap()
}

/// The names are an interface: others compare runs by them.
const NAMES: [&str; 38] = [
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
    "quantize 1x16 mse",
    "quantize 1x16 stochastic",
    "quantize 1x16 hadamard-column",
    "dequantize bf16",
    "dequantize f32",
    "quantize fp8-current amax-given",
    "quantize fp8-current e5m2 amax-given",
    "quantize fp8-current",
    "quantize fp8-current both amax-given",
    "quantize fp8-delayed",
    "quantize fp8-1x128",
    "quantize fp8-1x128 both",
    "quantize fp8-128x128",
    "quantize fp8-128x128 both",
    "quantize mxfp8",
    "quantize mxfp8 e5m2",
    "quantize mxfp8 both",
    "quantize mxfp8 32x32",
    "quantize mxfp8 32x32 both",
    "dequantize fp8-current bf16",
    "dequantize fp8-current f32",
    "dequantize fp8-1x128 bf16",
    "dequantize fp8-128x128 bf16",
    "dequantize mxfp8 bf16",
];

#[test]
fn json_has_a_row_per_operation() {
    let output = bench(&["--size", "64", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
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
    assert_eq!(text.lines().count(), 9, "{text}");
}

#[test]
fn tables_in_markdown_have_the_same_columns() {
    for (args, heading, rows) in [
        ("--size 32 --filter amax --markdown", "| operation | ms | GB/s | copies |", 4),
        ("gemm --m 1,2 --n 32 --k 32 --markdown", "| M | f32 ms | NVFP4 ms | × f32 | of floor | weight-only |", 2),
    ] {
        let text = String::from_utf8(bench(&args.split(' ').collect::<Vec<_>>()).stdout).unwrap();
        let table: Vec<&str> = text.lines().skip_while(|line| !line.is_empty()).skip(1).collect();
        assert!(table[0].starts_with(heading) && table[1].starts_with("|---|---|"), "{text}");
        let columns = |line: &&str| line.matches('|').count();
        assert!(table.iter().all(|line| columns(line) == columns(&table[0])), "{text}");
        assert!(table.len() >= 2 + rows, "{text}");
    }
    let both = bench(&["--markdown", "--json"]);
    assert!(String::from_utf8(both.stderr).unwrap().contains("cannot be used with"));
}

#[test]
fn settings_that_do_not_work_are_errors() {
    for (args, message) in [
        ("--size 100", "--size: expected a multiple of 16 up to 32768, got 100"),
        ("--size 0", "--size: expected a multiple of 16 up to 32768, got 0"),
        ("--filter fry", "--filter: no operation's name contains 'fry'"),
        ("--rows 64", "--rows and --cols are for --device cuda: the CPU's matrix is square, use --size"),
        ("--filter amax-given --cols 64 --device cpu", "--rows and --cols are for --device cuda"),
        ("--filter row+hadamard", "--filter: no operation's name contains 'row+hadamard'"),
        ("--device cuda --size 64", "--size is for --device cpu: on a GPU use --rows and --cols"),
        ("--device cuda --implementation scalar", "--implementation is for --device cpu"),
        ("--device cuda --rows 40", "--rows: expected a multiple of 16, got 40"),
        ("--device cuda --cols 0", "--cols: expected a multiple of 16, got 0"),
        ("--device cuda --rows 1048576 --cols 8192", "expected at most 4294967296 elements, got 1048576 × 8192"),
        ("--device cuda --rows 18446744073709551600", "elements, got 18446744073709551600 × 6144"),
    ] {
        let output = bench(&args.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{args}: {text}");
        assert!(text.contains(message), "{args}: {text}");
    }
}

#[test]
fn a_device_that_is_none_is_an_error() {
    for device in ["gpu", "cuda:", "cuda:one", "cuda:-1"] {
        let output = bench(&["--device", device]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("expected cpu, cuda or cuda:N with N the number of a GPU"), "{text}");
    }
}

#[test]
fn without_a_gpu_or_without_the_feature_it_says_what_to_do() {
    for args in
        [&["bench", "--device", "cuda"][..], &["bench", "gemm", "--device", "cuda"], &["tune"], &["tune", "--reset"]]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        // Hides the GPUs of a machine that has some.
        let output = command.args(args).env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let message = match cfg!(feature = "cuda") {
            true => "error: the CUDA driver ",
            false => "error: --device cuda: this build cannot use a GPU: build it with `--features cuda`",
        };
        assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0));
        assert!(text.starts_with(message), "{text}");
        assert!(!cfg!(feature = "cuda") || text.ends_with("; `nvfp4 doctor` lists what is missing\n"), "{text}");
    }
}

#[test]
fn products_have_a_row_per_m() {
    let output = bench(&["gemm", "--m", "1,3,20", "--n", "48", "--k", "80", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["m"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3, 20]);
    for key in ["nvfp4_ms", "nvfp4_of_floor", "weight_only_ms", "weight_only_of_floor"] {
        assert!(rows.iter().all(|row| row[key].as_f64().unwrap() > 0.0), "{key}");
    }
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(errors.contains("--features baseline"), !cfg!(feature = "baseline"), "{errors}");
    for key in ["f32_ms", "nvfp4_speedup", "weight_only_speedup"] {
        let known = |row: &serde_json::Value| row[key].as_f64().is_some_and(|value| value > 0.0);
        assert!(rows.iter().all(|row| known(row) == cfg!(feature = "baseline")), "{key}");
    }
    let text =
        String::from_utf8(bench(&["gemm", "--m", "2", "--n", "32", "--k", "33", "--implementation", "scalar"]).stdout);
    assert!(text.unwrap().starts_with("N = 32, K = 33, scalar, threads: "));
    let refused = bench(&["gemm", "--m", "0"]);
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && message.contains("--m: expected 1 to 32768, got 0"), "{message}");
}

#[test]
fn products_with_settings_that_do_not_work_are_errors() {
    for (args, message) in [
        ("--k 32769", "--k: expected 1 to 32768, got 32769"),
        ("--verbose", "--verbose is for --device cuda"),
        ("--device cuda --threads 2", "--threads is for --device cpu"),
        ("--device cuda --implementation scalar", "--implementation is for --device cpu"),
        ("--device cuda --m 1,0", "--m: expected 1 to 32768, got 0"),
        ("--device cuda --n 40000", "--n: expected 1 to 32768, got 40000"),
    ] {
        let output = bench(&["gemm"].into_iter().chain(args.split(' ')).collect::<Vec<_>>());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{args}: {text}");
        assert!(text.contains(message), "{args}: {text}");
    }
}
