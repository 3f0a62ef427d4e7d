//! Configurations and tensors that contradict each other or themselves: a server refuses them, or reads wrong numbers.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};

/// A Llama whose configuration says every size.
fn sized() -> Value {
    let mut config = config();
    for (key, value) in [
        ("model_type", json!("llama")),
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("intermediate_size", json!(96)),
        ("rms_norm_eps", json!(1e-5)),
    ] {
        config[key] = value;
    }
    config
}

fn modelopt() -> Parts {
    Parts::convert(&llama(Dtype::BF16), &sized(), &settings(Target::ModelOpt, Acts::Constant(1.0)))
}

fn set(parts: &mut Parts, name: &str, shape: &[usize]) {
    parts.tensors.insert(name.to_string(), random(Dtype::BF16, shape, 5));
}

#[test]
fn sizes_that_contradict_the_configuration_are_found() {
    check(
        &modelopt(),
        &[
            (
                "heads",
                &|p| p.config["num_attention_heads"] = json!(8),
                "Problem model.layers.0.self_attn.k_proj: 32 rows, but 'num_key_value_heads' x 'head_dim' in config.json is 16: a \
                 server refuses it; 1 more are like it",
            ),
            (
                "heads of keys",
                &|p| p.config["num_key_value_heads"] = json!(4),
                "32 rows, but 'num_key_value_heads' x 'head_dim' in config.json is 64",
            ),
            (
                "their size",
                &|p| p.config["head_dim"] = json!(32),
                "Problem model.layers.0.self_attn.q_proj: 64 rows, but 'num_attention_heads' x 'head_dim' in config.json is 128",
            ),
            (
                "the feed-forward size",
                &|p| p.config["intermediate_size"] = json!(128),
                "Problem model.layers.0.mlp.down_proj: 96 columns, but 'intermediate_size' in config.json is 128",
            ),
            (
                "fewer layers than there are",
                &|p| p.config["num_hidden_layers"] = json!(1),
                "Problem model.layers.1: has tensors, but config.json says 1 layers",
            ),
            (
                "a norm",
                &|p| set(p, "model.layers.1.input_layernorm.weight", &[32]),
                "Problem model.layers.1.input_layernorm: 32 numbers, but 'hidden_size' in config.json is 64",
            ),
            (
                "a norm of two dimensions",
                &|p| set(p, "model.layers.1.input_layernorm.weight", &[1, 64]),
                "Problem model.layers.1.input_layernorm: the shape [1, 64], where a server expects 1 dimensions",
            ),
            (
                "the last norm",
                &|p| set(p, "model.norm.weight", &[63]),
                "Problem model.norm: 63 numbers, but 'hidden_size' in config.json is 64",
            ),
            (
                "rows of the head",
                &|p| set(p, "lm_head.weight", &[128, 64]),
                "Problem lm_head: 128 rows, but 'vocab_size' in config.json is 64",
            ),
            (
                "columns of the head",
                &|p| set(p, "lm_head.weight", &[64, 32]),
                "Problem lm_head: 32 columns, but 'hidden_size' in config.json is 64",
            ),
            (
                "a bias",
                &|p| set(p, "model.layers.0.self_attn.q_proj.bias", &[32]),
                "Problem model.layers.0.self_attn.q_proj.bias: 32 numbers, but the weight beside it has 64 outputs",
            ),
            (
                "a norm of integers",
                &|p| {
                    let tensor = Tensor { dtype: Dtype::I32, shape: vec![64], bytes: vec![1; 256] };
                    p.tensors.insert("model.norm.weight".to_string(), tensor);
                },
                "Problem model.norm.weight: I32, where a server expects floats",
            ),
        ],
    );
}

