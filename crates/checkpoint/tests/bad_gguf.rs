//! What would make a GGUF file that is wrong is refused by name: settings, shapes, tokenizers. And a file that is wrong
//! already is found by `verify`.

mod generated;

use generated::for_llama_cpp::{source, tokenizer};
use generated::*;
use nvfp4_checkpoint::gguf::{GgufFile, Value, verify};
use nvfp4_checkpoint::{Acts, Settings, Severity, Target, convert};
use safetensors::Dtype;
use serde_json::{Value as Json, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

const LLAMA: &str = "LlamaForCausalLM";
const QWEN2: &str = "Qwen2ForCausalLM";
const QWEN3: &str = "Qwen3ForCausalLM";
const MOE: &str = "Qwen3MoeForCausalLM";

/// Llama 3's splitting rule.
const LLAMA3: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

fn to_gguf(source: &Path, target: &Path) -> Result<GgufFile, String> {
    let settings = Settings { target: Target::Gguf, threads: 2, ..Settings::default() };
    let _ = std::fs::remove_file(target);
    convert(source, target, &settings, &(), &AtomicBool::new(false)).map_err(|error| error.to_string())?;
    Ok(GgufFile::open(target).unwrap())
}

/// A model of a family, of which one file of JSON is replaced before it is converted.
struct Model {
    dir: Folder,
    config: Json,
}

impl Model {
    fn new(architecture: &str) -> Self {
        let dir = Folder::new();
        source(&dir.join("in"), architecture, if architecture == MOE { 4 } else { 0 });
        let config = serde_json::from_slice(&std::fs::read(dir.join("in/config.json")).unwrap()).unwrap();
        Model { dir, config }
    }

    fn with(&self, file: &str, json: &Json) -> Result<GgufFile, String> {
        let path = self.dir.join("in").join(file);
        let before = std::fs::read(&path).ok();
        std::fs::write(&path, json.to_string()).unwrap();
        let found = to_gguf(&self.dir.join("in"), &self.dir.join("out.gguf"));
        match before {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        found
    }

    fn config(&self, changes: &Json) -> Result<GgufFile, String> {
        let mut config = self.config.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        self.with("config.json", &config)
    }

    /// Every change is refused with what stands beside it.
    fn refuses(&self, cases: &[(Json, &str)]) {
        for (changes, said) in cases {
            let error = self.config(changes).map(drop).expect_err(&changes.to_string());
            assert!(error.contains(said), "{changes}: {error}");
        }
    }
}

#[test]
fn numbers_of_a_wrong_type_or_range_are_refused_by_key() {
    let yarn = |key: &str, value: Json| {
        let mut rope = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
        rope[key] = value;
        json!({ "rope_scaling": rope })
    };
    let llama3 = |key: &str, value: Json| {
        let mut rope = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192 });
        rope[key] = value;
        json!({ "rope_parameters": rope })
    };
    let model = Model::new(LLAMA);
    model.refuses(&[
        (json!({ "rope_theta": "1e6" }), "'rope_theta': expected a positive number, got \"1e6\""),
        (json!({ "rope_theta": [1e6] }), "'rope_theta': expected a positive number, got [1000000.0]"),
        (json!({ "rope_theta": 0 }), "'rope_theta'"),
        (json!({ "rope_theta": -1.0 }), "'rope_theta'"),
        (json!({ "rope_theta": 1e300 }), "'rope_theta'"),
        (json!({ "rope_theta": true }), "'rope_theta'"),
        (json!({ "rope_scaling": "yarn" }), "'rope_scaling': expected an object, got \"yarn\""),
        (json!({ "rope_scaling": { "rope_type": 1 } }), "'rope_type': expected text, got 1"),
        (json!({ "rope_scaling": { "type": ["yarn"] } }), "'type': expected text"),
        (json!({ "rope_scaling": { "factor": 8.0 } }), "no 'rope_type'"),
        (json!({ "rope_scaling": { "type": "linear", "rope_type": "yarn", "factor": 2 } }), "remove one"),
        (json!({ "rope_scaling": { "type": "linear", "factor": "2" } }), "'factor': expected a positive number"),
        (json!({ "rope_scaling": { "type": "linear", "factor": 0 } }), "'factor'"),
        (json!({ "rope_scaling": { "type": "linear" } }), "'factor' is missing"),
        (json!({ "rope_scaling": { "rope_theta": 1e4 } }), "'rope_theta' differs"),
        (json!({ "rope_scaling": { "full_attention": {} } }), "one encoding for all layers"),
        (
            json!({ "rope_scaling": { "type": "linear", "factor": 2 }, "rope_parameters": { "rope_type": "default" } }),
            "'rope_parameters' and 'rope_scaling' differ",
        ),
        (yarn("original_max_position_embeddings", json!(1u64 << 33)), "'original_max_position_embeddings'"),
        (yarn("original_max_position_embeddings", json!(64.5)), "'original_max_position_embeddings'"),
        (yarn("beta_fast", json!(16)), "'beta_fast' is not 32"),
        (yarn("attention_factor", json!(1.0)), "'attention_factor' is not 1.138"),
        (yarn("mscale", json!(1.0)), "'mscale'"),
        (yarn("truncate", json!(false)), "'truncate' must be true"),
        (llama3("factor", json!(-8.0)), "'factor'"),
        (llama3("low_freq_factor", json!(4.0)), "'high_freq_factor' is 4, which must be more than"),
        (llama3("original_max_position_embeddings", json!("8192")), "'original_max_position_embeddings'"),
        (json!({ "partial_rotary_factor": 0.5 }), "'partial_rotary_factor' is 0.5"),
        (json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }), "'partial_rotary_factor' is 0.5"),
        (json!({ "rms_norm_eps": 0 }), "'rms_norm_eps'"),
        (json!({ "rms_norm_eps": "1e-6" }), "'rms_norm_eps'"),
        (json!({ "num_key_value_heads": 3 }), "not a multiple of 'num_key_value_heads', 3"),
        (json!({ "head_dim": 15 }), "'head_dim' is 15"),
        (json!({ "hidden_act": "gelu" }), "'hidden_act' is 'gelu'"),
        (json!({ "layer_types": ["full_attention", "sliding_attention"] }), "'layer_types' is \"sliding_attention\""),
        (json!({ "use_sliding_window": true, "max_window_layers": 1 }), "'use_sliding_window' is true"),
        (json!({ "use_sliding_window": 1 }), "'use_sliding_window': expected true or false, got 1"),
        (json!({ "tie_word_embeddings": true }), "'tie_word_embeddings' is true, but 'lm_head.weight' is not"),
        (json!({ "eos_token_id": "59" }), "'eos_token_id': expected the number of a token"),
        (json!({ "eos_token_id": 64 }), "'eos_token_id'"),
        (json!({ "bos_token_id": [] }), "'bos_token_id'"),
        (json!({ "pad_token_id": -2 }), "'pad_token_id'"),
    ]);
    Model::new(QWEN3).refuses(&[(llama3("factor", json!(8.0)), "'qwen3' models do not have the rope type 'llama3'")]);
    Model::new(MOE).refuses(&[
        (json!({ "norm_topk_prob": false }), "'norm_topk_prob' must be true"),
        (json!({ "num_experts_per_tok": 5 }), "'num_experts_per_tok' is 5, more than the 4 experts"),
        (json!({ "num_local_experts": 5 }), "'num_local_experts' is 5 and 'num_experts' is 4"),
        (json!({ "mlp_only_layers": [0] }), "'mlp_only_layers' is not empty"),
        (json!({ "decoder_sparse_step": 2 }), "'decoder_sparse_step' is not 1"),
    ]);
}

