//! Sizes that a file merely claims: a zero beside a huge number, products that overflow, a vocabulary that no tensor has.
//! Whatever they are, reading ends with an error that names the tensor, or with a right answer.

mod generated;

use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::gguf::{self, GgufFile};
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A tensor whose bytes follow from its shape; nothing where a dimension is zero, whatever the others.
fn claimed(dtype: Dtype, shape: &[usize]) -> Tensor {
    let elements = if shape.contains(&0) { 0 } else { shape.iter().product() };
    Tensor { dtype, shape: shape.to_vec(), bytes: vec![0; elements * dtype.bitsize() / 8] }
}

/// One weight with the tensors that a dialect has for it.
struct Case {
    dialect: Dialect,
    tensors: Vec<(&'static str, Tensor)>,
    metadata: Vec<(&'static str, &'static str)>,
}

impl Case {
    /// A safetensors file in memory. The library's own writer refuses some of these shapes.
    fn file(&self) -> TensorFile {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        let metadata: serde_json::Map<String, Value> =
            self.metadata.iter().map(|(k, v)| (k.to_string(), json!(v))).collect();
        header.insert("__metadata__".to_string(), metadata.into());
        for (name, t) in &self.tensors {
            let start = data.len();
            data.extend_from_slice(&t.bytes);
            let dtype = format!("{:?}", t.dtype);
            let entry = json!({ "dtype": dtype, "shape": t.shape, "data_offsets": [start, data.len()] });
            header.insert(name.to_string(), entry);
        }
        let header = Value::from(header).to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        TensorFile::from_bytes(Path::new("claimed.safetensors"), bytes).unwrap()
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::from_files(Path::new("claimed"), vec![self.file()], None, None).unwrap()
    }
}

/// `X.weight` and its scales for a matrix of rows × cols, as a dialect with blocks of 16 has them.
fn nvfp4(dialect: Dialect, rows: usize, cols: usize) -> Case {
    let (codes, scales) = (claimed(Dtype::U8, &[rows, cols / 2]), claimed(Dtype::F8_E4M3, &[rows, cols / 16]));
    let one = || claimed(Dtype::F32, &[]);
    let (tensors, metadata) = match dialect {
        Dialect::CompressedTensors => {
            (vec![("x.weight_packed", codes), ("x.weight_scale", scales), ("x.weight_global_scale", one())], Vec::new())
        }
        Dialect::TorchAo => (
            vec![("x._weight_qdata", codes), ("x._weight_scale", scales)],
            vec![("x.weight", r#"{"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": true}}"#)],
        ),
        _ => (vec![("x.weight", codes), ("x.weight_scale", scales), ("x.weight_scale_2", one())], Vec::new()),
    };
    Case { dialect, tensors, metadata }
}

fn fp8(rows: usize, cols: usize) -> Case {
    let scale = claimed(Dtype::F32, &[rows.div_ceil(128), cols.div_ceil(128)]);
    let tensors = vec![("x.weight", claimed(Dtype::F8_E4M3, &[rows, cols])), ("x.weight_scale_inv", scale)];
    Case { dialect: Dialect::Fp8Block, tensors, metadata: Vec::new() }
}

fn mxfp4(shape: [usize; 4]) -> Case {
    let tensors = vec![("x_blocks", claimed(Dtype::U8, &shape)), ("x_scales", claimed(Dtype::U8, &shape[..3]))];
    Case { dialect: Dialect::MxFp4, tensors, metadata: Vec::new() }
}

fn experts([experts, bytes, outputs]: [usize; 3]) -> Case {
    let tensors = vec![
        ("x", claimed(Dtype::U8, &[experts, bytes, outputs])),
        ("x_weight_scale", claimed(Dtype::F8_E4M3, &[experts, bytes / 8, outputs])),
        ("x_weight_scale_2", claimed(Dtype::F32, &[1])),
    ];
    Case { dialect: Dialect::ModelOpt, tensors, metadata: Vec::new() }
}

const HUGE: usize = 1 << 40;

#[test]
fn zero_sized_weights_of_every_dialect_are_refused_by_name() {
    let mut cases = Vec::new();
    for (rows, cols) in [(0, 16), (4, 0), (0, 0), (HUGE, 0), (0, HUGE)] {
        for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors, Dialect::TorchAo, Dialect::ComfyUi] {
            cases.push(nvfp4(dialect, rows, cols));
        }
        cases.push(fp8(rows, cols));
    }
    for shape in [[2, 8, 0, 16], [2, 0, 2, 16], [HUGE, 0, 1, 16], [HUGE, 1, 0, 16], [1, HUGE, 0, 16]] {
        cases.push(mxfp4(shape));
    }
    for shape in [[1, 0, 1], [1, 8, 0], [HUGE, 0, 0], [HUGE, 0, 1], [1, 0, HUGE]] {
        cases.push(experts(shape));
    }
    for case in &cases {
        let checkpoint = case.checkpoint();
        let (first, dialect) = (&case.tensors[0], case.dialect);
        let error = Model::with_dialect(&checkpoint, dialect).unwrap_err().to_string();
        let named = error.starts_with(&format!("claimed.safetensors: tensor '{}': a quantized weight of ", first.0));
        assert!(named && error.contains("has no elements"), "{dialect} {:?}: {error}", first.1.shape);
    }
}

/// Everything that reads a model, on one whose sizes are all in order.
fn read_all(model: &Model<'_>) {
    statistics(model, 1).unwrap();
    verify(model, Client::Vllm, 1).unwrap();
    for weight in &model.weights {
        assert_eq!(weight.values(0..weight.rows, &mut Buffer::default()).unwrap().len() as u64, weight.elements());
    }
}

#[test]
fn no_experts_are_the_one_weight_without_elements() {
    for case in [mxfp4([0, 8, 2, 16]), mxfp4([0, HUGE, 1 << 20, 16]), experts([0, 8, 4]), experts([0, HUGE, 4])] {
        let checkpoint = case.checkpoint();
        let model = Model::with_dialect(&checkpoint, case.dialect).unwrap();
        assert_eq!((model.weights.len(), model.weights[0].matrices(), model.weights[0].rows), (1, 0, 0));
        read_all(&model);
    }
}

#[test]
fn sizes_whose_product_overflows_are_refused_by_name() {
    let cases = [mxfp4([0, 1, 1 << 60, 16]), experts([0, 1 << 63, 0]), nvfp4(Dialect::ModelOpt, 0, usize::MAX)];
    for case in &cases[..2] {
        let error = Model::with_dialect(&case.checkpoint(), case.dialect).unwrap_err().to_string();
        assert!(error.contains(case.tensors[0].0) && error.contains("more elements than"), "{error}");
    }
    let mut wide = nvfp4(Dialect::ModelOpt, 0, 16);
    wide.tensors[0].1.shape = vec![0, 1 << 63];
    let error = Model::with_dialect(&wide.checkpoint(), wide.dialect).unwrap_err().to_string();
    assert!(error.contains("'x.weight'") && error.contains("more elements than"), "{error}");
}

#[test]
fn plain_weights_without_elements_are_kept_as_they_are() {
    let dir = Folder::new();
    let mut tensors = layer(0, Dtype::BF16);
    let shapes = [[0, 64], [64, 0], [0, 0], [HUGE, 0]];
    for (i, shape) in shapes.iter().enumerate() {
        tensors.insert(format!("empty{i}.weight"), claimed(Dtype::BF16, shape));
    }
    folder(&dir.join("in"), &[tensors], &llama_config());
    for (name, target) in [("nvfp4", Target::ModelOpt), ("plain", Target::Plain(Precision::Bf16))] {
        let settings = Settings { target, ..Settings::default() };
        convert(&dir.join("in"), &dir.join(name), &settings, &(), &AtomicBool::new(false)).unwrap();
        let written = Checkpoint::open(&dir.join(name)).unwrap();
        for (i, shape) in shapes.iter().enumerate() {
            assert_eq!(written.get(&format!("empty{i}.weight")).unwrap().info.shape, shape);
        }
    }
}

#[test]
fn two_weights_of_one_module_are_refused() {
    let mut case = mxfp4([2, 8, 2, 16]);
    case.tensors.push(("x.weight", claimed(Dtype::BF16, &[4, 32])));
    let error = Model::with_dialect(&case.checkpoint(), case.dialect).unwrap_err().to_string();
    assert!(error.contains("tensor 'x.weight': 'x_blocks' is the weight of 'x' already"), "{error}");
}

#[test]
fn ranges_outside_a_tensor_are_errors() {
    let case = nvfp4(Dialect::ModelOpt, 4, 32);
    let checkpoint = case.checkpoint();
    let codes = checkpoint.get("x.weight").unwrap();
    assert!(codes.read(60, &mut [0; 4]).is_ok());
    for (offset, len) in [(61, 4), (64, 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let error = codes.read(offset, &mut vec![0; len]).unwrap_err().to_string();
        assert!(error.contains("tensor 'x.weight'") && error.ends_with("but it has 64"), "{error}");
    }
    let model = Model::with_dialect(&checkpoint, case.dialect).unwrap();
    let Stored::Nvfp4(parts) = &model.weights[0].stored else { panic!() };
    for rows in [0..5, 4..5, 0..usize::MAX] {
        assert!(model.weights[0].values(rows.clone(), &mut Buffer::default()).is_err());
        assert!(parts.codes_and_scales(rows, 32, &mut Vec::new(), &mut Vec::new()).is_err());
    }
}

/// A GGUF file of one tensor.
fn gguf_file(kind: u32, dims: &[u64], data: usize) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend([1u64, 0].into_iter().flat_map(u64::to_le_bytes));
    bytes.extend(8u64.to_le_bytes());
    bytes.extend(b"x.weight");
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| bytes.extend(d.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
    bytes
}

#[test]
fn gguf_tensors_that_claim_too_much_are_refused_by_name() {
    let open = |bytes| GgufFile::from_bytes(Path::new("claimed.gguf"), bytes);
    for dims in [&[0, 1, HUGE as u64][..], &[64, 0], &[64, HUGE as u64, 0], &[0]] {
        let error = open(gguf_file(40, dims, 0)).unwrap_err().to_string();
        assert!(error.starts_with("claimed.gguf: GGUF: tensor 'x.weight': a quantized weight of"), "{error}");
    }
    for (kind, dims) in [(0, &[0, 1 << 63, 4][..]), (40, &[0, 1 << 63, 4]), (99, &[1 << 63, 0, 2])] {
        let error = open(gguf_file(kind, dims, 0)).unwrap_err().to_string();
        assert!(error.contains("more elements than an address can count"), "{error}");
    }
    let empty = open(gguf_file(0, &[0, HUGE as u64], 0)).unwrap();
    assert_eq!(empty.floats(&empty.tensors()[0], 0..HUGE).unwrap(), [0f32; 0]);
    let file = open(gguf_file(40, &[64, 2], 72)).unwrap();
    gguf::verify(&file).unwrap();
    let tensor = &file.tensors()[0];
    assert_eq!(file.floats(tensor, 0..2).unwrap().len(), 128);
    for rows in [0..3, 2..3, 0..usize::MAX] {
        assert!(file.floats(tensor, rows.clone()).is_err());
        assert!(file.codes_and_scales(tensor, rows, &mut Vec::new(), &mut Vec::new()).is_err());
    }
}

#[test]
fn sizes_in_config_json_that_no_tensor_has_are_refused() {
    let dir = Folder::new();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "vocab_size": 64, "tie_word_embeddings": true,
        "rope_scaling": { "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192 },
    });
    let mut tensors = layer(0, Dtype::BF16);
    tensors.insert("model.embed_tokens.weight".to_string(), random(Dtype::BF16, &[64, 64], 7));
    tensors.insert("model.norm.weight".to_string(), random(Dtype::BF16, &[64], 8));
    let refused = |name: &str, key: &str, size: u64| {
        let mut config = config.clone();
        config[key] = json!(size);
        folder(&dir.join(name), &[tensors.clone()], &config);
        std::fs::remove_file(dir.join(name).join("tokenizer.json")).unwrap();
        let (target, settings) =
            (dir.join(&format!("{name}.gguf")), Settings { target: Target::Gguf, ..Settings::default() });
        convert(&dir.join(name), &target, &settings, &(), &AtomicBool::new(false)).map(drop)
    };
    refused("right", "vocab_size", 64).unwrap();
    for (key, said) in [
        (
            "vocab_size",
            "'vocab_size' is 2147483648, so 'model.embed_tokens.weight' must have the shape [2147483648, 64]",
        ),
        ("head_dim", "'num_key_value_heads' x 'head_dim' is 4294967296, so 'model.layers.0.self_attn.k_proj.weight'"),
        ("num_hidden_layers", "has no 'model.layers.1.input_layernorm.weight'"),
    ] {
        let error = refused(key, key, 1 << 31).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}
