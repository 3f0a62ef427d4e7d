//! Weights in every form that a checkpoint may have: the model gives what it gives with the decoded weights, to the bit.

mod generated;

use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::{Acts, KvCache, Selection, Settings, Target};
use nvfp4_model::{Activations, KeysValues, Lane, Run, Source, calibrate, open};
use safetensors::Dtype;
use serde_json::json;
use std::path::Path;

/// Whether a model's logits are those of its decoded weights.
fn is_as_decoded(dir: &Folder, folder: &Path) {
    let decoded = dir.join("decoded");
    let _ = std::fs::remove_dir_all(&decoded);
    converted(folder, &decoded, &to(Target::Plain(Precision::F32)));
    let (own, expected) = (all_logits(folder), all_logits(&decoded));
    assert!(own.iter().all(|z| z.is_finite()) && own.iter().any(|&z| z != own[0]));
    assert_eq!(own, expected, "{}", folder.display());
}

#[test]
fn nvfp4_fp8_and_mxfp8_give_what_their_decoded_weights_give() {
    let dir = Folder::new("forms");
    model(&dir.join("llama"), &with(config(), "intermediate_size", json!(128)), usual);
    model(&dir.join("moe"), &moe_config(32), usual);
    for (source, target, path, form) in [
        ("llama", Target::ModelOpt, "*", "nvfp4"),
        ("llama", Target::CompressedTensors, "*", "nvfp4"),
        ("llama", Target::ModelOpt, "*", "fp8-tensor"),
        ("llama", Target::CompressedTensors, "*", "fp8-channel"),
        ("llama", Target::ModelOpt, "*.down_proj", "fp8-block"),
        ("llama", Target::CompressedTensors, "*.down_proj", "fp8-block"),
        ("llama", Target::ModelOpt, "*", "mxfp8"),
        ("moe", Target::ModelOpt, "*.experts.*", "nvfp4"),
        ("moe", Target::CompressedTensors, "*", "nvfp4"),
        ("moe", Target::ModelOpt, "*", "fp8-tensor"),
        ("moe", Target::CompressedTensors, "*", "mxfp8"),
    ] {
        let made = dir.join(&format!("{source}-{target}-{form}"));
        converted(&dir.join(source), &made, &Settings { selection: only(path, form), ..to(target) });
        is_as_decoded(&dir, &made);
        std::fs::remove_dir_all(made).unwrap();
    }
}

#[test]
fn mixed_forms_in_one_checkpoint_give_what_their_decoded_weights_give() {
    let dir = Folder::new("mixed");
    model(&dir.join("moe"), &moe_config(32), usual);
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let selection = Selection { rules: "experts+fp8".parse().unwrap(), ..Selection::default() };
        let made = dir.join(&format!("{target}"));
        converted(&dir.join("moe"), &made, &Settings { selection, ..to(target) });
        let checkpoint = open(&made).unwrap();
        let source = Source::new(&checkpoint, None).unwrap();
        let format = |module: &str| source.weight(&format!("model.layers.1.{module}")).unwrap().format();
        assert_eq!([format("mlp.experts.3.up_proj"), format("self_attn.q_proj")], ["NVFP4", "FP8"]);
        is_as_decoded(&dir, &made);
    }
}

/// FP8 with block scales as DeepSeek publishes it, with a last block that is not full.
#[test]
fn fp8_with_inverse_block_scales_is_read() {
    let dir = Folder::new("inverse");
    let mut made = tensors(&config(), usual);
    for layer in 0..3 {
        let name = format!("model.layers.{layer}.mlp.gate_proj.weight");
        let bytes: Vec<u8> = (0..96 * 64).map(|i| (i * 7 % 0x60) as u8 | ((i % 3 == 0) as u8) << 7).collect();
        made.insert(name.clone(), (Dtype::F8_E4M3, vec![96, 64], bytes));
        made.insert(format!("{name}_scale_inv"), (Dtype::F32, vec![1, 1], 0.01f32.to_le_bytes().to_vec()));
    }
    let fp8 = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
    write(&dir.join("fp8"), &with(config(), "quantization_config", fp8), &made);
    is_as_decoded(&dir, &dir.join("fp8"));
}

