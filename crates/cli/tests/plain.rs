//! What commands say of a checkpoint that is not quantized, and of a target that is there already.

use std::path::Path;
use std::process::Command;

/// The exit code, standard output and standard error.
fn nvfp4(words: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(words).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn plain_checkpoints_are_compared_by_their_bytes_and_not_decoded() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("plain-{}", std::process::id()));
    let path = |name: &str| root.join(name).to_str().unwrap().to_string();
    std::fs::create_dir_all(&root).unwrap();
    for (folder, seed) in [("a", "0"), ("b", "1")] {
        assert_eq!(nvfp4(&["demo", "--dir", &path(folder), "--layers", "1", "--seed", seed]).0, Some(0));
    }
    let (plain, other) = (path("a/llama"), path("b/llama"));

    let (code, out, _) = nvfp4(&["diff", &plain, &plain]);
    assert_eq!((code, out.as_str()), (Some(0), "identical: 12 tensors\n"));
    let (code, _, said) = nvfp4(&["diff", &plain, &other]);
    assert!(code == Some(3) && said.contains("12 tensors differ; --bits lists what differs"), "{said}");

    let (code, out, said) = nvfp4(&["dequant", &plain, &path("out")]);
    assert!(code == Some(3) && out.is_empty() && said.contains("there is nothing to decode"), "{out}{said}");
    assert!(!root.join("out").exists());

    // The target is looked at before anything is said of the source.
    let (code, out, said) = nvfp4(&["convert", &plain, &path("a/llama-NVFP4")]);
    assert!(code == Some(3) && out.is_empty() && said.contains("already exists"), "{out}{said}");
    assert!(said.ends_with("hint: --force replaces it\n"), "{said}");
    std::fs::remove_dir_all(&root).unwrap();
}
