//! Conversions of small generated checkpoints, and of the inputs that the real libraries were run on.

mod converted;
mod generated;

use converted::beside_layers;
use generated::*;
use nvfp4::{Precision, Profile, Quantizer, Side, TensorRef, Unit};
use nvfp4_checkpoint::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn run(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

fn to(target: Target) -> Settings {
    Settings { target, threads: 2, ..Settings::default() }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// All tensors of a checkpoint.
fn tensors_of(folder: &Path) -> Tensors {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let copy = |t: Located<'_>| Tensor { dtype: t.info.dtype, shape: t.info.shape.clone(), bytes: t.bytes().unwrap() };
    checkpoint.tensors().map(|t| (t.info.name.clone(), copy(t))).collect()
}

fn verified(folder: &Path, client: Client) -> Vec<Finding> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    verify(&Model::new(&checkpoint).unwrap(), client, 1).unwrap()
}

#[test]
fn a_llama_becomes_modelopts_tensors_and_configuration() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let summary = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    assert_eq!(summary.quantized.len(), 14);
    let checkpoint = Checkpoint::open(&dir.join("out")).unwrap();
    let info = |name: &str| checkpoint.get(name).map(|t| (t.info.dtype, t.info.shape.clone()));
    let down = "model.layers.1.mlp.down_proj";
    assert_eq!(info(&format!("{down}.weight")), Some((Dtype::U8, vec![64, 48])));
    assert_eq!(info(&format!("{down}.weight_scale")), Some((Dtype::F8_E4M3, vec![64, 6])));
    assert_eq!(info(&format!("{down}.weight_scale_2")), Some((Dtype::F32, vec![])));
    assert_eq!(info(&format!("{down}.input_scale")), None);
    assert_eq!(info("lm_head.weight"), Some((Dtype::BF16, vec![64, 64])));
    assert_eq!(checkpoint.tensors().count(), 14 * 3 + 4 + 2 + 1, "weights, norms, embedding and head, last norm");

    let config = json_of(&dir.join("out/config.json"));
    let keys: Vec<&String> = config.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["architectures", "vocab_size", "hidden_size", "aardvark", "quantization_config"], "order kept");
    assert_eq!(config["quantization_config"]["quant_algo"], "W4A16_NVFP4");
    let own = json_of(&dir.join("out/hf_quant_config.json"));
    assert_eq!(own["quantization"]["exclude_modules"], json!(["lm_head", "model.embed_tokens"]));
    assert!(own["quantization"].get("kv_cache_quant_algo").is_some_and(Value::is_null));
    let files: Vec<String> = contents(&dir.join("out")).into_keys().collect();
    assert_eq!(
        files,
        ["1_Pooling/config.json", "config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"]
    );
    assert!(!dir.join("out.partial").exists());
    let model = Model::new(&checkpoint).unwrap();
    assert_eq!(model.dialect, Dialect::ModelOpt);
    assert_eq!(beside_layers(verify(&model, Client::Vllm, 2).unwrap()), []);
}

