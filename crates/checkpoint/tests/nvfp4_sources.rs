//! Checkpoints that are NVFP4 already: decoded to plain numbers, and with one tensor scale for what servers join.

mod converted;
mod generated;

use converted::{beside_layers, run, tensors_of, to};
use generated::for_llama_cpp::source;
use generated::*;
use half::{bf16, f16};
use nvfp4::{Element, Precision};
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Every weight has a tensor scale of its own.
fn apart(target: Target) -> Settings {
    Settings { selection: Selection { fuse: Fuse::Off, ..Selection::default() }, ..to(target) }
}

fn fixed(target: Target) -> Settings {
    Settings { selection: Selection { differing: Differing::Rescale, ..Selection::default() }, ..to(target) }
}

/// The decoded values of every weight, by module.
fn decoded(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let of = |weight: &Weight<'_>| {
        let mut buffer = Buffer::default();
        let values = weight.values(0..weight.rows, &mut buffer).unwrap();
        (weight.module.clone(), (0..values.len()).map(|i| values.get(i)).collect())
    };
    model.weights.iter().map(of).collect()
}

/// The bits of the tensor scale of every NVFP4 weight, by module.
fn globals(folder: &Path) -> BTreeMap<String, u32> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let of = |weight: &Weight<'_>| match &weight.stored {
        Stored::Nvfp4(parts) => Some((weight.module.clone(), parts.global(0).unwrap().to_bits())),
        _ => None,
    };
    Model::new(&checkpoint).unwrap().weights.iter().filter_map(of).collect()
}

fn findings(folder: &Path) -> Vec<Finding> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    beside_layers(verify(&Model::new(&checkpoint).unwrap(), Client::Vllm, 1).unwrap())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A layer whose joined weights are powers of two times each other, so that their tensor scales are too.
fn powers_of_two() -> Tensors {
    let mut tensors = layer(0, Dtype::BF16);
    let name = |module: &str| format!("model.layers.0.{module}.weight");
    for (module, of, factor) in [
        ("self_attn.k_proj", "self_attn.v_proj", 0.25),
        ("self_attn.q_proj", "self_attn.v_proj", 2.0),
        ("mlp.up_proj", "mlp.gate_proj", 0.5),
    ] {
        let of = tensors[&name(of)].clone();
        let scaled = |&b: &[u8; 2]| bf16::from_f32(bf16::from_le_bytes(b).to_f32() * factor).to_le_bytes();
        let bytes = of.bytes.as_chunks::<2>().0.iter().flat_map(scaled).collect();
        tensors.insert(name(module), Tensor { bytes, ..of });
    }
    tensors
}

#[test]
fn ratios_that_are_powers_of_two_go_into_block_scales_and_no_value_changes() {
    let dir = Folder::new();
    folder(&dir.join("in"), &[powers_of_two()], &llama_config());
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let (apart_dir, fixed_dir) = (dir.join(&format!("{target}-apart")), dir.join(&format!("{target}-fixed")));
        run(&dir.join("in"), &apart_dir, &apart(target)).unwrap();
        let problems = findings(&apart_dir);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].text.contains("tensor scales differ (ratio 2.0000)"), "{problems:?}");
        assert!(problems[1].text.contains("tensor scales differ (ratio 8.0000)"), "{problems:?}");
        assert!(problems.iter().all(|p| p.fix == Some(Fix::ConvertWithOneScale(target))), "{problems:?}");

        let summary = run(&apart_dir, &fixed_dir, &fixed(target)).unwrap();
        let rescaled: Vec<&str> = summary.rescaled.iter().map(|w| w.module.rsplit('.').next().unwrap()).collect();
        assert_eq!(rescaled, ["up_proj", "k_proj", "v_proj"], "gate and q have the largest scales");
        assert!(summary.rescaled.iter().all(|w| w.measure.error == 0.0) && summary.quantized.is_empty());
        assert_eq!(findings(&fixed_dir), []);
        let (before, after) = (decoded(&apart_dir), decoded(&fixed_dir));
        assert!(before.iter().all(|(module, values)| bits(values) == bits(&after[module])), "{target}");
    }
}