/// What a server does not find under its own name, and what it leaves out or makes up.
#[test]
fn what_a_server_passes_over_is_found() {
    fn rename(p: &mut Parts, from: &str, to: &str) {
        let tensor = p.tensors.remove(from).unwrap();
        p.tensors.insert(to.to_string(), tensor);
    }
    check(
        &modelopt(),
        &[
            (
                "a norm by another name",
                &|p| rename(p, "model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weightx"),
                "Problem model.layers.1: 'input_layernorm.weight' missing, which layer 0 has",
            ),
            (
                "the last norm by another name",
                &|p| rename(p, "model.norm.weight", "model.norms.weight"),
                "Problem model.norm.weight: missing",
            ),
            (
                "the embedding by another name",
                &|p| rename(p, "model.embed_tokens.weight", "model.embed_tokensx.weight"),
                "Problem model.embed_tokens.weight: missing",
            ),
            (
                "a head that is not the embedding",
                &|p| p.config["tie_word_embeddings"] = json!(true),
                "Problem lm_head: not the embedding, though 'tie_word_embeddings' in config.json is true",
            ),
            (
                "biases that are promised",
                &|p| p.config["attention_bias"] = json!(true),
                "Problem model.layers.0.self_attn.q_proj: no bias, but 'attention_bias' in config.json is true",
            ),
            (
                "biases that are not",
                &|p| {
                    p.config["attention_bias"] = json!(false);
                    set(p, "model.layers.0.self_attn.q_proj.bias", &[64]);
                },
                "Problem model.layers.0.self_attn.q_proj: a bias, but 'attention_bias' in config.json is false",
            ),
            (
                "no list where vLLM looks for it",
                &|p| drop(p.quantization().as_object_mut().unwrap().remove("ignore")),
                "Problem config.json: no 'ignore' in 'quantization_config'",
            ),
            (
                "no hidden size",
                &|p| drop(p.config.as_object_mut().unwrap().remove("hidden_size")),
                "Note config.json: 'hidden_size' is missing: sizes were not compared with it",
            ),
        ],
    );
    let tied = modelopt().after(&|p: &mut Parts| {
        p.config["tie_word_embeddings"] = json!(true);
        let table = p.tensors["model.embed_tokens.weight"].clone();
        p.tensors.insert("lm_head.weight".to_string(), table);
    });
    assert_eq!(tied, "");
}

/// Without heads in the configuration, layers are held against each other.
#[test]
fn layers_that_differ_are_found_unless_the_configuration_says_so() {
    let good = Parts::convert(&llama(Dtype::BF16), &config(), &settings(Target::ModelOpt, Acts::None));
    let wide = |p: &mut Parts| {
        for (part, dtype, cols) in [("weight", Dtype::U8, 32), ("weight_scale", Dtype::F8_E4M3, 4)] {
            for module in ["k_proj", "v_proj"] {
                let name = format!("model.layers.1.self_attn.{module}.{part}");
                p.tensors.insert(name, Tensor { dtype, shape: vec![48, cols], bytes: vec![8; 48 * cols] });
            }
        }
    };
    let said = good.after(&wide);
    assert!(said.contains("Problem model.layers.1.self_attn.k_proj: the shape [48, 64] (of 1), but"), "{said}");
    for (key, value) in [
        ("num_key_value_heads", json!([2, 3])),
        ("layer_types", json!(["sliding_attention", "full_attention"])),
        ("linear_attn_config", json!({ "full_attn_layers": [1, 2] })),
        ("block_configs", json!([{}, {}])),
    ] {
        let said = good.after(&|p: &mut Parts| {
            wide(p);
            p.config[key] = value.clone();
        });
        assert_eq!(said, "", "{key}");
    }
}