#[test]
fn joined_weights_share_a_tensor_scale_inside_experts_too() {
    let dir = Folder::new();
    let mut tensors = layer(0, Dtype::BF16);
    tensors.retain(|name, _| !name.contains(".mlp."));
    for e in 0..3 {
        for (i, (name, shape)) in
            [("gate_proj", [32, 64]), ("up_proj", [32, 64]), ("down_proj", [64, 32])].iter().enumerate()
        {
            let name = format!("model.layers.0.mlp.experts.{e}.{name}.weight");
            tensors.insert(name, random(Dtype::BF16, shape, 40 + 3 * e as u64 + i as u64));
        }
    }
    tensors.insert("model.layers.0.mlp.gate.weight".into(), random(Dtype::BF16, &[16, 64], 3));
    folder(&dir.join("in"), &[tensors], &llama_config());
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        let out = dir.join(&target.to_string());
        run(&dir.join("in"), &out, &to(target)).unwrap();
        let checkpoint = Checkpoint::open(&out).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        let scale = |module: &str| match &model.weight(&format!("model.layers.0.{module}")).unwrap().stored {
            Stored::Nvfp4(parts) => parts.global(0).unwrap(),
            other => panic!("{other:?}"),
        };
        assert_eq!(scale("self_attn.q_proj"), scale("self_attn.k_proj"));
        assert_eq!(scale("self_attn.q_proj"), scale("self_attn.v_proj"));
        for e in 0..3 {
            let expert = |name: &str| scale(&format!("mlp.experts.{e}.{name}"));
            assert_eq!(expert("gate_proj"), expert("up_proj"));
            assert_ne!(expert("gate_proj"), expert("down_proj"));
        }
        assert!(matches!(model.weight("model.layers.0.mlp.gate").unwrap().stored, Stored::Plain(_)));
        assert_eq!(beside_layers(verify(&model, Client::Vllm, 1).unwrap()), []);
        let transformers = verify(&model, Client::Transformers, 1).unwrap();
        assert!(transformers.iter().any(|f| f.text.contains("does not load separate experts")), "{transformers:?}");
    }
}

/// Bytes of a file do not depend on threads, memory or interruptions; that of shards is the source's.
#[test]
fn the_bytes_do_not_depend_on_threads_or_memory() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let shards = Shards::AtMost(20_000);
    run(&dir.join("in"), &dir.join("a"), &Settings { shards, threads: 1, ..Settings::default() }).unwrap();
    run(&dir.join("in"), &dir.join("b"), &Settings { shards, threads: 7, memory: 1, ..Settings::default() }).unwrap();
    let a = contents(&dir.join("a"));
    assert!(a == contents(&dir.join("b")));
    assert!(
        a.contains_key("model.safetensors.index.json") && a.keys().filter(|n| n.ends_with(".safetensors")).count() > 2
    );
    run(&dir.join("in"), &dir.join("c"), &Settings { shards: Shards::AsSource, ..Settings::default() }).unwrap();
    let names: Vec<String> = contents(&dir.join("c")).into_keys().filter(|n| n.ends_with(".safetensors")).collect();
    assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    Checkpoint::open(&dir.join("c")).unwrap();
}

/// Stops a conversion after a number of weights, which a test's observer counts.
struct StopAfter<'a> {
    left: std::sync::atomic::AtomicUsize,
    stop: &'a AtomicBool,
}

impl Observer for StopAfter<'_> {
    fn advance(&self, _: u64) {
        use std::sync::atomic::Ordering::Relaxed;
        if self.left.fetch_sub(1, Relaxed) == 1 {
            self.stop.store(true, Relaxed);
        }
    }
}

#[test]
fn an_interrupted_conversion_continues_to_the_same_bytes() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let settings = Settings { shards: Shards::AtMost(8_000), threads: 2, ..Settings::default() };
    run(&dir.join("in"), &dir.join("whole"), &settings).unwrap();
    for after in 1..40 {
        let (target, stop) = (dir.join("out"), AtomicBool::new(false));
        let observer = StopAfter { left: after.into(), stop: &stop };
        match convert(&dir.join("in"), &target, &settings, &observer, &stop) {
            Err(Error::Interrupted) => {
                assert!(!target.exists() && dir.join("out.partial").exists());
                let refused = run(&dir.join("in"), &target, &settings).unwrap_err();
                assert!(matches!(refused, Error::Unfinished { .. }), "{refused}");
                let other = Settings { existing: Existing::Resume, scale: ScaleChoice::Mse, ..settings.clone() };
                let refused = run(&dir.join("in"), &target, &other).unwrap_err().to_string();
                assert!(refused.contains("begun with other settings"), "{refused}");
                let again = Settings { existing: Existing::Resume, threads: 1, ..settings.clone() };
                let summary = run(&dir.join("in"), &target, &again).unwrap();
                assert_eq!(summary.quantized.len(), 14, "what was done before counts too");
            }
            done => drop(done.unwrap()),
        }
        assert!(contents(&target) == contents(&dir.join("whole")), "stopped after {after} pieces");
        std::fs::remove_dir_all(&target).unwrap();
    }
}

