//! Checkpoints in several forms: what rules make of weights, how it is described, and what is said
//! of descriptions that are wrong.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4_checkpoint::*;
use nvfp4_spec::{e4m3, e8m0};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

const Q: &str = "model.layers.1.self_attn.q_proj";
const DOWN: &str = "model.layers.1.mlp.down_proj";

fn preset(target: Target, name: &str) -> Settings {
    let (preset, rules) = Rules::preset(name).unwrap();
    Settings { selection: Selection { preset, rules, ..Selection::default() }, ..to(target) }
}

fn everything(target: Target, form: &str) -> Settings {
    rules(target, &format!("[default]\nform = \"{form}\""))
}

/// A Llama of two layers whose sides are multiples of 128.
fn wide() -> Vec<Tensors> {
    let mut tensors = Tensors::new();
    for l in 0..2 {
        let shapes: [(&str, &[usize]); 9] = [
            ("self_attn.q_proj", &[128, 128]),
            ("self_attn.k_proj", &[128, 128]),
            ("self_attn.v_proj", &[128, 128]),
            ("self_attn.o_proj", &[128, 128]),
            ("mlp.gate_proj", &[256, 128]),
            ("mlp.up_proj", &[256, 128]),
            ("mlp.down_proj", &[128, 256]),
            ("input_layernorm", &[128]),
            ("post_attention_layernorm", &[128]),
        ];
        for (i, (name, shape)) in shapes.iter().enumerate() {
            let seed = (100 * l + i + 1) as u64;
            tensors.insert(format!("model.layers.{l}.{name}.weight"), random(Dtype::BF16, shape, seed));
        }
    }
    for (i, name) in ["model.embed_tokens", "lm_head"].iter().enumerate() {
        tensors.insert(format!("{name}.weight"), random(Dtype::BF16, &[64, 128], 7 + i as u64));
    }
    tensors.insert("model.norm.weight".to_string(), random(Dtype::BF16, &[128], 9));
    vec![tensors]
}

fn wide_config() -> Value {
    json!({ "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2,
            "tie_word_embeddings": false, "intermediate_size": 256, "num_attention_heads": 4 })
}

fn shapes(folder: &Path, module: &str) -> Vec<(String, Dtype, Vec<usize>)> {
    let of = |(name, t): (String, Tensor)| Some((name.strip_prefix(module)?.to_string(), t.dtype, t.shape));
    tensors_of(folder).into_iter().filter_map(of).collect()
}

#[test]
fn a_preset_puts_the_rest_in_fp8_and_modelopt_names_every_layer() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let out = dir.join("out");
    let summary = run(&dir.join("in"), &out, &preset(Target::ModelOpt, "mlp+fp8")).unwrap();
    assert_eq!((summary.quantized.len(), summary.findings), (14, vec![]));
    let expected = [
        (".input_scale", Dtype::F32, vec![]),
        (".weight", Dtype::F8_E4M3, vec![128, 128]),
        (".weight_scale", Dtype::F32, vec![]),
    ];
    assert_eq!(shapes(&out, Q), expected.map(|(name, dtype, shape)| (name.to_string(), dtype, shape)));
    let own = json_of(&out.join("hf_quant_config.json"))["quantization"].clone();
    let config = json_of(&out.join("config.json"))["quantization_config"].clone();
    for said in [&own, &config] {
        assert_eq!(said["quant_algo"], "MIXED_PRECISION");
        assert_eq!(said["quantized_layers"][Q], json!({ "quant_algo": "FP8" }));
        assert_eq!(said["quantized_layers"][DOWN], json!({ "quant_algo": "W4A16_NVFP4", "group_size": 16 }));
        assert_eq!(said["quantized_layers"].as_object().unwrap().len(), 14);
    }
    assert_eq!(config["ignore"], json!(["lm_head", "model.embed_tokens"]));
    // q, k and v keep a scale each, as ModelOpt's do; vLLM takes the largest and requantizes.
    let tensors = tensors_of(&out);
    for last in ["q_proj", "k_proj", "v_proj"] {
        let module = format!("model.layers.1.self_attn.{last}");
        let amax = decoded(&dir.join("in"), &module).into_iter().fold(0f32, |m, x| m.max(x.abs()));
        assert_eq!(tensors[&format!("{module}.weight_scale")].bytes, (amax / 448.0).to_le_bytes());
    }
    assert_eq!(tensors[&format!("{Q}.input_scale")].bytes, 1f32.to_le_bytes());
}

