//! What the commands say about models of several families.

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A folder that is removed with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-families-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    /// A model of these tensors.
    fn model(&self, name: &str, tensors: &[(String, Vec<usize>)], config: &Value) -> String {
        let data = tensors.iter().enumerate().map(|(i, (_, shape))| {
            let value = |j: usize| bf16::from_f32(0.01 * ((i + 2) * (j % 97 + 1)) as f32 - 0.5);
            (0..shape.iter().product()).flat_map(|j| value(j).to_le_bytes()).collect::<Vec<u8>>()
        });
        let data: Vec<Vec<u8>> = data.collect();
        let views = tensors
            .iter()
            .zip(&data)
            .map(|((name, shape), bytes)| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
        std::fs::create_dir_all(self.0.join(name)).unwrap();
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        serialize_to_file(views, Some(metadata), &self.0.join(name).join("model.safetensors")).unwrap();
        std::fs::write(self.0.join(name).join("config.json"), config.to_string()).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn nvfp4(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = nvfp4(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output));
    text(&output)
}

/// Twelve layers with experts in one tensor.
fn experts() -> Vec<(String, Vec<usize>)> {
    let layer = |l: usize| {
        [
            (format!("model.layers.{l}.self_attn.o_proj.weight"), vec![64, 64]),
            (format!("model.layers.{l}.feed_forward.experts.gate_up_proj"), vec![4, 64, 64]),
        ]
    };
    (0..12).flat_map(layer).collect()
}

#[test]
fn experts_that_stay_are_said_everywhere() {
    let dir = Folder::new("experts");
    let source = dir.model("in", &experts(), &json!({ "architectures": ["Llama4ForCausalLM"] }));
    let plan = ok(&["plan", &source]);
    let rows: Vec<&str> = plan
        .lines()
        .filter(|line| line.contains("experts in one tensor, without the other projections of the same experts"))
        .collect();
    assert_eq!(rows.len(), 12, "{plan}");
    assert!(rows[2].contains("layers.2.") && rows[10].contains("layers.10."), "{plan}");
    assert!(rows[0].contains("4x64x64") && plan.contains("; 80 % of the source's bytes stay as they are"), "{plan}");
    let report: Value = serde_json::from_str(&ok(&["plan", &source, "--json"])).unwrap();
    let kept = report["weights"].as_array().unwrap().iter().filter(|w| w["action"] == "keep");
    let names: Vec<&str> = kept.map(|w| w["module"].as_str().unwrap()).collect();
    assert_eq!((names.len(), names[10]), (12, "model.layers.10.feed_forward.experts.gate_up_proj"));
    let (out, page) = (dir.path("out"), dir.path("page.html"));
    let said = ok(&["convert", &source, &out, "-v", "--report", &page]);
    assert!(said.contains("experts.gate_up_proj  4x64x64  keep: experts in one tensor, without the other projections of the same experts"), "{said}");
    assert!(said.contains("80 % of the source's bytes stay as they are"), "{said}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.contains(
            "<li>experts in one tensor, without the other projections of the same experts: model.layers.0.feed_forward"
        ),
        "{page}"
    );
}

#[test]
fn the_last_line_says_who_reads_the_result() {
    let dir = Folder::new("next");
    let weights = [("model.layers.0.mlp.down_proj.weight".to_string(), vec![64, 64])];
    let convert = |name: &str, config: Value, more: &[&str]| {
        let source = dir.model(name, &weights, &config);
        let out = dir.path(&format!("{name}-out"));
        let mut args = vec!["convert", &source, &out, "-q"];
        args.extend(more);
        nvfp4(&args)
    };
    let said = text(&convert("llama", json!({ "architectures": ["LlamaForCausalLM"] }), &[]));
    assert!(said.contains("next     vllm serve "), "{said}");
    let unnamed = convert("unnamed", json!({}), &[]);
    let said = text(&unnamed);
    assert!(unnamed.status.success() && said.contains("next     config.json names no architecture"), "{said}");
    assert!(!said.contains("vllm serve"), "{said}");
    let bert = convert("bert", json!({ "architectures": ["DistilBertModel"] }), &[]);
    assert!(
        bert.status.success() && text(&bert).contains("next     DistilBertModel: vLLM 0.32 has no code"),
        "{}",
        text(&bert)
    );
    assert_eq!(nvfp4(&["verify", &dir.path("bert-out")]).status.code(), Some(1));
    let t5 = convert("t5", json!({ "architectures": ["T5EncoderModel"] }), &[]);
    assert!(t5.status.code() == Some(3) && text(&t5).contains("--any-architecture"), "{}", text(&t5));
    let t5 = convert("t5", json!({ "architectures": ["T5EncoderModel"] }), &["--any-architecture"]);
    assert!(t5.status.success() && text(&t5).contains("next     T5EncoderModel: no server runs"), "{}", text(&t5));
}

