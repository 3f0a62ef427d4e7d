//! Small generated checkpoints in temporary folders.

#![allow(dead_code)] // every test file uses a part of it

pub mod for_llama_cpp;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder that is removed with its owner.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("nvfp4-checkpoint-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Clone)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Heavy-tailed values around 0.02, by position.
pub fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| 0.02 * uniform() / (0.05 + uniform().abs())).collect()
}

pub fn tensor(dtype: Dtype, shape: &[usize], values: &[f32]) -> Tensor {
    let bytes = match dtype {
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
        other => panic!("no values of type {other:?}"),
    };
    Tensor { dtype, shape: shape.to_vec(), bytes }
}

pub fn random(dtype: Dtype, shape: &[usize], seed: u64) -> Tensor {
    tensor(dtype, shape, &values(shape.iter().product(), seed))
}

pub type Tensors = BTreeMap<String, Tensor>;

pub fn save(path: &Path, tensors: &Tensors) {
    save_with(path, tensors, &[("format", "pt")]);
}

pub fn save_with(path: &Path, tensors: &Tensors, metadata: &[(&str, &str)]) {
    let views = tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    serialize_to_file(views, Some(metadata), path).unwrap();
}

/// Writes a folder of one or several shards with a configuration and a tokenizer.
pub fn folder(path: &Path, shards: &[Tensors], config: &Value) {
    std::fs::create_dir_all(path).unwrap();
    let name = |i: usize| match shards.len() {
        1 => "model.safetensors".to_string(),
        n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
    };
    let mut map = BTreeMap::new();
    for (i, tensors) in shards.iter().enumerate() {
        save(&path.join(name(i)), tensors);
        map.extend(tensors.keys().map(|t| (t.clone(), name(i))));
    }
    if shards.len() > 1 {
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    std::fs::write(path.join("tokenizer.json"), "{\"tokens\": []}").unwrap();
    std::fs::create_dir_all(path.join("1_Pooling")).unwrap();
    std::fs::write(path.join("1_Pooling/config.json"), "{\"pooling\": 1}").unwrap();
}

pub fn llama_config() -> Value {
    json!({ "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "aardvark": 1 })
}

/// The tensors of a layer, hidden size 64 and feed-forward size 96.
pub fn layer(l: usize, dtype: Dtype) -> Tensors {
    let shapes: [(&str, &[usize]); 9] = [
        ("self_attn.q_proj", &[64, 64]),
        ("self_attn.k_proj", &[32, 64]),
        ("self_attn.v_proj", &[32, 64]),
        ("self_attn.o_proj", &[64, 64]),
        ("mlp.gate_proj", &[96, 64]),
        ("mlp.up_proj", &[96, 64]),
        ("mlp.down_proj", &[64, 96]),
        ("input_layernorm", &[64]),
        ("post_attention_layernorm", &[64]),
    ];
    let named = shapes.iter().enumerate().map(|(i, (name, shape))| {
        (format!("model.layers.{l}.{name}.weight"), random(dtype, shape, (100 * l + i + 1) as u64))
    });
    named.collect()
}

/// A Llama of two layers in two shards; gate and up of layer 0 lie in different shards.
pub fn llama(dtype: Dtype) -> Vec<Tensors> {
    let (mut first, mut second) = (layer(0, dtype), layer(1, dtype));
    let up = "model.layers.0.mlp.up_proj.weight";
    second.insert(up.to_string(), first.remove(up).unwrap());
    first.insert("model.embed_tokens.weight".to_string(), random(dtype, &[64, 64], 7));
    second.insert("model.norm.weight".to_string(), random(dtype, &[64], 8));
    second.insert("lm_head.weight".to_string(), random(dtype, &[64, 64], 9));
    vec![first, second]
}

/// Every file of a folder with its bytes.
pub fn contents(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![path.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap().path();
            match entry.is_dir() {
                true => open.push(entry),
                false => {
                    let name = entry.strip_prefix(path).unwrap().to_string_lossy().into_owned();
                    found.insert(name, std::fs::read(&entry).unwrap());
                }
            }
        }
    }
    found
}