#[test]
fn other_ratios_are_requantized_within_the_rounding_of_a_block_scale() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let (apart_dir, fixed_dir) = (dir.join(&format!("{target}-apart")), dir.join(&format!("{target}-fixed")));
        run(&dir.join("in"), &apart_dir, &apart(target)).unwrap();
        let kept = run(&apart_dir, &dir.join(&format!("{target}-kept")), &to(target)).unwrap();
        assert!(kept.rescaled.is_empty() && !findings(&dir.join(&format!("{target}-kept"))).is_empty());

        let summary = run(&apart_dir, &fixed_dir, &fixed(target)).unwrap();
        let (old, new) = (globals(&apart_dir), globals(&fixed_dir));
        let changed: Vec<&String> = old.keys().filter(|module| old[*module] != new[*module]).collect();
        let mut rescaled: Vec<&String> = summary.rescaled.iter().map(|w| &w.module).collect();
        rescaled.sort();
        assert_eq!(rescaled, changed);
        assert!(rescaled.len() >= 4, "at least one of q/k/v and one of gate/up, in two layers");
        for weight in &summary.rescaled {
            // The same codes with the nearest scale byte are among the choices: off by at most 1/16 where bytes are normal.
            let error = weight.measure.relative_error();
            assert!(error > 0.0 && error <= 1.0 / 16.0, "{}: {error}", weight.module);
        }
        assert_eq!(findings(&fixed_dir), []);
        let (before, after) = (decoded(&apart_dir), decoded(&fixed_dir));
        for (module, values) in &before {
            let measure = summary.rescaled.iter().find(|w| w.module == *module).map(|w| w.measure);
            let found = Measure::of(&nvfp4_kernels::Values::F32(values), &after[module]);
            assert_eq!(
                found.error,
                measure.map_or(0.0, |m| m.error),
                "{module}: what was measured is what was written"
            );
        }
        run(&fixed_dir, &dir.join(&format!("{target}-again")), &fixed(target)).unwrap();
        let weights = |path: &Path| contents(path)["model.safetensors"].clone();
        assert!(weights(&fixed_dir) == weights(&dir.join(&format!("{target}-again"))), "nothing is left to fix");
    }
}

#[test]
fn scales_of_activations_are_shared_too() {
    let dir = Folder::new();
    folder(&dir.join("in"), &[layer(0, Dtype::BF16)], &llama_config());
    let modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    let names = modules.iter().chain(&mlp).enumerate();
    let amaxes = names.map(|(i, m)| (format!("model.layers.0.{m}"), 2688.0 * (i + 1) as f32)).collect();
    run(&dir.join("in"), &dir.join("apart"), &Settings { acts: Acts::Amaxes(amaxes), ..apart(Target::ModelOpt) })
        .unwrap();
    run(&dir.join("apart"), &dir.join("fixed"), &fixed(Target::ModelOpt)).unwrap();
    let written = Checkpoint::open(&dir.join("fixed")).unwrap();
    let scale = |m: &str| {
        let bytes = written.get(&format!("model.layers.0.{m}.input_scale")).unwrap().bytes().unwrap();
        f32::from_le_bytes(bytes.try_into().unwrap())
    };
    assert_eq!(modules.map(scale), [3.0, 3.0, 3.0, 4.0]);
    assert_eq!(mlp.map(scale), [6.0, 6.0, 7.0]);
    assert_eq!(findings(&dir.join("fixed")), []);
}