#[test]
fn compressed_tensors_has_a_group_for_each_form() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let out = dir.join("out");
    let text = "[[rule]]\npath = \"*.mlp.*\"\nform = \"nvfp4\"\n[[rule]]\npath = \"*.o_proj\"\nform = \"mxfp8\"\n\
                [[rule]]\npath = \"model.layers.0.*\"\nform = \"fp8-block\"\n[default]\nform = \"fp8\"";
    let summary = run(&dir.join("in"), &out, &rules(Target::CompressedTensors, text)).unwrap();
    assert_eq!(summary.findings, []);
    let config = json_of(&out.join("config.json"))["quantization_config"].clone();
    assert_eq!((&config["format"], &config["quant_method"]), (&json!("mixed-precision"), &json!("compressed-tensors")));
    let groups: Vec<&Value> = config["config_groups"].as_object().unwrap().values().collect();
    let of = |module: &str| {
        let has = |g: &&&Value| g["targets"].as_array().unwrap().contains(&json!(module));
        let group = groups.iter().find(has).unwrap();
        (group["format"].clone(), group["weights"]["strategy"].clone(), group["input_activations"]["strategy"].clone())
    };
    assert_eq!(of(DOWN), (json!("nvfp4-pack-quantized"), json!("tensor_group"), Value::Null));
    assert_eq!(of(Q), (json!("float-quantized"), json!("channel"), json!("token")));
    let block = "model.layers.0.self_attn.q_proj";
    assert_eq!(of(block), (json!("float-quantized"), json!("block"), json!("group")));
    let mx = "model.layers.0.self_attn.o_proj";
    assert_eq!(of(mx), (json!("mxfp8-quantized"), json!("group"), json!("group")));
    // llm-compressor stores scales in the type of the weights.
    let scale = |module: &str| shapes(&out, module).pop().unwrap();
    assert_eq!(scale(Q), (".weight_scale".to_string(), Dtype::BF16, vec![128, 1]));
    assert_eq!(scale(block), (".weight_scale".to_string(), Dtype::BF16, vec![1, 1]));
    assert_eq!(scale(mx), (".weight_scale".to_string(), Dtype::U8, vec![128, 4]));
}

