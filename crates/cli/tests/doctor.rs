//! `nvfp4 doctor` where there is no GPU, or none to be seen.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn doctor(args: &[&str], cache: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.arg("doctor").args(args).env("NVFP4_CACHE_DIR", cache);
    // Hides the GPUs of a machine that has some.
    command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
}

/// The report as text and as JSON; either way it is no failure.
fn reports(cache: &Path) -> (String, Value) {
    let (text, json) = (doctor(&[], cache), doctor(&["--json"], cache));
    for output in [&text, &json] {
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    (String::from_utf8(text.stdout).unwrap(), serde_json::from_slice(&json.stdout).unwrap())
}

#[test]
fn the_report_says_what_runs_and_what_is_missing() {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-cache");
    let (text, json) = reports(&cache);
    assert!(text.starts_with(&format!("nvfp4    {}\ncpu      scalar", env!("CARGO_PKG_VERSION"))), "{text}");
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["cpu"]["implementations"][0], "scalar");
    assert!(json["cpu"]["threads"].as_u64().unwrap() > 0);
    assert!(text.lines().nth(2).unwrap().starts_with("memory   "), "{text}");
    if cfg!(target_os = "linux") {
        let bytes = |key: &str| json["memory"][key].as_u64().unwrap();
        assert!(0 < bytes("available") && bytes("available") < bytes("bytes"), "{json}");
    }
    let implementations = json["cpu"]["implementations"].as_array().unwrap();
    assert!(!implementations.contains(&Value::from("cuda")));

    let cuda = &json["cuda"];
    assert_eq!(cuda["built"], cfg!(feature = "cuda"));
    if !cfg!(feature = "cuda") {
        assert_eq!(text.lines().count(), 4, "{text}");
        let line = "cuda     not in this build: install it with the feature `cuda` (cargo install --locked --path crates/cli --features cuda; for Python see docs/python.md)";
        assert!(text.ends_with(&format!("{line}\n")), "{text}");
        return;
    }
    for line in ["driver   ", "nvrtc    ", "gpu      none", "cache    "] {
        assert_eq!(text.lines().filter(|l| l.starts_with(line)).count(), 1, "{line}: {text}");
    }
    assert!(text.contains("the CUDA driver "), "the sentence about what is missing: {text}");
    assert_eq!(cuda["gpus"].as_array().unwrap().len(), 0);
    assert_eq!(cuda["cache"]["folder"].as_str(), cache.to_str());
    assert_eq!(cuda["cache"]["writable"], true);
    let problems = cuda["problems"].as_array().unwrap();
    assert!(!problems.is_empty());
    for problem in problems {
        assert_eq!(text.matches(problem.as_str().unwrap()).count(), 1, "each problem is said once: {text}");
    }
}

#[test]
#[cfg(feature = "cuda")]
fn a_cache_that_cannot_be_written_is_said() {
    // A file where the folder should be.
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-file");
    std::fs::write(&file, "").unwrap();
    let (text, json) = reports(&file);
    assert!(text.contains("doctor-file cannot be written, so kernels are compiled anew"), "{text}");
    assert_eq!(json["cuda"]["cache"]["writable"], false);
}