/// A scale byte that is NaN makes a weight's error NaN, which the journal must hold.
#[test]
fn decoding_nan_can_be_interrupted_and_continued() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    run(&dir.join("in"), &dir.join("nvfp4"), &to(Target::ModelOpt)).unwrap();
    let mut tensors = tensors_of(&dir.join("nvfp4"));
    let module = "model.layers.0.self_attn.k_proj";
    tensors.get_mut(&format!("{module}.weight_scale")).unwrap().bytes[5] = 0x7F;
    save(&dir.join("nvfp4/model.safetensors"), &tensors);
    let settings = Settings { shards: Shards::AtMost(8_000), ..to(Target::Plain(Precision::Bf16)) };
    run(&dir.join("nvfp4"), &dir.join("whole"), &settings).unwrap();
    let mut continued = 0;
    for after in 1..30 {
        let (target, stop) = (dir.join("out"), AtomicBool::new(false));
        let observer = StopAfter { left: after.into(), stop: &stop };
        if convert(&dir.join("nvfp4"), &target, &settings, &observer, &stop).is_err() {
            let again = Settings { existing: Existing::Resume, ..settings.clone() };
            let summary = run(&dir.join("nvfp4"), &target, &again).unwrap();
            let weight = summary.decoded.iter().find(|w| w.module == module).unwrap();
            assert!(weight.measure.error.is_nan());
            continued += 1;
        }
        assert!(contents(&target) == contents(&dir.join("whole")), "stopped after {after} pieces");
        std::fs::remove_dir_all(&target).unwrap();
    }
    assert!(continued > 0);
}

/// The inputs that the real libraries quantized, as checkpoints: the same codes, scales and tensor scales.
#[test]
fn profiles_have_the_bytes_that_the_real_libraries_wrote() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/profiles");
    let mut cases = 0;
    for entry in std::fs::read_dir(testdata).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let (profile, target, global) = match name.split("__").next().unwrap() {
            "modelopt" => (Profile::ModelOpt, Target::ModelOpt, "weight_scale_2"),
            "llm_compressor" => (Profile::LlmCompressor, Target::CompressedTensors, "weight_global_scale"),
            _ => continue,
        };
        if name.contains("has_") {
            continue; // NaN and infinity are refused
        }
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let input = file.tensor("input").unwrap();
        let weight = Tensor { dtype: input.dtype(), shape: input.shape().to_vec(), bytes: input.data().to_vec() };
        if !weight.shape[1].is_multiple_of(16) {
            continue;
        }
        let dir = Folder::new();
        save(&dir.join("in.safetensors"), &Tensors::from([("a.b.weight".to_string(), weight)]));
        let settings = Settings { profile: Some(profile), ..to(target) };
        run(&dir.join("in.safetensors"), &dir.join("out"), &settings).unwrap();
        let written = Checkpoint::open(&dir.join("out")).unwrap();
        let part = |part: &str| written.get(&format!("a.b.{part}")).unwrap().bytes().unwrap();
        let codes = if target == Target::ModelOpt { "weight" } else { "weight_packed" };
        let recorded = |name: &str| file.tensor(name).unwrap().data().to_vec();
        assert_eq!(part(codes), recorded("codes"), "{name}: codes");
        assert_eq!(part("weight_scale"), recorded("scales"), "{name}: scales");
        assert_eq!(part(global), recorded("global"), "{name}: tensor scale");
        cases += 1;
    }
    assert!(cases > 50, "{cases}");
}

#[test]
fn every_source_type_is_quantized_as_its_values() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let dir = Folder::new();
        let x = values(64 * 96, 5);
        save(&dir.join("m.safetensors"), &Tensors::from([("a.weight".into(), tensor(dtype, &[64, 96], &x))]));
        run(&dir.join("m.safetensors"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
        let rounded: Vec<f32> = match dtype {
            Dtype::BF16 => x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
            Dtype::F16 => x.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
            _ => x,
        };
        let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
        let expected = quantizer.quantize(&TensorRef::new(&rounded[..], &[64, 96]).unwrap()).unwrap();
        let written = Checkpoint::open(&dir.join("out")).unwrap();
        let bytes = |name: &str| written.get(name).unwrap().bytes().unwrap();
        assert_eq!(bytes("a.weight"), expected.nvfp4(Side::Row).unwrap().codes(), "{dtype:?}");
        assert_eq!(bytes("a.weight_scale"), expected.nvfp4(Side::Row).unwrap().scales());
    }
}