#[test]
fn every_form_of_fp8_is_near_its_source_and_read_back() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        for (form, algorithm) in [
            ("fp8-tensor", "FP8"),
            ("fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN"),
            ("fp8-block", "FP8_PB_WO"),
            ("mxfp8", "MXFP8"),
        ] {
            let out = dir.join(&format!("{form}-{target}"));
            let summary = run(&dir.join("in"), &out, &everything(target, form)).unwrap();
            assert_eq!((summary.quantized.len(), &summary.findings[..]), (14, &[][..]), "{form} {target}");
            if target == Target::ModelOpt {
                assert_eq!(json_of(&out.join("config.json"))["quantization_config"]["quant_algo"], algorithm);
            }
            for module in [Q, DOWN] {
                let (x, y) = (decoded(&dir.join("in"), module), decoded(&out, module));
                let error: f32 = x.iter().zip(&y).map(|(x, y)| (x - y) * (x - y)).sum();
                let norm: f32 = x.iter().map(|x| x * x).sum();
                assert!((error / norm).sqrt() < 0.04, "{form} {target}: {}", (error / norm).sqrt());
                let said = summary.quantized.iter().find(|w| w.module == module).unwrap().measure.relative_error();
                assert!((said - f64::from((error / norm).sqrt())).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn bytes_do_not_depend_on_memory_or_threads() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    for form in ["fp8-block", "mxfp8", "fp8-channel", "fp8-tensor"] {
        let whole = everything(Target::ModelOpt, form);
        run(&dir.join("in"), &dir.join(form), &whole).unwrap();
        let small = Settings { memory: 1, threads: 1, ..whole };
        run(&dir.join("in"), &dir.join(&format!("{form}-small")), &small).unwrap();
        assert!(contents(&dir.join(form)) == contents(&dir.join(&format!("{form}-small"))), "{form}");
    }
}

/// DeepSeek's blocks, and a weight of each kind that ModelOpt and compressed-tensors have.
#[test]
fn fp8_sources_stay_byte_for_byte_where_a_rule_says_so() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    for (from, to_) in [(Target::ModelOpt, Target::CompressedTensors), (Target::CompressedTensors, Target::ModelOpt)] {
        for form in ["fp8-tensor", "fp8-channel", "fp8-block", "mxfp8"] {
            let (first, second) = (dir.join(&format!("{form}-{from}")), dir.join(&format!("{form}-{from}-again")));
            run(&dir.join("in"), &first, &everything(from, form)).unwrap();
            let keep = "[[rule]]\npath = \"*\"\nform = \"keep\"";
            let summary = run(&first, &second, &rules(to_, keep)).unwrap();
            assert_eq!((summary.quantized.len(), &summary.findings[..]), (0, &[][..]), "{form} {from}");
            let (a, b) = (tensors_of(&first), tensors_of(&second));
            for name in a.keys().filter(|name| !name.ends_with("input_scale")) {
                assert!(a[name].bytes == b[name].bytes, "{form} {from} {name}");
            }
            assert_eq!(decoded(&first, Q), decoded(&second, Q));
        }
    }
}

#[test]
fn experts_in_nvfp4_beside_deepseeks_fp8() {
    let dir = Folder::new();
    let mut tensors = Tensors::new();
    let mut fp8 = |module: &str, rows: usize, cols: usize| {
        let bytes = random(Dtype::F32, &[rows, cols], module.len() as u64).bytes;
        let codes =
            bytes.chunks_exact(4).map(|b| e4m3::encode(1e4 * f32::from_le_bytes(b.try_into().unwrap()))).collect();
        let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![rows, cols], bytes: codes };
        tensors.insert(format!("{module}.weight"), weight);
        let sides = [rows.div_ceil(128), cols.div_ceil(128)];
        tensors.insert(format!("{module}.weight_scale_inv"), random(Dtype::F32, &sides, 3));
    };
    for (name, rows) in [("q_proj", 128), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256)] {
        fp8(&format!("model.layers.0.self_attn.{name}"), rows, if name == "o_proj" { 128 } else { 256 });
    }
    for e in 0..2 {
        for (name, rows, cols) in [("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)] {
            fp8(&format!("model.layers.0.mlp.experts.{e}.{name}"), rows, cols);
        }
    }
    let config =
        json!({ "architectures": ["DeepseekV3ForCausalLM"], "quantization_config": { "quant_method": "fp8" } });
    folder(&dir.join("in"), &[tensors.clone()], &config);
    let text = "[[rule]]\npath = \"*.experts.*\"\nform = \"nvfp4\"\n[default]\nform = \"keep\"";
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let out = dir.join(&target.to_string());
        let summary = run(&dir.join("in"), &out, &rules(target, text)).unwrap();
        assert_eq!(summary.quantized.len(), 6);
        let written = tensors_of(&out);
        let module = "model.layers.0.self_attn.o_proj";
        assert_eq!(written[&format!("{module}.weight")].bytes, tensors[&format!("{module}.weight")].bytes);
        let (scale, own) =
            (&written[&format!("{module}.weight_scale")], &tensors[&format!("{module}.weight_scale_inv")]);
        let shape = if target == Target::ModelOpt { vec![2, 1, 1, 1] } else { vec![2, 1] };
        assert_eq!((&scale.bytes, &scale.shape), (&own.bytes, &shape));
        let config = json_of(&out.join("config.json"))["quantization_config"].clone();
        if target == Target::ModelOpt {
            assert_eq!(config["quantized_layers"][module]["quant_algo"], "FP8_PB_WO");
        } else {
            let experts = config["config_groups"]["group_0"]["targets"].as_array().unwrap();
            assert!(experts.contains(&json!(r"re:(.*\.)?layers\.0\.mlp\.experts\.\d+\..*$")), "{experts:?}");
        }
        assert_eq!(decoded(&dir.join("in"), module), decoded(&out, module));
    }
}