#[test]
fn numbers_that_are_none_are_found_with_their_place() {
    let put = |p: &mut Parts, name: &str, dtype, at: usize, value: f32| {
        let tensor = &p.tensors[name];
        let mut values = values(tensor.shape.iter().product(), 3);
        values[at] = value;
        let changed = generated::tensor(dtype, &tensor.shape.clone(), &values);
        p.tensors.insert(name.to_string(), changed);
    };
    let good = modelopt();
    let cases = [
        ("model.norm.weight", Dtype::BF16, 63, f32::NAN, "the number at [63] is NaN"),
        ("model.norm.weight", Dtype::F32, 0, f32::INFINITY, "the number at [0] is inf"),
        ("model.embed_tokens.weight", Dtype::F16, 64 * 3 + 5, f32::NEG_INFINITY, "the number at [3, 5] is -inf"),
        ("lm_head.weight", Dtype::BF16, 4095, f32::NAN, "the number at [63, 63] is NaN"),
        ("lm_head.weight", Dtype::BF16, 4095, 3e38, ""),
    ];
    for (name, dtype, at, value, expected) in cases {
        let said = good.after(&|p: &mut Parts| put(p, name, dtype, at, value));
        match expected {
            "" => assert_eq!(said, ""),
            _ => assert_eq!(said, format!("Problem {name}: {expected}: outputs become NaN\n")),
        }
    }
    let masked = |value: f32| {
        good.after(&move |p: &mut Parts| {
            p.tensors.insert("model.attn_mask".to_string(), generated::tensor(Dtype::F32, &[1], &[value]));
        })
    };
    assert_eq!(masked(f32::NEG_INFINITY), "");
    assert!(masked(f32::NAN).starts_with("Problem model.attn_mask"));
}

#[test]
fn values_of_another_type_are_found() {
    let good = modelopt();
    let whole = "expected a whole number greater than 0";
    let cases = [
        ("num_hidden_layers", json!(null), whole),
        ("num_hidden_layers", json!("16"), whole),
        ("num_hidden_layers", json!(-1), whole),
        ("num_hidden_layers", json!(2.0), whole),
        ("num_hidden_layers", json!(0), whole),
        ("num_hidden_layers", json!([2]), whole),
        ("hidden_size", json!("64"), whole),
        ("hidden_size", json!(null), whole),
        ("vocab_size", json!(64.5), whole),
        ("num_attention_heads", json!("4"), "expected a whole number"),
        ("intermediate_size", json!([96, "x"]), "expected a whole number"),
        ("num_experts", json!({}), "expected a whole number"),
        ("num_attention_heads", json!([]), "expected a whole number"),
        ("max_position_embeddings", json!(0), whole),
        ("rms_norm_eps", json!("1e-5"), "expected a number greater than 0"),
        ("rope_theta", json!(-1), "expected a number greater than 0"),
        ("torch_dtype", json!("bfloat61"), "expected bfloat16, float16 or float32"),
        ("tie_word_embeddings", json!("false"), "expected true or false"),
        ("model_type", json!(3), "expected a text"),
        ("text_config", json!(3), "expected an object"),
    ];
    for (key, value, expected) in cases {
        let said = good.after(&|p: &mut Parts| p.config[key] = value.clone());
        let line = format!("Problem config.json: '{key}' is {value}, {expected}: a server refuses it\n");
        assert!(said.contains(&line), "{key} = {value}: {said}");
    }
    let said = good.after(&|p: &mut Parts| drop(p.config.as_object_mut().unwrap().remove("num_hidden_layers")));
    let note = "Note config.json: 'num_hidden_layers' is missing: whether layers are missing, and their sizes, was not checked\n";
    assert_eq!(said, note);
    for (key, value) in [("head_dim", json!(null)), ("num_key_value_heads", json!([2, 2])), ("num_experts", json!(0))] {
        assert_eq!(good.after(&|p: &mut Parts| p.config[key] = value.clone()), "", "{key}");
    }
}