#[test]
fn fp8_with_block_scales_is_decoded_and_quantized() {
    let (rows, cols) = (200, 144);
    let dir = Folder::new();
    let bytes: Vec<u8> = (0..rows * cols).map(|i| (i * 31 % 0x7F) as u8 | ((i as u8 & 1) << 7)).collect();
    let scales: Vec<f32> = vec![0.5, 0.25, 0.003, 1.7];
    let decoded: Vec<f32> = (0..rows * cols)
        .map(|i| nvfp4_spec::e4m3::decode(bytes[i]) * scales[i / cols / 128 * 2 + i % cols / 128])
        .collect();
    let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![rows, cols], bytes };
    let tensors = Tensors::from([
        ("a.weight".to_string(), weight),
        ("a.weight_scale_inv".to_string(), tensor(Dtype::F32, &[2, 2], &scales)),
    ]);
    save(&dir.join("m.safetensors"), &tensors);
    let settings = Settings { memory: 1, ..to(Target::ModelOpt) };
    run(&dir.join("m.safetensors"), &dir.join("out"), &settings).unwrap();
    let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
    let expected = quantizer.quantize(&TensorRef::new(&decoded[..], &[rows, cols]).unwrap()).unwrap();
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    assert!(written.get("a.weight_scale_inv").is_none());
    assert_eq!(written.get("a.weight").unwrap().bytes().unwrap(), expected.nvfp4(Side::Row).unwrap().codes());
}

