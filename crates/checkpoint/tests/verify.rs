//! What `verify` says of a good checkpoint with one thing changed: every change is one that a server gets wrong or refuses.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;

const K: &str = "model.layers.1.self_attn.k_proj";

#[test]
fn changes_of_modelopts_checkpoint_are_found() {
    let good = Parts::convert(&llama(Dtype::BF16), &config(), &settings(Target::ModelOpt, Acts::Constant(1.0)));
    check(
        &good,
        &[
            (
                "no tensor scale",
                &|p| p.remove(&format!("{K}.weight_scale_2")),
                "Problem model.layers.1.self_attn.k_proj: NVFP4 codes without 'model.layers.1.self_attn.k_proj.weight_scale_2': a \
                 server leaves the scale uninitialised",
            ),
            (
                "codes without scales at all",
                &|p| p.remove(&format!("{K}.weight_scale")),
                "NVFP4 codes without 'model.layers.1.self_attn.k_proj.weight_scale' and",
            ),
            (
                "scales without codes",
                &|p| {
                    p.remove(&format!("{K}.weight_scale_2"));
                    p.tensors.remove(&format!("{K}.weight"));
                },
                "Problem model.layers.1.self_attn.k_proj: block scales without codes",
            ),
            (
                "no activation scale",
                &|p| p.remove(&format!("{K}.input_scale")),
                "no activation scale, which the configuration promises",
            ),
            (
                "the algorithms differ",
                &|p| p.quantization()["quant_algo"] = json!("W4A16_NVFP4"),
                "Problem quant_algo: config.json says W4A16_NVFP4, hf_quant_config.json says NVFP4",
            ),
            (
                "the algorithms differ, the other way round",
                &|p| p.own["quantization"]["quant_algo"] = json!("W4A16_NVFP4"),
                "Problem quant_algo: config.json says NVFP4, hf_quant_config.json says W4A16_NVFP4",
            ),
            (
                "another algorithm",
                &|p| {
                    p.quantization()["quant_algo"] = json!("FP8");
                    p.own["quantization"]["quant_algo"] = json!("FP8");
                },
                "Problem config.json: the algorithm is 'FP8', but the weights are NVFP4",
            ),
            (
                "several algorithms",
                &|p| {
                    p.quantization()["quant_algo"] = json!("MIXED_PRECISION");
                    p.own["quantization"]["quant_algo"] = json!("MIXED_PRECISION");
                },
                "Problem quantized_layers: missing or empty beside 'MIXED_PRECISION': vLLM refuses the checkpoint",
            ),
            (
                "no algorithm",
                &|p| drop(p.quantization().as_object_mut().unwrap().remove("quant_algo")),
                "Problem config.json: no 'quant_algo'",
            ),
            (
                "activation scales that are not promised",
                &|p| {
                    p.quantization()["quant_algo"] = json!("W4A16_NVFP4");
                    p.own["quantization"]["quant_algo"] = json!("W4A16_NVFP4");
                },
                "Note activation scales: the configuration says weights only, so the activation scales of 14 weights",
            ),
            (
                "other blocks",
                &|p| p.own["quantization"]["group_size"] = json!(32),
                "Problem hf_quant_config.json: blocks of 32 ('group_size')",
            ),
            (
                "other blocks in config.json",
                &|p| p.quantization()["config_groups"]["group_0"]["weights"]["group_size"] = json!(32),
                "Problem config.json: blocks of 32",
            ),
            (
                "lists that differ",
                &|p| p.quantization()["ignore"] = json!(["lm_head"]),
                "Note lists of modules: 'model.embed_tokens' is in one of",
            ),
            (
                "a head that is not listed",
                &|p| p.own["quantization"]["exclude_modules"] = json!(["model.embed_tokens"]),
                "Problem lm_head: not quantized, but not in the list of hf_quant_config.json",
            ),
            (
                "a tied head that is not listed",
                &|p| {
                    p.tensors.remove("lm_head.weight");
                    p.config["tie_word_embeddings"] = json!(true);
                    p.own["quantization"]["exclude_modules"] = json!(["model.embed_tokens"]);
                },
                "Problem lm_head: tied to the embedding, and not in the list of hf_quant_config.json",
            ),
            (
                "a projection is missing",
                &|p| p.remove(K),
                "Problem model.layers.1: 'self_attn.k_proj.weight' missing, which layer 0 has",
            ),
            (
                "a norm of a layer is missing",
                &|p| p.remove("model.layers.0.input_layernorm"),
                "Problem model.layers.0: 'input_layernorm.weight' missing, which layer 1 has",
            ),
            (
                "half a layer is missing",
                &|p| p.remove("model.layers.0.mlp."),
                "Problem model.layers.0: 'mlp.down_proj.weight' and 2 more missing",
            ),
            (
                "a layer is missing",
                &|p| p.remove("model.layers.1."),
                "Problem model.layers.1: has no tensors; config.json says 2 layers",
            ),
            (
                "more layers than there are",
                &|p| p.config["num_hidden_layers"] = json!(1_000_000_000_000_u64),
                "Problem model.layers.2: has no tensors, nor have 999999999997 more",
            ),
            ("no embedding", &|p| p.remove("model.embed_tokens"), "Problem embedding: missing"),
            ("no last norm", &|p| p.remove("model.norm"), "Problem norm: the norm after the last layer is missing"),
            ("no head", &|p| p.remove("lm_head"), "Problem output head: missing, and 'tie_word_embeddings'"),
            (
                "another hidden size",
                &|p| p.config["hidden_size"] = json!(128),
                "Problem model.embed_tokens: 64 columns, but 'hidden_size' in config.json is 128",
            ),
            (
                "another vocabulary",
                &|p| p.config["vocab_size"] = json!(65),
                "Problem model.embed_tokens: 64 rows, but 'vocab_size' in config.json is 65",
            ),
            (
                "an activation that nobody has",
                &|p| p.config["hidden_act"] = json!("siluu"),
                "Problem config.json: 'hidden_act' is 'siluu', which no server has for LlamaForCausalLM",
            ),
            (
                "fewer heads of keys than of queries, and nothing that says so",
                &|p| p.config["num_attention_heads"] = json!(4),
                "32 rows, but 'num_key_value_heads' x 'head_dim' in config.json is 64",
            ),
            (
                "no architecture",
                &|p| drop(p.config.as_object_mut().unwrap().remove("architectures")),
                "Problem architecture: config.json names no architecture",
            ),
            (
                "an architecture that no server loads",
                &|p| p.config["architectures"] = json!(["T5ForConditionalGeneration"]),
                "Problem architecture: T5ForConditionalGeneration: no server runs",
            ),
            (
                "an architecture that is not known",
                &|p| p.config["architectures"] = json!(["LamaForCausalLM"]),
                "Note architecture: vLLM (August 2026) has no code for LamaForCausalLM",
            ),
        ],
    );
}

