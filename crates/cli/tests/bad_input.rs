//! What is wrong with words, lists, files and names, and what the program says of it.

mod program;

use program::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::path::Path;

#[cfg(unix)]
#[test]
fn lists_that_are_no_files_or_say_a_thing_twice_are_refused_at_once() {
    let dir = Folder::new("lists");
    let (source, target) = (dir.llama("in", 1, 64), dir.path("out"));
    let pipe = dir.path("pipe.json");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let endless = dir.path("endless.json");
    std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
    let [twice, tiny] = [("twice.json", r#"{"a": 1, "a": 2}"#), ("tiny.json", "")].map(|(name, text)| {
        std::fs::write(dir.path(name), text).unwrap();
        dir.path(name)
    });
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("self_attn.{name}"));
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("mlp.{name}"));
    let modules = attention.into_iter().chain(mlp).map(|name| format!("model.layers.0.{name}"));
    let amaxes: std::collections::BTreeMap<String, f64> = modules.map(|module| (module, 1e-44)).collect();
    let gguf = dir.path("out.gguf");
    std::fs::write(&tiny, serde_json::to_string(&amaxes).unwrap()).unwrap();
    let (special, small) = ("where a file is expected", "too small or too large for a float32");
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["convert", &source, &target, "--acts", &pipe], special),
        (vec!["convert", &source, &target, "--acts", &endless], special),
        (vec!["convert", &source, &target, "--acts", &twice], "'a'"),
        (vec!["convert", &source, &target, "--fuse", &pipe], special),
        (vec!["plan", &source, "--fuse", &endless], special),
        (vec!["recipe", "check", &pipe], special),
        (vec!["recipe", "explain", &endless], special),
        (vec!["recipe", "explain", "nvfp4", "--model", &pipe], special),
        (vec!["train", "--recipe", &pipe], special),
        (vec!["train", "--text", &endless], special),
        (vec!["train", "--merge", &pipe], special),
        (vec!["convert", &source, &target, "--acts", &tiny], small),
        (vec!["convert", &source, &target, "--acts", &tiny, "--to", "compressed-tensors"], small),
        (vec!["convert", &source, &gguf, "--acts", &tiny, "--to", "gguf"], small),
        (
            vec!["convert", &source, &target, "--acts", "const=1e-45", "--to", "compressed-tensors"],
            "not a normal float32",
        ),
        (vec!["convert", &source, &target, "--acts", "const=3e38"], "not a normal float32"),
    ];
    for (args, expected) in cases {
        let output = nvfp4(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!Path::new(&target).exists() && !Path::new(&gguf).exists(), "{args:?}");
    }
}

#[test]
fn mistakes_exit_with_2_or_3_and_name_the_fix() {
    let dir = Folder::new("mistakes");
    let source = dir.llama("in", 1, 64);
    let out = dir.path("out");
    for (args, message) in [
        (vec!["--skip", "nothing"], "matches no weight"),
        (vec!["--skip", "*.q_proj"], "servers join q/k/v"),
        (vec!["--scale", "4over6", "--profile", "modelopt"], "4over6 with another producer's profile"),
        (vec!["--acts", "missing.json"], "--acts missing.json"),
        (vec!["--only", "*.q_proj", "--fuse", "off", "--acts", "const=-1"], "expected a positive number"),
        (vec!["--to", "gguf"], "give the target a name that ends in .gguf"),
        (vec!["--fuse", "missing.json"], "--fuse missing.json"),
        (vec!["--fuse", "both"], "expected auto, off or a .json file"),
        (vec!["--device", "gpu"], "expected cpu, cuda or cuda:N"),
        #[cfg(not(feature = "cuda"))]
        (vec!["--device", "cuda"], "build it with `--features cuda`"),
        (vec!["--mem", "lots"], "expected a size like 5GB"),
        (vec!["--threads", "0"], "--threads: expected at least 1"),
    ] {
        let mut all = vec!["convert", &source, &out];
        all.extend(args);
        let output = nvfp4(&all);
        assert!(
            matches!(output.status.code(), Some(2 | 3)) && text(&output).contains(message),
            "{all:?}: {}",
            text(&output)
        );
        assert!(!Path::new(&out).exists());
    }
    ok(&["convert", &source, &out, "-q"]);
    let again = nvfp4(&["convert", &source, &out, "-q"]);
    assert!(again.status.code() == Some(3) && text(&again).contains("already exists"), "{}", text(&again));
    ok(&["convert", &source, &out, "-q", "--force", "--scale", "mse"]);
    assert!(ok(&["completions", "bash"]).contains("nvfp4"));
}