#[test]
fn mxfp4_experts_keep_their_values() {
    let (experts, outputs, groups) = (3, 8, 2);
    let dir = Folder::new();
    let blocks: Vec<u8> = (0..experts * outputs * groups * 16).map(|i| (i * 73 % 256) as u8).collect();
    let scales: Vec<u8> = (0..experts * outputs * groups).map(|i| 110 + (i % 18) as u8).collect();
    let byte = |shape: Vec<usize>, bytes: Vec<u8>| Tensor { dtype: Dtype::U8, shape, bytes };
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let mut tensors = Tensors::from([
        (format!("{name}_blocks"), byte(vec![experts, outputs, groups, 16], blocks.clone())),
        (format!("{name}_scales"), byte(vec![experts, outputs, groups], scales.clone())),
        (format!("{name}_bias"), random(Dtype::BF16, &[experts, outputs], 1)),
    ]);
    let config = json!({ "architectures": ["Llama4ForCausalLM"], "quantization_config": { "quant_method": "mxfp4" } });
    folder(&dir.join("in"), &[tensors.clone()], &config);
    let summary = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    assert_eq!(summary.quantized[0].measure.error, 0.0, "exact");
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    let part = |suffix: &str| written.get(&format!("{name}{suffix}")).unwrap();
    assert_eq!(part("").info.shape, [experts, groups * 16, outputs]);
    assert_eq!(part("_weight_scale").info.shape, [experts, groups * 2, outputs]);
    let (codes, bytes) = (part("").bytes().unwrap(), part("_weight_scale").bytes().unwrap());
    let globals: Vec<f32> =
        part("_weight_scale_2").bytes().unwrap().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    for (e, o, k) in (0..experts * outputs * groups * 32)
        .map(|i| (i / (outputs * groups * 32), i / (groups * 32) % outputs, i % (groups * 32)))
    {
        let code = |packed: &[u8], at: usize| packed[at] >> (4 * (k % 2)) & 15;
        let row = (e * outputs + o) * groups;
        let before = nvfp4_spec::e2m1::decode(code(&blocks, row * 16 + k / 2))
            * 2f32.powi(i32::from(scales[row + k / 32]) - 127);
        let after = nvfp4_spec::e2m1::decode(code(&codes, (e * groups * 16 + k / 2) * outputs + o))
            * nvfp4_spec::e4m3::decode(bytes[(e * groups * 2 + k / 16) * outputs + o])
            * globals[e];
        assert_eq!(before, after);
    }
    let refused = run(&dir.join("in"), &dir.join("ct"), &to(Target::CompressedTensors)).unwrap_err().to_string();
    assert!(refused.contains("convert to ModelOpt's form"), "{refused}");

    // Read back: the same values, one tensor scale for each expert; decoded, inputs before outputs.
    let source = Checkpoint::open(&dir.join("in")).unwrap();
    let (source, model) = (Model::new(&source).unwrap(), Model::new(&written).unwrap());
    assert_eq!(model.weights.iter().map(|w| (w.matrices(), w.rows, w.cols)).collect::<Vec<_>>(), [(3, 24, 64)]);
    let all = |model: &Model<'_>, rows: std::ops::Range<usize>| {
        let mut buffer = Buffer::default();
        let values = model.weight(name).unwrap().values(rows, &mut buffer).unwrap();
        (0..values.len()).map(|i| values.get(i)).collect::<Vec<f32>>()
    };
    for rows in [0..24, 0..8, 3..5, 6..19] {
        assert_eq!(all(&source, rows.clone()), all(&model, rows));
    }
    assert_eq!(beside_layers(verify(&model, Client::Vllm, 1).unwrap()), []);
    run(&dir.join("out"), &dir.join("again"), &to(Target::ModelOpt)).unwrap();
    let weights = |folder: &str| contents(&dir.join(folder))["model.safetensors"].clone();
    assert!(weights("out") == weights("again"), "relabelled to itself");
    run(&dir.join("out"), &dir.join("plain"), &to(Target::Plain(Precision::Bf16))).unwrap();
    let plain = Checkpoint::open(&dir.join("plain")).unwrap();
    let decoded = plain.get(name).unwrap();
    assert_eq!((decoded.info.dtype, &decoded.info.shape[..]), (Dtype::BF16, &[experts, groups * 32, outputs][..]));
    let (decoded, values) = (decoded.bytes().unwrap(), all(&model, 0..24));
    let at = |e: usize, k: usize, o: usize| {
        half::bf16::from_le_bytes(decoded.as_chunks().0[(e * groups * 32 + k) * outputs + o]).to_f32()
    };
    assert!((0..values.len()).all(|i| at(i / 512, i % 64, i / 64 % 8) == values[i]), "BF16 holds all of them");

    tensors.get_mut(&format!("{name}_scales")).unwrap().bytes[5] = 255;
    folder(&dir.join("nan"), &[tensors], &json!({}));
    let refused = run(&dir.join("nan"), &dir.join("nan-out"), &to(Target::ModelOpt)).unwrap_err().to_string();
    assert!(refused.contains("holds NaN"), "{refused}");
}

#[test]
fn no_mxfp4_experts_are_decoded_to_no_experts_of_the_same_shape() {
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let dir = Folder::new();
    let empty = |shape: &[usize]| Tensor { dtype: Dtype::U8, shape: shape.to_vec(), bytes: Vec::new() };
    let tensors = Tensors::from([
        (format!("{name}_blocks"), empty(&[0, 8, 2, 16])),
        (format!("{name}_scales"), empty(&[0, 8, 2])),
    ]);
    folder(&dir.join("in"), &[tensors], &json!({}));
    for precision in [Precision::Bf16, Precision::F32] {
        let out = dir.join(&format!("{precision:?}"));
        run(&dir.join("in"), &out, &to(Target::Plain(precision))).unwrap();
        assert_eq!(tensors_of(&out)[name].shape, [0, 64, 8]);
    }
}

