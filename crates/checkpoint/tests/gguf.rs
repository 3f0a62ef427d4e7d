//! GGUF files: the values of a conversion to GGUF are those of one to ModelOpt, under llama.cpp's names and in its order.

mod generated;

use generated::for_llama_cpp::{source, tokenizer};
use generated::*;
use nvfp4_checkpoint::gguf::{GgufFile, Type, Value, check_gguf, verify};
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::json;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn run(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

fn to(target: Target) -> Settings {
    Settings { target, threads: 2, ..Settings::default() }
}

/// All values of a weight of a checkpoint.
fn values_of(model: &Model<'_>, module: &str) -> Vec<f32> {
    let weight = model.weight(module).unwrap();
    let mut buffer = Buffer::default();
    let values = weight.values(0..weight.rows, &mut buffer).unwrap();
    (0..values.len()).map(|i| values.get(i)).collect()
}

/// Rows of every head: first half and second half, one from each in turn.
fn interleaved(values: &[f32], cols: usize, head: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    let from = |r: usize| r / head * head + (r % head) % 2 * (head / 2) + (r % head) / 2;
    (0..rows).flat_map(|r| values[from(r) * cols..][..cols].to_vec()).collect()
}

#[test]
fn a_llama_has_the_values_of_modelopts_with_heads_interleaved() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    run(&dir.join("in"), &dir.join("modelopt"), &to(Target::ModelOpt)).unwrap();
    let summary = run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap();
    assert_eq!(summary.quantized.len(), 14);
    assert!(!dir.join("out.gguf.partial").exists());
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    assert_eq!(verify(&file).unwrap(), []);
    let checkpoint = Checkpoint::open(&dir.join("modelopt")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let read = |name: &str| {
        let tensor = file.get(name).unwrap_or_else(|| panic!("{name}"));
        (tensor.kind, file.floats(tensor, 0..tensor.rows()).unwrap())
    };
    for l in 0..2 {
        for (ours, theirs, cols) in [
            ("attn_q", "self_attn.q_proj", 64),
            ("attn_k", "self_attn.k_proj", 64),
            ("attn_v", "self_attn.v_proj", 64),
            ("attn_output", "self_attn.o_proj", 64),
            ("ffn_gate", "mlp.gate_proj", 64),
            ("ffn_down", "mlp.down_proj", 128),
        ] {
            let mut expected = values_of(&model, &format!("model.layers.{l}.{theirs}"));
            if ["attn_q", "attn_k"].contains(&ours) {
                expected = interleaved(&expected, cols, 16);
            }
            assert!(read(&format!("blk.{l}.{ours}.weight")) == (Type::NVFP4, expected), "{l} {ours}");
        }
        assert_eq!(read(&format!("blk.{l}.attn_norm.weight")).0, Type::F32);
    }
    let plain = |name: &str| {
        let bytes = checkpoint.get(name).unwrap().bytes().unwrap();
        bytes.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect::<Vec<f32>>()
    };
    assert!(read("blk.1.ffn_norm.weight") == (Type::F32, plain("model.layers.1.post_attention_layernorm.weight")));
    assert!(read("token_embd.weight") == (Type::BF16, plain("model.embed_tokens.weight")));
    assert!(read("output.weight") == (Type::BF16, plain("lm_head.weight")));
    assert_eq!(file.tensors().len(), 2 * (7 * 2 + 2) + 3, "weights with scales, norms; embedding, head, last norm");
}

#[test]
fn keys_say_what_config_and_tokenizer_say() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap();
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    let value = |key: &str| file.values().get(key).cloned().unwrap_or_else(|| panic!("{key}"));
    let text = |t: &str| Value::Text(t.to_string());
    assert_eq!(value("general.architecture"), text("llama"));
    assert_eq!(value("general.file_type"), Value::U32(39));
    assert_eq!(value("llama.block_count"), Value::U32(2));
    assert_eq!(value("llama.attention.head_count_kv"), Value::U32(2));
    assert_eq!(value("llama.attention.key_length"), Value::U32(16));
    assert_eq!(value("llama.rope.freq_base"), Value::F32(500_000.0));
    assert_eq!(value("llama.attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
    assert_eq!(value("tokenizer.ggml.model"), text("gpt2"));
    assert_eq!(value("tokenizer.ggml.pre"), text("qwen2"));
    assert_eq!(value("tokenizer.ggml.eos_token_id"), Value::U32(59));
    assert_eq!(value("tokenizer.ggml.merges"), Value::Texts(vec!["t 1".to_string(), "t 2".to_string()]));
    let Value::Texts(tokens) = value("tokenizer.ggml.tokens") else { panic!() };
    let Value::I32s(kinds) = value("tokenizer.ggml.token_type") else { panic!() };
    assert_eq!(
        (tokens.len(), tokens[7].as_str(), tokens[59].as_str(), tokens[63].as_str()),
        (64, "t7", "<|end|>", "[PAD63]")
    );
    assert_eq!((kinds[7], kinds[59], kinds[63]), (1, 3, 5), "normal, control, unused");
}

#[test]
fn experts_are_one_tensor_with_a_scale_for_each() {
    let dir = Folder::new();
    source(&dir.join("in"), "Qwen3MoeForCausalLM", 12);
    run(&dir.join("in"), &dir.join("modelopt"), &to(Target::ModelOpt)).unwrap();
    run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap();
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    assert_eq!(verify(&file).unwrap(), []);
    let checkpoint = Checkpoint::open(&dir.join("modelopt")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    for (ours, theirs) in [("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")] {
        let tensor = file.get(&format!("blk.1.{ours}.weight")).unwrap();
        assert_eq!((tensor.kind, tensor.matrices(), file.scales(tensor).unwrap().len()), (Type::NVFP4, 12, 12));
        // Expert 10 stands before expert 2 in the checkpoint's order of names.
        let expert = |e: usize| values_of(&model, &format!("model.layers.1.mlp.experts.{e}.{theirs}"));
        let expected: Vec<f32> = (0..12).flat_map(expert).collect();
        assert!(file.floats(tensor, 0..tensor.rows()).unwrap() == expected, "{ours}");
    }
    assert_eq!(file.get("blk.0.ffn_gate_inp.weight").unwrap().kind, Type::F32, "the router");
    let query = file.get("blk.0.attn_q.weight").unwrap();
    assert!(
        file.floats(query, 0..64).unwrap() == values_of(&model, "model.layers.0.self_attn.q_proj"),
        "not reordered"
    );
}

/// The bytes do not depend on threads, memory, interruptions, or on whether the source was NVFP4 already.
#[test]
fn the_same_bytes_in_pieces_resumed_and_from_modelopt() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    run(&dir.join("in"), &dir.join("a.gguf"), &to(Target::Gguf)).unwrap();
    let whole = std::fs::read(dir.join("a.gguf")).unwrap();
    let small = Settings { memory: 1, threads: 1, ..to(Target::Gguf) };
    run(&dir.join("in"), &dir.join("b.gguf"), &small).unwrap();
    assert!(std::fs::read(dir.join("b.gguf")).unwrap() == whole);
    let stopped = convert(&dir.join("in"), &dir.join("c.gguf"), &small, &(), &AtomicBool::new(true));
    assert!(matches!(stopped, Err(Error::Interrupted)) && !dir.join("c.gguf").exists());
    run(&dir.join("in"), &dir.join("c.gguf"), &Settings { existing: Existing::Resume, ..small.clone() }).unwrap();
    assert!(std::fs::read(dir.join("c.gguf")).unwrap() == whole);
    let (same, other) = (dir.join("x/in"), dir.join("modelopt"));
    run(&dir.join("in"), &other, &to(Target::ModelOpt)).unwrap();
    std::fs::create_dir_all(dir.join("x")).unwrap();
    std::fs::rename(other, &same).unwrap(); // the name of the folder is the name of the model
    run(&same, &dir.join("d.gguf"), &to(Target::Gguf)).unwrap();
    assert!(std::fs::read(dir.join("d.gguf")).unwrap() == whole);
    let again = run(&dir.join("in"), &dir.join("a.gguf"), &to(Target::Gguf)).unwrap_err().to_string();
    assert!(again.contains("already exists"), "{again}");
    run(&dir.join("in"), &dir.join("a.gguf"), &Settings { existing: Existing::Replace, ..small.clone() }).unwrap();
    std::fs::write(dir.join("notes.gguf"), "mine").unwrap();
    let kept = run(&dir.join("in"), &dir.join("notes.gguf"), &Settings { existing: Existing::Replace, ..small });
    assert!(kept.unwrap_err().to_string().contains("is neither a GGUF file") && dir.join("notes.gguf").exists());
}

#[test]
fn biases_of_queries_come_along_and_others_are_refused() {
    let dir = Folder::new();
    source(&dir.join("in"), "Qwen2ForCausalLM", 0);
    let refused = run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap_err().to_string();
    assert!(refused.contains("leaves out the tensor scales of Qwen2's MLP"), "{refused}");
    let selection = Selection { skip: vec!["**.mlp.*".parse().unwrap()], ..Selection::default() };
    run(&dir.join("in"), &dir.join("out.gguf"), &Settings { selection, ..to(Target::Gguf) }).unwrap();
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    assert_eq!(file.get("blk.1.attn_q.bias").unwrap().kind, Type::F32);
    assert_eq!(file.get("blk.1.attn_q.weight").unwrap().kind, Type::NVFP4);
    assert_eq!(file.get("blk.1.ffn_up.weight").unwrap().kind, Type::BF16);
}

#[test]
fn what_gguf_cannot_hold_is_refused_by_name() {
    let dir = Folder::new();
    let error = |name: &str, target: &str| {
        let refused = run(&dir.join(name), &dir.join(target), &to(Target::Gguf)).unwrap_err().to_string();
        assert!(!dir.join(&format!("{target}.partial")).exists(), "nothing is left: {refused}");
        refused
    };
    source(&dir.join("llama"), "LlamaForCausalLM", 0);
    assert!(error("llama", "folder").contains("give the target a name that ends in .gguf"));
    source(&dir.join("oss"), "GptOssForCausalLM", 0);
    assert!(error("oss", "a.gguf").starts_with("GptOssForCausalLM is not written as GGUF"));
    source(&dir.join("extra"), "Qwen3ForCausalLM", 0);
    let file = dir.join("extra/more.safetensors");
    save(&file, &Tensors::from([("visual.patch.weight".to_string(), random(Dtype::BF16, &[8, 64], 1))]));
    std::fs::rename(dir.join("extra/model.safetensors"), dir.join("extra/first.safetensors")).unwrap();
    assert!(error("extra", "a.gguf").starts_with("tensor 'visual.patch.weight' has no place"));
    let mut other = tokenizer();
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\w+");
    std::fs::write(dir.join("llama/tokenizer.json"), other.to_string()).unwrap();
    assert!(error("llama", "a.gguf").starts_with("tokenizer.json splits text by a rule"));
}

#[test]
fn sentence_pieces_become_tokens_scores_and_kinds() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    std::fs::remove_file(dir.join("in/tokenizer.json")).unwrap();
    // Field 1: a piece of text (1), score (2, binary32) and kind (3).
    let piece = |text: &str, score: f32, kind: u8| {
        let mut message = vec![0x0A, text.len() as u8];
        message.extend(text.as_bytes());
        message.push(0x15);
        message.extend(score.to_le_bytes());
        message.extend([0x18, kind]);
        [vec![0x0A, message.len() as u8], message].concat()
    };
    let model =
        [piece("<unk>", 0.0, 2), piece("<s>", 0.0, 3), piece("▁the", -1.5, 1), piece("<0x0A>", 0.0, 6)].concat();
    std::fs::write(dir.join("in/tokenizer.model"), &model).unwrap();
    std::fs::write(dir.join("in/tokenizer_config.json"), r#"{"bos_token": "<s>", "add_bos_token": true}"#).unwrap();
    run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap();
    let file = GgufFile::open(&dir.join("out.gguf")).unwrap();
    let value = |key: &str| file.values()[&format!("tokenizer.ggml.{key}")].clone();
    assert_eq!(value("model"), Value::Text("llama".to_string()));
    let (Value::Texts(tokens), Value::F32s(scores), Value::I32s(kinds)) =
        (value("tokens"), value("scores"), value("token_type"))
    else {
        panic!()
    };
    assert_eq!((tokens[2].as_str(), scores[2], &kinds[..5]), ("▁the", -1.5, &[2, 3, 1, 6, 5][..]));
    assert_eq!((value("bos_token_id"), value("add_bos_token")), (Value::U32(1), Value::Bool(true)));
    std::fs::write(dir.join("in/tokenizer.model"), &model[..model.len() - 3]).unwrap();
    let truncated = run(&dir.join("in"), &dir.join("b.gguf"), &to(Target::Gguf)).unwrap_err().to_string();
    assert!(truncated.contains("truncated"), "{truncated}");
}

#[test]
fn files_that_lie_are_refused() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    run(&dir.join("in"), &dir.join("out.gguf"), &to(Target::Gguf)).unwrap();
    let whole = std::fs::read(dir.join("out.gguf")).unwrap();
    assert!(check_gguf(&whole));
    for cut in (0..whole.len()).step_by(97) {
        assert!(!check_gguf(&whole[..cut]), "cut at {cut}");
    }
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = whole.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        let path = dir.join("bad.gguf");
        std::fs::write(&path, file).unwrap();
        GgufFile::open(&path).unwrap_err().to_string()
    };
    assert!(changed(0, b"GGML").contains("does not begin with 'GGUF'"));
    assert!(changed(4, &9u32.to_le_bytes()).contains("version 9"));
    assert!(changed(4, &3u32.to_be_bytes()).contains("big-endian"));
    assert!(changed(8, &u64::MAX.to_le_bytes()).contains("more than"));
    assert!(changed(24, &u64::MAX.to_le_bytes()).contains("truncated"), "the length of the first key");
}
