//! What a converted checkpoint says about keys and values, and their scales.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::json;
use std::collections::BTreeMap;

#[test]
fn a_key_value_cache_in_fp8_is_said_and_stays_said() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let fp8 = |target| Settings { kv: KvCache::Fp8Cast, ..to(target) };
    run(&dir.join("in"), &dir.join("modelopt"), &fp8(Target::ModelOpt)).unwrap();
    let written = Checkpoint::open(&dir.join("modelopt")).unwrap();
    for scale in ["k_proj.k_scale", "v_proj.v_scale"] {
        let scale = written.get(&format!("model.layers.1.self_attn.{scale}")).unwrap();
        assert_eq!((&scale.info.shape[..], scale.bytes().unwrap()), (&[][..], 1f32.to_le_bytes().to_vec()));
    }
    assert!(written.get("model.layers.1.self_attn.q_proj.q_scale").is_none());
    let said = |folder: &str| {
        let config = json_of(&dir.join(folder).join("config.json"));
        config["quantization_config"]["kv_cache_scheme"]["num_bits"].clone()
    };
    let own = json_of(&dir.join("modelopt/hf_quant_config.json"));
    assert_eq!((said("modelopt"), &own["quantization"]["kv_cache_quant_algo"]), (json!(8), &json!("FP8")));
    run(&dir.join("modelopt"), &dir.join("again"), &to(Target::ModelOpt)).unwrap();
    assert!(contents(&dir.join("modelopt")) == contents(&dir.join("again")), "relabelled to itself");
    // compressed-tensors has other names for the scales, and a dimension.
    run(&dir.join("modelopt"), &dir.join("ct"), &to(Target::CompressedTensors)).unwrap();
    run(&dir.join("in"), &dir.join("ct-cast"), &fp8(Target::CompressedTensors)).unwrap();
    for folder in ["ct", "ct-cast"] {
        assert_eq!(said(folder), json!(8));
        let written = Checkpoint::open(&dir.join(folder)).unwrap();
        for letter in ["k", "v"] {
            let scale = written.get(&format!("model.layers.1.self_attn.{letter}_scale")).unwrap();
            assert_eq!((&scale.info.shape[..], scale.bytes().unwrap()), (&[1][..], 1f32.to_le_bytes().to_vec()));
            assert!(written.get(&format!("model.layers.1.self_attn.{letter}_proj.{letter}_scale")).is_none());
        }
        assert_eq!(beside_layers(verify(&Model::new(&written).unwrap(), Client::Transformers, 1).unwrap()), []);
    }
    run(&dir.join("ct"), &dir.join("back"), &to(Target::ModelOpt)).unwrap();
    let names = |folder: &str| {
        let checkpoint = Checkpoint::open(&dir.join(folder)).unwrap();
        checkpoint.tensors().map(|t| t.info.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("back"), names("modelopt"));
    run(&dir.join("modelopt"), &dir.join("plain"), &to(Target::Plain(Precision::Bf16))).unwrap();
    assert!(!names("plain").iter().any(|name| name.ends_with("_scale")), "nothing is quantized there");
    let refused = run(&dir.join("in"), &dir.join("a.gguf"), &fp8(Target::Gguf)).unwrap_err().to_string();
    assert!(refused.contains("leave the setting out"), "{refused}");
}

/// One layer's scale of keys is gone from a source that has all others: 1 takes its place, and the others stay.
#[test]
fn scales_of_keys_and_values_that_a_source_lacks_are_written_as_one() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let missing = "model.layers.1.self_attn.k_scale";
    for (made, target) in [("modelopt", Target::ModelOpt), ("ct", Target::CompressedTensors)] {
        let cast = Settings { kv: KvCache::Fp8Cast, ..to(target) };
        run(&dir.join("in"), &dir.join(made), &cast).unwrap();
        let mut tensors = tensors_of(&dir.join(made));
        let scales: Vec<String> =
            tensors.keys().filter(|n| n.ends_with("k_scale") || n.ends_with("v_scale")).cloned().collect();
        assert_eq!(scales.len(), 4);
        scales.iter().for_each(|name| tensors.get_mut(name).unwrap().bytes = 2f32.to_le_bytes().to_vec());
        let removed = scales.iter().find(|n| n.contains("layers.1.") && n.ends_with("k_scale")).unwrap();
        tensors.remove(removed);
        save(&dir.join(made).join("model.safetensors"), &tensors);
        if target == Target::CompressedTensors {
            let found = beside_layers(verified(&dir.join(made), Client::Transformers));
            assert_eq!(found.iter().map(|f| f.about.as_str()).collect::<Vec<_>>(), [missing]);
            assert_eq!(found[0].fix, Some(Fix::Convert(Target::CompressedTensors)));
        }
        let mended = dir.join(&format!("{made}-mended"));
        run(&dir.join(made), &mended, &to(Target::CompressedTensors)).unwrap();
        assert_eq!(beside_layers(verified(&mended, Client::Transformers)), []);
        let written = tensors_of(&mended);
        for layer in 0..2 {
            for letter in ["k", "v"] {
                let name = format!("model.layers.{layer}.self_attn.{letter}_scale");
                let expected = if name == missing { 1f32 } else { 2.0 };
                assert_eq!(written[&name].bytes, expected.to_le_bytes(), "{name}");
            }
        }
    }
}