#[test]
fn names_of_acts_that_fit_nothing_are_said() {
    let dir = Folder::new("acts");
    let weights = [("model.layers.0.mlp.down_proj.weight".to_string(), vec![64, 64])];
    let source = dir.model("in", &weights, &json!({ "architectures": ["LlamaForCausalLM"] }));
    let (out, acts) = (dir.path("out"), dir.path("acts.json"));
    std::fs::write(&acts, r#"{ "model.layers.0.mlp.down_proj": 26.88, "model.layers.0.mlp.downproj": 1.0 }"#).unwrap();
    let said = ok(&["convert", &source, &out, "--acts", &acts]);
    assert!(said.contains("acts     1 name for no quantized weight, such as 'model.layers.0.mlp.downproj'"), "{said}");
}

/// Experts of a layer in one tensor, as Qwen 3.5 has them.
fn stacked(layers: usize, experts: usize) -> Vec<(String, Vec<usize>)> {
    let layer = |l: usize| {
        let name = move |last: &str| format!("model.layers.{l}.{last}");
        [
            (name("mlp.experts.gate_up_proj"), vec![experts, 32, 32]),
            (name("mlp.experts.down_proj"), vec![experts, 32, 16]),
            (name("self_attn.o_proj.weight"), vec![32, 32]),
        ]
    };
    (0..layers).flat_map(layer).collect()
}

#[test]
fn a_plan_of_many_experts_has_few_lines() {
    let folder = Folder::new("fold");
    let config = json!({ "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 40, "hidden_size": 32 });
    let model = folder.model("in", &stacked(2, 40), &config);
    let said = ok(&["plan", &model]);
    assert!(said.contains("model.layers.{0..1}.mlp.experts.{0..39}.gate_proj"), "{said}");
    assert!(said.contains("242 weights in 4 lines; --each lists every weight, --json too"), "{said}");
    let each = ok(&["plan", &model, "--each"]);
    assert!(each.contains("model.layers.1.mlp.experts.39.up_proj"), "{each}");
    assert!(each.lines().count() > 242, "{each}");
    let json: Value = serde_json::from_str(&ok(&["plan", &model, "--json"])).unwrap();
    assert_eq!(json["weights"].as_array().unwrap().len(), 242);
}

#[test]
fn a_family_that_is_not_known_is_planned_by_general_rules() {
    let folder = Folder::new("unknown");
    let model = folder.model("in", &stacked(1, 2), &json!({ "architectures": ["NobodysForCausalLM"] }));
    let said = ok(&["plan", &model]);
    assert!(said.contains("no code for NobodysForCausalLM") && said.contains("general rules"), "{said}");
}

#[test]
fn verify_says_which_kernels_a_server_takes() {
    let folder = Folder::new("kernels");
    let config = json!({ "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "hidden_size": 32 });
    let model = folder.model("in", &stacked(1, 2), &config);
    for (acts, gpu, path) in [("none", "9.0", "decoded"), ("const", "9.0", "decoded"), ("const", "10.0", "native")] {
        let out = folder.path(&format!("out-{acts}-{gpu}"));
        let mut args = vec!["convert", &model, &out];
        if acts != "none" {
            args.extend(["--acts", acts]);
        }
        nvfp4(&args);
        let said = text(&nvfp4(&["verify", &out, "--gpu", gpu]));
        assert!(said.contains(&format!("kernels  vLLM on {gpu}: {path}, ")), "{said}");
        let json =
            String::from_utf8(nvfp4(&["verify", &out, "--for", "sglang", "--gpu", gpu, "--json"]).stdout).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["kernels"]["gpu"], &json["kernels"]["path"]), (&json!(gpu), &json!(path)));
    }
    assert_eq!(nvfp4(&["verify", &model, "--gpu", "hopper"]).status.code(), Some(2));
}