#[test]
fn nvfp4_sources_become_fp8_and_the_loss_is_measured() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    run(&dir.join("in"), &dir.join("nvfp4"), &to(Target::ModelOpt)).unwrap();
    let summary = run(&dir.join("nvfp4"), &dir.join("fp8"), &preset(Target::ModelOpt, "fp8")).unwrap();
    assert_eq!((summary.quantized.len(), summary.findings), (14, vec![]));
    let error = summary.quantized[0].measure.relative_error();
    assert!(error > 0.0 && error < 0.04, "{error}");
}

#[test]
fn rules_that_servers_cannot_follow_are_refused() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let refused = |settings: &Settings| run(&dir.join("in"), &dir.join("out"), settings).unwrap_err().to_string();
    let split =
        refused(&rules(Target::ModelOpt, "[[rule]]\npath = \"*.q_proj\"\nform = \"fp8\"\n[default]\nform = \"nvfp4\""));
    assert!(split.contains("servers join q/k/v into one matrix; give them one form"), "{split}");
    let text = "[[rule]]\npath = \"*.mlp.*\"\nform = \"nvfp4\"\n[default]\nform = \"fp8-channel\"";
    let channel = refused(&rules(Target::ModelOpt, text));
    assert!(channel.contains("vLLM reads FP8 per channel in no mixed checkpoint of ModelOpt's"), "{channel}");
    let unknown = refused(&rules(Target::ModelOpt, "[[rule]]\npath = \"*.q_prox\"\nform = \"fp8\""));
    assert!(unknown.contains("q_prox"), "{unknown}");
    let acts = refused(&everything(Target::ModelOpt, "nvfp4-w4a4"));
    assert!(acts.contains("whose scales are not given"), "{acts}");
}

#[test]
fn what_is_left_alone_by_default_stays_unless_a_rule_has_its_name() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let form = |out: &str, settings: Settings| {
        run(&dir.join("in"), &dir.join(out), &settings).unwrap();
        tensors_of(&dir.join(out))["lm_head.weight"].dtype
    };
    assert_eq!(form("all", everything(Target::ModelOpt, "fp8")), Dtype::BF16);
    let named = "[[rule]]\npath = \"lm_head\"\nform = \"fp8\"\n[default]\nform = \"nvfp4\"";
    assert_eq!(form("named", rules(Target::ModelOpt, named)), Dtype::F8_E4M3);
}

#[test]
fn activations_of_w4a16_have_no_scales_beside_those_of_w4a4() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let text = "[[rule]]\npath = \"*.mlp.*\"\nform = \"nvfp4-w4a4\"\n[default]\nform = \"nvfp4-w4a16\"";
    let settings = Settings { acts: Acts::Constant(1.0), ..rules(Target::ModelOpt, text) };
    let summary = run(&dir.join("in"), &dir.join("out"), &settings).unwrap();
    assert_eq!(summary.findings, []);
    let tensors = tensors_of(&dir.join("out"));
    assert!(tensors.contains_key(&format!("{DOWN}.input_scale")) && !tensors.contains_key(&format!("{Q}.input_scale")));
    let layers = json_of(&dir.join("out/config.json"))["quantization_config"]["quantized_layers"].clone();
    assert_eq!((&layers[Q]["quant_algo"], &layers[DOWN]["quant_algo"]), (&json!("W4A16_NVFP4"), &json!("NVFP4")));
}

