//! The program, as a user runs it, and small models to run it on.

#![allow(dead_code)] // every test file uses a part of it

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder that is removed with its owner.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    /// A Llama of some layers, hidden size `h`, in a folder.
    pub fn llama(&self, name: &str, layers: usize, h: usize) -> String {
        let mut tensors: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".into(), vec![64, h]),
            ("lm_head.weight".into(), vec![64, h]),
            ("model.norm.weight".into(), vec![h]),
        ];
        for l in 0..layers {
            let shapes = [
                ("self_attn.q_proj", [h, h]),
                ("self_attn.k_proj", [h / 2, h]),
                ("self_attn.v_proj", [h / 2, h]),
                ("self_attn.o_proj", [h, h]),
                ("mlp.gate_proj", [2 * h, h]),
                ("mlp.up_proj", [2 * h, h]),
                ("mlp.down_proj", [h, 2 * h]),
            ];
            tensors.extend(shapes.map(|(n, s)| (format!("model.layers.{l}.{n}.weight"), s.to_vec())));
            let norms = ["input_layernorm", "post_attention_layernorm"];
            tensors.extend(norms.map(|n| (format!("model.layers.{l}.{n}.weight"), vec![h])));
        }
        let mut state = 1u64;
        // No two weights of a layer have the same largest value.
        let mut value = |factor: f32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bf16::from_f32(0.05 * factor * x * x * x)
        };
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
            .into_iter()
            .enumerate()
            .map(|(i, (n, s))| {
                let factor = 1.0 + i as f32 / 16.0;
                let bytes = (0..s.iter().product::<usize>()).flat_map(|_| value(factor).to_le_bytes()).collect();
                (n, s, bytes)
            })
            .collect();
        let views = data.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::BF16, s.clone(), b).unwrap()));
        std::fs::create_dir_all(self.0.join(name)).unwrap();
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        serialize_to_file(views, Some(metadata), &self.0.join(name).join("model.safetensors")).unwrap();
        let config = json!({ "architectures": ["LlamaForCausalLM"], "hidden_size": h, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * h, "vocab_size": 64,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6 });
        std::fs::write(self.0.join(name).join("config.json"), config.to_string()).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.args(args);
    command
}

pub fn nvfp4(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

pub fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn ok(args: &[&str]) -> String {
    let output = nvfp4(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

pub fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

pub fn contents(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path());
    entries.map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&p).unwrap())).collect()
}