#[test]
fn changes_of_compressed_tensors_checkpoint_are_found() {
    let good =
        Parts::convert(&llama(Dtype::BF16), &config(), &settings(Target::CompressedTensors, Acts::Constant(1.0)));
    check(
        &good,
        &[
            (
                "no tensor scale",
                &|p| p.remove(&format!("{K}.weight_global_scale")),
                "NVFP4 codes without 'model.layers.1.self_attn.k_proj.weight_global_scale'",
            ),
            (
                "no activation scale",
                &|p| p.remove(&format!("{K}.input_global_scale")),
                "no activation scale, which the configuration promises",
            ),
            (
                "not 4 bits",
                &|p| p.quantization()["config_groups"]["group_0"]["weights"]["num_bits"] = json!(8),
                "Problem config.json: no entry of 'config_groups'",
            ),
            (
                "other blocks",
                &|p| p.quantization()["config_groups"]["group_0"]["weights"]["group_size"] = json!(32),
                "Problem config.json: blocks of 32",
            ),
            ("a projection is missing", &|p| p.remove(K), "Problem model.layers.1: 'self_attn.k_proj.weight' missing"),
        ],
    );
}

/// Older checkpoints of ModelOpt have their description in one file.
#[test]
fn hf_quant_config_alone_is_enough() {
    let good = Parts::convert(&llama(Dtype::BF16), &config(), &settings(Target::ModelOpt, Acts::None));
    assert_eq!(good.after(&|p| drop(p.config.as_object_mut().unwrap().remove("quantization_config"))), "");
    assert!(good.after(&|p| p.own = json!({})).contains("Problem hf_quant_config.json: 'group_size' is missing"));
}

