//! A whole model of one file, of every dialect: grouped, verified, decoded, compared and laid out for every target.
//!
//! Bytes choose the dialect, the weights, their shapes and types, the configuration, what is missing, and which bytes of the
//! finished file are damaged.
#![no_main]

mod choices;

use choices::Choices;
use nvfp4_checkpoint::fuzzed::check_model;
use nvfp4_checkpoint::{Client, Dialect};

const DIALECTS: [Option<Dialect>; 10] = [
    None,
    Some(Dialect::Plain),
    Some(Dialect::Fp8Block),
    Some(Dialect::MxFp4),
    Some(Dialect::ModelOpt),
    Some(Dialect::CompressedTensors),
    Some(Dialect::TorchAo),
    Some(Dialect::ComfyUi),
    Some(Dialect::DeepSeekV4),
    Some(Dialect::DeepSeekV4Nvfp4),
];

const MODULES: [&str; 12] = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.layers.0.mlp.experts.1.gate_proj",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.embed_tokens",
    "lm_head",
    "model.layers.99999999999.mlp.gate",
    "",
];

/// Sizes of a dimension: most fit in a file, and some only if another is zero.
const SIZES: [u64; 16] = [16, 64, 1, 2, 8, 4, 32, 128, 0, 130, 3, 17, 256, 1 << 20, 1 << 40, 1 << 63];

const TYPES: [&str; 9] = ["BF16", "F16", "F32", "U8", "F8_E4M3", "F8_E8M0", "I64", "F4", "BOOL"];

/// The most bytes of tensors in a file.
const MOST: u64 = 1 << 14;

/// A file that is being put together.
#[derive(Default)]
struct File {
    header: String,
    data: Vec<u8>,
}

