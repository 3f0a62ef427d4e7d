//! A converted checkpoint in which one thing is changed, and what `verify` says of it.

#![allow(dead_code)] // every test file uses a part of it

use super::generated::*;
use nvfp4_checkpoint::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A converted checkpoint, in pieces that can be changed.
#[derive(Clone)]
pub struct Parts {
    pub tensors: Tensors,
    pub config: Value,
    pub own: Value,
}

pub fn config() -> Value {
    let mut config = llama_config();
    config["num_hidden_layers"] = json!(2);
    config["tie_word_embeddings"] = json!(false);
    config
}

fn json_of(path: &Path) -> Value {
    std::fs::read(path).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap())
}

impl Parts {
    pub fn convert(source: &[Tensors], config: &Value, settings: &Settings) -> Self {
        let dir = Folder::new();
        folder(&dir.join("in"), source, config);
        convert(&dir.join("in"), &dir.join("out"), settings, &(), &AtomicBool::new(false)).unwrap();
        let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
        let copy =
            |t: Located<'_>| Tensor { dtype: t.info.dtype, shape: t.info.shape.clone(), bytes: t.bytes().unwrap() };
        Parts {
            tensors: checkpoint.tensors().map(|t| (t.info.name.clone(), copy(t))).collect(),
            config: json_of(&dir.join("out/config.json")),
            own: json_of(&dir.join("out/hf_quant_config.json")),
        }
    }

    pub fn verify(&self, client: Client) -> Vec<Finding> {
        let dir = Folder::new();
        save(&dir.join("model.safetensors"), &self.tensors);
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if !self.own.is_null() {
            std::fs::write(dir.join("hf_quant_config.json"), self.own.to_string()).unwrap();
        }
        let checkpoint = Checkpoint::open(&dir.join("")).unwrap();
        verify(&Model::new(&checkpoint).unwrap(), client, 1).unwrap()
    }

    /// What is said after a change.
    pub fn after(&self, change: &dyn Fn(&mut Parts)) -> String {
        let mut changed = self.clone();
        change(&mut changed);
        let line = |f: &Finding| format!("{:?} {}: {}\n", f.severity, f.about, f.text);
        changed.verify(Client::Vllm).iter().map(line).collect()
    }

    pub fn quantization(&mut self) -> &mut Value {
        &mut self.config["quantization_config"]
    }

    pub fn remove(&mut self, start: &str) {
        self.tensors.retain(|name, _| !name.starts_with(start));
    }
}

pub fn settings(target: Target, acts: Acts) -> Settings {
    Settings { target, acts, threads: 1, ..Settings::default() }
}

pub type Change = (&'static str, &'static dyn Fn(&mut Parts), &'static str);

#[track_caller]
pub fn check(good: &Parts, changes: &[Change]) {
    assert_eq!(good.after(&|_| {}), "");
    for (name, change, expected) in changes {
        let said = good.after(*change);
        assert!(said.contains(expected), "{name}: expected '{expected}', got '{said}'");
    }
}

/// Findings without the note that a configuration does not say how many layers there are.
pub fn beside_layers(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.retain(|finding| !finding.text.starts_with("'num_hidden_layers' is missing"));
    findings
}
