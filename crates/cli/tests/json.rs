//! What every command prints with `--json` has the form that `crates/cli/schema/output.json` describes.

use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

fn schema() -> Value {
    serde_json::from_str(include_str!("../schema/output.json")).unwrap()
}

/// What a value has that a schema does not allow. Knows the words that the schema is written in, and fails at others.
fn violations(schema: &Value, root: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (word, rule) in schema.as_object().unwrap() {
        match word.as_str() {
            "description" => {}
            "$ref" => {
                let name = rule.as_str().unwrap().strip_prefix("#/$defs/").unwrap();
                found.extend(violations(&root["$defs"][name], root, value, at));
            }
            "allOf" => rule.as_array().unwrap().iter().for_each(|s| found.extend(violations(s, root, value, at))),
            "const" if rule != value => found.push(format!("{at}: expected {rule}, got {value}")),
            "enum" if !rule.as_array().unwrap().contains(value) => {
                found.push(format!("{at}: {value} is not in {rule}"))
            }
            "const" | "enum" => {}
            "type" => {
                let own = match value {
                    Value::Null => "null",
                    Value::Bool(_) => "boolean",
                    Value::Number(n) if n.is_f64() => "number",
                    Value::Number(_) => "integer",
                    Value::String(_) => "string",
                    Value::Array(_) => "array",
                    Value::Object(_) => "object",
                };
                let allows = |name: &Value| name == own || (name == "number" && own == "integer");
                let allowed = rule.as_array().map_or_else(|| allows(rule), |names| names.iter().any(allows));
                if !allowed {
                    found.push(format!("{at}: expected {rule}, got {value}"));
                }
            }
            "required" => {
                let missing = rule.as_array().unwrap().iter().filter(|key| value.get(key.as_str().unwrap()).is_none());
                found.extend(missing.map(|key| format!("{at}: {key} is missing")));
            }
            "properties" => {
                for (key, rule) in rule.as_object().unwrap() {
                    if let Some(inner) = value.get(key) {
                        found.extend(violations(rule, root, inner, &format!("{at}.{key}")));
                    }
                }
            }
            "additionalProperties" => {
                let named = |key: &str| schema["properties"].get(key).is_some();
                for (key, inner) in value.as_object().into_iter().flatten().filter(|(key, _)| !named(key)) {
                    found.extend(violations(rule, root, inner, &format!("{at}.{key}")));
                }
            }
            "items" => {
                for (i, inner) in value.as_array().into_iter().flatten().enumerate() {
                    found.extend(violations(rule, root, inner, &format!("{at}[{i}]")));
                }
            }
            word => panic!("{at}: the check does not know '{word}'"),
        }
    }
    found
}

/// Runs a command and holds what it prints against a part of the schema.
fn check(words: &[&str], form: &str, code: i32) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    // Hides the GPUs of a machine that has some.
    let output = command.args(words).arg("--json").env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap();
    let (printed, said) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{words:?}: {printed}{said}");
    let value: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{words:?}: {error}: {printed}"));
    let root = schema();
    assert!(root["$defs"][form].is_object(), "{form}");
    let wrong = violations(&root["$defs"][form], &root, &value, form);
    assert!(wrong.is_empty(), "{words:?}: {wrong:#?}");
    value
}