impl File {
    /// A tensor of this type, or seldom of another, and of this shape, or seldom of a reversed or longer one.
    fn tensor(&mut self, bytes: &mut Choices<'_>, name: &str, dtype: &str, shape: &[u64]) {
        let (mut dtype, mut shape) = (dtype, shape.to_vec());
        match bytes.byte() {
            255 => dtype = bytes.pick(&TYPES),
            254 => shape.reverse(),
            253 => shape.push(bytes.pick(&SIZES)),
            252 => drop(shape.pop()),
            251 => return,
            250 => shape.iter_mut().for_each(|d| *d = 0),
            _ => {}
        }
        let bits = match dtype {
            "F4" => 4,
            "BF16" | "F16" => 16,
            "F32" => 32,
            "I64" => 64,
            _ => 8,
        };
        let elements = shape.iter().try_fold(bits, |n: u64, &d| n.checked_mul(d));
        let Some(len) = elements.map(|bits| bits / 8).filter(|len| *len <= MOST) else { return };
        let start = self.data.len();
        let (first, step) = (bytes.byte(), bytes.byte());
        self.data.extend((0..len).map(|i| first.wrapping_add((i as u8).wrapping_mul(step))));
        let (comma, end) = (if self.header.is_empty() { "" } else { "," }, self.data.len());
        self.header +=
            &format!(r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
    }

    fn weight(&mut self, bytes: &mut Choices<'_>, dialect: Dialect, module: &str, metadata: &mut Vec<String>) {
        let [rows, cols, experts] = [bytes.pick(&SIZES), bytes.pick(&SIZES), bytes.pick(&SIZES)];
        let [half, blocks] = [cols / 2, cols / 16];
        let (down, across) = (rows.div_ceil(128), cols.div_ceil(128));
        let padded = rows.next_multiple_of(128).checked_mul(blocks.next_multiple_of(4)).unwrap_or(0);
        let swizzled = bytes.byte() % 2 == 1;
        let scales: &[u64] = match swizzled || dialect == Dialect::ComfyUi {
            true => &[padded],
            false => &[rows, blocks],
        };
        let name = |part: &str| format!("{module}.{part}");
        match dialect {
            Dialect::Plain => {
                let dtype = bytes.pick(&TYPES[..3]);
                self.tensor(bytes, &name("weight"), dtype, &[rows, cols]);
            }
            Dialect::Fp8Block => {
                self.tensor(bytes, &name("weight"), "F8_E4M3", &[rows, cols]);
                let dtype = bytes.pick(&["F32", "BF16"]);
                self.tensor(bytes, &name("weight_scale_inv"), dtype, &[down, across]);
            }
            Dialect::MxFp4 => {
                self.tensor(bytes, &format!("{module}_blocks"), "U8", &[experts, rows, cols / 32, 16]);
                self.tensor(bytes, &format!("{module}_scales"), "U8", &[experts, rows, cols / 32]);
            }
            Dialect::DeepSeekV4 if swizzled => {
                self.tensor(bytes, &name("weight"), "F8_E4M3", &[rows, cols]);
                self.tensor(bytes, &name("scale"), "F8_E8M0", &[down, across]);
            }
            Dialect::DeepSeekV4 => {
                self.tensor(bytes, &name("weight"), "I8", &[rows, half]);
                self.tensor(bytes, &name("scale"), "F8_E8M0", &[rows, cols / 32]);
            }
            Dialect::ModelOpt if bytes.byte() % 2 == 1 => {
                let count: &[u64] = if bytes.byte() % 2 == 1 { &[experts] } else { &[1] };
                self.tensor(bytes, module, "U8", &[experts, half, rows]);
                self.tensor(bytes, &format!("{module}_weight_scale"), "F8_E4M3", &[experts, blocks, rows]);
                self.tensor(bytes, &format!("{module}_weight_scale_2"), "F32", count);
                self.tensor(bytes, &format!("{module}_input_scale"), "F32", count);
            }
            Dialect::ModelOpt | Dialect::DeepSeekV4Nvfp4 | Dialect::ComfyUi => {
                self.tensor(bytes, &name("weight"), "U8", &[rows, half]);
                self.tensor(bytes, &name("weight_scale"), "F8_E4M3", scales);
                self.tensor(bytes, &name("weight_scale_2"), "F32", &[]);
                self.tensor(bytes, &name("input_scale"), "F32", &[]);
                if dialect == Dialect::ComfyUi {
                    self.tensor(bytes, &name("comfy_quant"), "U8", &[8]);
                }
            }
            Dialect::CompressedTensors => {
                self.tensor(bytes, &name("weight_packed"), "U8", &[rows, half]);
                self.tensor(bytes, &name("weight_scale"), "F8_E4M3", scales);
                self.tensor(bytes, &name("weight_global_scale"), "F32", &[1]);
                self.tensor(bytes, &name("input_global_scale"), "F32", &[1]);
            }
            Dialect::TorchAo => {
                self.tensor(bytes, &name("_weight_qdata"), "U8", &[rows, half]);
                self.tensor(bytes, &name("_weight_scale"), "F8_E4M3", scales);
                self.tensor(bytes, &name("_weight_per_tensor_scale"), "F32", &[]);
                let text = format!(r#"{{\"_type\":\"NVFP4Tensor\",\"_data\":{{\"is_swizzled_scales\":{swizzled}}}}}"#);
                metadata.push(format!(r#""{}":"{text}""#, name("weight")));
            }
            other => unreachable!("no weights are made for {other:?}"),
        }
    }

    fn finish(self, metadata: &[String]) -> Vec<u8> {
        let comma = if self.header.is_empty() { "" } else { "," };
        let header = format!(r#"{{"__metadata__":{{{}}}{comma}{}}}"#, metadata.join(","), self.header);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &self.data].concat()
    }
}

fn config(bytes: &mut Choices<'_>) -> String {
    let architecture =
        bytes.pick(&["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "GptOssForCausalLM"]);
    let quantization = bytes.pick(&[
        "null",
        r#"{"quant_method":"modelopt","quant_algo":"NVFP4","ignore":["lm_head","re:.*gate","*"]}"#,
        r#"{"quant_method":"compressed-tensors","ignore":["re:("],"kv_cache_scheme":{},
            "config_groups":{"a":{"input_activations":{}}}}"#,
        r#"{"quant_method":"fp8"}"#,
    ]);
    let rope = bytes.pick(&[
        "null",
        r#"{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,
            "original_max_position_embeddings":8192}"#,
        r#"{"rope_type":"yarn","factor":1e300,"original_max_position_embeddings":1e300}"#,
    ]);
    let keys = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "vocab_size",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ];
    let sizes: Vec<String> = keys.iter().map(|key| format!(r#""{key}":{}"#, bytes.pick(&SIZES))).collect();
    let producer = r#""producer":{"name":"modelopt"},"quantization":{"quant_algo":"NVFP4","exclude_modules":["a*"]}"#;
    format!(
        r#"{{"architectures":["{architecture}"],"quantization_config":{quantization},"rope_scaling":{rope},
            "rms_norm_eps":1e-6,{producer},{}}}"#,
        sizes.join(",")
    )
}

libfuzzer_sys::fuzz_target!(init: choices::on_this_thread(), |data: &[u8]| {
    let mut bytes = Choices(data);
    let given = bytes.pick(&DIALECTS);
    let dialect = given.unwrap_or_else(|| bytes.pick(&DIALECTS[1..]).unwrap_or(Dialect::Plain));
    let client = bytes.pick(&[Client::Vllm, Client::LlamaCpp, Client::Transformers]);
    let config = config(&mut bytes);
    let (mut file, mut metadata, mut used) = (File::default(), Vec::new(), Vec::new());
    for _ in 0..1 + bytes.byte() % 6 {
        let module = bytes.pick(&MODULES);
        // A name twice would end in the header's own check.
        if !used.contains(&module) || bytes.seldom() {
            let own = if bytes.seldom() { Dialect::Plain } else { dialect };
            file.weight(&mut bytes, own, module, &mut metadata);
            used.push(module);
        }
    }
    if bytes.byte() % 2 == 1 {
        file.tensor(&mut bytes, "model.layers.0.self_attn.q_proj.bias", "BF16", &[16]);
        file.tensor(&mut bytes, "model.norm.weight", "F32", &[16]);
    }
    let mut file = file.finish(&metadata);
    bytes.damage(&mut file);
    check_model(file, config.as_bytes(), given, client);
});