/// Weights of a mixture, one router and two experts a layer; the first layer is dense.
fn mixture() -> (Tensors, Value) {
    let mut tensors: Tensors = llama(Dtype::BF16).into_iter().flatten().collect();
    for l in 0..3 {
        for norm in ["q_norm", "k_norm"] {
            let name = format!("model.layers.{l}.self_attn.{norm}.weight");
            tensors.insert(name, random(Dtype::BF16, &[16], 4));
        }
    }
    for l in 1..3 {
        let mut sparse = layer(l, Dtype::BF16);
        let dense: Vec<String> = sparse.keys().filter(|name| name.contains(".mlp.")).cloned().collect();
        for name in dense {
            let weight = sparse.remove(&name).unwrap();
            tensors.remove(&name);
            for e in 0..2 {
                sparse.insert(name.replace(".mlp.", &format!(".mlp.experts.{e}.")), weight.clone());
            }
        }
        sparse.insert(format!("model.layers.{l}.mlp.gate.weight"), random(Dtype::BF16, &[2, 64], 3));
        tensors.extend(sparse);
    }
    let mut config = config();
    config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
    config["num_hidden_layers"] = json!(3);
    (config["num_experts"], config["mlp_only_layers"]) = (json!(2), json!([0]));
    (tensors, config)
}

#[test]
fn an_expert_that_is_missing_is_found_and_a_dense_layer_is_fine() {
    let (tensors, config) = mixture();
    let good = Parts::convert(&[tensors], &config, &settings(Target::ModelOpt, Acts::None));
    check(
        &good,
        &[
            (
                "an expert",
                &|p| p.remove("model.layers.2.mlp.experts.1."),
                "Problem model.layers.2: only 1 of 2 experts have a 'mlp.experts.#.down_proj.weight'",
            ),
            ("a router", &|p| p.remove("model.layers.2.mlp.gate"), "Problem model.layers.2: 'mlp.gate.weight' missing"),
            (
                "no number of experts",
                &|p| drop(p.config.as_object_mut().unwrap().remove("num_experts")),
                "Problem config.json: no 'num_experts', but layer 1 has 2",
            ),
            (
                "every router",
                &|p| p.tensors.retain(|name, _| !name.contains(".mlp.gate.")),
                "Problem model.layers.1: 'mlp.gate.weight' missing, which every layer of Qwen3MoeForCausalLM has",
            ),
            (
                "every expert",
                &|p| p.tensors.retain(|name, _| !name.contains(".experts.")),
                "Problem model.layers.2: 'mlp.experts.#.down_proj.weight' and 2 more missing, which every layer",
            ),
            (
                "every norm of queries",
                &|p| p.tensors.retain(|name, _| !name.contains("q_norm")),
                "Problem model.layers.0: 'self_attn.q_norm.weight' missing, which every layer",
            ),
            (
                "a dense layer that is not said to be one",
                &|p| p.config["mlp_only_layers"] = json!([]),
                "Problem model.layers.0: 'mlp.experts.#.down_proj.weight' and 3 more missing, which layer 1 has",
            ),
        ],
    );
}

/// What no layer has, no comparison of layers finds; nor what one layer has under another name.
#[test]
fn parts_that_every_layer_of_a_family_has_are_asked_for() {
    let of = |architecture: &str| {
        let mut config = config();
        config["architectures"] = json!([architecture]);
        Parts::convert(&llama(Dtype::BF16), &config, &settings(Target::ModelOpt, Acts::None))
    };
    for (architecture, known) in [("LlamaForCausalLM", true), ("MistralForCausalLM", true), ("OlmoForCausalLM", false)]
    {
        let good = of(architecture);
        assert_eq!(good.after(&|_| {}), "");
        for (part, first) in [
            ("mlp", "mlp.down_proj.weight' and 2 more"),
            ("mlp.down_proj", "mlp.down_proj.weight'"),
            ("self_attn.o_proj", "self_attn.o_proj.weight'"),
            ("input_layernorm", "input_layernorm.weight'"),
        ] {
            let said = good.after(&|p| p.tensors.retain(|name, _| !name.contains(&format!(".{part}."))));
            for layer in 0..2 {
                let expected =
                    format!("Problem model.layers.{layer}: '{first} missing, which every layer of {architecture}");
                assert_eq!(said.contains(&expected), known, "{part}: {said}");
            }
        }
        for (from, to) in [("layers.1.mlp.up_proj.", "layers.1.mlp.foo."), ("layers.1.mlp.", "layers.1.ffn.")] {
            let renamed = |p: &mut Parts| {
                p.tensors = p.tensors.iter().map(|(name, t)| (name.replace(from, to), t.clone())).collect();
            };
            let said = good.after(&renamed);
            let found =
                |line: &str| line.starts_with("Problem model.layers.1: 'mlp.") && line.contains("missing, which");
            assert_eq!(said.lines().filter(|line| found(line)).count(), 1, "{architecture}, {to}: {said}");
        }
    }
    let mixtral = of("MixtralForCausalLM").after(&|_| {});
    assert!(mixtral.contains("'block_sparse_moe.experts.#.w1.weight' and 3 more missing"), "{mixtral}");
}