/// A name that would colour a terminal is shown as what it is.
#[test]
fn names_cannot_steer_a_terminal() {
    let dir = Folder::new("terminal");
    let (file, out) = (dir.path("m.safetensors"), dir.path("out"));
    let bytes = vec![0x3C; 16 * 64 * 2];
    let name = "model.\u{1b}[31mred.weight".to_string();
    let view = TensorView::new(Dtype::BF16, vec![16, 64], &bytes).unwrap();
    serialize_to_file([(name, view)], None, Path::new(&file)).unwrap();
    for args in [
        vec!["plan", &file],
        vec!["convert", &file, &out, "-v"],
        vec!["inspect", &out, "-v"],
        vec!["diff", &file, &out],
        vec!["inspect", &out, "--tensor", "\u{1b}[31mred"],
    ] {
        let said = text(&nvfp4(&args));
        assert!(said.contains("\\u{1b}[31mred") && !said.contains('\u{1b}'), "{args:?}: {said}");
    }
}

/// One safetensors file of zeros; shapes may claim anything.
fn zeros(path: &str, tensors: &[(&str, &str, &[usize])], metadata: Value) {
    let (mut header, mut data) = (serde_json::Map::from_iter([("__metadata__".to_string(), metadata)]), Vec::new());
    for (name, dtype, shape) in tensors {
        let (start, bits) = (
            data.len(),
            if *dtype == "BF16" {
                16
            } else if *dtype == "F32" {
                32
            } else {
                8
            },
        );
        let elements: usize = if shape.contains(&0) { 0 } else { shape.iter().product() };
        data.resize(start + elements * bits / 8, 0u8);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.to_string(), entry);
    }
    let header = Value::from(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn names_of_any_length_are_printed_and_control_characters_are_not_obeyed() {
    let dir = Folder::new("names");
    let long = format!("{}.weight", "a".repeat(70_000));
    let (plain, hostile) = (dir.path("plain.safetensors"), "x\u{1b}[31my\rz.weight");
    zeros(&plain, &[(&long, "BF16", &[16, 32]), (hostile, "BF16", &[16, 32])], json!({}));
    for args in [&["plan", &plain][..], &["inspect", "-v", &plain], &["inspect", &plain, "--tensor", "31"]] {
        let text = ok(args);
        assert!(text.contains(r"x\u{1b}[31my\u{d}z") && !text.contains(['\u{1b}', '\r']), "{text}");
        assert!(text.contains(&long[..70_000]) || args.contains(&"--tensor"));
    }
    let other = dir.path("other.safetensors");
    zeros(&other, &[(hostile, "BF16", &[16, 16]), (&long, "BF16", &[16, 32])], json!({}));
    let differ = nvfp4(&["diff", "--bits", &plain, &other]);
    assert_eq!(differ.status.code(), Some(1));
    assert!(text(&differ).contains(r"\u{1b}[31m") && !text(&differ).contains('\u{1b}'));
    let error = text(&nvfp4(&["inspect", &plain, "--tensor", "\u{1b}[31mno"]));
    assert!(error.starts_with(r"error: --tensor \u{1b}[31mno: no such weight"), "{error}");
}

#[test]
fn weights_without_elements_are_refused_by_every_command_that_reads() {
    let dir = Folder::new("zeros");
    let (experts, fp8, swizzled) = (dir.path("e.safetensors"), dir.path("f.safetensors"), dir.path("c.safetensors"));
    let huge = 1 << 40;
    let of_experts: [(&str, &str, &[usize]); 3] =
        [("x", "U8", &[huge, 0, 0]), ("x_weight_scale", "F8_E4M3", &[huge, 0, 0]), ("x_weight_scale_2", "F32", &[1])];
    zeros(&experts, &of_experts, json!({}));
    zeros(&fp8, &[("x.weight", "F8_E4M3", &[4, 0]), ("x.weight_scale_inv", "F32", &[1, 0])], json!({}));
    let of_comfy: [(&str, &str, &[usize]); 3] =
        [("x.weight", "U8", &[4, 0]), ("x.weight_scale", "F8_E4M3", &[0]), ("x.weight_scale_2", "F32", &[])];
    zeros(&swizzled, &of_comfy, json!({ "_quantization_metadata": "{}" }));
    let out = dir.path("out");
    for (file, from) in [(&experts, &["--from", "modelopt"][..]), (&fp8, &[]), (&swizzled, &[])] {
        for command in [&["verify", file][..], &["inspect", file], &["inspect", "-v", file], &["dequant", file, &out]] {
            let output = nvfp4(&[command, from].concat());
            assert_eq!(output.status.code(), Some(3), "{}", text(&output));
            assert!(text(&output).contains("tensor 'x") && text(&output).contains("has no elements"));
        }
    }
    assert!(!Path::new(&out).exists());
}

/// A file that does not exist: the system's reason is said, and said once.
#[test]
fn errors_of_the_system_are_said_once() {
    let output = text(&nvfp4(&["inspect", "nowhere"]));
    assert_eq!(output.matches("No such file").count(), 1, "{output}");
}