#[test]
fn wrong_descriptions_of_mixed_checkpoints_are_found() {
    let parts = Parts::convert(&wide(), &wide_config(), &preset(Target::ModelOpt, "mlp+fp8"));
    assert_eq!(parts.verify(Client::Vllm), []);
    let layer = |module: &'static str, layer: Value| {
        move |p: &mut Parts| {
            p.config["quantization_config"]["quantized_layers"][module] = layer.clone();
            p.own["quantization"]["quantized_layers"][module] = layer.clone();
        }
    };
    let said = parts.after(&layer(Q, json!({ "quant_algo": "NVFP4", "group_size": 16 })));
    assert!(said.contains(&format!("Problem {Q}: FP8 per tensor, but the configuration says NVFP4")), "{said}");
    let said = parts.after(&layer(Q, json!({ "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN" })));
    assert!(said.contains("vLLM reads it as not quantized in a mixed checkpoint"), "{said}");
    let said = parts.after(&layer(DOWN, json!({ "quant_algo": "W4A16_NVFP4", "group_size": 32 })));
    assert!(said.contains("blocks of 32 in 'quantized_layers'"), "{said}");
    let said = parts.after(&layer(DOWN, json!({ "quant_algo": "INT3" })));
    assert!(said.contains("'INT3' in 'quantized_layers': no algorithm that vLLM knows"), "{said}");
    let said = parts.after(&|p| drop(p.tensors.remove(&format!("{Q}.input_scale"))));
    assert!(said.contains(&format!("Problem {Q}: no activation scale, which the configuration promises")), "{said}");
    let said = parts.after(&|p| {
        p.config["quantization_config"]["quantized_layers"].as_object_mut().unwrap().shift_remove(Q);
    });
    assert!(said.contains(&format!("Problem {Q}: FP8 per tensor, but the configuration says not quantized")), "{said}");
    assert!(said.contains("Note quantized_layers: config.json and hf_quant_config.json differ"), "{said}");
    let said =
        parts.after(&|p| p.config["quantization_config"]["ignore"] = json!(["lm_head", "model.embed_tokens", Q]));
    assert!(said.contains(&format!("Problem {Q}: FP8, but '{Q}' in config.json says that it is not")), "{said}");

    let parts = Parts::convert(&wide(), &wide_config(), &preset(Target::CompressedTensors, "mlp+fp8"));
    assert_eq!(parts.verify(Client::Vllm), []);
    let group = |p: &mut Parts, key: &str, value: Value| {
        p.config["quantization_config"]["config_groups"]["group_1"][key] = value;
    };
    let said = parts.after(&|p| group(p, "targets", json!(["model.layers.0.self_attn.q_proj"])));
    assert!(
        said.contains(&format!("Problem {Q}: FP8 per channel, but the configuration says not quantized")),
        "{said}"
    );
    let said = parts.after(&|p| group(p, "format", json!("nvfp4-pack-quantized")));
    assert!(said.contains("expected 'float-quantized' for FP8 per channel"), "{said}");
    let said = parts.after(&|p| {
        p.config["quantization_config"]["config_groups"]["group_1"]["weights"]["strategy"] = json!("tensor")
    });
    assert!(said.contains("FP8 per channel, but the configuration says FP8 per tensor"), "{said}");
}

/// vLLM asks for the form of MiniMax M2's experts by another name than their files have.
#[test]
fn experts_are_also_named_as_vllm_calls_them() {
    let dir = Folder::new();
    let mut tensors = Tensors::new();
    for (e, name) in [(0, "w1"), (0, "w2"), (0, "w3"), (1, "w1"), (1, "w2"), (1, "w3")] {
        let module = format!("model.layers.0.block_sparse_moe.experts.{e}.{name}");
        tensors.insert(format!("{module}.weight"), random(Dtype::BF16, &[128, 128], e + 3));
    }
    tensors.insert("model.layers.0.self_attn.o_proj.weight".to_string(), random(Dtype::BF16, &[128, 128], 9));
    folder(&dir.join("in"), &[tensors], &json!({ "architectures": ["MiniMaxM2ForCausalLM"] }));
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let out = dir.join(&target.to_string());
        let summary = run(&dir.join("in"), &out, &preset(target, "experts+fp8")).unwrap();
        assert_eq!(beside_layers(summary.findings), []);
        let config = json_of(&out.join("config.json"))["quantization_config"].clone();
        if target == Target::ModelOpt {
            let layers = config["quantized_layers"].as_object().unwrap();
            assert_eq!(layers["model.layers.0.mlp.experts.0.w3"]["quant_algo"], "W4A16_NVFP4");
            assert_eq!(layers.len(), 7 + 3, "one expert stands for all");
        } else {
            let named = config["config_groups"]["group_0"]["targets"].as_array().unwrap();
            assert!(named.contains(&json!(r"re:(.*\.)?layers\.0\.mlp\.experts\.\d+\..*$")), "{named:?}");
        }
    }
}

