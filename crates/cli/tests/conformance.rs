//! `nvfp4 conformance` as a user runs it: all golden cases, and what it says of cases that are wrong.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden")
}

fn golden_fp8() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden-fp8")
}

fn conformance(args: &[&str], dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("conformance").args(args).arg(dir).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A folder with one file in it, and what `conformance` says of it.
fn run_on(test: &str, name: &str, bytes: &[u8]) -> (Option<i32>, String) {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join(name), bytes).unwrap();
    let output = conformance(&[], &dir);
    (output.status.code(), stdout(&output))
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(golden().join(name)).unwrap()
}

const CASE: &str = "quantize__tensor1d__f32__has_nan__32x64__s45000.safetensors";

/// The case with its string metadata changed.
fn with_metadata(name: &str, change: impl Fn(&mut HashMap<String, String>)) -> Vec<u8> {
    let bytes = read(name);
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    change(&mut metadata);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    safetensors::serialize(file.iter(), Some(metadata)).unwrap()
}

#[test]
fn all_golden_cases_match() {
    let output = conformance(&[], &golden());
    assert!(stdout(&output).ends_with("\n711 cases, 0 mismatches\n"), "{}", stdout(&output));
    assert!(stdout(&output).contains("\nquantize tensor1d 4over6 MAE strict 448: 18 cases, 0 mismatches\n"));
    assert!(output.status.success());
}

#[test]
fn all_golden_cases_of_fp8_match() {
    let output = conformance(&[], &golden_fp8());
    assert!(stdout(&output).ends_with("\n75 cases, 0 mismatches\n"), "{}", stdout(&output));
    assert!(stdout(&output).contains("\nfp8_block 1x128 e4m3 powers of two epsilon: 1 case, 0 mismatches\n"));
    assert!(output.status.success());
}

#[test]
fn every_implementation_alone_matches() {
    for implementation in nvfp4_kernels::Implementation::available() {
        for (dir, cases) in [(golden(), 711), (golden_fp8(), 75)] {
            let output = conformance(&["--implementation", &implementation.to_string()], &dir);
            assert!(stdout(&output).starts_with(&format!("implementations: {implementation}; ")));
            assert!(stdout(&output).ends_with(&format!("\n{cases} cases, 0 mismatches\n")));
        }
    }
}

/// A case is known by its metadata alone, and files of both folders may lie together under any names.
#[test]
fn names_of_files_do_not_matter() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("other-names");
    std::fs::create_dir_all(&dir).unwrap();
    let mut cases = 0;
    for entry in std::fs::read_dir(golden_fp8()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            std::fs::copy(path, dir.join(format!("{cases}.safetensors"))).unwrap();
            cases += 1;
        }
    }
    std::fs::write(dir.join("x.safetensors"), read(CASE)).unwrap();
    let output = conformance(&[], &dir);
    assert!(stdout(&output).ends_with(&format!("\n{} cases, 0 mismatches\n", cases + 1)), "{}", stdout(&output));
}

