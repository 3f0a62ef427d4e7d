//! MXFP4 that stays beside other forms, and DeepSeek-V4's form.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4_checkpoint::*;
use nvfp4_spec::e8m0;
use safetensors::Dtype;
use serde_json::{Value, json};

const UP: &str = "model.layers.1.mlp.up_proj";
const KEEP: &str = "[[rule]]\npath = \"*.mlp.*\"\nform = \"mxfp4\"\n[default]\nform = ";

fn bytes(dtype: Dtype, shape: &[usize], of: impl Fn(usize) -> u8) -> Tensor {
    Tensor { dtype, shape: shape.to_vec(), bytes: (0..shape.iter().product()).map(of).collect() }
}

/// Codes and powers of two of a matrix.
fn mxfp4(rows: usize, cols: usize, seed: usize, dtypes: [Dtype; 2]) -> [Tensor; 2] {
    let code = move |i: usize| ((i + seed) * 73 % 251) as u8;
    let power = move |i: usize| 118 + ((i * 5 + seed) % 9) as u8;
    [bytes(dtypes[0], &[rows, cols / 2], code), bytes(dtypes[1], &[rows, cols / 32], power)]
}

/// A Llama whose MLPs are compressed-tensors' MXFP4.
fn packed() -> (Vec<Tensors>, Value) {
    let mut shards = llama(Dtype::BF16);
    for tensors in &mut shards {
        let names: Vec<String> = tensors.keys().filter(|name| name.contains(".mlp.")).cloned().collect();
        for (i, name) in names.iter().enumerate() {
            let old = tensors.remove(name).unwrap();
            let [codes, scales] = mxfp4(old.shape[0], old.shape[1], i, [Dtype::U8; 2]);
            tensors.insert(format!("{name}_packed"), codes);
            tensors.insert(format!("{name}_scale"), scales);
        }
    }
    let weights = json!({ "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": true,
                          "dynamic": false });
    let inputs = json!({ "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": true,
                         "dynamic": true });
    let mut config = config();
    config["quantization_config"] = json!({
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": { "group_0": { "targets": ["re:.*mlp.*"], "weights": weights, "input_activations": inputs,
                                        "format": "mxfp4-pack-quantized" } },
    });
    (shards, config)
}

#[test]
fn mxfp4_of_compressed_tensors_becomes_nvfp4_of_the_same_values() {
    let (dir, (shards, config)) = (Folder::new(), packed());
    folder(&dir.join("in"), &shards, &config);
    let settings = rules(Target::ModelOpt, "[default]\nform = \"nvfp4\"");
    let summary = run(&dir.join("in"), &dir.join("out"), &settings).unwrap();
    assert_eq!(summary.findings, []);
    assert_eq!(decoded(&dir.join("in"), UP), decoded(&dir.join("out"), UP));
    let tensors = tensors_of(&dir.join("out"));
    let scale = |last: &str| &tensors[&format!("model.layers.1.mlp.{last}.weight_scale_2")].bytes;
    assert_eq!(scale("gate_proj"), scale("up_proj"));
    assert_eq!(*scale("up_proj"), e8m0::decode(126 - 8).to_le_bytes(), "the largest exponent of both");
}

#[test]
fn mxfp4_stays_beside_nvfp4_and_fp8() {
    let (dir, (shards, config)) = (Folder::new(), packed());
    folder(&dir.join("in"), &shards, &config);
    let before = tensors_of(&dir.join("in"));
    for form in ["nvfp4", "fp8", "keep"] {
        let out = dir.join(form);
        let summary =
            run(&dir.join("in"), &out, &rules(Target::CompressedTensors, &format!("{KEEP}\"{form}\""))).unwrap();
        assert_eq!(summary.findings, [], "{form}");
        let after = tensors_of(&out);
        for part in ["weight_packed", "weight_scale"] {
            let name = format!("{UP}.{part}");
            assert!((&before[&name].bytes, &before[&name].shape) == (&after[&name].bytes, &after[&name].shape));
        }
        assert_eq!(decoded(&dir.join("in"), UP), decoded(&out, UP));
        let groups = json_of(&out.join("config.json"))["quantization_config"]["config_groups"].clone();
        let own = groups.as_object().unwrap().values().find(|group| group["format"] == "mxfp4-pack-quantized").unwrap();
        assert_eq!(
            own["input_activations"],
            config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
        );
    }
    let small = Settings { memory: 1, threads: 1, ..rules(Target::CompressedTensors, &format!("{KEEP}\"nvfp4\"")) };
    run(&dir.join("in"), &dir.join("small"), &small).unwrap();
    assert!(contents(&dir.join("nvfp4")) == contents(&dir.join("small")));
}

