//! The commands about checkpoints, as a user runs them.

mod program;

use program::*;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

#[test]
fn convert_verify_inspect_diff_and_back() {
    let dir = Folder::new("tour");
    let source = dir.llama("in", 2, 64);
    let (out, ct, back) = (dir.path("out"), dir.path("ct"), dir.path("back"));

    let plan = ok(&["plan", &source]);
    assert!(plan.contains("nvfp4 (q/k/v)") && plan.contains("output head") && plan.contains("total "), "{plan}");
    assert_eq!(ok(&["convert", &source, &out, "--dry-run"]), plan);
    let weights = json_of(&["plan", &source, "--json"])["weights"].as_array().unwrap().len();
    assert_eq!(weights, 16);

    let converted = nvfp4(&["convert", &source, &out]);
    let printed = text(&converted);
    assert_eq!(converted.status.code(), Some(0), "{printed}");
    for expected in ["14 weights -> NVFP4", "2 x q/k/v", "[  14/14]", "worst", "checks   ok", "vllm serve"] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    assert!(ok(&["verify", &out]).contains("14 NVFP4 weights (ModelOpt), for vLLM"));
    let failed = nvfp4(&["verify", &out, "--for", "transformers"]);
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed));
    assert!(text(&failed).contains("--to compressed-tensors"));
    let failed = nvfp4(&["verify", &source, "--json"]);
    assert_eq!(failed.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&failed.stdout).unwrap();
    assert_eq!(report["findings"][0]["severity"], "problem");

    ok(&["convert", &out, &ct, "--to", "compressed-tensors", "-q"]);
    ok(&["verify", &ct, "--for", "transformers"]);
    let comfy = dir.path("comfy.safetensors");
    assert!(ok(&["convert", &out, &comfy, "--to", "comfyui"]).contains("load it in ComfyUI"));
    assert!(ok(&["verify", &comfy, "--for", "comfyui"]).contains("14 NVFP4 weights (ComfyUI), for ComfyUI"));
    assert!(ok(&["inspect", &comfy]).contains("dialect  ComfyUI"));
    let inspected = ok(&["inspect", &ct]);
    assert!(inspected.contains("dialect  compressed-tensors") && inspected.contains("entropy"), "{inspected}");
    assert_eq!(json_of(&["inspect", &out, "--json"])["nvfp4_weights"], 14);
    let block = ok(&["inspect", &out, "--tensor", "layers.0.mlp.up_proj", "--block", "3,1"]);
    assert!(block.contains("columns 16..32") && block.contains("scale    0x"), "{block}");
    assert_eq!(nvfp4(&["inspect", &out, "--tensor", "up_proj"]).status.code(), Some(3));

    let diff = ok(&["diff", &source, &out, "--top", "3"]);
    assert!(diff.contains("… and 11 more") && diff.contains("summary  14 weights"), "{diff}");
    let error = json_of(&["diff", &source, &out, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!((0.05..0.15).contains(&error), "{error}");
    assert!(ok(&["diff", &out, &out, "--bits"]).contains("identical"));
    assert_eq!(nvfp4(&["diff", &out, &ct, "--bits"]).status.code(), Some(1));

    let lone = dir.path("lone.safetensors");
    std::fs::copy(format!("{out}/model.safetensors"), &lone).unwrap();
    let refused = nvfp4(&["diff", &source, &lone]);
    assert!(refused.status.code() == Some(3) && text(&refused).contains("--from modelopt"), "{}", text(&refused));
    assert_eq!(json_of(&["diff", &source, &lone, "--from", "modelopt", "--json"])["total"]["relerr"], error);
    let both = nvfp4(&["diff", &out, &lone, "--from", "modelopt", "--bits"]);
    assert!(both.status.code() == Some(2) && text(&both).contains("cannot be used with"), "{}", text(&both));
    // A damaged checkpoint that says whose it is is refused for what is wrong with it, whatever --from says.
    let damaged = dir.path("damaged");
    std::fs::create_dir(&damaged).unwrap();
    for file in ["config.json", "hf_quant_config.json"] {
        std::fs::copy(format!("{out}/{file}"), format!("{damaged}/{file}")).unwrap();
    }
    let bytes = std::fs::read(&lone).unwrap();
    let name = b"up_proj.weight_scale\"";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    let renamed = [&bytes[..at], b"up_proj.weight_other\"", &bytes[at + name.len()..]].concat();
    std::fs::write(format!("{damaged}/model.safetensors"), renamed).unwrap();
    let refused = nvfp4(&["diff", &source, &damaged, "--from", "plain"]);
    assert!(text(&refused).contains("up_proj.weight_scale' is missing"), "{}", text(&refused));

    ok(&["dequant", &out, &back]);
    assert!(ok(&["inspect", &back]).contains("dialect  not quantized"));
    let again = json_of(&["diff", &out, &back, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!(again < 0.004, "one rounding to BF16: {again}");
    let config: Value = serde_json::from_slice(&std::fs::read(format!("{back}/config.json")).unwrap()).unwrap();
    assert_eq!(config["hidden_size"], 64);
    assert_eq!(config.get("quantization_config"), None);
}

#[test]
fn dequant_writes_the_type_that_is_asked_for() {
    let dir = Folder::new("dtype");
    let (source, packed) = (dir.llama("in", 1, 64), dir.path("packed"));
    ok(&["convert", &source, &packed, "-q"]);
    for (dtype, name) in [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")] {
        let plain = dir.path(dtype);
        let printed = ok(&["dequant", &packed, &plain, "--dtype", dtype]);
        assert!(printed.contains(&format!("7 weights decoded to {name}")), "{printed}");
        let weight = ok(&["inspect", &plain, "--tensor", "layers.0.mlp.up_proj"]);
        assert!(weight.contains(&format!("128x64  {name}\n")), "{weight}");
    }
    let exact = json_of(&["diff", &packed, &dir.path("f32"), "--json"])["total"]["relerr"].as_f64().unwrap();
    assert_eq!(exact, 0.0, "F32 holds every decoded value");
    let wrong = nvfp4(&["dequant", &packed, &dir.path("f8"), "--dtype", "f8"]);
    assert!(wrong.status.code() == Some(2) && text(&wrong).contains("bf16, f16, f32"), "{}", text(&wrong));
}

#[test]
fn verbose_says_what_happens_to_every_weight_and_why() {
    let dir = Folder::new("verbose");
    let (source, packed, plain) = (dir.llama("in", 1, 64), dir.path("packed"), dir.path("plain"));
    let said = text(&nvfp4(&["convert", &source, &packed, "-v"]));
    for expected in [
        "[   9/9]",
        "lm_head  64x64  keep: output head",
        "model.embed_tokens  64x64  keep: embedding",
        "q_proj  64x64  nvfp4, one tensor scale for q/k/v  8.19 kB -> 2.31 kB  relerr 0.",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let said = text(&nvfp4(&["dequant", &packed, &plain, "--verbose"]));
    assert!(said.contains("decode: NVFP4") && said.contains("lm_head  64x64  keep: not quantized"), "{said}");
    let both = nvfp4(&["convert", &source, &dir.path("no"), "-q", "-v"]);
    assert!(both.status.code() == Some(2) && text(&both).contains("cannot be used with"), "{}", text(&both));

    let said = ok(&["inspect", &packed, "-v"]);
    let line = said.lines().find(|l| l.contains("layers.0.mlp.up_proj")).unwrap();
    assert!(line.contains("128x64  NVFP4") && line.contains(" to 0x7e") && line.ends_with("gate/up"), "{line}");
    assert!(!ok(&["inspect", &packed]).contains("up_proj"));
    let report = json_of(&["inspect", &packed, "--verbose", "--json"]);
    assert_eq!(report["weights"].as_array().unwrap().len(), 9);
    let file = dir.path("m.gguf");
    ok(&["convert", &source, &file, "--to", "gguf", "-q"]);
    assert!(ok(&["inspect", &file, "-v"]).contains("blk.0.ffn_up.weight"));
}

#[test]
fn different_scales_in_a_fused_group_are_found_and_fixed() {
    let dir = Folder::new("fix");
    let (source, apart, kept) = (dir.llama("in", 2, 64), dir.path("apart"), dir.path("kept"));
    let (fixed, page) = (dir.path("fixed"), dir.path("page.html"));
    let made = nvfp4(&["convert", &source, &apart, "-q", "--fuse", "off"]);
    assert!(made.status.code() == Some(1) && text(&made).contains("tensor scales differ"), "{}", text(&made));
    for command in [vec!["verify", &apart], vec!["inspect", &apart], vec!["convert", &apart, &kept, "-q"]] {
        let said = text(&nvfp4(&command));
        assert!(said.contains("[fix: nvfp4 convert --fix-scales]"), "{command:?}: {said}");
    }
    let plan = ok(&["plan", &apart, "--fix-scales"]);
    assert!(plan.contains("rescale (q/k/v)") && plan.contains("relabel (gate/up)"), "{plan}");
    let printed = ok(&["convert", &apart, &fixed, "-q", "--fix-scales", "--report", &page]);
    let sentence = "6 weights got the tensor scale of what they are joined with: 0 exactly, 6 requantized (relerr 0.0";
    assert!(printed.contains(&format!("fixed    {sentence}")) && printed.contains("checks   ok"), "{printed}");
    assert!(std::fs::read_to_string(&page).unwrap().contains(sentence));
    ok(&["verify", &fixed]);
    let error = json_of(&["diff", &source, &fixed, "--json"])["total"]["relerr"].as_f64().unwrap();
    assert!(error < 0.15, "{error}");
    let again = ok(&["convert", &fixed, &dir.path("again"), "-q", "--fix-scales"]);
    assert!(again.contains("fixed    nothing: no joined NVFP4 weights differ in their tensor scale"), "{again}");
}

#[test]
fn a_gguf_file_is_written_inspected_and_verified() {
    let dir = Folder::new("gguf");
    let source = dir.llama("in", 2, 64);
    let (out, page) = (dir.path("out.gguf"), dir.path("page.html"));
    assert!(ok(&["plan", &source, "--to", "gguf"]).contains("nvfp4 (q/k/v)"));
    let printed = ok(&["convert", &source, &out, "--to", "gguf", "-q", "--report", &page]);
    assert!(printed.contains("note     tokenizer: none") && printed.contains("next     llama-cli -m "), "{printed}");
    assert!(std::fs::read_to_string(&page).unwrap().contains("<polyline"));
    let inspected = ok(&["inspect", &out]);
    assert!(inspected.starts_with("dialect  GGUF  llama\n") && inspected.contains("14 weights, 4.5"), "{inspected}");
    let report = json_of(&["inspect", &out, "--json"]);
    assert_eq!((&report["dialect"], &report["nvfp4_weights"]), (&json!("GGUF"), &json!(14)));
    let block = ok(&["inspect", &out, "--tensor", "blk.0.ffn_up", "--block", "3,1"]);
    assert!(block.contains("columns 16..32") && block.contains("scale    0x"), "{block}");
    ok(&["verify", &out, "--for", "llama.cpp"]);
    let wrong = nvfp4(&["verify", &out]);
    assert!(wrong.status.code() == Some(1) && text(&wrong).contains("--for llama.cpp"), "{}", text(&wrong));
    std::fs::write(dir.path("cut.gguf"), &std::fs::read(&out).unwrap()[..5000]).unwrap();
    let cut = nvfp4(&["inspect", &dir.path("cut.gguf")]);
    assert!(cut.status.code() == Some(3) && text(&cut).contains("truncated"), "{}", text(&cut));
}

#[test]
fn a_report_is_refused_before_the_conversion_and_replaces_reports_only() {
    let dir = Folder::new("report");
    let source = dir.llama("in", 1, 64);
    let (out, other, page) = (dir.path("out"), dir.path("notes.txt"), dir.path("page.html"));
    std::fs::write(&other, "mine").unwrap();
    let weights = std::fs::read(format!("{source}/model.safetensors")).unwrap();
    for (report, message) in [
        (dir.path("missing/r.html"), "there is no folder"),
        (dir.path("in"), "this is a folder"),
        (format!("{source}/model.safetensors"), "this is in the source"),
        (format!("{source}/r.html"), "this is in the source"),
        (format!("{out}/r.html"), "there is no folder"),
        (other.clone(), "there is a file that is not a report"),
    ] {
        let output = nvfp4(&["convert", &source, &out, "-q", "--report", &report]);
        assert!(output.status.code() == Some(3) && text(&output).contains(message), "{report}: {}", text(&output));
        assert!(!Path::new(&out).exists() && !Path::new(&format!("{out}.partial")).exists());
    }
    assert_eq!(std::fs::read(format!("{source}/model.safetensors")).unwrap(), weights);
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "mine");
    ok(&["convert", &source, &out, "-q", "--report", &page]);
    let first = std::fs::read(&page).unwrap();
    ok(&["convert", &source, &dir.path("again"), "-q", "--report", &page]);
    let second = std::fs::read_to_string(&page).unwrap();
    assert!(second.contains(&dir.path("again")) && !String::from_utf8_lossy(&first).contains(&dir.path("again")));
    let inside = nvfp4(&["convert", &source, &out, "-q", "--force", "--report", &format!("{out}/r.html")]);
    assert!(text(&inside).contains("this is in the target"), "{}", text(&inside));
    ok(&["convert", &source, &out, "-q", "--force", "--report", &other]);
    assert_eq!(std::fs::read(&other).unwrap(), first);
}

/// A cache keeps files elsewhere and has links to them: neither is replaced by a report, whatever is forced.
#[cfg(unix)]
#[test]
fn a_report_never_takes_the_place_of_a_file_that_the_source_links_to() {
    let dir = Folder::new("links");
    std::fs::create_dir(dir.path("snapshots")).unwrap();
    std::fs::create_dir(dir.path("blobs")).unwrap();
    let source = dir.llama("snapshots/in", 1, 64);
    let (link, blob, out) = (format!("{source}/model.safetensors"), dir.path("blobs/a"), dir.path("out"));
    std::fs::rename(&link, &blob).unwrap();
    std::os::unix::fs::symlink("../../blobs/a", &link).unwrap();
    let before = std::fs::read(&blob).unwrap();
    for report in [&link, &blob] {
        let output = nvfp4(&["convert", &source, &out, "-q", "--force", "--report", report]);
        assert!(output.status.code() == Some(3) && text(&output).contains("in the source"), "{}", text(&output));
        assert!(std::fs::read(&blob).unwrap() == before && !Path::new(&out).exists());
    }
}

/// Commands in another program's process: it is not started again, and a second command finds its way.
#[test]
fn commands_can_be_called_again_and_again() {
    let dir = Folder::new("library");
    let source = dir.llama("in", 1, 64);
    let call = |words: &[&str]| {
        let words = ["nvfp4"].iter().chain(words).map(Into::into);
        nvfp4_cli::main(words, nvfp4_cli::Host::Library)
    };
    for target in [dir.path("a"), dir.path("b")] {
        assert_eq!(call(&["convert", &source, &target, "-q"]), ExitCode::SUCCESS);
    }
    let train = "train --steps 2 --layers 1 --width 16 --heads 1 --context 8 --batch 1 --threads 3 --recipe bf16 -q";
    let words: Vec<&str> = train.split(' ').collect();
    assert_eq!((call(&words), call(&words)), (ExitCode::SUCCESS, ExitCode::SUCCESS));
}