/// The exit code and the error text of a run whose output nobody reads.
fn unread(dir: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    let mut child = command.arg("conformance").arg(dir).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_reader_that_closes_the_pipe_early_changes_nothing() {
    assert_eq!(unread(&golden()), (Some(0), String::new()));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unread");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("x.safetensors"), b"").unwrap();
    assert_eq!(unread(&dir), (Some(1), String::new()), "a case that cannot run fails, read or unread");
}

#[test]
fn an_unknown_implementation_is_refused_with_the_known_ones() {
    let output = conformance(&["--implementation", "abacus"], &golden());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("'abacus'; available: scalar"), "{message}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_of_the_machine() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    // Hides the GPUs of a machine that has some.
    let command = command.args(["conformance", "--implementation", "cuda"]).env("CUDA_VISIBLE_DEVICES", "-1");
    let output = command.arg(golden()).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    let which = if cfg!(feature = "cuda") { "this machine" } else { "this build" };
    assert!(message.starts_with(&format!("error: {which} cannot run 'cuda': ")), "{message}");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_wrong_byte_is_named_by_file_tensor_index_and_values() {
    let mut bytes = read(CASE);
    let (n, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let (start, _) = header.info("data_kernel").unwrap().data_offsets;
    let position = 8 + n + start + 5;
    let expected = bytes[position];
    bytes[position] ^= 1;
    let (code, text) = run_on("wrong-byte", CASE, &bytes);
    assert_eq!(code, Some(1));
    let line = format!(
        "mismatch: {CASE}: scalar kernel specials: data_kernel[5]: expected {:#04x}, got {expected:#04x}\n",
        expected ^ 1
    );
    assert!(text.contains(&line), "{text}");
    assert!(text.ends_with("\n1 case, 1 mismatch\n"));
}

#[test]
fn an_unknown_kind_is_an_error_not_a_skip() {
    let bytes = with_metadata(CASE, |m| drop(m.insert("kind".into(), "poem".into())));
    let (code, text) = run_on("unknown-kind", "x.safetensors", &bytes);
    assert_eq!(code, Some(1));
    assert!(text.contains("error: x.safetensors: unknown kind of case 'poem'"), "{text}");
    assert!(text.ends_with("0 cases, 0 mismatches, 1 file could not be run\n"));
}

#[test]
fn missing_or_senseless_metadata_is_an_error() {
    let bytes = with_metadata(CASE, |m| drop(m.remove("scaling")));
    let (code, text) = run_on("missing-metadata", "x.safetensors", &bytes);
    assert_eq!(code, Some(1));
    assert!(text.contains("metadata 'scaling' is missing"), "{text}");
    let bytes = with_metadata(CASE, |m| drop(m.insert("scaling".into(), "tensor3d".into())));
    let (_, text) = run_on("senseless-metadata", "x.safetensors", &bytes);
    assert!(text.contains("metadata 'scaling': expected one of tensor1d, row1d, tensor2d, got 'tensor3d'"), "{text}");
}

#[test]
fn a_case_that_does_not_record_an_amax_is_an_error() {
    for name in [CASE, "rht__sign__bf16__outliers__16x16__s50008.safetensors"] {
        let bytes = read(name);
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for victim in ["amax", "amax_t"] {
            let tensors = file.iter().filter(|(tensor, _)| *tensor != victim);
            let changed = safetensors::serialize(tensors, header.metadata().clone()).unwrap();
            let (code, text) = run_on("no-amax", "x.safetensors", &changed);
            assert_eq!(code, Some(1), "{name}");
            assert!(text.contains(&format!("error: x.safetensors: tensor '{victim}' is missing")), "{name}: {text}");
        }
    }
}

#[test]
fn truncated_files_are_errors_at_every_length() {
    let bytes = read("swizzle__16x16.safetensors");
    for len in [0, 1, 7, 8, 9, 100, bytes.len() / 2, bytes.len() - 1] {
        let (code, text) = run_on("truncated", "x.safetensors", &bytes[..len]);
        assert_eq!(code, Some(1), "{len} bytes");
        assert!(text.contains("error: x.safetensors: not a valid safetensors file"), "{len} bytes: {text}");
    }
}

#[test]
fn hostile_headers_are_errors() {
    let file = |header: &str| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes
    };
    let huge = 1u64 << 62;
    let cases = [
        ("length", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
        ("json", file("{\"input\": ")),
        ("offsets", file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#)),
        ("beyond", file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#)),
        ("overflow", file(&format!(r#"{{"a":{{"dtype":"F32","shape":[{huge},{huge}],"data_offsets":[0,4]}}}}"#))),
        ("empty-huge", file(&format!(r#"{{"a":{{"dtype":"F32","shape":[{huge},0],"data_offsets":[0,0]}}}}"#))),
        ("no-metadata", file("{}")),
    ];
    for (name, bytes) in cases {
        let (code, text) = run_on(&format!("hostile-{name}"), "x.safetensors", &bytes);
        assert_eq!(code, Some(1), "{name}: {text}");
        assert!(text.contains("error: x.safetensors: "), "{name}: {text}");
    }
}

/// Swaps tensors for others of another shape or type, one at a time: never a panic, never a pass.
#[test]
fn tensors_of_the_wrong_shape_or_type_are_errors_or_mismatches() {
    let mut kinds = HashMap::new();
    for entry in [golden(), golden_fp8()].iter().flat_map(|dir| std::fs::read_dir(dir).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let (_, header) = safetensors::SafeTensors::read_metadata(&std::fs::read(&path).unwrap()).unwrap();
            let metadata = header.metadata().clone().unwrap();
            // Both decoding tables of FP8 are called the same; that of E8M0 has another tensor.
            let key = (metadata["kind"].clone(), metadata.get("table").cloned(), header.tensors().len());
            kinds.entry(key).or_insert(path);
        }
    }
    for path in kinds.values() {
        let (bytes, name) = (std::fs::read(path).unwrap(), path.display());
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for victim in file.names() {
            let replacement =
                safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![3, 1], &[1, 2, 3]).unwrap();
            let tensors: Vec<_> =
                file.iter().map(|(n, view)| (n, if n == victim { replacement.clone() } else { view })).collect();
            let changed = safetensors::serialize(tensors, header.metadata().clone()).unwrap();
            let (code, text) = run_on("wrong-tensor", "x.safetensors", &changed);
            assert_eq!(code, Some(1), "{name} {victim}: {text}");
            assert!(text.contains("x.safetensors: "), "{name} {victim}: {text}");
        }
    }
}

#[test]
fn a_folder_without_cases_or_no_folder_is_an_error() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("empty");
    std::fs::create_dir_all(&dir).unwrap();
    for (dir, message) in [(dir.clone(), "holds no .safetensors file"), (dir.join("nowhere"), "cannot read the folder")]
    {
        let output = conformance(&[], &dir);
        assert_eq!(output.status.code(), Some(3));
        assert!(String::from_utf8(output.stderr).unwrap().contains(message));
    }
}
