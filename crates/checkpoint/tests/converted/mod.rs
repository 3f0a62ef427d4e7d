//! Conversions as tests run them, what they write, and what `verify` says of it after a change.

#![allow(dead_code)] // every test file uses a part of it

use super::generated::*;
use nvfp4_checkpoint::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

pub fn run(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

pub fn to(target: Target) -> Settings {
    Settings { target, threads: 2, ..Settings::default() }
}

/// Settings with a file of rules.
pub fn rules(target: Target, text: &str) -> Settings {
    let selection = Selection { rules: Rules::from_toml(text).unwrap(), ..Selection::default() };
    Settings { selection, ..to(target) }
}

/// The values of a weight.
pub fn decoded(folder: &Path, module: &str) -> Vec<f32> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let (weight, mut buffer) = (model.weight(module).unwrap(), Buffer::default());
    let values = weight.values(0..weight.rows, &mut buffer).unwrap();
    (0..values.len()).map(|i| values.get(i)).collect()
}

pub fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// All tensors of a checkpoint.
pub fn tensors_of(folder: &Path) -> Tensors {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let copy = |t: Located<'_>| Tensor { dtype: t.info.dtype, shape: t.info.shape.clone(), bytes: t.bytes().unwrap() };
    checkpoint.tensors().map(|t| (t.info.name.clone(), copy(t))).collect()
}

pub fn verified(folder: &Path, client: Client) -> Vec<Finding> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    verify(&Model::new(&checkpoint).unwrap(), client, 1).unwrap()
}

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

impl Parts {
    pub fn convert(source: &[Tensors], config: &Value, settings: &Settings) -> Self {
        let dir = Folder::new();
        folder(&dir.join("in"), source, config);
        let out = dir.join("out");
        run(&dir.join("in"), &out, settings).unwrap();
        // Only ModelOpt's form has a file of its own.
        let own = Some(out.join("hf_quant_config.json")).filter(|path| path.exists());
        Parts {
            tensors: tensors_of(&out),
            config: json_of(&out.join("config.json")),
            own: own.map_or(Value::Null, |path| json_of(&path)),
        }
    }

    pub fn verify(&self, client: Client) -> Vec<Finding> {
        let dir = Folder::new();
        save(&dir.join("model.safetensors"), &self.tensors);
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if !self.own.is_null() {
            std::fs::write(dir.join("hf_quant_config.json"), self.own.to_string()).unwrap();
        }
        verified(&dir.join(""), client)
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