#[test]
fn mxfp4_experts_give_what_their_decoded_weights_give_and_so_do_they_in_nvfp4() {
    let dir = Folder::new("oss");
    let (config, made) = oss();
    write(&dir.join("oss"), &config, &made);
    is_as_decoded(&dir, &dir.join("oss"));
    converted(&dir.join("oss"), &dir.join("nvfp4"), &Settings::default());
    is_as_decoded(&dir, &dir.join("nvfp4"));
}

/// Experts in one tensor, gates before ups, in both orders. Where 2·inner is hidden, gate and up alone
/// do not say which comes first.
#[test]
fn experts_in_one_tensor_of_either_order_give_what_they_give_apart() {
    let dir = Folder::new("stacked");
    for width in [32, 48] {
        let config = moe_config(width);
        let apart = tensors(&config, usual);
        write(&dir.join("apart"), &config, &apart);
        let expected = all_logits(&dir.join("apart"));
        for inputs_first in [false, true] {
            let mut joined: Tensors = apart
                .iter()
                .filter(|(name, _)| !name.contains(".experts."))
                .map(|(n, t)| (n.clone(), t.clone()))
                .collect();
            for layer in 0..3 {
                let module = format!("model.layers.{layer}.mlp.experts");
                for (name, parts, [outputs, inputs]) in [
                    ("gate_up_proj", &["gate_proj", "up_proj"][..], [2 * width, HIDDEN]),
                    ("down_proj", &["down_proj"][..], [HIDDEN, width]),
                ] {
                    let mut all = Vec::new();
                    for expert in 0..4 {
                        let bytes = parts.iter().flat_map(|p| &apart[&format!("{module}.{expert}.{p}.weight")].2);
                        let bytes: Vec<u8> = bytes.copied().collect();
                        let at = |o: usize, i: usize| &bytes[2 * (o * inputs + i)..][..2];
                        match inputs_first {
                            false => all.extend_from_slice(&bytes),
                            true => {
                                (0..inputs).for_each(|i| (0..outputs).for_each(|o| all.extend_from_slice(at(o, i))))
                            }
                        }
                    }
                    let shape = if inputs_first { vec![4, inputs, outputs] } else { vec![4, outputs, inputs] };
                    joined.insert(format!("{module}.{name}"), (Dtype::BF16, shape, all));
                }
            }
            write(&dir.join("joined"), &config, &joined);
            assert_eq!(all_logits(&dir.join("joined")), expected, "width {width}, inputs first: {inputs_first}");
        }
        // Statistics have the names that a conversion asks for.
        let checkpoint = open(&dir.join("joined")).unwrap();
        let source = Source::new(&checkpoint, None).unwrap();
        let amaxes = calibrate(&source, &rows(), &mut (), &GO).unwrap().amaxes(&source);
        let settings = Settings { acts: Acts::Amaxes(amaxes), ..Settings::default() };
        converted(&dir.join("joined"), &dir.join(&format!("packed-{width}")), &settings);
    }
}

/// Keys and values in FP8: both dialects' scales are read, and a scale changes what is rounded.
#[test]
fn keys_and_values_are_rounded_with_the_scales_of_either_dialect() {
    let dir = Folder::new("kv");
    model(&dir.join("in"), &config(), usual);
    let mut seen = Vec::new();
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let made = dir.join(&format!("{target}"));
        converted(&dir.join("in"), &made, &Settings { kv: KvCache::Fp8Cast, ..to(target) });
        let checkpoint = open(&made).unwrap();
        assert!(Source::new(&checkpoint, None).unwrap().keeps_fp8());
        let plain = Run { activations: Activations::Plain, keys_values: KeysValues::Plain, watch: &() };
        let unrounded = logits_of(&checkpoint, &plain).unwrap();
        assert_ne!(all_logits(&made), unrounded);
        seen.push(all_logits(&made));
    }
    assert_eq!(seen[0], seen[1]);
    let found = evaluate(Some(&dir.join("in")), &dir.join("modelopt"), Activations::AsStored).unwrap();
    assert_eq!(
        found.said.iter().map(|(lane, _)| *lane).collect::<Vec<_>>(),
        [Lane::Reference, Lane::Weights, Lane::Served]
    );
}