/// Experts in one tensor have a scale each: gate and up of one expert share theirs, and of another they already do.
#[test]
fn experts_in_one_tensor_are_fixed_one_by_one() {
    let dir = Folder::new();
    let (experts, outputs, cols) = (2, 16, 32);
    let mut tensors = Tensors::new();
    for (name, scales) in [("gate_proj", [1.0f32, 2.0]), ("up_proj", [0.25, 2.0])] {
        let name = format!("model.layers.0.mlp.experts.{name}");
        let byte = |dtype, shape: &[usize], byte: fn(usize) -> u8| Tensor {
            dtype,
            shape: shape.to_vec(),
            bytes: (0..shape.iter().product()).map(byte).collect(),
        };
        tensors.insert(name.clone(), byte(Dtype::U8, &[experts, cols / 2, outputs], |i| (i * 37 % 251) as u8));
        let scale = byte(Dtype::F8_E4M3, &[experts, cols / 16, outputs], |i| 0x30 + (i % 16) as u8);
        tensors.insert(format!("{name}_weight_scale"), scale);
        tensors.insert(format!("{name}_weight_scale_2"), tensor(Dtype::F32, &[experts], &scales));
    }
    let quantization = json!({ "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": [] });
    let config = json!({ "architectures": ["Llama4ForCausalLM"], "quantization_config": quantization });
    folder(&dir.join("in"), &[tensors], &config);
    assert!(findings(&dir.join("in"))[0].text.contains("ratio 4.0000"), "{:?}", findings(&dir.join("in")));
    let summary = run(&dir.join("in"), &dir.join("fixed"), &fixed(Target::ModelOpt)).unwrap();
    assert_eq!(summary.rescaled.iter().map(|w| w.measure.error).collect::<Vec<_>>(), [0.0]);
    assert_eq!(findings(&dir.join("fixed")), []);
    assert_eq!(decoded(&dir.join("in")), decoded(&dir.join("fixed")));
    let written = Checkpoint::open(&dir.join("fixed")).unwrap();
    let scales = written.get("model.layers.0.mlp.experts.up_proj_weight_scale_2").unwrap().bytes().unwrap();
    assert_eq!(scales, [1f32, 2.0].map(f32::to_le_bytes).concat());
}

#[test]
fn fixing_is_refused_where_it_means_nothing() {
    let dir = Folder::new();
    folder(&dir.join("in"), &[layer(0, Dtype::BF16)], &llama_config());
    run(&dir.join("in"), &dir.join("apart"), &apart(Target::ModelOpt)).unwrap();
    let refused =
        |name: &str, settings: &Settings| run(&dir.join("apart"), &dir.join(name), settings).unwrap_err().to_string();
    assert!(refused("a.gguf", &fixed(Target::Gguf)).contains("there is nothing to fix"));
    let mut off = fixed(Target::ModelOpt);
    off.selection.fuse = Fuse::Off;
    assert!(refused("off", &off).contains("joining is turned off"));
    // A source that is quantized here shares scales anyway.
    let summary = run(&dir.join("in"), &dir.join("out"), &fixed(Target::ModelOpt)).unwrap();
    assert_eq!((summary.quantized.len(), summary.rescaled.len()), (7, 0));
}

