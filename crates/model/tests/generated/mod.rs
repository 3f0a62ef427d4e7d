//! Small generated models, and what is done with them.

#![allow(dead_code)] // each test uses some of it

use half::bf16;
use nvfp4_checkpoint::{Checkpoint, Rules, Selection, Settings, Target, convert};
use nvfp4_model::{
    Activations, Decoder, Evaluate, Evaluation, Generation, Lanes, Progress, Rows, Run, Sampling, Source, StateFile,
    Watch, generate, logits, open,
};
use nvfp4_spec::{BLOCK, activation, e2m1, e4m3};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

pub static GO: AtomicBool = AtomicBool::new(false);
pub const HIDDEN: usize = 64;
pub const WORDS: usize = 96;

pub const PROMPT: [u32; 4] = [3, 14, 15, 92];

/// Continues a prompt of a model of three layers, and compares each token with a pass over all before it.
pub fn greedy_tokens_are_the_most_likely(source: &Source<'_>) -> Generation<'static> {
    let greedy = Generation { prompt: &PROMPT, most: 6, ends: &[], sampling: Sampling::Greedy };
    let made = generate(source, &greedy, &Run::AS_STORED, &GO, |_| Ok(())).unwrap();
    assert_eq!(made.len(), 6);
    let decoder = Decoder::new(source);
    for i in 0..made.len() {
        let context = [&PROMPT[..], &made[..i]].concat();
        let rows = Rows::new([&context[..]]);
        let mut states = vec![decoder.embed(&context).unwrap()];
        (0..3).for_each(|layer| decoder.advance(layer, &rows, &mut states, &[Run::AS_STORED], &GO).unwrap());
        let all = logits(&decoder, states.remove(0)).unwrap();
        let last = &all[all.len() - WORDS..];
        let most = (0..WORDS).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        assert_eq!(made[i], most as u32, "token {i}");
    }
    greedy
}

/// Stops when a layer is done.
pub struct StopAfter<'s>(pub &'s AtomicBool, pub &'static str);

impl Progress for StopAfter<'_> {
    fn advance(&mut self, _work: u64, what: &str) {
        if what == self.1 {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// A folder that is gone when the test is done.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("model-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A type, a shape and bytes, by name.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5
    })
}

/// The configuration with one setting changed.
pub fn with(mut config: Value, name: &str, value: Value) -> Value {
    config[name] = value;
    config
}

/// A model with 4 experts of this width, of which a token goes to 2.
pub fn moe_config(width: usize) -> Value {
    let mut config = with(config(), "architectures", json!(["Qwen3MoeForCausalLM"]));
    for (name, value) in [
        ("model_type", json!("qwen3_moe")),
        ("num_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("moe_intermediate_size", json!(width)),
        ("head_dim", json!(16)),
        ("norm_topk_prob", json!(true)),
    ] {
        config[name] = value;
    }
    config
}

/// GPT-OSS with 4 experts of this width.
pub fn oss_config(width: usize) -> Value {
    let mut config = with(config(), "architectures", json!(["GptOssForCausalLM"]));
    for (name, value) in [
        ("model_type", json!("gpt_oss")),
        ("num_local_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("intermediate_size", json!(width)),
        ("head_dim", json!(16)),
        ("sliding_window", json!(8)),
    ] {
        config[name] = value;
    }
    config
}

fn number(config: &Value, name: &str) -> usize {
    config[name].as_u64().unwrap() as usize
}

/// The names and shapes of a model's tensors, without `.weight`.
pub fn shapes(config: &Value) -> Vec<(String, Vec<usize>)> {
    let width = number(config, "intermediate_size");
    let mut shapes = vec![
        ("model.embed_tokens".to_string(), vec![WORDS, HIDDEN]),
        ("lm_head".to_string(), vec![WORDS, HIDDEN]),
        ("model.norm".to_string(), vec![HIDDEN]),
    ];
    for layer in 0..number(config, "num_hidden_layers") {
        let mut own = vec![
            ("input_layernorm".to_string(), vec![HIDDEN]),
            ("post_attention_layernorm".to_string(), vec![HIDDEN]),
            ("self_attn.q_proj".to_string(), vec![64, HIDDEN]),
            ("self_attn.k_proj".to_string(), vec![32, HIDDEN]),
            ("self_attn.v_proj".to_string(), vec![32, HIDDEN]),
            ("self_attn.o_proj".to_string(), vec![HIDDEN, 64]),
        ];
        let mut gated = |module: String, width: usize| {
            own.push((format!("{module}.gate_proj"), vec![width, HIDDEN]));
            own.push((format!("{module}.up_proj"), vec![width, HIDDEN]));
            own.push((format!("{module}.down_proj"), vec![HIDDEN, width]));
        };
        match config["model_type"].as_str().unwrap() {
            "qwen3_moe" => {
                (0..4).for_each(|i| gated(format!("mlp.experts.{i}"), number(config, "moe_intermediate_size")));
                own.push(("mlp.gate".to_string(), vec![4, HIDDEN]));
                own.push(("self_attn.q_norm".to_string(), vec![16]));
                own.push(("self_attn.k_norm".to_string(), vec![16]));
            }
            "gpt_oss" => own.push(("mlp.router".to_string(), vec![4, HIDDEN])),
            _ => gated("mlp".to_string(), width),
        }
        shapes.extend(own.into_iter().map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)));
    }
    shapes
}