#[test]
fn every_command_prints_what_the_schema_says() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("json-{}", std::process::id()));
    let path = |name: &str| root.join(name).to_str().unwrap().to_string();
    let (demo, one, golden) = (path("demo"), path("golden"), path("golden/case.safetensors"));
    std::fs::create_dir_all(&one).unwrap();
    let case = "../../testdata/golden/quantize__tensor1d__f32__has_nan__32x64__s45000.safetensors";
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(case), &golden).unwrap();
    let made = check(&["demo", "--dir", &demo, "--layers", "1"], "demo", 0);
    assert_eq!(made["convert"]["weights"].as_array().unwrap().len(), 7);
    let (source, packed) = (path("demo/llama"), path("demo/llama-NVFP4"));
    let (out, gguf, plain) = (path("out"), path("out.gguf"), path("plain"));
    let done = check(&["convert", &source, &out, "-q"], "convert", 0);
    assert_eq!((&done["to"], &done["passed"]), (&json!("modelopt"), &json!(true)));
    check(&["convert", &source, &gguf, "-q", "--to", "gguf"], "convert", 0);
    check(&["convert", &source, &path("dry"), "--dry-run"], "convert --dry-run", 0);
    check(&["convert", &source, &path("off"), "-q", "--fuse", "off"], "convert", 1);
    for part in ["1/2", "0/2"] {
        check(&["convert", &source, &path("parts"), "-q", "--part", part], "convert --part", 0);
    }
    check(&["convert", &source, &path("parts"), "-q", "--finish"], "convert", 0);
    check(&["plan", &source, "--parts", "3"], "plan", 0);
    check(&["dequant", &packed, &plain, "-q"], "dequant", 0);
    check(&["plan", &source], "plan", 0);
    check(&["verify", &packed], "verify", 0);
    check(&["verify", &source], "verify", 1);
    check(&["diff", &source, &packed], "diff", 0);
    check(&["diff", &packed, &out, "--bits"], "diff --bits", 0);
    check(&["diff", &source, &plain, "--bits"], "diff --bits", 1);
    for (file, tensor) in [(&packed, "layers.0.mlp.up_proj"), (&gguf, "blk.0.ffn_up")] {
        let rows = check(&["inspect", file, "-v"], "inspect", 0);
        let named = |row: &&Value| row["module"].as_str().unwrap().contains(tensor);
        let weights = rows["weights"].as_array().unwrap();
        assert_eq!(weights.iter().find(named).unwrap()["shape"], json!([1536, 512]), "{file}");
        let one = check(&["inspect", file, "--tensor", tensor], "inspect --tensor", 0);
        assert_eq!(one["shape"], json!([1536, 512]), "{file}");
        check(&["inspect", file, "--tensor", tensor, "--block", "3,1"], "inspect --block", 0);
    }
    let (text, stats) = (path("text.txt"), path("stats.safetensors"));
    std::fs::write(&text, "b a c d a b d c b b a d c c a b ".repeat(4)).unwrap();
    let words = json!({ "a": 3, "b": 5, "c": 70, "d": 6000, "[UNK]": 0 });
    let model = json!({ "type": "WordLevel", "vocab": words, "unk_token": "[UNK]" });
    let tokenizer =
        json!({ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" }, "model": model });
    for folder in [&source, &packed] {
        std::fs::write(Path::new(folder).join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
    check(&["eval", &source, &packed, "--text", &text, "--dry-run"], "eval --dry-run", 0);
    let found = check(&["eval", &source, &packed, "--text", &text, "-q", "--context", "16"], "eval", 0);
    assert_eq!((found["tokens"].as_u64(), found["layers"].as_array().unwrap().len()), (Some(64), 1));
    check(&["calibrate", &source, "--text", &text, "-q", "-o", &stats], "calibrate", 0);
    check(&["convert", &source, &path("w4a4"), "-q", "--acts", &stats], "convert", 0);
    check(&["calibrate", &source, "--text", &text, "-q", "--hessian", "full", "-o", &stats], "calibrate", 0);
    let gptq = ["--acts", &stats, "--scale", "local-hessian", "--round", "gptq", "--gptq-order", "static"];
    check(&[&["convert", &source, &path("gptq"), "-q"][..], &gptq].concat(), "convert", 0);
    let page = path("page.html");
    let words = ["eval", &source, &path("w4a4"), "--text", &text, "-q", "--report", &page];
    let found = check(&words, "eval", 0);
    let runs: Vec<&Value> = found["runs"].as_array().unwrap().iter().map(|run| &run["run"]).collect();
    assert_eq!(runs, ["reference", "weights", "served"]);
    let saturated = |blocks: &Value| blocks["saturated"].as_u64().unwrap();
    let blocks = found["blocks"].as_object().unwrap();
    assert!(blocks.len() == 7 && blocks.values().all(|b| b["count"].as_u64().unwrap() > 0), "{blocks:?}");
    // Of the text that it was calibrated on, only what the error of earlier weights adds may saturate.
    assert!(blocks.values().map(saturated).sum::<u64>() < 8, "{blocks:?}");
    check(&["eval", &source, "--text", &text, "-q"], "eval", 0);
    let said = check(&["generate", &packed, "--prompt", "a b", "--tokens", "4"], "generate", 0);
    assert_eq!(said["prompt_tokens"], 2);
    std::fs::write(&text, "a").unwrap();
    check(&["eval", &source, "--text", &text], "error", 3);
    check(&["recipe", "explain", "nvfp4"], "recipe explain", 0);
    check(&["recipe", "explain", "nvfp4+attention"], "recipe", 1);
    check(&["doctor"], "doctor", 0);
    check(&["tune"], "error", 3);
    check(&["bench", "--size", "32", "--filter", "dequantize"], "bench", 0);
    check(&["bench", "gemm", "--m", "1", "--n", "32", "--k", "32"], "bench", 0);
    check(&["modes", "--rows", "16", "--cols", "16"], "modes", 0);
    check(&["agreement", "--shape", "16x16"], "agreement", 0);
    check(&["conformance", &one], "conformance", 0);
    check(&["convert", &source, &out], "error", 3);
    check(&["convert", "nowhere", &path("no")], "error", 3);
    check(&["plan", "--frobnicate"], "error", 2);
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn the_check_finds_what_is_wrong() {
    let root = schema();
    let wrong = |form: &str, value: Value| violations(&root["$defs"][form], &root, &value, form);
    assert_eq!(wrong("shape", json!("512x512")), ["shape: expected \"array\", got \"512x512\""]);
    assert_eq!(wrong("shape", json!([512, "x"])), ["shape[1]: expected \"integer\", got \"x\""]);
    let finding = json!({ "severity": "bad", "about": "", "text": "" });
    assert_eq!(wrong("finding", finding).len(), 2, "an unknown word, and no fix");
}

/// An error is told twice: in words on standard error, and as JSON with what helps.
#[test]
fn errors_are_json_with_the_hint_and_the_exit_code() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("json-there");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("mine"), "").unwrap();
    let value = check(&["convert", "nowhere", folder.to_str().unwrap()], "error", 3);
    assert_eq!(value["command"], "convert");
    assert_eq!(value["error"]["hint"], "--force replaces it", "the target is looked at first");
    assert!(value["error"]["message"].as_str().unwrap().contains("already exists"));
}