#[test]
fn weights_are_decoded_to_the_type_that_is_asked_for() {
    fn check<T: Element>(dir: &Folder, name: &str, dtype: Dtype, bytes_of: fn(T) -> Vec<u8>) {
        let values = decoded(&dir.join("nvfp4"));
        let summary = run(&dir.join("nvfp4"), &dir.join(name), &to(Target::Plain(T::PRECISION))).unwrap();
        assert_eq!((summary.decoded.len(), summary.quantized.len()), (14, 0));
        let plain = Checkpoint::open(&dir.join(name)).unwrap();
        for weight in &summary.decoded {
            let values = &values[&weight.module];
            let tensor = plain.get(&format!("{}.weight", weight.module)).unwrap();
            let expected: Vec<u8> = values.iter().flat_map(|&x| bytes_of(T::from_f32(x))).collect();
            assert_eq!((tensor.info.dtype, tensor.bytes().unwrap() == expected), (dtype, true), "{}", weight.module);
            let zeroed = values.iter().filter(|&&x| x != 0.0 && T::from_f32(x).to_f32() == 0.0).count();
            assert_eq!(weight.measure.zeroed, zeroed as u64);
        }
        assert_eq!(
            plain.get("lm_head.weight").unwrap().info.dtype,
            Dtype::BF16,
            "what was not quantized keeps its type"
        );
        let config: Value =
            serde_json::from_slice(&std::fs::read(dir.join(name).join("config.json")).unwrap()).unwrap();
        assert_eq!((&config["torch_dtype"], config.get("quantization_config")), (&json!(name), None));
    }
    let dir = Folder::new();
    let mut config = llama_config();
    config["torch_dtype"] = json!("bfloat16");
    folder(&dir.join("in"), &llama(Dtype::BF16), &config);
    run(&dir.join("in"), &dir.join("nvfp4"), &to(Target::ModelOpt)).unwrap();
    check::<f32>(&dir, "float32", Dtype::F32, |x| x.to_le_bytes().to_vec());
    check::<bf16>(&dir, "bfloat16", Dtype::BF16, |x| x.to_le_bytes().to_vec());
    check::<f16>(&dir, "float16", Dtype::F16, |x| x.to_le_bytes().to_vec());
}

#[test]
fn values_beyond_a_type_are_refused_and_values_that_vanish_are_counted() {
    let dir = Folder::new();
    let weight = |byte: u8| Tensor { dtype: Dtype::F8_E4M3, shape: vec![16, 128], bytes: vec![byte; 16 * 128] };
    let source = |name: &str, byte: u8, scale: f32| {
        let mut large = weight(0);
        large.bytes[3 * 128 + 5] = byte;
        let scale = tensor(Dtype::F32, &[1, 1], &[scale]);
        let tensors = Tensors::from([("a.weight".to_string(), large), ("a.weight_scale_inv".to_string(), scale)]);
        save(&dir.join(name), &tensors);
    };
    source("large.safetensors", 0x7E, 1000.0);
    let f16 = to(Target::Plain(Precision::F16));
    let refused = run(&dir.join("large.safetensors"), &dir.join("f16"), &f16).unwrap_err().to_string();
    assert_eq!(
        refused,
        "weight 'a' holds 448000 at row 3, column 5, and the largest F16 is 65504; decode to BF16 or F32, and start \
         over"
    );
    assert!(!dir.join("f16").exists());
    run(&dir.join("large.safetensors"), &dir.join("bf16"), &to(Target::Plain(Precision::Bf16))).unwrap();
    assert_eq!(decoded(&dir.join("bf16"))["a"].iter().sum::<f32>(), 448_512.0, "the nearest of BF16");

    // 448 times this lies between the largest numbers of BF16 and of F32.
    let mut huge = weight(0);
    huge.bytes[0] = 0x7E;
    let tensors = Tensors::from([
        ("b.weight".to_string(), huge),
        ("b.weight_scale_inv".to_string(), tensor(Dtype::F32, &[1, 1], &[7.59e35])),
        ("c.weight".to_string(), random(Dtype::BF16, &[16, 64], 1)),
    ]);
    save(&dir.join("skipped.safetensors"), &tensors);
    let skips = Selection { skip: vec!["b".parse().unwrap()], ..Selection::default() };
    let settings = Settings { selection: skips, ..to(Target::ModelOpt) };
    let refused = run(&dir.join("skipped.safetensors"), &dir.join("kept"), &settings).unwrap_err().to_string();
    let advice = "quantize it too, or decode the source to F32 and convert that, and start over";
    assert!(refused.starts_with("weight 'b' holds 34003") && refused.ends_with(advice), "{refused}");
    // What it says helps.
    run(&dir.join("skipped.safetensors"), &dir.join("f32"), &to(Target::Plain(Precision::F32))).unwrap();
    run(&dir.join("f32"), &dir.join("kept"), &Settings { existing: Existing::Replace, ..settings }).unwrap();
    assert_eq!(Checkpoint::open(&dir.join("kept")).unwrap().get("b.weight").unwrap().info.dtype, Dtype::F32);

    source("small.safetensors", 0x38, 1e-8);
    let summary = run(&dir.join("small.safetensors"), &dir.join("zeros"), &f16).unwrap();
    assert_eq!(summary.decoded.iter().map(|w| w.measure.zeroed).collect::<Vec<_>>(), [1]);
}

