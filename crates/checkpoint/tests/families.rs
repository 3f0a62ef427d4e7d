//! What is decided about models of several families: what shares a scale, what stays, what a server is told, what is refused.

mod converted;
mod generated;

use converted::beside_layers;
use generated::*;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn run(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

fn to(target: Target) -> Settings {
    Settings { target, threads: 1, ..Settings::default() }
}

/// A source of matrices with these names and shapes.
fn matrices(names: &[(&str, &[usize])]) -> Tensors {
    let named =
        |(i, (name, shape)): (usize, &(&str, &[usize]))| (name.to_string(), random(Dtype::BF16, shape, 1 + i as u64));
    names.iter().enumerate().map(named).collect()
}

/// The actions of a plan by module, and the list that a server gets.
fn decided(tensors: &Tensors, config: &Value, target: Target) -> (Vec<(String, Action)>, Vec<String>) {
    let dir = Folder::new();
    folder(&dir.join("in"), std::slice::from_ref(tensors), config);
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let plan = Plan::new(&model, &Selection::default(), target).unwrap();
    let actions = plan.items.iter().map(|i| (i.weight.module.clone(), i.action.clone())).collect();
    run(&dir.join("in"), &dir.join("out"), &to(target)).unwrap();
    let written: Value = serde_json::from_slice(&std::fs::read(dir.join("out/config.json")).unwrap()).unwrap();
    let ignore = written["quantization_config"]["ignore"].as_array().unwrap();
    (actions, ignore.iter().map(|name| name.as_str().unwrap().to_string()).collect())
}

fn kept(actions: &[(String, Action)]) -> Vec<&str> {
    actions.iter().filter(|(_, action)| matches!(action, Action::Keep(_))).map(|(module, _)| module.as_str()).collect()
}

#[test]
fn weights_that_some_server_joins_share_a_tensor_scale() {
    let joins: [&[&str]; 13] = [
        &["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
        &["mlp.c_fc_0", "mlp.c_fc_1"],
        &["linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"],
        &["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.b_proj"],
        &[
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.index_q_proj",
            "self_attn.index_k_proj",
        ],
        &["attn.wq", "attn.wk", "attn.wv"],
        &["self_attn.q_proj", "self_attn.k_proj"],
        &["mlp.fc1", "mlp.fc3"],
        &["attn.q", "attn.k", "attn.v"],
        &["attn.wq_a", "attn.wkv"],
        &["attn.compressor.wkv", "attn.compressor.wgate"],
        &["first_sub_layer.query_net", "first_sub_layer.key_net", "first_sub_layer.value_net"],
        &["attn.wq_du", "attn.wk_dv", "attn.wv_dv", "attn.wr_du"],
    ];
    for join in joins {
        let modules: Vec<String> = join.iter().map(|last| format!("model.layers.0.{last}")).collect();
        let mut tensors = matrices(&[("model.layers.0.mlp.down_proj.weight", &[64, 64])]);
        for (i, module) in modules.iter().enumerate() {
            tensors.insert(format!("{module}.weight"), random(Dtype::BF16, &[32, 64], 9 + i as u64));
        }
        let dir = Folder::new();
        folder(&dir.join("in"), &[tensors], &llama_config());
        run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
        let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        let scale = |module: &str| match &model.weight(module).unwrap().stored {
            Stored::Nvfp4(parts) => parts.global(0).unwrap(),
            other => panic!("{module}: {other:?}"),
        };
        assert!(modules.iter().all(|module| scale(module) == scale(&modules[0])), "{join:?}");
        assert_ne!(scale(&modules[0]), scale("model.layers.0.mlp.down_proj"));
    }
}

/// A gate of attention is joined with q, k and v in one family and stands alone in others, where it may be kept.
#[test]
fn a_weight_that_is_joined_in_some_models_only_may_be_kept() {
    let names = ["q_proj", "k_proj", "v_proj", "g_proj"].map(|last| format!("model.layers.0.self_attn.{last}.weight"));
    let shaped: Vec<(&str, &[usize])> = names.iter().map(|name| (name.as_str(), &[32, 64][..])).collect();
    let dir = Folder::new();
    folder(&dir.join("in"), &[matrices(&shaped)], &llama_config());
    let selection = Selection { skip: vec!["*.g_proj".parse().unwrap()], ..Selection::default() };
    run(&dir.join("in"), &dir.join("out"), &Settings { selection, ..to(Target::ModelOpt) }).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
    assert_eq!(beside_layers(verify(&Model::new(&checkpoint).unwrap(), Client::Vllm, 1).unwrap()), []);
}

#[test]
fn nemotrons_router_stays() {
    let tensors = matrices(&[
        ("backbone.layers.0.mixer.gate.weight", &[4, 64]),
        ("backbone.layers.0.mixer.experts.0.up_proj.weight", &[64, 64]),
        ("backbone.layers.0.mixer.experts.0.down_proj.weight", &[64, 64]),
    ]);
    let config = json!({ "architectures": ["NemotronHForCausalLM"], "n_routed_experts": 4 });
    let (actions, ignore) = decided(&tensors, &config, Target::ModelOpt);
    assert_eq!(kept(&actions), ["backbone.layers.0.mixer.gate"]);
    assert_eq!(ignore, ["backbone.layers.0.mixer.gate", "lm_head"]);
}

#[test]
fn the_layer_that_predicts_further_tokens_stays() {
    let tensors = matrices(&[
        ("model.layers.1.mlp.down_proj.weight", &[64, 64]),
        ("model.layers.2.mlp.down_proj.weight", &[64, 64]),
        ("model.layers.2.eh_proj.weight", &[64, 128]),
        ("model.layers.2.shared_head.head.weight", &[64, 64]),
        ("model.layers.1.self_attn.indexer.wk.weight", &[64, 64]),
        ("model.layers.1.self_attn.indexer.weights_proj.weight", &[64, 64]),
    ]);
    let config =
        json!({ "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1 });
    let (actions, ignore) = decided(&tensors, &config, Target::ModelOpt);
    assert_eq!(kept(&actions).len(), 5);
    assert!(ignore.contains(&"model.layers.2.eh_proj".to_string()), "{ignore:?}");
}

/// Experts that lie in one tensor without the rest of them are kept: a server is told under the name that it asks for, and the plan says so.
#[test]
fn experts_in_one_tensor_are_named() {
    let shape: &[usize] = &[4, 64, 64];
    let cases = [
        ("model.layers.0.block_sparse_moe.input_linear.weight", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.feed_forward.experts.gate_up_proj", "model.layers.0.feed_forward.experts"),
        ("model.layers.0.moe.up_proj.weight", "model.layers.0.moe.experts"),
    ];
    for (name, module) in cases {
        let tensors = matrices(&[(name, shape), ("model.layers.0.self_attn.o_proj.weight", &[64, 64])]);
        for target in [Target::ModelOpt, Target::CompressedTensors] {
            let (_, ignore) = decided(&tensors, &llama_config(), target);
            assert!(ignore.contains(&module.to_string()), "{ignore:?}");
            let asked = ignore.contains(&format!("{module}.0.gate_proj"));
            assert_eq!(asked, target == Target::CompressedTensors, "{ignore:?}");
        }
        let dir = Folder::new();
        folder(&dir.join("in"), &[tensors], &llama_config());
        let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        let plan = Plan::new(&model, &Selection::default(), Target::ModelOpt).unwrap();
        let said: Vec<(&str, &str)> =
            plan.copied.iter().map(|c| (c.tensor.info.name.as_str(), c.reason.as_str())).collect();
        assert_eq!(said, [(name, "experts in one tensor, without the other projections of the same experts")]);
        assert!((plan.kept_share(&model) - 0.8).abs() < 1e-9);
    }
}

#[test]
fn what_looks_like_a_weight_and_is_copied_has_a_reason() {
    let mut tensors = matrices(&[
        ("model.layers.0.self_attn.o_proj.weight", &[64, 64]),
        ("weight", &[64, 64]),
        ("model.layers.0.table", &[64, 64]),
        ("model.layers.0.conv1d.weight", &[64, 1, 4]),
        ("model.norm.weight", &[64]),
    ]);
    let double = Tensor { dtype: Dtype::F64, shape: vec![16, 16], bytes: vec![0; 16 * 16 * 8] };
    tensors.insert("model.layers.0.double.weight".to_string(), double);
    let dir = Folder::new();
    folder(&dir.join("in"), &[tensors], &llama_config());
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let plan = Plan::new(&model, &Selection::default(), Target::ModelOpt).unwrap();
    let said: Vec<(&str, &str)> =
        plan.copied.iter().map(|c| (c.tensor.info.name.as_str(), c.reason.as_str())).collect();
    assert_eq!(
        said,
        [
            ("model.layers.0.conv1d.weight", "3 dimensions, not a matrix"),
            ("model.layers.0.double.weight", "F64 is not quantized; store it as F32"),
            ("model.layers.0.table", "its name does not end in '.weight'"),
            ("weight", "its name is only 'weight', without a module"),
        ]
    );
}

#[test]
fn heads_that_may_be_tied_are_always_listed() {
    let tensors = matrices(&[("model.decoder.layers.0.fc1.weight", &[64, 64])]);
    for (architecture, head) in [("WhisperForConditionalGeneration", "proj_out"), ("GPTNeoXForCausalLM", "embed_out")] {
        let (_, ignore) = decided(&tensors, &json!({ "architectures": [architecture] }), Target::ModelOpt);
        assert_eq!(ignore.len(), 2);
        assert!(ignore.contains(&head.to_string()), "{ignore:?}");
    }
}

/// What no program would load is refused with the reason, and converted where someone insists.
#[test]
fn models_that_no_server_loads_are_refused_by_name() {
    let weights = matrices(&[("h.0.attn.c_attn.weight", &[64, 64]), ("h.0.mlp.c_proj.weight", &[64, 64])]);
    let adapter = matrices(&[("base.layers.0.q_proj.lora_A.weight", &[16, 64])]);
    let cases: [(&Tensors, Value, &str); 7] = [
        (
            &weights,
            json!({ "architectures": ["GPT2LMHeadModel"] }),
            "GPT2LMHeadModel: its weights have inputs before outputs",
        ),
        (
            &weights,
            json!({ "architectures": ["T5ForConditionalGeneration"] }),
            "T5ForConditionalGeneration: no server runs",
        ),
        (&weights, json!({ "architectures": ["JambaForCausalLM"] }), "JambaForCausalLM: vLLM 0.32 does not load it"),
        (&weights, json!({ "architectures": ["MambaForCausalLM"] }), "MambaForCausalLM: vLLM 0.32 quantizes none"),
        (&weights, json!({ "_class_name": "FluxTransformer2DModel" }), "a model of diffusers"),
        (&adapter, json!({}), "a LoRA adapter, not a model"),
        (&weights, json!({ "architectures": ["MT5EncoderModel"] }), "MT5EncoderModel: no server runs"),
    ];
    for (tensors, config, expected) in cases {
        let dir = Folder::new();
        folder(&dir.join("in"), std::slice::from_ref(tensors), &config);
        let refused = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap_err();
        assert!(matches!(refused, Error::Setting { setting: Setting::Architectures, .. }), "{refused}");
        assert!(refused.to_string().starts_with(expected), "{refused}");
        assert!(!dir.join("out.partial").exists());
        let selection = Selection { architectures: Architectures::Any, ..Selection::default() };
        run(&dir.join("in"), &dir.join("out"), &Settings { selection, ..to(Target::ModelOpt) }).unwrap();
        run(&dir.join("in"), &dir.join("plain"), &to(Target::Plain(nvfp4::Precision::F32))).unwrap();
    }
    let dir = Folder::new();
    folder(&dir.join("adapter"), std::slice::from_ref(&weights), &json!({ "architectures": ["LlamaForCausalLM"] }));
    std::fs::write(dir.join("adapter/adapter_config.json"), "{}").unwrap();
    let refused = run(&dir.join("adapter"), &dir.join("out"), &to(Target::ModelOpt)).unwrap_err().to_string();
    assert!(refused.starts_with("a LoRA adapter"), "{refused}");
    folder(&dir.join("mistral"), &[weights], &json!({}));
    std::fs::remove_file(dir.join("mistral/config.json")).unwrap();
    std::fs::write(dir.join("mistral/params.json"), "{}").unwrap();
    let refused = run(&dir.join("mistral"), &dir.join("out"), &to(Target::ModelOpt)).unwrap_err().to_string();
    assert!(refused.starts_with("in Mistral's own form (params.json)"), "{refused}");
}

/// DistilBERT and GPT-OSS are converted, and it is said that no server loads them.
#[test]
fn models_that_only_we_read_are_converted_with_a_word() {
    let dir = Folder::new();
    let tensors = matrices(&[("encoder.layer.0.intermediate.dense.weight", &[64, 64])]);
    folder(&dir.join("in"), &[tensors], &json!({ "architectures": ["DistilBertModel"] }));
    run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
    let finding = loading(&Model::new(&checkpoint).unwrap(), Client::Vllm).unwrap();
    assert_eq!((finding.severity, finding.about.as_str()), (Severity::Problem, "architecture"));
    assert!(finding.text.starts_with("DistilBertModel: vLLM 0.32 has no code for it"), "{}", finding.text);
}

/// Layers below a name that is not known are counted all the same.
#[test]
fn layers_of_unknown_families_are_found() {
    let config = json!({ "architectures": ["NovelForSequenceClassification"], "num_hidden_layers": 3 });
    for (layers, problem) in [(vec![0, 1, 2], None), (vec![0, 2], Some("novel.encoder.layer.1"))] {
        let dir = Folder::new();
        let mut tensors = Tensors::new();
        for layer in layers {
            let name = format!("novel.encoder.layer.{layer}.output.dense.weight");
            tensors.insert(name, random(Dtype::BF16, &[64, 64], layer + 1));
        }
        folder(&dir.join("in"), &[tensors], &config);
        let summary = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
        let problems = summary.findings.into_iter().filter(|f| f.severity == Severity::Problem);
        let found: Vec<String> = problems.map(|f| f.about).collect();
        assert_eq!(found, Vec::from_iter(problem.map(str::to_string)));
    }
}

/// What vLLM finds when it loads the result of a conversion.
fn found(tensors: &Tensors, architecture: &str, settings: &Settings) -> Option<String> {
    let dir = Folder::new();
    folder(&dir.join("in"), std::slice::from_ref(tensors), &json!({ "architectures": [architecture] }));
    run(&dir.join("in"), &dir.join("out"), settings).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
    loading(&Model::new(&checkpoint).unwrap(), Client::Vllm).map(|finding| finding.text)
}

/// An architecture, tensors that stay, a module that does not, and what vLLM calls those that stay.
type Called<'a> = (&'a str, &'a [(&'a str, &'a [usize])], &'a str, &'a [&'a str]);

/// vLLM asks for what stays by names that the files do not have.
#[test]
fn what_stays_is_also_named_as_vllm_calls_it() {
    let cases: [Called<'_>; 4] = [
        (
            "PhimoeForCausalLM",
            &[("model.layers.0.block_sparse_moe.gate.weight", &[4, 64])],
            "model.layers.0.self_attn.o_proj",
            &["model.layers.0.mlp.router"],
        ),
        (
            "Glm4vForConditionalGeneration",
            &[
                ("model.visual.blocks.0.mlp.gate_proj.weight", &[64, 64]),
                ("model.visual.blocks.0.mlp.up_proj.weight", &[64, 64]),
                ("model.visual.blocks.0.attn.qkv.weight", &[192, 64]),
            ],
            "model.language_model.layers.0.self_attn.o_proj",
            &["model.visual.blocks.0.mlp.gate_up_proj", "model.visual.blocks.0.attn.k_proj"],
        ),
        (
            "GraniteMoeHybridForCausalLM",
            &[("model.layers.0.mamba.norm.weight", &[64, 64])],
            "model.layers.0.mamba.out_proj",
            &["model.layers.0.mixer.norm"],
        ),
        (
            "GPTJForCausalLM",
            &[("transformer.h.0.attn.q_proj.weight", &[64, 8]), ("transformer.h.0.attn.k_proj.weight", &[64, 8])],
            "transformer.h.0.attn.out_proj",
            &["transformer.h.0.attn.qkv_proj"],
        ),
    ];
    for (architecture, stay, other, called) in cases {
        let mut tensors = matrices(stay);
        tensors.insert(format!("{other}.weight"), random(Dtype::BF16, &[64, 64], 9));
        for target in [Target::ModelOpt, Target::CompressedTensors] {
            let (actions, ignore) = decided(&tensors, &json!({ "architectures": [architecture] }), target);
            assert_eq!(kept(&actions).len(), stay.len(), "{actions:?}");
            assert!(called.iter().all(|name| ignore.contains(&name.to_string())), "{ignore:?}");
        }
    }
}

/// transformers 5 looks for vision modules by other names than those of the files that people have.
#[test]
fn what_stays_is_also_named_as_transformers_calls_it() {
    let tower = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj";
    let tensors = matrices(&[
        (&format!("{tower}.weight"), &[64, 64]),
        ("language_model.model.layers.0.self_attn.o_proj.weight", &[64, 64]),
    ]);
    for (architecture, target, named) in [
        ("LlavaForConditionalGeneration", Target::CompressedTensors, true),
        ("LlavaForConditionalGeneration", Target::ModelOpt, false),
        ("LlamaForCausalLM", Target::CompressedTensors, false),
    ] {
        let (_, ignore) = decided(&tensors, &json!({ "architectures": [architecture] }), target);
        assert!(ignore.contains(&tower.to_string()), "{ignore:?}");
        let other = "model.vision_tower.encoder.layers.0.self_attn.q_proj".to_string();
        assert_eq!(ignore.contains(&other), named, "{architecture}: {ignore:?}");
    }
}

/// What transformers does not load in compressed-tensors' format is named.
#[test]
fn weights_that_transformers_sets_while_it_loads_are_named() {
    let tensors = matrices(&[("transformer.h.0.mlp.dense_h_to_4h.weight", &[64, 64])]);
    for (architecture, expected) in [("FalconForCausalLM", true), ("FalconH1ForCausalLM", false)] {
        let dir = Folder::new();
        folder(&dir.join("in"), std::slice::from_ref(&tensors), &json!({ "architectures": [architecture] }));
        run(&dir.join("in"), &dir.join("out"), &to(Target::CompressedTensors)).unwrap();
        let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
        let findings = verify(&Model::new(&checkpoint).unwrap(), Client::Transformers, 1).unwrap();
        let named =
            findings.iter().any(|f| f.severity == Severity::Problem && f.text.contains("fails where it finds codes"));
        assert_eq!(named, expected, "{findings:?}");
    }
}

/// Bloom's `query_key_value` stays, and vLLM does not load one with a tensor scale.
#[test]
fn what_vllm_sorts_by_heads_stays() {
    let bloom = "BloomForCausalLM";
    let module = "transformer.h.0.self_attention.query_key_value";
    let tensors =
        matrices(&[(&format!("{module}.weight"), &[192, 64]), ("transformer.h.0.mlp.dense_h_to_4h.weight", &[64, 64])]);
    let (actions, _) = decided(&tensors, &json!({ "architectures": [bloom] }), Target::ModelOpt);
    assert_eq!(kept(&actions), [module]);
    let (actions, _) = decided(&tensors, &json!({ "architectures": ["FalconForCausalLM"] }), Target::ModelOpt);
    assert_eq!(kept(&actions), [""; 0]);
    assert_eq!(found(&tensors, bloom, &to(Target::ModelOpt)), None);
    let selection = Selection { default_skips: DefaultSkips::Off, ..Selection::default() };
    let text = found(&tensors, bloom, &Settings { selection, ..to(Target::ModelOpt) }).unwrap();
    assert!(text.contains("sorts its query_key_value by heads"), "{text}");
}

/// Aria's experts stay in their tensor. vLLM gives other names to entries of the list, but not to patterns.
#[test]
fn arias_experts_stay_by_a_pattern() {
    let experts = "language_model.model.layers.0.mlp.experts";
    let tensors = matrices(&[
        (&format!("{experts}.fc1.weight"), &[4, 64, 64]),
        (&format!("{experts}.fc2.weight"), &[4, 32, 64]),
        ("language_model.model.layers.0.self_attn.o_proj.weight", &[64, 64]),
    ]);
    let config = json!({ "architectures": ["AriaForConditionalGeneration"] });
    for (target, pattern) in [
        (Target::ModelOpt, "*.layers.0.mlp.experts*"),
        (Target::CompressedTensors, "re:.*layers[.]0[.]mlp[.]experts[.].*"),
    ] {
        let (actions, ignore) = decided(&tensors, &config, target);
        assert_eq!(actions.len(), 1);
        assert!(ignore.contains(&pattern.to_string()), "{ignore:?}");
    }
}

/// Forms that vLLM reads of other architectures are named where it does not.
#[test]
fn forms_that_vllm_does_not_read_of_some_architectures_are_named() {
    let acts = |target| Settings { acts: Acts::Constant(1.0), ..to(target) };
    let cases: [(&str, &str, Settings, Settings, &str); 3] = [
        (
            "ExaoneMoeForCausalLM",
            "lm_head",
            to(Target::ModelOpt),
            to(Target::CompressedTensors),
            "asks for its output head without a name",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            "model.layers.0.block_sparse_moe.experts.0.down_proj",
            acts(Target::CompressedTensors),
            acts(Target::ModelOpt),
            "the activation scales of its experts",
        ),
        (
            "Zamba2ForCausalLM",
            "model.layers.0.shared_transformer.feed_forward.gate_up_proj_adapter_list.0.0",
            acts(Target::ModelOpt),
            to(Target::ModelOpt),
            "the activation scales of its adapters",
        ),
    ];
    for (architecture, module, wrong, right, reason) in cases {
        let other = "model.layers.0.self_attn.o_proj.weight";
        let tensors = matrices(&[(&format!("{module}.weight"), &[64, 64]), (other, &[64, 64])]);
        let text = found(&tensors, architecture, &wrong).unwrap();
        assert!(text.contains(reason), "{text}");
        assert_eq!(found(&tensors, architecture, &right), None, "{architecture}");
    }
    // A head that is quantized itself is in no list.
    let tensors = matrices(&[("lm_head.weight", &[64, 64])]);
    let all = Settings {
        selection: Selection { default_skips: DefaultSkips::Off, ..Selection::default() },
        ..to(Target::ModelOpt)
    };
    assert_eq!(found(&tensors, "ExaoneMoeForCausalLM", &all), None);
}

#[test]
fn a_written_file_says_who_wrote_it() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
    let metadata = checkpoint.files()[0].metadata();
    assert_eq!(metadata["format"], "pt");
    assert_eq!(metadata["written_by"], format!("nvfp4 {}", env!("CARGO_PKG_VERSION")));
}

/// Several models in folders of their own, as diffusers keeps a pipeline.
#[test]
fn a_folder_of_models_names_them() {
    let dir = Folder::new();
    let weights = matrices(&[("a.weight", &[64, 64])]);
    for part in ["transformer", "vae"] {
        std::fs::create_dir_all(dir.join("flux").join(part)).unwrap();
        save(&dir.join("flux").join(part).join("diffusion_pytorch_model.safetensors"), &weights);
    }
    std::fs::create_dir_all(dir.join("flux/scheduler")).unwrap();
    let error = Checkpoint::open(&dir.join("flux")).unwrap_err().to_string();
    assert!(error.contains("but there are some in 'transformer', 'vae'; give one of these"), "{error}");
    let refused = run(&dir.join("flux/transformer"), &dir.join("out"), &to(Target::ModelOpt)).unwrap_err().to_string();
    assert!(refused.starts_with("a model of diffusers"), "{refused}");
}