#[test]
fn a_scale_is_of_keys_only_where_the_source_says_that_they_are_quantized() {
    let dir = Folder::new();
    let mut shards = llama(Dtype::BF16);
    let name = "model.layers.0.self_attn.k_scale";
    shards[0].insert(name.to_string(), tensor(Dtype::F32, &[1], &[3.0]));
    folder(&dir.join("in"), &shards, &llama_config());
    run(&dir.join("in"), &dir.join("modelopt"), &to(Target::ModelOpt)).unwrap();
    run(&dir.join("modelopt"), &dir.join("plain"), &to(Target::Plain(Precision::Bf16))).unwrap();
    for made in ["modelopt", "plain"] {
        assert_eq!(tensors_of(&dir.join(made))[name].bytes, 3f32.to_le_bytes(), "{made}: a parameter like others");
    }
    // The same tensor beside a configuration that says so, of a type that is not passed on.
    let file = dir.join("modelopt/hf_quant_config.json");
    let mut said = json_of(&file);
    said["quantization"]["kv_cache_quant_algo"] = json!("NVFP4");
    std::fs::write(&file, said.to_string()).unwrap();
    run(&dir.join("modelopt"), &dir.join("decoded"), &to(Target::Plain(Precision::Bf16))).unwrap();
    assert!(!tensors_of(&dir.join("decoded")).contains_key(name), "nothing is quantized there");
}

#[test]
fn calibrated_scales_of_keys_and_values_are_written_under_the_names_of_each_target() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let names = ["0.self_attn.k_scale", "0.self_attn.v_scale", "1.self_attn.k_scale", "1.self_attn.v_scale"];
    let scales: BTreeMap<String, f32> =
        names.iter().zip(1..).map(|(name, i)| (format!("model.layers.{name}"), 0.01 * i as f32)).collect();
    let calibrated =
        |scales: &BTreeMap<String, f32>, target| Settings { kv: KvCache::Fp8(scales.clone()), ..to(target) };
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let made = dir.join(&target.to_string());
        run(&dir.join("in"), &made, &calibrated(&scales, target)).unwrap();
        let written = tensors_of(&made);
        for (name, scale) in &scales {
            let letter = if name.contains("k_scale") { "k" } else { "v" };
            let name = match target {
                Target::ModelOpt => name.replace("self_attn.", &format!("self_attn.{letter}_proj.")),
                _ => name.clone(),
            };
            assert_eq!(written[&name].bytes, scale.to_le_bytes(), "{name}");
        }
        if target == Target::CompressedTensors {
            assert_eq!(beside_layers(verified(&made, Client::Transformers)), []);
        }
        // What is there stays, and is not replaced.
        let again = run(&made, &dir.join("again"), &calibrated(&scales, target)).unwrap_err().to_string();
        assert!(again.contains("the source has them already"), "{again}");
    }
    let refused = |scales: &BTreeMap<String, f32>| {
        run(&dir.join("in"), &dir.join("refused"), &calibrated(scales, Target::ModelOpt)).unwrap_err().to_string()
    };
    let mut fewer = scales.clone();
    fewer.retain(|name, _| !name.contains(".1."));
    let said = refused(&fewer);
    assert!(said.contains("layers.1.self_attn.k_scale', 'model.layers.1.self_attn.v_scale"), "{said}");
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut scales = scales.clone();
        scales.insert("model.layers.1.self_attn.v_scale".to_string(), wrong);
        assert!(refused(&scales).contains("expected a positive number"), "{wrong}");
    }
}