#[test]
fn mxfp4_that_no_server_reads_is_refused_by_name() {
    let (dir, (shards, config)) = (Folder::new(), packed());
    folder(&dir.join("in"), &shards, &config);
    let refused = |settings: &Settings| run(&dir.join("in"), &dir.join("out"), settings).unwrap_err().to_string();
    let said = refused(&rules(Target::ModelOpt, &format!("{KEEP}\"nvfp4\"")));
    assert!(said.contains("mlp.down_proj': no server reads MXFP4 in the format modelopt"), "{said}");
    let said = refused(&rules(Target::CompressedTensors, "[default]\nform = \"mxfp4\""));
    assert!(said.contains("k_proj' is BF16, and MXFP4 is kept, not made"), "{said}");
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let stacked = [
        (format!("{name}_blocks"), bytes(Dtype::U8, &[2, 64, 2, 16], |i| i as u8)),
        (format!("{name}_scales"), bytes(Dtype::U8, &[2, 64, 2], |_| 120)),
    ];
    folder(&dir.join("gpt"), &[stacked.into()], &json!({ "architectures": ["GptOssForCausalLM"] }));
    let keep = rules(Target::CompressedTensors, "[default]\nform = \"keep\"");
    let said = run(&dir.join("gpt"), &dir.join("out"), &keep).unwrap_err().to_string();
    assert!(said.contains("holds several experts, whose MXFP4 vLLM reads in GPT-OSS's own form alone"), "{said}");
}

#[test]
fn wrong_descriptions_of_mxfp4_are_found() {
    let (shards, config) = packed();
    let parts = Parts::convert(&shards, &config, &rules(Target::CompressedTensors, &format!("{KEEP}\"nvfp4\"")));
    assert_eq!(parts.verify(Client::Vllm), []);
    let group = |p: &mut Parts, at: &str, value: Value| {
        let groups = p.config["quantization_config"]["config_groups"].as_object_mut().unwrap();
        let own = groups.values_mut().find(|group| group["format"] == "mxfp4-pack-quantized").unwrap();
        *own.pointer_mut(at).unwrap() = value;
    };
    let said = parts.after(&|p| group(p, "/format", json!("nvfp4-pack-quantized")));
    assert!(said.contains("expected 'mxfp4-pack-quantized' for MXFP4"), "{said}");
    let said = parts.after(&|p| group(p, "/targets", json!([])));
    assert!(said.contains(&format!("{UP}: MXFP4, but the configuration says not quantized")), "{said}");
    let said = parts.after(&|p| p.tensors.get_mut(&format!("{UP}.weight_scale")).unwrap().bytes[3] = 0xFF);
    assert!(said.contains("the number at [1, 1] is NaN"), "{said}");
}

/// DeepSeek-V4 as it is published, without what stands beside its matrices.
fn deepseek() -> (Vec<Tensors>, Value) {
    let mut tensors = Tensors::new();
    for l in 0..2 {
        for (name, rows, cols) in [("wq_a", 128, 256), ("wkv", 128, 256), ("wo_b", 256, 128)] {
            let module = format!("layers.{l}.attn.{name}");
            let code = move |i: usize| ((i + rows) * 31 % 120) as u8;
            tensors.insert(format!("{module}.weight"), bytes(Dtype::F8_E4M3, &[rows, cols], code));
            let scale = bytes(Dtype::F8_E8M0, &[rows / 128, cols / 128], |i| 120 + i as u8);
            tensors.insert(format!("{module}.scale"), scale);
        }
        for e in 0..2 {
            for (i, (name, rows, cols)) in [("w1", 64, 256), ("w2", 256, 64), ("w3", 64, 256)].into_iter().enumerate() {
                let module = format!("layers.{l}.ffn.experts.{e}.{name}");
                let [codes, scales] = mxfp4(rows, cols, 7 * l + 3 * e + i, [Dtype::I8, Dtype::F8_E8M0]);
                tensors.insert(format!("{module}.weight"), codes);
                tensors.insert(format!("{module}.scale"), scales);
            }
        }
        tensors.insert(format!("layers.{l}.ffn.gate.weight"), random(Dtype::BF16, &[2, 256], 5));
        tensors.insert(format!("layers.{l}.attn_norm.weight"), random(Dtype::BF16, &[256], 6));
    }
    for name in ["embed", "head"] {
        tensors.insert(format!("{name}.weight"), random(Dtype::BF16, &[64, 256], 8));
    }
    tensors.insert("norm.weight".to_string(), random(Dtype::BF16, &[256], 9));
    let config = json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "expert_dtype": "fp4",
        "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 64, "n_routed_experts": 2, "moe_intermediate_size": 64,
        "quantization_config": { "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                                 "weight_block_size": [128, 128], "activation_scheme": "dynamic" },
    });
    (vec![tensors], config)
}

fn acts(text: &str) -> Settings {
    Settings { acts: Acts::Constant(1.0), ..rules(Target::DeepSeekV4, text) }
}