#[test]
fn nvfp4_is_relabelled_without_quantizing_again() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let acts = Settings { acts: Acts::Constant(0.5), ..to(Target::ModelOpt) };
    run(&dir.join("in"), &dir.join("modelopt"), &acts).unwrap();
    run(&dir.join("modelopt"), &dir.join("ct"), &to(Target::CompressedTensors)).unwrap();
    run(&dir.join("ct"), &dir.join("back"), &to(Target::ModelOpt)).unwrap();
    let (a, b) = (Checkpoint::open(&dir.join("modelopt")).unwrap(), Checkpoint::open(&dir.join("ct")).unwrap());
    let down = "model.layers.1.mlp.down_proj";
    let bytes = |c: &Checkpoint, name: &str| c.get(&format!("{down}.{name}")).unwrap().bytes().unwrap();
    assert_eq!(bytes(&a, "weight"), bytes(&b, "weight_packed"));
    assert_eq!(bytes(&a, "weight_scale"), bytes(&b, "weight_scale"));
    let float = |bytes: Vec<u8>| f32::from_le_bytes(bytes.try_into().unwrap());
    assert_eq!(float(bytes(&b, "weight_global_scale")), 1.0 / float(bytes(&a, "weight_scale_2")));
    assert_eq!(float(bytes(&b, "input_global_scale")), 2.0);
    assert_eq!(json_of(&dir.join("back/hf_quant_config.json")), json_of(&dir.join("modelopt/hf_quant_config.json")));
    let back = Checkpoint::open(&dir.join("back")).unwrap();
    assert_eq!(bytes(&a, "weight"), bytes(&back, "weight"));
    assert_eq!(beside_layers(verify(&Model::new(&b).unwrap(), Client::Transformers, 1).unwrap()), []);
}

