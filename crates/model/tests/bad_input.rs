//! What a file can get wrong is refused, by its name and with what to do.

mod generated;

use generated::*;
use nvfp4_checkpoint::{Settings, Target};
use nvfp4_model::{
    Activations, Decoder, Error, Evaluation, Generation, Result, Run, Sampling, Source, StateFile, generate, open,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

fn refusal(folder: &Path) -> String {
    evaluate(None, folder, Activations::AsStored).unwrap_err().to_string()
}

#[test]
fn settings_that_no_model_has_are_refused() {
    let dir = Folder::new("settings");
    let here = dir.join("in");
    let made = tensors(&config(), usual);
    for (name, value, wanted) in [
        ("num_attention_heads", json!(0), "'num_attention_heads' is 0"),
        ("num_attention_heads", json!(128), "have 0 elements each"),
        ("num_attention_heads", json!("4"), "expected a size"),
        ("num_attention_heads", json!(3), "3 heads cannot share 2 keys"),
        ("head_dim", json!(0), "'head_dim' is 0"),
        ("head_dim", json!(15), "15 of 15 elements of a head cannot turn"),
        ("head_dim", json!(1 << 27), "'head_dim' is 134217728; expected at most 65536"),
        ("num_hidden_layers", json!(1_000_000_000_000u64), "expected a size"),
        ("num_hidden_layers", json!(100_000_000), "expected at most 65536"),
        ("num_hidden_layers", json!(4), "'model.layers.3."),
        ("num_hidden_layers", json!(-3), "expected a size"),
        ("num_hidden_layers", Value::Null, "has no 'num_hidden_layers'"),
        ("hidden_size", json!(1u64 << 40), "expected a size"),
        ("intermediate_size", json!(1 << 27), "'model.layers.0.mlp.gate_proj' is 96 × 64"),
        ("vocab_size", json!(0), "'vocab_size' is 0"),
        ("rms_norm_eps", json!(-1.0), "expected a positive number"),
        ("rope_theta", json!(-2.0), "the angles of positions are not numbers"),
        ("rope_scaling", json!({ "type": "linear", "factor": 0.0 }), "the angles of positions are not numbers"),
        ("rope_scaling", json!({ "type": "linear" }), "has no 'factor'"),
        ("sliding_window", json!(0), "'sliding_window' is 0"),
        ("layer_types", json!([]), "'layer_types' has 0 entries"),
        ("hidden_act", json!("relu6"), "'relu6' is not run"),
    ] {
        let mut config = with(config(), name, value.clone());
        if name == "layer_types" {
            config["sliding_window"] = json!(4);
        }
        write(&here, &config, &made);
        let said = refusal(&here);
        assert!(said.contains(wanted), "{name} {value}: {said}");
    }
}

#[test]
fn tensors_that_are_missing_or_of_another_size_are_named() {
    let dir = Folder::new("tensors");
    let here = dir.join("in");
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut made = tensors(&config(), usual);
        change(&mut made);
        write(&here, &config(), &made);
        refusal(&here)
    };
    let without = |name: &'static str| refused(&move |made: &mut Tensors| assert!(made.remove(name).is_some()));
    let q = "model.layers.1.self_attn.q_proj";
    for (said, wanted) in [
        (
            without("model.layers.1.self_attn.q_proj.weight"),
            "no weight 'model.layers.1.self_attn.q_proj'; is the download",
        ),
        (without("model.layers.2.input_layernorm.weight"), "no tensor 'model.layers.2.input_layernorm.weight'"),
        (without("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (without("model.embed_tokens.weight"), "no tensor is called 'embed_tokens.weight'"),
        (without("lm_head.weight"), "no 'lm_head'"),
        (
            refused(&|made| drop(made.insert("lm_head.weight".into(), bf16s(&[WORDS, 32], |_| 1.0)))),
            "'lm_head' is 96 × 32; config.json asks for 96 × 64",
        ),
        (refused(&|made| drop(made.insert(format!("{q}.bias"), bf16s(&[3], |_| 1.0)))), "has 3 elements"),
        (
            refused(&|made| drop(made.insert("model.norm.weight".into(), (Dtype::U8, vec![64], vec![1; 64])))),
            "expected F32, BF16 or F16",
        ),
    ] {
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn numbers_that_are_not_are_named_wherever_they_are() {
    let dir = Folder::new("nan");
    let here = dir.join("in");
    for (damaged, wanted) in [
        ("model.embed_tokens", "'model.embed_tokens' has numbers that are not finite for token"),
        ("model.layers.0.self_attn.v_proj", "'model.layers.0.self_attn' gives"),
        ("model.layers.2.mlp.down_proj", "'model.layers.2.mlp' gives"),
        ("model.norm", "'lm_head' or the last norm is damaged"),
        ("lm_head", "'lm_head' or the last norm is damaged"),
    ] {
        for value in [f32::NAN, f32::INFINITY] {
            model(&here, &config(), |name, i| if name == damaged && i % 64 == 3 { value } else { usual(name, i) });
            let said = refusal(&here);
            assert!(said.contains(wanted), "{damaged} {value}: {said}");
        }
    }
}

/// One layer in the format of another program.
#[test]
fn a_checkpoint_that_mixes_formats_is_refused_by_the_tensor() {
    let dir = Folder::new("dialects");
    model(&dir.join("in"), &config(), usual);
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        converted(&dir.join("in"), &dir.join(&target.to_string()), &Settings { target, ..Settings::default() });
    }
    let read = |folder: &str| -> Tensors {
        let bytes = std::fs::read(dir.join(folder).join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let owned = file
            .iter()
            .map(|(name, view)| (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())));
        owned.collect()
    };
    let (first, second) = (read("modelopt"), read("compressed-tensors"));
    let layer = |name: &str| name.starts_with("model.layers.1.");
    let kept = first.into_iter().filter(|(name, _)| !layer(name));
    let mixed: Tensors = kept.chain(second.into_iter().filter(|(name, _)| layer(name))).collect();
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("modelopt/config.json")).unwrap()).unwrap();
    write(&dir.join("mixed"), &config, &mixed);
    let said = refusal(&dir.join("mixed"));
    assert!(said.contains("is not of the format of the other weights") && said.contains("--from"), "{said}");
}

#[test]
fn tokens_that_the_model_does_not_know_are_refused() {
    let dir = Folder::new("tokens");
    let (here, padded) = (dir.join("in"), dir.join("padded"));
    model(&here, &config(), usual);
    // Embeddings may have more rows than there are tokens.
    write(&padded, &with(config(), "vocab_size", json!(90)), &tensors(&config(), usual));
    for (folder, token) in [(&here, 96), (&padded, 90), (&here, u32::MAX)] {
        let checkpoint = open(folder).unwrap();
        let source = Source::new(&checkpoint, None).unwrap();
        let said = Decoder::new(&source).embed(&[1, token]).unwrap_err().to_string();
        assert!(said.contains(&format!("the token {token}")) && said.contains("not of one model"), "{said}");
    }
}

#[test]
fn a_prompt_that_is_too_long_is_refused() {
    let dir = Folder::new("prompt");
    model(&dir.join("in"), &config(), usual);
    let checkpoint = open(&dir.join("in")).unwrap();
    let source = Source::new(&checkpoint, None).unwrap();
    let said = |prompt: &[u32], most: usize| {
        let generation = Generation { prompt, most, ends: &[], sampling: Sampling::Greedy };
        generate(&source, &generation, &Run::AS_STORED, &GO, |_| Ok(())).unwrap_err().to_string()
    };
    assert!(said(&[1; 65], 0).contains("give a shorter prompt"));
    assert!(said(&[1; 60], 5).contains("64 positions"));
    assert!(said(&[1], usize::MAX).contains("ask for fewer tokens"));
    assert!(said(&[], 5).contains("give some text"));
    assert!(said(&[96], 5).contains("not of one model"));
}

/// Stops when the second layer is done, and leaves a state.
fn stopped(here: &Path, path: &Path) -> Result<Evaluation> {
    struct Stop(AtomicBool);
    impl nvfp4_model::Progress for &Stop {
        fn advance(&mut self, _work: u64, what: &str) {
            self.0.fetch_or(what == "layer 2", Ordering::Relaxed);
        }
    }
    let stop = Stop(AtomicBool::new(false));
    let state = StateFile::new(path, "this".to_string());
    run(None, here, Activations::AsStored, Some(&state), &mut &stop, &stop.0)
}

#[test]
fn a_state_that_is_damaged_is_refused_with_its_name() {
    let dir = Folder::new("states");
    let (here, path) = (dir.join("in"), dir.join("state"));
    model(&here, &config(), usual);
    assert!(matches!(stopped(&here, &path), Err(Error::Interrupted)));
    let whole = std::fs::read(&path).unwrap();
    let state = StateFile::new(&path, "this".to_string());
    let again = || run(None, &here, Activations::AsStored, Some(&state), &mut (), &GO);
    for len in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let said = again().unwrap_err().to_string();
        assert!(said.contains("state") && said.contains("remove it"), "{len}: {said}");
    }
    // Numbers of it that are not possible.
    let text = String::from_utf8_lossy(&whole).into_owned();
    assert!(text.contains(r#"\"layer\":2"#), "{}", &text[..300]);
    for (from, to) in [(r#"\"layer\":2"#, r#"\"layer\":9"#), (r#"\"lanes\":1"#, r#"\"lanes\":2"#)] {
        let at = whole.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        let mut changed = whole.clone();
        changed[at..at + from.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, changed).unwrap();
        let said = again().unwrap_err().to_string();
        assert!(said.contains("remove it"), "{said}");
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(again().unwrap().said, evaluate(None, &here, Activations::AsStored).unwrap().said);
}
