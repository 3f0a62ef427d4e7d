//! Entry points for `fuzz/`: all that reads a checkpoint, over bytes in memory. Each of them
//! returns, whatever the bytes.

use super::dialect::{Dialect, Model};
use super::file::TensorFile;
use super::folder::Checkpoint;
use super::gguf::{self, GgufFile};
use super::plan::Plan;
use super::selection::Selection;
use super::shards::{self, Shards};
use super::target::{Activations, Extras, Target};
use super::weight::Buffer;
use super::{Client, compare, verify};
use crate::Result;
use nvfp4::Precision;
use nvfp4_files::regular::parse_json;
use serde_json::Value;
use std::path::Path;

/// Reads a model of one safetensors file: groups its tensors, checks, decodes and compares its
/// weights, and lays out what it would be converted to. Returns whether it is a model at all.
///
/// `config` is used as `config.json` and as `hf_quant_config.json`; without a dialect, the model
/// must say whose it is.
pub fn check_model(file: Vec<u8>, config: &[u8], dialect: Option<Dialect>, client: Client) -> bool {
    let open = || -> Result<Checkpoint> {
        let (name, config) = (Path::new("fuzzed"), parse_json(config).ok());
        Checkpoint::from_files(name, vec![TensorFile::from_bytes(name, file)?], config.clone(), config)
    };
    let Ok(checkpoint) = open() else { return false };
    let model = match dialect {
        Some(dialect) => Model::with_dialect(&checkpoint, dialect),
        None => Model::new(&checkpoint),
    };
    let Ok(model) = model else { return false };
    let _ = verify(&model, client, 1);
    let _ = compare(&model, &model, 1);
    let mut buffer = Buffer::default();
    for weight in &model.weights {
        let step = ((1 << 16) / weight.cols.max(1)).max(1);
        // A weight without columns may claim any number of rows.
        let rows = if weight.elements() == 0 { 0 } else { weight.rows };
        for start in (0..rows).step_by(step) {
            let rows = start..(start + step).min(weight.rows);
            let read = weight.values(rows.clone(), &mut buffer).map(|values| values.len());
            assert!(read.is_ok_and(|len| len == rows.len() * weight.cols), "a weight that was taken in can be read");
        }
    }
    let folders = [Target::ModelOpt, Target::CompressedTensors, Target::DeepSeekV4, Target::Plain(Precision::Bf16)];
    for target in folders.into_iter().chain([Target::ComfyUi, Target::Gguf]) {
        let plan = match target {
            Target::Plain(_) => Ok(Plan::decode(&model)),
            _ => Plan::new(&model, &Selection::default(), target),
        };
        let Ok(plan) = plan else { continue };
        match target {
            Target::Gguf => drop(gguf::lay_out(&model, &plan, Activations::Plain)),
            _ => drop(shards::lay_out(&model, &plan, target, Extras::default(), Shards::AtMost(1 << 20))),
        }
    }
    true
}

/// Reads a whole GGUF file: checks it and decodes what can be decoded. Returns whether it is one.
pub fn check_gguf_file(file: Vec<u8>) -> bool {
    let Ok(file) = GgufFile::from_bytes(Path::new("fuzzed"), file) else { return false };
    let _ = gguf::verify(&file);
    for tensor in file.tensors() {
        let elements: u64 = tensor.dims.iter().product();
        let _ = file.floats(tensor, 0..if elements == 0 { 0 } else { tensor.rows().min(1 << 16) });
    }
    true
}

/// Reads a `config.json` in every way that this crate does, with the same text as
/// `hf_quant_config.json`. Returns whether all of them accept it.
pub fn check_config(bytes: &[u8]) -> bool {
    let Ok(json) = parse_json::<Value>(bytes) else { return false };
    let (config, quantization) = (Some(json.clone()), Some(json));
    let Ok(checkpoint) = Checkpoint::from_files(Path::new("fuzzed"), Vec::new(), config, quantization) else {
        return false;
    };
    let Ok(model) = Model::new(&checkpoint) else { return false };
    verify(&model, Client::Vllm, 1).is_ok() && gguf::check_parameters(&checkpoint)
}