/// The same numbers in ComfyUI's and torchao's order.
#[test]
fn other_dialects_are_read_in_their_own_order() {
    let (rows, cols) = (160, 96);
    let dir = Folder::new();
    let x = values(rows * cols, 3);
    let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
    let q = quantizer.quantize(&TensorRef::new(&x[..], &[rows, cols]).unwrap()).unwrap();
    let row = q.nvfp4(Side::Row).unwrap();
    assert_eq!(row.unit(), Unit::Multiplier);
    let swizzled = nvfp4_spec::swizzle::swizzle(row.scales(), rows, cols / 16).unwrap();
    let byte = |dtype, shape: Vec<usize>, bytes: Vec<u8>| Tensor { dtype, shape, bytes };
    let swapped = row.codes().iter().map(|b| b.rotate_left(4)).collect();
    let scales = byte(Dtype::F8_E4M3, vec![256, swizzled.len() / 256], swizzled);
    let global = tensor(Dtype::F32, &[], row.stored());
    let comfy = Tensors::from([
        ("a.weight".to_string(), byte(Dtype::U8, vec![rows, cols / 2], swapped)),
        ("a.weight_scale".to_string(), scales.clone()),
        ("a.weight_scale_2".to_string(), global.clone()),
    ]);
    save(&dir.join("unmarked.safetensors"), &comfy);
    let unmarked = Checkpoint::open(&dir.join("unmarked.safetensors")).unwrap();
    let refused = Model::new(&unmarked).unwrap_err().to_string();
    assert!(refused.contains("nothing says which it is"), "{refused}");
    let mut marked = comfy.clone();
    marked.insert("a.comfy_quant".into(), byte(Dtype::U8, vec![19], br#"{"format": "nvfp4"}"#.to_vec()));
    save(&dir.join("comfy.safetensors"), &marked);
    let torchao = Tensors::from([
        ("a._weight_qdata".to_string(), byte(Dtype::U8, vec![rows, cols / 2], row.codes().to_vec())),
        ("a._weight_scale".to_string(), scales),
        ("a._weight_per_tensor_scale".to_string(), global),
    ]);
    let entry = r#"{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": true}}"#;
    save_with(&dir.join("torchao.safetensors"), &torchao, &[("a.weight", entry)]);
    for (name, dialect) in [("comfy", Dialect::ComfyUi), ("torchao", Dialect::TorchAo)] {
        let checkpoint = Checkpoint::open(&dir.join(&format!("{name}.safetensors"))).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        assert_eq!(model.dialect, dialect);
        let expected = row.dequantize::<f32>().unwrap();
        let mut buffer = Buffer::default();
        for rows in [0..rows, 5..131, 130..160] {
            let values = model.weights[0].values(rows.clone(), &mut buffer).unwrap();
            assert!((0..values.len()).all(|i| values.get(i) == expected[rows.start * cols + i]), "{name} {rows:?}");
        }
        run(&dir.join(&format!("{name}.safetensors")), &dir.join(name), &to(Target::ModelOpt)).unwrap();
        let written = Checkpoint::open(&dir.join(name)).unwrap();
        assert_eq!(written.get("a.weight").unwrap().bytes().unwrap(), row.codes());
        assert_eq!(written.get("a.weight_scale").unwrap().bytes().unwrap(), row.scales());
        assert_eq!(written.tensors().count(), 3);
    }
}

#[test]
fn scale_rules_lower_the_error() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let error = |name: &str, scale| {
        let settings = Settings { scale, ..to(Target::ModelOpt) };
        let summary = run(&dir.join("in"), &dir.join(name), &settings).unwrap();
        let mut total = Measure::default();
        summary.quantized.iter().for_each(|w| total.add(&w.measure));
        total.relative_error()
    };
    let (max, mse, four) =
        (error("max", ScaleChoice::Max), error("mse", ScaleChoice::Mse), error("46", ScaleChoice::FourOverSix));
    assert!(mse < max && four < max, "{max} {mse} {four}");
    // What is written decodes to what was measured: the tensor scale belongs to the bound of 4over6.
    let (a, b) = (Checkpoint::open(&dir.join("in")).unwrap(), Checkpoint::open(&dir.join("46")).unwrap());
    let (a, b) = (Model::new(&a).unwrap(), Model::new(&b).unwrap());
    let (x, y) = (a.weight("model.layers.0.mlp.up_proj").unwrap(), b.weight("model.layers.0.mlp.up_proj").unwrap());
    let (mut p, mut q) = (Buffer::default(), Buffer::default());
    let (x, y) = (x.values(0..96, &mut p).unwrap(), y.values(0..96, &mut q).unwrap());
    let decoded: Vec<f32> = (0..y.len()).map(|i| y.get(i)).collect();
    assert!(Measure::of(&x, &decoded).relative_error() < 0.12);
    let other = Settings { scale: ScaleChoice::FourOverSix, profile: Some(Profile::ModelOpt), ..to(Target::ModelOpt) };
    assert!(run(&dir.join("in"), &dir.join("no"), &other).unwrap_err().to_string().contains("4over6"));
}

#[test]
fn activations_come_from_a_constant_or_a_table_and_joined_weights_share_the_largest() {
    let dir = Folder::new();
    folder(&dir.join("in"), &[layer(0, Dtype::F16)], &llama_config());
    let modules = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    let table =
        modules.iter().enumerate().map(|(i, m)| (format!("model.layers.0.{m}"), 2688.0 * (i + 1) as f32)).collect();
    let settings = Settings { acts: Acts::Amaxes(table), ..to(Target::ModelOpt) };
    run(&dir.join("in"), &dir.join("out"), &settings).unwrap();
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    let scale = |m: &str| {
        let bytes = written.get(&format!("model.layers.0.{m}.input_scale")).unwrap().bytes().unwrap();
        f32::from_le_bytes(bytes.try_into().unwrap())
    };
    assert_eq!(modules.map(scale), [3.0, 3.0, 3.0, 4.0, 6.0, 6.0, 7.0]);
    assert_eq!(json_of(&dir.join("out/hf_quant_config.json"))["quantization"]["quant_algo"], "NVFP4");
    assert_eq!(beside_layers(verify(&Model::new(&written).unwrap(), Client::Vllm, 1).unwrap()), []);
    let table = modules[..5].iter().map(|m| (format!("model.layers.0.{m}"), 1.0)).collect();
    let missing = Settings { acts: Acts::Amaxes(table), ..to(Target::ModelOpt) };
    let refused = run(&dir.join("in"), &dir.join("no"), &missing).unwrap_err().to_string();
    assert_eq!(
        refused, "scales of activations: no amax for 'model.layers.0.mlp.down_proj', 'model.layers.0.mlp.up_proj'",
        "all at once"
    );
    assert!(!dir.join("no.partial").exists(), "the corrected command is not in the way of its predecessor");
}

#[test]
fn patterns_choose_weights_and_may_not_split_a_group() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let count = |selection: Selection| Plan::new(&model, &selection, Target::ModelOpt).map(|p| p.quantized().count());
    let patterns = |text: &str| vec![text.parse().unwrap()];
    assert_eq!(count(Selection { skip: patterns("model.layers.0.*"), ..Selection::default() }).unwrap(), 7);
    assert_eq!(count(Selection { only: patterns("re:.*down_proj"), ..Selection::default() }).unwrap(), 2);
    assert_eq!(count(Selection { preset: Preset::MlpAndOutput, ..Selection::default() }).unwrap(), 8);
    assert_eq!(count(Selection { default_skips: DefaultSkips::Off, ..Selection::default() }).unwrap(), 16);
    let split = count(Selection { skip: patterns("*.q_proj"), ..Selection::default() }).unwrap_err().to_string();
    assert!(split.contains("servers join q/k/v into one matrix"), "{split}");
    assert_eq!(count(Selection { skip: patterns("*.q_proj"), fuse: Fuse::Off, ..Selection::default() }).unwrap(), 12);
    let nothing = count(Selection { skip: patterns("model.layer.*"), ..Selection::default() }).unwrap_err().to_string();
    assert!(nothing.contains("matches no weight"), "{nothing}");
}

