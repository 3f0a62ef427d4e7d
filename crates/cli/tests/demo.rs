//! `nvfp4 demo` as a new user runs it.

use nvfp4_testing::{Need, missing};
use std::process::Command;

#[test]
fn converts_and_verifies_a_generated_checkpoint_and_writes_a_page() {
    let dir = std::env::temp_dir().join(format!("nvfp4-demo-test-{}", std::process::id()));
    let text = dir.to_string_lossy().into_owned();
    let demo =
        || Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(["demo", "--layers", "2", "--dir", &text]).output().unwrap();
    let output = demo();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed} {}", String::from_utf8_lossy(&output.stderr));
    for expected in
        ["generated a Llama of 2 layers", "$ nvfp4 convert", "checks   ok", "for vLLM", "summary  14 weights"]
    {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    let weights = std::fs::read(dir.join("llama-NVFP4/model.safetensors")).unwrap();
    let page = std::fs::read_to_string(dir.join("report.html")).unwrap();
    for part in [
        "<!DOCTYPE html>",
        "prefers-color-scheme: dark",
        "Relative error by layer",
        "How it was made",
        "<polyline",
        "Worst weights",
        "Block scales",
        "embedding",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for outside in ["http://", "https://", "<script", "src=", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    if let Some(dom) = rendered(&dir.join("report.html")) {
        for part in ["<polyline", "<td>model.layers.", "role=\"img\"", "Kept as they were"] {
            assert!(dom.contains(part), "{part} in the browser");
        }
        assert_eq!(dom.matches("<svg").count(), 3);
    }
    // It has a tokenizer, of bytes.
    let words = dir.with_extension("txt");
    std::fs::write(&words, "The quick brown fox jumps over the lazy dog.").unwrap();
    let eval = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["eval", &format!("{text}/llama"), &format!("{text}/llama-NVFP4"), "--context", "22", "--text"])
        .arg(&words)
        .output()
        .unwrap();
    let said = String::from_utf8(eval.stdout).unwrap();
    assert!(said.contains("44 tokens"), "{said} {}", String::from_utf8_lossy(&eval.stderr));
    std::fs::remove_file(&words).unwrap();
    assert!(demo().status.success(), "a second run replaces the first");
    assert!(weights == std::fs::read(dir.join("llama-NVFP4/model.safetensors")).unwrap(), "deterministic");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// What nobody's demo made is neither replaced nor said to be removable.
#[test]
fn a_folder_with_files_of_others_is_refused_and_left_as_it_is() {
    let dir = std::env::temp_dir().join(format!("nvfp4-demo-others-{}", std::process::id()));
    let text = dir.to_string_lossy().into_owned();
    let demo =
        || Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(["demo", "--layers", "1", "--dir", &text]).output().unwrap();
    std::fs::create_dir_all(dir.join("llama")).unwrap();
    let (weights, notes) = (dir.join("llama/model.safetensors"), dir.join("notes.txt"));
    std::fs::write(&weights, "precious").unwrap();
    let refused = demo();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(3) && said.contains("it holds 'llama'"), "{said}");
    assert_eq!(std::fs::read_to_string(&weights).unwrap(), "precious");
    std::fs::remove_dir_all(dir.join("llama")).unwrap();
    assert!(demo().status.success(), "an empty folder");
    std::fs::write(&notes, "precious").unwrap();
    let refused = demo();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("it holds 'notes.txt'"), "{said}");
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "precious");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// The page as a browser holds it. Without Chromium there is none to ask.
fn rendered(page: &std::path::Path) -> Option<String> {
    let args = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"];
    match Command::new("chromium").args(args).arg(format!("file://{}", page.display())).output() {
        Ok(output) => {
            assert!(output.status.success(), "chromium: {}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8(output.stdout).unwrap())
        }
        Err(error) => {
            missing(Need::Browser, format!("the report was not looked at, because chromium does not run: {error}"));
            None
        }
    }
}