#[test]
fn absent_and_null_have_defaults_and_what_is_said_is_written() {
    let model = Model::new(LLAMA);
    let value = |changes: &Json, key: &str| model.config(changes).unwrap().values().get(key).cloned();
    for theta in [json!(null), json!(10000)] {
        assert_eq!(value(&json!({ "rope_theta": theta }), "llama.rope.freq_base"), Some(Value::F32(10_000.0)));
    }
    let rope = json!({ "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "attention_factor": null, "rope_theta": 500000.0 });
    let yarn = json!({ "rope_parameters": rope, "rope_scaling": rope });
    assert_eq!(value(&yarn, "llama.rope.scaling.original_context_length"), Some(Value::U32(64)));
    assert_eq!(value(&yarn, "llama.rope.scaling.factor"), Some(Value::F32(4.0)));
    for id in [json!([59, 3]), json!(59)] {
        assert_eq!(value(&json!({ "eos_token_id": id }), "tokenizer.ggml.eos_token_id"), Some(Value::U32(59)));
    }
    assert_eq!(value(&json!({ "pad_token_id": -1 }), "tokenizer.ggml.padding_token_id"), None);
    let plain = json!({ "partial_rotary_factor": 1.0, "hidden_act": "silu", "use_sliding_window": false,
        "layer_types": ["full_attention", "full_attention"], "head_dim": 16, "rope_scaling": {} });
    model.config(&plain).unwrap();
}

#[test]
fn shapes_that_contradict_config_json_are_refused_with_the_tensor_and_the_key() {
    let model = Model::new(LLAMA);
    model.refuses(&[
        (json!({ "head_dim": 32 }), "'num_key_value_heads' x 'head_dim' is 64"),
        (json!({ "num_attention_heads": 2, "head_dim": 16 }), "'num_attention_heads' x 'head_dim' is 32"),
        (
            json!({ "num_key_value_heads": 4 }),
            "'model.layers.0.self_attn.k_proj.weight' must have the shape [64, 64], but it has [32, 64]",
        ),
        (json!({ "hidden_size": 128, "head_dim": 16 }), "'hidden_size' is 128"),
        (json!({ "intermediate_size": 64 }), "'intermediate_size' is 64"),
        (json!({ "vocab_size": 60 }), "'vocab_size' is 60"),
        (json!({ "num_hidden_layers": 3 }), "no 'model.layers.2.input_layernorm.weight'"),
        (json!({ "num_hidden_layers": 1 }), "beyond the 'num_hidden_layers'"),
    ]);
    Model::new(MOE).refuses(&[
        (json!({ "moe_intermediate_size": 64 }), "'moe_intermediate_size' is 64"),
        (json!({ "num_experts": 3 }), "3 experts"),
        (json!({ "num_experts": 5 }), "'num_experts' is 5, so 'model.layers.0.mlp.gate.weight'"),
    ]);
    let shape = |architecture: &str, name: &str, shape: Option<&[usize]>| {
        let dir = Folder::new();
        source(&dir.join("in"), architecture, if architecture == MOE { 4 } else { 0 });
        let path = dir.join("in/model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors = Tensors::new();
        for (own, view) in all.tensors() {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            tensors.insert(own, Tensor { dtype, shape, bytes });
        }
        match shape {
            Some(shape) => drop(tensors.insert(name.to_string(), random(Dtype::BF16, shape, 1))),
            None => drop(tensors.remove(name)),
        }
        save(&path, &tensors);
        to_gguf(&dir.join("in"), &dir.join("out.gguf")).map(drop).expect_err(name)
    };
    for (architecture, name, key, dims) in [
        (LLAMA, "model.layers.1.self_attn.q_proj.weight", "'num_attention_heads' x 'head_dim' is 64", &[128, 64][..]),
        (LLAMA, "model.layers.1.self_attn.v_proj.weight", "'num_key_value_heads' x 'head_dim' is 32", &[64, 64]),
        (LLAMA, "model.layers.1.self_attn.o_proj.weight", "'num_attention_heads' x 'head_dim' is 64", &[64, 128]),
        (LLAMA, "model.layers.0.mlp.up_proj.weight", "'intermediate_size' is 128", &[64, 64]),
        (LLAMA, "model.layers.0.mlp.down_proj.weight", "'intermediate_size' is 128", &[64, 64]),
        (LLAMA, "model.layers.0.input_layernorm.weight", "'hidden_size' is 64", &[32]),
        (LLAMA, "model.norm.weight", "'hidden_size' is 64", &[64, 64]),
        (LLAMA, "model.embed_tokens.weight", "'hidden_size' is 64", &[64, 128]),
        (LLAMA, "lm_head.weight", "'vocab_size' is 64", &[128, 64]),
        (QWEN2, "model.layers.0.self_attn.k_proj.bias", "'num_key_value_heads' x 'head_dim' is 32", &[64]),
        (QWEN3, "model.layers.0.self_attn.q_norm.weight", "'head_dim' is 16", &[64]),
        (MOE, "model.layers.0.mlp.gate.weight", "'num_experts' is 4", &[8, 64]),
        (MOE, "model.layers.0.mlp.experts.1.up_proj.weight", "'moe_intermediate_size' is 128", &[64, 64]),
        (LLAMA, "model.layers.0.self_attn.q_norm.weight", "has no place", &[16]),
        (LLAMA, "model.layers.0.input_layernorm.bias", "has no place", &[64]),
        (QWEN3, "model.layers.0.self_attn.o_proj.bias", "has no place", &[64]),
        (MOE, "model.layers.0.mlp.up_proj.weight", "has no place", &[128, 64]),
    ] {
        let error = shape(architecture, name, Some(dims));
        assert!(error.contains(&format!("'{name}'")) && error.contains(key), "{error}");
        assert!(key == "has no place" || error.ends_with(&format!("but it has {dims:?}")), "{error}");
    }
    for (architecture, name) in [
        (LLAMA, "model.norm.weight"),
        (LLAMA, "lm_head.weight"),
        (LLAMA, "model.layers.1.mlp.up_proj.weight"),
        (QWEN2, "model.layers.1.self_attn.v_proj.bias"),
        (QWEN3, "model.layers.1.self_attn.k_norm.weight"),
        (MOE, "model.layers.1.mlp.gate.weight"),
    ] {
        let error = shape(architecture, name, None);
        assert!(error.contains(&format!("no '{name}'")), "{error}");
    }
}

/// A change of `tokenizer.json`: the place of a value, and the value.
fn changed(mut json: Json, pointer: &str, value: Json) -> Json {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = json.pointer_mut(parent).unwrap();
    match key.parse::<usize>() {
        Ok(i) if parent.is_array() => parent[i] = value,
        _ => parent[key] = value,
    }
    json
}

#[test]
fn tokenizers_that_llama_cpp_would_read_otherwise_are_refused_by_setting() {
    let model = Model::new(LLAMA);
    for (pointer, value, said) in [
        ("/model/type", json!("WordPiece"), "expected the 'type' 'BPE', got 'WordPiece'"),
        ("/model/type", json!(1), "'type': expected text"),
        ("/model", json!([]), "'model': expected an object"),
        ("/normalizer", json!({ "type": "Lowercase" }), "llama.cpp does not do 'Lowercase'"),
        ("/normalizer", json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" }] }), "'NFKC'"),
        ("/normalizer", json!("NFC"), "'normalizer': expected an object"),
        ("/decoder", json!({ "type": "WordPiece" }), "'decoder': expected the 'type' 'ByteLevel'"),
        ("/model/end_of_word_suffix", json!("</w>"), "'end_of_word_suffix' is not empty"),
        ("/model/continuing_subword_prefix", json!("##"), "'continuing_subword_prefix' is not empty"),
        ("/model/dropout", json!(0.1), "'dropout': expected none"),
        ("/model/byte_fallback", json!(true), "'byte_fallback' must be false"),
        ("/model/ignore_merges", json!(true), "'ignore_merges' must be false: llama.cpp's 'qwen2' does so"),
        ("/model/merges", json!(null), "'merges' is missing"),
        ("/model/merges", json!({}), "'merges': expected a list"),
        ("/model/merges/0", json!(5), "'merges': expected pairs of tokens, got 5"),
        ("/model/merges/0", json!(["t", "1", "2"]), "expected pairs of tokens"),
        ("/model/merges/0", json!("t 1 2"), "expected pairs of tokens"),
        ("/model/merges/0", json!(["t", "9"]), "'9' is not in 'vocab'"),
        ("/model/merges/0", json!("1 2"), "'12' is not in 'vocab'"),
        ("/model/merges/0", json!("t 2"), "twice"),
        ("/model/vocab", json!({}), "'vocab' is empty"),
        ("/model/vocab", json!([]), "'vocab': expected an object"),
        ("/model/vocab/t3", json!(4), "have one number, 4"),
        ("/model/vocab/t3", json!("3"), "the token 't3' has no place"),
        ("/model/vocab/t3", json!(64), "the token 't3' has no place"),
        ("/model/vocab/[PAD63]", json!(60), "'[PAD63]' has two numbers, 60 and 63"),
        ("/added_tokens", json!({}), "'added_tokens': expected a list"),
        ("/added_tokens/0", json!("x"), "'added_tokens': expected objects"),
        ("/added_tokens/0/id", json!(3), "have one number, 3"),
        ("/added_tokens/0/id", json!(-1), "has no place"),
        ("/added_tokens/0/content", json!(3), "'content': expected text"),
        ("/added_tokens/0/content", json!("t3"), "'t3' has two numbers, 3 and 59"),
        ("/added_tokens/0/special", json!("yes"), "'special': expected true or false"),
        ("/added_tokens/0/lstrip", json!(true), "'lstrip' must be false"),
        ("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true), "'add_prefix_space' must be false"),
        ("/pre_tokenizer/pretokenizers/1/use_regex", json!(true), "splits text by a rule"),
        ("/pre_tokenizer/pretokenizers/0/invert", json!(true), "'invert' must be false"),
        ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed"), "'behavior'"),
        ("/post_processor", json!({ "type": "RobertaProcessing" }), "llama.cpp does not do 'RobertaProcessing'"),
        (
            "/post_processor",
            json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "t7" } }, { "Sequence": {} }] }),
            "puts 't7' around a text, which is not the 'bos_token'",
        ),
    ] {
        let error = model.with("tokenizer.json", &changed(tokenizer(), pointer, value.clone())).map(drop);
        let error = error.expect_err(&format!("{pointer} {value}"));
        assert!(error.contains(said), "{pointer} {value}: {error}");
    }
    for (settings, said) in [
        (json!([]), "tokenizer_config.json: expected an object"),
        (json!({ "eos_token": 59 }), "'eos_token': expected text"),
        (json!({ "eos_token": "<|stop|>" }), "'eos_token' is '<|stop|>', which is not a token"),
        (json!({ "add_bos_token": "no" }), "'add_bos_token': expected true or false"),
        (json!({ "chat_template": 1 }), "'chat_template': expected a list"),
        (json!({ "chat_template": [{ "name": "rag", "template": "" }] }), "has the name 'default'"),
    ] {
        let error = model.with("tokenizer_config.json", &settings).map(drop).expect_err(&settings.to_string());
        assert!(error.contains(said), "{settings}: {error}");
    }
}