pub fn bf16s(shape: &[usize], value: impl Fn(usize) -> f32) -> (Dtype, Vec<usize>, Vec<u8>) {
    let bytes = (0..shape.iter().product()).flat_map(|i| bf16::from_f32(value(i)).to_le_bytes()).collect();
    (Dtype::BF16, shape.to_vec(), bytes)
}

/// The tensors of a model whose weights are what `value` says.
pub fn tensors(config: &Value, value: impl Fn(&str, usize) -> f32) -> Tensors {
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let made = bf16s(&shape, |i| value(&name, i));
        (format!("{name}.weight"), made)
    };
    shapes(config).into_iter().map(tensor).collect()
}

/// Writes a checkpoint.
pub fn write(folder: &Path, config: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).unwrap();
    let view = |(dtype, shape, bytes): &'_ (Dtype, Vec<usize>, Vec<u8>)| (*dtype, shape.clone(), bytes.clone());
    let owned: Vec<_> = tensors.iter().map(|(name, tensor)| (name, view(tensor))).collect();
    let views = owned
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Writes a model whose weights are what `value` says.
pub fn model(folder: &Path, config: &Value, value: impl Fn(&str, usize) -> f32) {
    write(folder, config, &tensors(config, value));
}

/// Numbers between -0.25 and 0.25 that depend on the name; norms are 1.
pub fn usual(name: &str, i: usize) -> f32 {
    let mut z = name.bytes().fold(i as u64 + 1, |z, b| z.wrapping_mul(0x100_0000_01B3) ^ u64::from(b));
    z = (z ^ (z >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let random = (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    if name.ends_with("norm") { 1.0 } else { 0.5 * random }
}

/// What a conversion makes of a model.
pub fn converted(source: &Path, target: &Path, settings: &Settings) {
    convert(source, target, settings, &(), &GO).unwrap();
}

pub fn rows() -> Rows {
    let row = |seed: usize| (0..24).map(|i| ((i * 37 + seed * 11) % WORDS) as u32).collect::<Vec<u32>>();
    Rows::new([&row(0)[..], &row(1), &row(2)[..9]])
}

/// The logits of all positions, in one way to run.
pub fn logits_of(checkpoint: &Checkpoint, run: &Run<'_>) -> nvfp4_model::Result<Vec<f32>> {
    logits_from(&Source::new(checkpoint, None)?, run)
}

/// The same, where the source's products are computed.
pub fn logits_from(source: &Source<'_>, run: &Run<'_>) -> nvfp4_model::Result<Vec<f32>> {
    let (decoder, rows) = (Decoder::new(source), rows());
    let mut states = vec![decoder.embed(rows.tokens())?];
    for layer in 0..source.config().layers {
        decoder.advance(layer, &rows, &mut states, &[*run], &GO)?;
    }
    logits(&decoder, states.remove(0))
}

/// The logits of a model's folder, as it is stored.
pub fn all_logits(folder: &Path) -> Vec<f32> {
    logits_of(&open(folder).unwrap(), &Run::AS_STORED).unwrap()
}

pub fn evaluate(reference: Option<&Path>, model: &Path, activations: Activations) -> nvfp4_model::Result<Evaluation> {
    run(reference, model, activations, None, &mut (), &GO)
}

pub fn run(
    reference: Option<&Path>,
    model: &Path,
    activations: Activations,
    state: Option<&StateFile>,
    progress: &mut dyn Progress,
    stop: &AtomicBool,
) -> nvfp4_model::Result<Evaluation> {
    let (first, second) = (reference.map(open).transpose()?, open(model)?);
    let (first, second) = (first.as_ref().map(|c| Source::new(c, None)).transpose()?, Source::new(&second, None)?);
    let rows = rows();
    Evaluate {
        reference: first.as_ref(),
        model: &second,
        rows: &rows,
        given: 0,
        activations,
        lanes: Lanes::Each,
        state,
    }
    .run(progress, stop)
}

/// Settings that write this format.
pub fn to(target: Target) -> Settings {
    Settings { target, ..Settings::default() }
}

/// Rules that give one form to modules and leave the others.
pub fn only(path: &str, form: &str) -> Selection {
    let rules = format!("[[rule]]\npath = '{path}'\nform = '{form}'\n[default]\nform = 'keep'\n");
    Selection { rules: Rules::from_toml(&rules).unwrap(), ..Selection::default() }
}

/// A GPT-OSS with experts in MXFP4, biases and sinks.
pub fn oss() -> (Value, Tensors) {
    let config = oss_config(32);
    let mut made = tensors(&config, usual);
    for layer in 0..3 {
        let name = format!("model.layers.{layer}.");
        for (part, outputs, inputs) in [("gate_up_proj", 64, HIDDEN), ("down_proj", HIDDEN, 32)] {
            let part = format!("{name}mlp.experts.{part}");
            let blocks = vec![4, outputs, inputs / 32, 16];
            let codes = (0..4 * outputs * inputs / 2).map(|i| (usual(&part, i) * 512.0) as i32 as u8).collect();
            let scales = (0..4 * outputs * inputs / 32).map(|i| 119 + (i % 4) as u8).collect();
            made.insert(format!("{part}_blocks"), (Dtype::U8, blocks, codes));
            made.insert(format!("{part}_scales"), (Dtype::U8, vec![4, outputs, inputs / 32], scales));
            made.insert(format!("{part}_bias"), bf16s(&[4, outputs], |i| usual(&part, i + 9)));
        }
        made.insert(format!("{name}mlp.router.bias"), bf16s(&[4], |i| usual("router", i)));
        made.insert(format!("{name}self_attn.sinks"), bf16s(&[4], |i| usual("sinks", i)));
    }
    (with(config, "quantization_config", json!({ "quant_method": "mxfp4" })), made)
}

/// What goes into a module and what comes out.
pub type Through = (Vec<f32>, Vec<f32>);

/// Inputs and outputs of every module.
#[derive(Default)]
pub struct Seen(pub Mutex<BTreeMap<String, Through>>);

impl Watch for Seen {
    fn input(&self, module: &str, x: &[f32], _cols: usize) {
        self.0.lock().unwrap().entry(module.to_string()).or_default().0.extend(x);
    }

    fn output(&self, module: &str, y: &[f32], _cols: usize) {
        self.0.lock().unwrap().entry(module.to_string()).or_default().1.extend(y);
    }
}

/// The input in 4 bits with a stored scale.
pub fn rounded(x: &[f32], scale: f32) -> Vec<f64> {
    let block = |block: &[f32; BLOCK]| {
        let q = activation::quantize(block, scale);
        q.codes[0].map(|code| f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(q.scale)))
    };
    x.as_chunks::<BLOCK>().0.iter().flat_map(block).collect()
}
