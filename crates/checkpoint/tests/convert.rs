//! Conversions of small generated checkpoints, and of the inputs that the real libraries were run on.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4::{Precision, Profile};
use nvfp4_checkpoint::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

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
        refused, "activation scales: no amax for 'model.layers.0.mlp.down_proj', 'model.layers.0.mlp.up_proj'",
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
fn experts_in_one_tensor_are_quantized_or_kept_and_named() {
    let dir = Folder::new();
    let mut tensors = layer(0, Dtype::BF16);
    tensors.retain(|name, _| !name.contains(".mlp."));
    tensors.insert("model.layers.0.mlp.experts.gate_up_proj".into(), random(Dtype::BF16, &[2, 64, 32], 4));
    tensors.insert("model.layers.0.mlp.experts.down_proj".into(), random(Dtype::BF16, &[2, 16, 64], 5));
    folder(&dir.join("in"), &[tensors], &llama_config());
    let excluded = |name: &str, skip: Vec<Pattern>| {
        let selection = Selection { skip, ..Selection::default() };
        run(&dir.join("in"), &dir.join(name), &Settings { selection, ..to(Target::ModelOpt) }).unwrap();
        json_of(&dir.join(name).join("hf_quant_config.json"))["quantization"]["exclude_modules"].clone()
    };
    assert_eq!(excluded("all", vec![]), json!(["lm_head"]));
    let experts = vec!["*.experts.*".parse().unwrap()];
    assert_eq!(excluded("kept", experts), json!(["lm_head", "model.layers.0.mlp.experts"]));
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