/// The settings of the published tokenizers: Qwen 2 and 3, and Llama 3, which puts its first token before a text.
#[test]
fn the_tokenizers_of_llama_3_and_qwen_are_taken() {
    let model = Model::new(LLAMA);
    let common = |mut json: Json| {
        let settings = json!({ "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false });
        json["model"].as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        json["decoder"] = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
        json["added_tokens"][0] = json!({ "id": 59, "content": "<|end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true });
        json["pre_tokenizer"]["pretokenizers"][0]["invert"] = json!(false);
        json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(false);
        json
    };
    let mut qwen = common(tokenizer());
    qwen["normalizer"] = json!({ "type": "NFC" });
    qwen["post_processor"] = json!({ "type": "ByteLevel", "add_prefix_space": false });
    let file = model.with("tokenizer.json", &qwen).unwrap();
    assert!(file.values().keys().all(|key| !key.contains("add_")), "llama.cpp does what the tokenizer does");
    let mut llama = common(tokenizer());
    llama["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(LLAMA3);
    llama["model"]["ignore_merges"] = json!(true);
    llama["post_processor"] = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" },
        { "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<|end|>", "type_id": 0 } },
            { "Sequence": { "id": "A", "type_id": 0 } }] }] });
    std::fs::write(model.dir.join("in/tokenizer_config.json"), r#"{"bos_token": "<|end|>"}"#).unwrap();
    let file = model.with("tokenizer.json", &llama).unwrap();
    assert!(file.values().keys().all(|key| !key.contains("add_")));
    let puts =
        |json: &Json| model.with("tokenizer.json", json).unwrap().values()["tokenizer.ggml.add_bos_token"].clone();
    llama["post_processor"] = json!(null);
    assert_eq!(puts(&llama), Value::Bool(false), "llama.cpp would put one there by itself");
    qwen["post_processor"] = json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<|end|>" } },
        { "Sequence": { "id": "A" } }] });
    assert_eq!(puts(&qwen), Value::Bool(true));
    llama["model"]["ignore_merges"] = json!(false);
    let error = model.with("tokenizer.json", &llama).unwrap_err();
    assert!(error.contains("'ignore_merges' must be true: llama.cpp's 'llama-bpe' does so"), "{error}");
}