/// Layers of several types: what one lacks, the other type has instead, or the configuration says that it is another type.
#[test]
fn layers_of_other_types_are_no_problem() {
    let mut hybrid: Tensors = llama(Dtype::BF16).into_iter().flatten().collect();
    hybrid.retain(|name, _| !name.contains("layers.1.self_attn"));
    hybrid.insert("model.layers.1.mamba.in_proj.weight".into(), random(Dtype::BF16, &[64, 64], 1));
    hybrid.insert("model.layers.1.mamba.A_log".into(), random(Dtype::F32, &[64], 1));
    let mut typed = config();
    typed["architectures"] = json!(["GraniteMoeHybridForCausalLM"]);
    let good = Parts::convert(&[hybrid], &typed, &settings(Target::ModelOpt, Acts::None));
    assert_eq!(good.after(&|_| {}), "");

    let mut shared: Tensors = llama(Dtype::BF16).into_iter().flatten().collect();
    shared.retain(|name, _| !name.contains("layers.1.self_attn.v_proj"));
    let mut typed = config();
    typed["architectures"] = json!(["Gemma4ForCausalLM"]);
    typed["layer_types"] = json!(["sliding_attention", "full_attention"]);
    let good = Parts::convert(&[shared], &typed, &settings(Target::ModelOpt, Acts::None));
    assert_eq!(good.after(&|_| {}), "");

    let mut predicts: Tensors = llama(Dtype::BF16).into_iter().flatten().collect();
    predicts.extend(layer(2, Dtype::BF16));
    predicts.insert("model.layers.2.eh_proj.weight".into(), random(Dtype::BF16, &[64, 128], 1));
    let good = Parts::convert(&[predicts], &config(), &settings(Target::ModelOpt, Acts::None));
    assert_eq!(good.after(&|_| {}), "");
}

/// Only a server is asked about architectures: llama.cpp's converter and transformers have lists of their own.
#[test]
fn other_programs_are_asked_about_weights_alone() {
    let mut parts = Parts::convert(&llama(Dtype::BF16), &config(), &settings(Target::CompressedTensors, Acts::None));
    parts.config["architectures"] = json!(["DistilBertModel"]);
    assert_eq!(parts.verify(Client::Transformers), []);
}

/// In GGUF a tensor with a changed name is missing under its own.
#[test]
fn a_layer_of_gguf_without_its_parts_is_found() {
    let dir = Folder::new();
    let mut config = config();
    for (key, value) in [
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("intermediate_size", json!(96)),
        ("max_position_embeddings", json!(128)),
        ("rms_norm_eps", json!(1e-6)),
    ] {
        config[key] = value;
    }
    folder(&dir.join("in"), &llama(Dtype::BF16), &config);
    std::fs::remove_file(dir.join("in/tokenizer.json")).unwrap();
    let path = dir.join("out.gguf");
    convert(&dir.join("in"), &path, &settings(Target::Gguf, Acts::None), &(), &AtomicBool::new(false)).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for (name, changed) in
        [("blk.1.ffn_down.weight", "blk.1.ffn_dawn.weight"), ("output_norm.weight", "outputXnorm.weight")]
    {
        let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
        let damaged = [&bytes[..at], changed.as_bytes(), &bytes[at + name.len()..]].concat();
        std::fs::write(&path, damaged).unwrap();
        let findings = gguf::verify(&gguf::GgufFile::open(&path).unwrap()).unwrap();
        assert!(findings[0].about == name && findings[0].text.starts_with("missing"), "{findings:?}");
    }
}