/// Codes would be copied as if they were values. Nothing is written, whatever the target.
#[test]
fn weights_without_one_of_their_parts_are_refused_by_its_name() {
    let dir = Folder::new();
    folder(&dir.join("plain"), &llama(Dtype::BF16), &llama_config());
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        run(&dir.join("plain"), &dir.join(&target.to_string()), &to(target)).unwrap();
    }
    let fp8 = |module: &str| {
        let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![16, 128], bytes: vec![1; 16 * 128] };
        let scale = tensor(Dtype::F32, &[1, 1], &[1.0]);
        [(format!("{module}.weight"), weight), (format!("{module}.weight_scale_inv"), scale)]
    };
    let blocks: Tensors = [fp8("a"), fp8("b")].into_iter().flatten().collect();
    folder(&dir.join("fp8"), &[blocks], &llama_config());
    const UP: &str = "model.layers.1.mlp.up_proj";
    for (source, module, there, missing) in [
        ("modelopt", UP, "weight", "weight_scale_2"),
        ("modelopt", UP, "weight_scale", "weight"),
        ("compressed-tensors", UP, "weight_packed", "weight_global_scale"),
        ("fp8", "b", "weight", "weight_scale_inv"),
    ] {
        let checkpoint = Checkpoint::open(&dir.join(source)).unwrap();
        let copy = |t: Located<'_>| {
            let (dtype, shape) = (t.info.dtype, t.info.shape.clone());
            (t.info.name.clone(), Tensor { dtype, shape, bytes: t.bytes().unwrap() })
        };
        let mut tensors: Tensors = checkpoint.tensors().map(copy).collect();
        tensors.remove(&format!("{module}.{missing}")).unwrap();
        if missing == "weight" {
            tensors.remove(&format!("{module}.weight_scale_2")).unwrap();
        }
        let bad = dir.join("bad");
        folder(&bad, &[tensors], checkpoint.config().unwrap());
        for target in [Target::Plain(Precision::Bf16), Target::ModelOpt, Target::CompressedTensors] {
            let said = run(&bad, &dir.join("out"), &to(target)).unwrap_err().to_string();
            let expected = format!("tensor '{module}.{missing}' is missing, which '{module}.{there}' needs");
            assert!(said.ends_with(&expected), "{source}, {target}: {said}");
        }
        assert!(!dir.join("out").exists() && !dir.join("out.partial").exists());
    }
}

/// A scale that GGUF cannot hold is found when it is packed, and the error names its weight.
#[test]
fn a_block_scale_that_gguf_cannot_hold_is_refused_with_its_weight() {
    let dir = Folder::new();
    source(&dir.join("in"), "LlamaForCausalLM", 0);
    run(&dir.join("in"), &dir.join("nvfp4"), &to(Target::ModelOpt)).unwrap();
    let (module, file) = ("model.layers.1.mlp.up_proj", dir.join("nvfp4/model.safetensors"));
    for (i, (byte, expected)) in [(0x7F, "NaN (byte 0x7f)"), (0xB8, "-1 (byte 0xb8)")].into_iter().enumerate() {
        let mut tensors = tensors_of(&dir.join("nvfp4"));
        // The second block of the sixth row, of 4 blocks each.
        tensors.get_mut(&format!("{module}.weight_scale")).unwrap().bytes[5 * 4 + 1] = byte;
        save(&file, &tensors);
        let error = run(&dir.join("nvfp4"), &dir.join(&format!("{i}.gguf")), &to(Target::Gguf)).unwrap_err();
        let expected = format!("weight '{module}' has the block scale {expected} at row 5, block 1; GGUF has");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}
