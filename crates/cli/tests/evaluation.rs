//! `eval`, `calibrate` and `generate` as a user meets them: what is refused says what to do.

mod program;

use nvfp4_testing::{Need, missing};
use program::*;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// A small model with a tokenizer of words `a`, `b`, … and their numbers.
fn model(dir: &Folder, words: &Value) -> String {
    let folder = dir.llama("llama", 2, 32);
    let path = Path::new(&folder);
    let mut config: Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    (config["model_type"], config["max_position_embeddings"]) = (json!("llama"), json!(1024));
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let model = json!({ "type": "WordLevel", "vocab": words, "unk_token": "[UNK]" });
    let tokenizer =
        json!({ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" }, "model": model });
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

fn error(args: &[&str]) -> String {
    let out = nvfp4(args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(out.status.code(), Some(3), "{args:?}: {said}");
    said
}

#[test]
fn texts_and_tokenizers_that_do_not_fit_are_refused() {
    let dir = Folder::new("evaluation");
    let folder = model(&dir, &json!({ "[UNK]": 0, "a": 1, "b": 2, "far": 64 }));
    let text = dir.path("text.txt");
    let said = |bytes: &[u8], more: &[&str]| {
        std::fs::write(&text, bytes).unwrap();
        error(&[&["eval", folder.as_str(), "--text", text.as_str(), "-q"], more].concat())
    };
    for (said, wanted) in [
        (said(b"", &[]), "the text has 0 tokens"),
        (said(b"a", &[]), "the text has 1 tokens"),
        (said(b"a \xFF\xFE b", &[]), "UTF-8"),
        (said(b"a b far a", &[]), "the text has the token 64, but the model knows 64"),
        (said(b"a b a", &["--context", "1"]), "take a longer one"),
        (said(b"a b a", &["--context", "1025"]), "the model knows 1024 positions"),
        (said(b"a b a", &["--context", "0"]), "take a longer one"),
        (said(b"a b a", &["--rows", "0"]), "nothing to predict"),
        (error(&["eval", &folder, "--text", &dir.path("absent.txt")]), "absent.txt"),
        (error(&["generate", &folder, "--prompt", &"a ".repeat(1024), "--tokens", "1"]), "give a shorter prompt"),
        (error(&["generate", &folder, "--prompt", "a", "--tokens", "18446744073709551615"]), "ask for fewer tokens"),
        (error(&["generate", &folder, "--prompt", "far"]), "not of one model"),
        (error(&["generate", &folder, "--prompt", ""]), "give some text"),
        (error(&["calibrate", &folder, "--text", &text, "-o", &dir.path("stats.json")]), "ends in .safetensors"),
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    std::fs::write(Path::new(&folder).join("tokenizer.json"), "{").unwrap();
    assert!(said(b"a b a", &[]).contains("tokenizer.json"));
    std::fs::remove_file(Path::new(&folder).join("tokenizer.json")).unwrap();
    assert!(said(b"a b a", &[]).contains("copy it from the original model"));
}

/// The words of each command that runs a model.
fn commands<'a>(folder: &'a str, text: &'a str, stats: &'a str) -> [Vec<&'a str>; 3] {
    [
        vec!["eval", folder, "--text", text, "-q"],
        vec!["calibrate", folder, "--text", text, "-q", "-o", stats],
        vec!["generate", folder, "--prompt", "a b", "--tokens", "4"],
    ]
}

#[test]
fn devices_that_are_none_or_not_there_are_refused() {
    let dir = Folder::new("devices");
    let folder = model(&dir, &json!({ "[UNK]": 0, "a": 1, "b": 2 }));
    let (text, stats) = (dir.path("text.txt"), dir.path("stats.safetensors"));
    std::fs::write(&text, "a b a b a").unwrap();
    for words in commands(&folder, &text, &stats) {
        for device in ["gpu", "cuda:", "cuda:one", "cuda:-1"] {
            let out = nvfp4(&[&words[..], &["--device", device]].concat());
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert_eq!(out.status.code(), Some(2), "{said}");
            assert!(said.contains("expected cpu, cuda or cuda:N with N the number of a GPU"), "{said}");
        }
        // Hides the GPUs of a machine that has some.
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        let out = command.args(&words).args(["--device", "cuda"]).env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let message = match cfg!(feature = "cuda") {
            true => "error: the CUDA driver ",
            false => "error: --device cuda: this build cannot use a GPU: build it with `--features cuda`",
        };
        assert_eq!(out.status.code(), Some(3), "{said}");
        assert!(said.starts_with(message), "{said}");
    }
    assert!(!Path::new(&stats).exists());
    ok(&["eval", &folder, "--text", &text, "-q", "--device", "cpu"]);
}

#[test]
fn models_run_on_a_gpu() {
    #[cfg(not(feature = "cuda"))]
    let there = Err::<(), _>("the feature `cuda` is not in this build");
    #[cfg(feature = "cuda")]
    let there = nvfp4::cuda::Device::open(0);
    if let Err(reason) = there {
        return missing(Need::Gpu, reason);
    }
    let dir = Folder::new("on-gpu");
    let folder = model(&dir, &json!({ "[UNK]": 0, "a": 1, "b": 2, "c": 63 }));
    let (text, stats, made) = (dir.path("text.txt"), dir.path("stats.safetensors"), dir.path("made"));
    std::fs::write(&text, "a b c b a c c a b b a c ".repeat(3)).unwrap();
    for words in commands(&folder, &text, &stats) {
        ok(&[&words[..], &["--device", "cuda"]].concat());
    }
    ok(&["convert", &folder, &made, "--acts", &stats, "-q"]);
    let words = ["eval", &folder, &made, "--text", &text, "-q", "--json"];
    let read = |more: &[&str]| json_of(&[&words[..], more].concat());
    assert!(read(&["--dry-run"])["gpu_memory"].is_null());
    assert!(read(&["--dry-run", "--device", "cuda"])["gpu_memory"].as_u64().unwrap() > 0);
    let found = read(&["--device", "cuda"]);
    assert_eq!(found["runs"].as_array().unwrap().len(), read(&[])["runs"].as_array().unwrap().len());
    assert!(found["runs"][0]["perplexity"]["mean"].as_f64().unwrap() > 1.0);
}

#[test]
fn keys_and_values_get_the_scales_that_were_calibrated() {
    let dir = Folder::new("calibrated-kv");
    let folder = model(&dir, &json!({ "[UNK]": 0, "a": 1, "b": 2, "c": 63 }));
    let (text, stats, made) = (dir.path("text.txt"), dir.path("stats.safetensors"), dir.path("made"));
    std::fs::write(&text, "a b c b a c c a b b a c ".repeat(3)).unwrap();
    ok(&["calibrate", &folder, "--text", &text, "-o", &stats, "-q"]);
    for acts in [&["--acts", "const"][..], &[]] {
        let said = error(&[&["convert", folder.as_str(), made.as_str(), "--kv", "fp8"], acts].concat());
        assert!(said.contains("give --acts FILE.safetensors"), "{said}");
    }
    ok(&["convert", &folder, &made, "--kv", "fp8", "--acts", &stats, "-q"]);
    let read = |path: &Path, name: &str| -> f32 {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        f32::from_le_bytes(file.tensor(name).unwrap().data().try_into().unwrap())
    };
    for layer in 0..2 {
        for letter in ["k", "v"] {
            let found = read(Path::new(&stats), &format!("model.layers.{layer}.self_attn.{letter}_scale"));
            let name = format!("model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale");
            assert_eq!(read(&Path::new(&made).join("model.safetensors"), &name), found);
            assert!(found > 0.0 && found < 1.0);
        }
    }
    ok(&["verify", &made]);
    ok(&["eval", &folder, &made, "--text", &text, "-q"]);
    // Statistics of another model.
    let other = dir.llama("other", 3, 32);
    let said = error(&["convert", &other, &dir.path("not"), "--kv", "fp8", "--acts", &stats]);
    assert!(said.contains("model.layers.2."), "{said}");
}