#[test]
fn a_quantization_that_is_not_known_is_found() {
    check(
        &modelopt(),
        &[
            (
                "another method",
                &|p| p.quantization()["quant_method"] = json!("modelopt_fp5"),
                "Problem config.json: 'quant_method' in 'quantization_config' is \"modelopt_fp5\", expected 'modelopt'",
            ),
            (
                "no method",
                &|p| drop(p.quantization().as_object_mut().unwrap().remove("quant_method")),
                "Problem config.json: no 'quant_method' in 'quantization_config', expected 'modelopt'",
            ),
            (
                "no object",
                &|p| *p.quantization() = json!("modelopt"),
                "Problem config.json: 'quantization_config' is \"modelopt\", expected an object",
            ),
            (
                "another algorithm",
                &|p| p.quantization()["quant_algo"] = json!("NVFP5"),
                "Problem config.json: the algorithm is 'NVFP5', but the weights are NVFP4 ('quant_algo', expected NVFP4 or",
            ),
            (
                "a cache",
                &|p| p.own["quantization"]["kv_cache_quant_algo"] = json!("FP9"),
                "Problem hf_quant_config.json: 'kv_cache_quant_algo' is \"FP9\", expected null, FP8 or NVFP4",
            ),
            (
                "a list that is none",
                &|p| p.own["quantization"]["exclude_modules"] = json!("lm_head"),
                "Problem hf_quant_config.json: 'exclude_modules' is not a list of names",
            ),
            (
                "names that are none",
                &|p| p.quantization()["ignore"] = json!(["lm_head", 3]),
                "Problem config.json: 'ignore' is not a list of names",
            ),
        ],
    );
    let compressed =
        Parts::convert(&llama(Dtype::BF16), &sized(), &settings(Target::CompressedTensors, Acts::Constant(1.0)));
    check(
        &compressed,
        &[
            (
                "another method",
                &|p| p.quantization()["quant_method"] = json!("modelopt"),
                "'quant_method' in 'quantization_config' is \"modelopt\", expected 'compressed-tensors'",
            ),
            (
                "another format",
                &|p| p.quantization()["format"] = json!("pack-quantized"),
                "'format' in 'quantization_config' is \"pack-quantized\", expected 'nvfp4-pack-quantized'",
            ),
            (
                "no format",
                &|p| drop(p.quantization().as_object_mut().unwrap().remove("format")),
                "no 'format' in 'quantization_config', expected 'nvfp4-pack-quantized'",
            ),
            (
                "another format of a group",
                &|p| p.quantization()["config_groups"]["group_0"]["format"] = json!(""),
                "'config_groups.group_0.format' in 'quantization_config' is \"\", expected 'nvfp4-pack-quantized'",
            ),
            (
                "no targets",
                &|p| p.quantization()["config_groups"]["group_0"]["targets"] = json!([]),
                "and 13 more NVFP4 weights are not among the 'targets' of any group of 'config_groups' ([]), expected [\"Linear\"]",
            ),
            (
                "other targets",
                &|p| p.quantization()["config_groups"]["group_0"]["targets"] = json!(["Lineer", "re:.*self_attn"]),
                "and 5 more NVFP4 weights are not among the 'targets'",
            ),
            (
                "weights that are not symmetric",
                &|p| p.quantization()["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false),
                "no entry of 'config_groups' has weights of symmetric 4-bit floats",
            ),
            (
                "blocks of no size",
                &|p| p.quantization()["config_groups"]["group_0"]["weights"]["group_size"] = json!(null),
                "Problem config.json: blocks of null ('group_size')",
            ),
            (
                "blocks of a size that is not said",
                &|p| {
                    let group = &mut p.quantization()["config_groups"]["group_0"]["weights"];
                    group.as_object_mut().unwrap().remove("group_size");
                },
                "no entry of 'config_groups' has weights",
            ),
            (
                "a cache",
                &|p| p.quantization()["kv_cache_scheme"] = json!("fp8"),
                "'kv_cache_scheme' is \"fp8\", expected null or an object with 'num_bits'",
            ),
            (
                "other activations",
                &|p| p.quantization()["config_groups"]["group_0"]["input_activations"]["num_bits"] = json!(8),
                "'config_groups.group_0.input_activations' are not 4-bit floats",
            ),
        ],
    );
    let named = compressed.after(&|p: &mut Parts| {
        p.quantization()["config_groups"]["group_0"]["targets"] = json!(["re:.*self_attn", "re:.*mlp"]);
    });
    assert_eq!(named, "");
}

/// Python writes such numbers.
#[test]
fn a_number_that_json_does_not_have_is_refused_with_its_key() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    for (text, expected) in [
        (
            r#"{"hidden_size": 64, "rope_theta": Infinity}"#,
            "config.json: 'rope_theta' is Infinity, which JSON does not",
        ),
        (r#"{"rope_scaling": {"factor": NaN}}"#, "config.json: 'factor' is NaN, which JSON does not have"),
    ] {
        std::fs::write(dir.join("in/config.json"), text).unwrap();
        let error = Checkpoint::open(&dir.join("in")).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