/// q, k and v are one module of vLLM's StableLM, which a group names once.
#[test]
fn a_group_names_what_vllm_joins_once() {
    let dir = Folder::new();
    let mut config = wide_config();
    config["architectures"] = json!(["StableLmForCausalLM"]);
    folder(&dir.join("in"), &wide(), &config);
    run(&dir.join("in"), &dir.join("out"), &preset(Target::ModelOpt, "mlp+fp8")).unwrap();
    let config = json_of(&dir.join("out/config.json"))["quantization_config"].clone();
    for joined in ["self_attn.qkv_proj", "mlp.gate_up_proj"] {
        let joined = json!(format!("model.layers.0.{joined}"));
        let groups = config["config_groups"].as_object().unwrap().values();
        let count =
            groups.flat_map(|group| group["targets"].as_array().unwrap()).filter(|target| **target == joined).count();
        assert_eq!(count, 1, "{joined}");
    }
}

#[test]
fn keys_and_values_in_nvfp4_are_said() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let kv = |target| Settings { kv: KvCache::Nvfp4Cast, ..to(target) };
    let summary = run(&dir.join("in"), &dir.join("out"), &kv(Target::ModelOpt)).unwrap();
    assert_eq!(summary.findings, []);
    assert_eq!(json_of(&dir.join("out/hf_quant_config.json"))["quantization"]["kv_cache_quant_algo"], "NVFP4");
    assert_eq!(json_of(&dir.join("out/config.json"))["quantization_config"]["kv_cache_scheme"], "NVFP4");
    run(&dir.join("out"), &dir.join("again"), &to(Target::ModelOpt)).unwrap();
    assert!(contents(&dir.join("out")) == contents(&dir.join("again")), "relabelled to itself");
    let refused = run(&dir.join("in"), &dir.join("ct"), &kv(Target::CompressedTensors)).unwrap_err().to_string();
    assert!(refused.contains("no keys and values in NVFP4"), "{refused}");
}

#[test]
fn mxfp8_is_decoded_with_its_powers_of_two() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    run(&dir.join("in"), &dir.join("out"), &everything(Target::ModelOpt, "mxfp8")).unwrap();
    let tensors = tensors_of(&dir.join("out"));
    let (codes, scales) = (&tensors[&format!("{DOWN}.weight")].bytes, &tensors[&format!("{DOWN}.weight_scale")].bytes);
    let value = |i: usize| e4m3::decode(codes[i]) * e8m0::decode(scales[i / 256 * 8 + i % 256 / 32]);
    assert!(decoded(&dir.join("out"), DOWN).into_iter().enumerate().all(|(i, x)| x == value(i)));
}

#[test]
fn parts_make_the_bytes_of_one_process() {
    let dir = Folder::new();
    folder(&dir.join("in"), &wide(), &wide_config());
    let text = "[[rule]]\npath = \"*.mlp.*\"\nform = \"nvfp4\"\n[[rule]]\npath = \"*.o_proj\"\nform = \"fp8-block\"\n\
                [default]\nform = \"fp8-tensor\"";
    let (settings, stop) = (rules(Target::ModelOpt, text), AtomicBool::new(false));
    run(&dir.join("in"), &dir.join("one"), &settings).unwrap();
    for part in Portion::all(3) {
        convert_part(&dir.join("in"), &dir.join("parts"), &settings, part, &(), &stop).unwrap();
    }
    let summary = finish(&dir.join("in"), &dir.join("parts"), &settings, &(), &stop).unwrap();
    assert_eq!((summary.quantized.len(), summary.findings), (14, vec![]));
    assert!(contents(&dir.join("one")) == contents(&dir.join("parts")));
}

/// vLLM asks for the layers of some architectures by names that they do not have: they have one form.
#[test]
fn layers_without_names_have_one_form() {
    for architecture in ["FalconH1ForCausalLM", "Zamba2ForCausalLM", "AriaForConditionalGeneration"] {
        let dir = Folder::new();
        let tensors = ["mlp.down_proj", "self_attn.o_proj"]
            .map(|name| (format!("model.layers.0.{name}.weight"), random(Dtype::BF16, &[128, 128], 3)));
        folder(&dir.join("in"), &[tensors.into_iter().collect()], &json!({ "architectures": [architecture] }));
        let refused = run(&dir.join("in"), &dir.join("out"), &preset(Target::ModelOpt, "mlp+fp8")).unwrap_err();
        assert!(refused.to_string().contains("by names that they do not have"), "{refused}");
        run(&dir.join("in"), &dir.join("out"), &preset(Target::ModelOpt, "fp8")).unwrap();
    }
}