/// Where the value of a key begins in a file: after its name and its type.
fn value_at(bytes: &[u8], key: &str) -> usize {
    let name = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
    bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 4
}

#[test]
fn verify_finds_shapes_keys_and_scales_that_llama_cpp_would_trip_on() {
    let dir = Folder::new();
    source(&dir.join("in"), MOE, 4);
    let settings = Settings { target: Target::Gguf, acts: Acts::Constant(0.5), threads: 2, ..Settings::default() };
    convert(&dir.join("in"), &dir.join("out.gguf"), &settings, &(), &AtomicBool::new(false)).unwrap();
    let whole = std::fs::read(dir.join("out.gguf")).unwrap();
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    assert_eq!(verify(&file).unwrap(), []);
    let found = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        let findings = verify(&GgufFile::from_bytes(Path::new("changed.gguf"), changed).unwrap()).unwrap();
        let problems = findings.into_iter().filter(|f| f.severity == Severity::Problem);
        let lines: Vec<String> = problems.map(|problem| format!("{}: {}", problem.about, problem.text)).collect();
        assert!(!lines.is_empty(), "a problem");
        lines.join("\n")
    };
    for (key, number, said) in [
        ("embedding_length", 128, "has the dimensions [64, 64], but embedding_length is 128"),
        ("attention.head_count", 8, "attention.head_count x attention.key_length is 128"),
        ("attention.head_count_kv", 4, "attention.head_count_kv x attention.key_length is 64"),
        ("attention.head_count_kv", 3, "not a multiple of head_count_kv"),
        ("attention.key_length", 32, "but attention.key_length is 32"),
        ("rope.dimension_count", 8, "rope.dimension_count: 8, but attention.key_length is 16"),
        ("expert_count", 3, "expert_count is 3"),
        ("expert_used_count", 5, "more than the 4 experts"),
        ("expert_feed_forward_length", 64, "expert_feed_forward_length is 64"),
        ("block_count", 1, "beyond the 1 layers"),
        ("block_count", 0, "qwen3moe.block_count: expected a positive whole number"),
        ("block_count", 3, "blk.2.attn_norm.weight: missing"),
        ("vocab_size", 63, "63, but tokenizer.ggml.tokens has 64"),
        ("rope.freq_base", 0xFF80_0000, "rope.freq_base: expected a positive binary32 number, got -inf"),
        ("attention.layer_norm_rms_epsilon", 0, "expected a positive binary32 number, got 0.0"),
    ] {
        let said_now = found(value_at(&whole, &format!("qwen3moe.{key}")), &u32::to_le_bytes(number));
        assert!(said_now.contains(said), "{key} {number}: {said_now}");
    }
    let eos = value_at(&whole, "tokenizer.ggml.eos_token_id");
    assert!(found(eos, &64u32.to_le_bytes()).contains("expected the number of one of 64 tokens"));
    // 6 is the tag of binary32 where llama.cpp wants a whole number.
    let count = value_at(&whole, "qwen3moe.block_count");
    assert!(
        found(count - 4, &6u32.to_le_bytes()).starts_with("qwen3moe.block_count: expected a positive whole number")
    );
    for (key, text, said) in [
        ("tokenizer.ggml.model", "gpt9", "tokenizer.ggml.model: 'gpt9', which llama.cpp"),
        ("tokenizer.ggml.pre", "qwen9", "tokenizer.ggml.pre: 'qwen9', which llama.cpp"),
    ] {
        let problem = found(value_at(&whole, key) + 8, text.as_bytes());
        assert!(problem.starts_with(said), "{problem}");
    }
    // The type of a tensor stands behind its one dimension.
    let kind = value_at(&whole, "blk.0.attn_norm.weight") + 8;
    for (number, said) in [(99u32, "type 99, which ggml"), (1, "F16 of [64] ends before byte")] {
        let problem = found(kind, &number.to_le_bytes());
        assert!(problem.contains(&format!("blk.0.attn_norm.weight: {said}")), "{problem}");
    }
    for (name, other, said) in [
        ("blk.1.attn_q_norm.weight", "blk.1.attn_x_norm.weight", "blk.1.attn_q_norm.weight: missing"),
        ("blk.1.ffn_up_exps.scale", "blk.1.ffn_up_exps.scaly", "blk.1.ffn_up_exps.weight: no tensor scale, which '"),
        ("blk.1.ffn_up_exps.input_scale", "blk.1.ffn_zz_exps.input_scale", ""),
    ] {
        let problem = found(value_at(&whole, name) - 4 - name.len(), other.as_bytes());
        let stray = format!("{other}: llama.cpp's 'qwen3moe' models have no such tensor");
        assert!(problem.contains(&stray) && problem.contains(said), "{problem}");
    }
    for (name, said) in [("scale", "a tensor scale is"), ("input_scale", "an activation scale is")] {
        let tensor = file.get(&format!("blk.1.ffn_up_exps.{name}")).unwrap();
        for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            let problem = found(tensor.start as usize + 8, &bad.to_le_bytes());
            assert!(problem.starts_with(&format!("blk.1.ffn_up_exps.weight: {said}")), "{problem}");
        }
    }
}