#[test]
fn deepseek_v4_keeps_its_fp8_and_gets_experts_in_nvfp4() {
    let (dir, (shards, config)) = (Folder::new(), deepseek());
    folder(&dir.join("in"), &shards, &config);
    let text = "[[rule]]\npath = \"*.experts.*\"\nform = \"nvfp4\"\n[default]\nform = \"keep\"";
    let summary = run(&dir.join("in"), &dir.join("out"), &acts(text)).unwrap();
    assert_eq!((summary.quantized.len(), &summary.findings[..]), (12, &[][..]));
    run(&dir.join("in"), &dir.join("default"), &acts("")).unwrap();
    assert!(contents(&dir.join("out")) == contents(&dir.join("default")), "rules say what is done without them");
    let after = tensors_of(&dir.join("out"));
    let expert = "layers.1.ffn.experts.0";
    for (name, tensor) in &shards[0] {
        if name.contains(".experts.") {
            continue;
        }
        let same = &after[name];
        assert!(same.dtype == tensor.dtype && same.shape == tensor.shape && same.bytes == tensor.bytes, "{name}");
    }
    for name in ["w1", "w2", "w3"] {
        let module = format!("{expert}.{name}");
        assert_eq!(decoded(&dir.join("in"), &module), decoded(&dir.join("out"), &module));
        assert_eq!(after[&format!("{module}.input_scale")].bytes, 1f32.to_le_bytes());
        assert!(!after.contains_key(&format!("{module}.scale")));
    }
    assert_eq!(
        after[&format!("{expert}.w1.weight_scale_2")].bytes,
        after[&format!("{expert}.w3.weight_scale_2")].bytes
    );
    let mut expected = config;
    expected["quantization_config"]["moe_quant_algo"] = json!("NVFP4");
    assert_eq!(json_of(&dir.join("out/config.json")), expected);
    // Its own result is read, and stays what it is.
    let again = Settings { acts: Acts::None, ..acts("") };
    run(&dir.join("out"), &dir.join("again"), &again).unwrap();
    assert!(contents(&dir.join("out")) == contents(&dir.join("again")));
}

#[test]
fn what_vllm_does_not_read_of_deepseek_v4_is_refused() {
    let (dir, (shards, config)) = (Folder::new(), deepseek());
    let refused = |tensors: &[Tensors], config: &Value, settings: &Settings| {
        let source = dir.join("in");
        let _ = std::fs::remove_dir_all(&source);
        folder(&source, tensors, config);
        run(&source, &dir.join("out"), settings).unwrap_err().to_string()
    };
    let said = refused(&shards, &config, &Settings { acts: Acts::None, ..acts("") });
    assert!(said.contains("with scales of their activations; give them"), "{said}");
    let said = refused(&shards, &config, &acts("[[rule]]\npath = \"*.attn.*\"\nform = \"nvfp4\""));
    assert!(said.contains("attn.wkv': in DeepSeek-V4's form all experts are NVFP4"), "{said}");
    let said = refused(&shards, &config, &acts("[[rule]]\npath = \"layers.1.*\"\nform = \"keep\""));
    assert!(said.contains("'layers.1.ffn.experts.0.w1': in DeepSeek-V4's form all experts are NVFP4"), "{said}");
    let mut other = config.clone();
    other["expert_dtype"] = json!("fp8");
    let said = refused(&shards, &other, &acts(""));
    assert!(said.contains("'expert_dtype' in config.json is \"fp8\""), "{said}");
    let mut wide = shards.clone();
    let scale = tensor(Dtype::F32, &[1, 2], &[0.5, 0.25]);
    wide[0].insert("layers.0.attn.wkv.scale".to_string(), scale);
    let said = refused(&wide, &config, &acts(""));
    assert!(said.contains("the scales of 'layers.0.attn.wkv' are F32"), "{said}");
    let said = refused(&llama(Dtype::BF16), &llama_config(), &acts(""));
    assert!(said.contains("the source is not quantized"), "{said}");
}

#[test]
fn wrong_files_in_deepseek_v4s_form_are_found() {
    let (shards, config) = deepseek();
    let parts = Parts::convert(&shards, &config, &acts(""));
    assert_eq!(parts.verify(Client::Vllm), []);
    let said = parts.after(&|p| drop(p.quantization().as_object_mut().unwrap().shift_remove("moe_quant_algo")));
    assert!(said.contains("'moe_quant_algo' in 'quantization_config' is missing"), "{said}");
    let said = parts.after(&|p| p.config["expert_dtype"] = json!("fp8"));
    assert!(said.contains("vLLM looks at 'moe_quant_algo' beside 'fp4' alone"), "{said}");
    let said = parts.after(&|p| drop(p.tensors.remove("layers.0.ffn.experts.1.w2.input_scale")));
    assert!(said.contains("layers.0.ffn.experts.1.w2: no activation scale, which vLLM expects"), "{said}");
    let said = parts.after(&|p| {
        let [codes, scales] = mxfp4(64, 256, 1, [Dtype::I8, Dtype::F8_E8M0]);
        p.remove("layers.0.ffn.experts.1.w1.");
        p.tensors.insert("layers.0.ffn.experts.1.w1.weight".to_string(), codes);
        p.tensors.insert("layers.0.ffn.experts.1.w1.scale".to_string(), scales);
    });
    assert!(said.contains("w1: MXFP4, but 'moe_quant_algo' says that all experts are NVFP4"), "{said}");
    assert!(parts.verify(Client::SgLang).iter().any(|finding| finding.text.contains("does not load")));
}