#[test]
fn experts_in_one_tensor_are_kept_and_named() {
    let dir = Folder::new();
    let mut tensors = layer(0, Dtype::BF16);
    tensors.retain(|name, _| !name.contains(".mlp."));
    tensors.insert("model.layers.0.mlp.experts.gate_up_proj".into(), random(Dtype::BF16, &[2, 64, 32], 4));
    tensors.insert("model.layers.0.mlp.experts.down_proj".into(), random(Dtype::BF16, &[2, 16, 64], 5));
    folder(&dir.join("in"), &[tensors], &llama_config());
    run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let own = json_of(&dir.join("out/hf_quant_config.json"));
    assert_eq!(own["quantization"]["exclude_modules"], json!(["lm_head", "model.layers.0.mlp.experts"]));
}

#[test]
fn kept_fp8_weights_are_decoded_to_bf16() {
    let dir = Folder::new();
    let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![16, 128], bytes: vec![0x38; 16 * 128] };
    let tensors = Tensors::from([
        ("lm_head.weight".to_string(), weight.clone()),
        ("lm_head.weight_scale_inv".to_string(), tensor(Dtype::F32, &[1, 1], &[2.0])),
        ("a.weight".to_string(), weight),
        ("a.weight_scale_inv".to_string(), tensor(Dtype::F32, &[1, 1], &[2.0])),
    ]);
    save(&dir.join("m.safetensors"), &tensors);
    run(&dir.join("m.safetensors"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    let head = written.get("lm_head.weight").unwrap();
    assert_eq!((head.info.dtype, head.bytes().unwrap()), (Dtype::BF16, [0x00, 0x40].repeat(16 * 128)));
    assert!(written.get("lm_head.weight_scale_inv").is_none());
}

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
    assert!(refused.contains("ask for none here"), "{refused}");
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
fn lists_of_names_say_what_is_joined() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let fuse = Fuse::Names(vec![vec!["q_proj".into(), "o_proj".into()], vec!["absent".into()]]);
    let plan = Plan::new(&model, &Selection { fuse, ..Selection::default() }, Target::ModelOpt).unwrap();
    let groups: Vec<(&str, usize)> = plan.groups.iter().map(|g| (g.kind.as_str(), g.members.len())).collect();
    assert_eq!(groups, [("q_proj/o_proj", 2), ("q_proj/o_proj", 2)]);
}
