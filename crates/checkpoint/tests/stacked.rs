//! Experts that lie in one tensor are written as the matrices that servers read, with the bytes of experts that were never joined.

mod converted;
mod generated;

use converted::*;
use generated::*;
use half::bf16;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::{Value, json};

const EXPERTS: usize = 3;
const HIDDEN: usize = 64;
const INNER: usize = 48;

/// How a family stores its experts.
#[derive(Clone, Copy, Debug)]
struct Form {
    architecture: &'static str,
    /// The module of the experts, as servers call it.
    module: &'static str,
    /// Tensors, and the projections that each holds.
    tensors: &'static [(&'static str, &'static [&'static str])],
    order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    OutputsFirst,
    InputsFirst,
}

const FORMS: [Form; 4] = [
    Form {
        architecture: "Qwen3_5MoeForConditionalGeneration",
        module: "model.language_model.layers.0.mlp.experts",
        tensors: &[
            ("model.language_model.layers.0.mlp.experts.gate_up_proj", &["gate_proj", "up_proj"]),
            ("model.language_model.layers.0.mlp.experts.down_proj", &["down_proj"]),
        ],
        order: Order::OutputsFirst,
    },
    Form {
        architecture: "Llama4ForConditionalGeneration",
        module: "language_model.model.layers.0.feed_forward.experts",
        tensors: &[
            ("language_model.model.layers.0.feed_forward.experts.gate_up_proj", &["gate_proj", "up_proj"]),
            ("language_model.model.layers.0.feed_forward.experts.down_proj", &["down_proj"]),
        ],
        order: Order::InputsFirst,
    },
    Form {
        architecture: "GraniteMoeForCausalLM",
        module: "model.layers.0.block_sparse_moe.experts",
        tensors: &[
            ("model.layers.0.block_sparse_moe.input_linear.weight", &["gate_proj", "up_proj"]),
            ("model.layers.0.block_sparse_moe.output_linear.weight", &["down_proj"]),
        ],
        order: Order::OutputsFirst,
    },
    Form {
        architecture: "Step3p5ForCausalLM",
        module: "model.layers.0.moe.experts",
        tensors: &[
            ("model.layers.0.moe.gate_proj.weight", &["gate_proj"]),
            ("model.layers.0.moe.up_proj.weight", &["up_proj"]),
            ("model.layers.0.moe.down_proj.weight", &["down_proj"]),
        ],
        order: Order::OutputsFirst,
    },
];

impl Form {
    fn config(&self) -> Value {
        json!({ "architectures": [self.architecture], "hidden_size": HIDDEN, "num_local_experts": EXPERTS })
    }

    /// An attention's projection, and what is not the experts'.
    fn rest(&self) -> Tensors {
        let layer = self.module.split(".0.").next().unwrap();
        [(format!("{layer}.0.self_attn.o_proj.weight"), random(Dtype::BF16, &[64, 64], 5))].into()
    }

    /// The values of a projection, outputs before inputs.
    fn values(projection: &str, expert: usize) -> (usize, usize, Vec<f32>) {
        let (rows, cols) = if projection == "down_proj" { (HIDDEN, INNER) } else { (INNER, HIDDEN) };
        (rows, cols, values(rows * cols, (projection.len() * 100 + expert) as u64))
    }

    fn separate(&self, dtype: Dtype) -> Tensors {
        let mut tensors = self.rest();
        for (_, projections) in self.tensors {
            for projection in *projections {
                for expert in 0..EXPERTS {
                    let (rows, cols, values) = Form::values(projection, expert);
                    let name = format!("{}.{expert}.{projection}.weight", self.module);
                    tensors.insert(name, tensor(dtype, &[rows, cols], &values));
                }
            }
        }
        tensors
    }

    fn stacked(&self, dtype: Dtype) -> Tensors {
        let mut tensors = self.rest();
        for (name, projections) in self.tensors {
            let (mut all, mut shape) = (Vec::new(), Vec::new());
            for expert in 0..EXPERTS {
                let (mut matrix, mut outputs, mut inputs) = (Vec::new(), 0, 0);
                for projection in *projections {
                    let (rows, cols, values) = Form::values(projection, expert);
                    matrix.extend(values);
                    (outputs, inputs) = (outputs + rows, cols);
                }
                match self.order {
                    Order::OutputsFirst => {
                        all.extend(matrix);
                        shape = vec![EXPERTS, outputs, inputs];
                    }
                    Order::InputsFirst => {
                        all.extend(
                            (0..inputs)
                                .flat_map(|i| (0..outputs).map(move |o| (o, i)))
                                .map(|(o, i)| matrix[o * inputs + i]),
                        );
                        shape = vec![EXPERTS, inputs, outputs];
                    }
                }
            }
            tensors.insert(name.to_string(), tensor(dtype, &shape, &all));
        }
        tensors
    }
}

/// What a conversion writes.
fn converted(tensors: Tensors, config: &Value, settings: &Settings) -> (Tensors, Value) {
    let dir = Folder::new();
    folder(&dir.join("in"), &[tensors], config);
    run(&dir.join("in"), &dir.join("out"), settings).unwrap();
    (tensors_of(&dir.join("out")), json_of(&dir.join("out/config.json")))
}

fn assert_same(a: &(Tensors, Value), b: &(Tensors, Value), about: &str) {
    assert_eq!(a.0.keys().collect::<Vec<_>>(), b.0.keys().collect::<Vec<_>>(), "{about}");
    for (name, t) in &a.0 {
        assert!(
            t.shape == b.0[name].shape && t.dtype == b.0[name].dtype && t.bytes == b.0[name].bytes,
            "{about}: {name}"
        );
    }
    assert_eq!(a.1, b.1, "{about}");
}

#[test]
fn each_form_becomes_the_experts_that_were_never_joined() {
    for form in FORMS {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            for target in [Target::ModelOpt, Target::CompressedTensors] {
                let stacked = converted(form.stacked(dtype), &form.config(), &to(target));
                let separate = converted(form.separate(dtype), &form.config(), &to(target));
                assert_same(&stacked, &separate, &format!("{} {dtype:?} {target}", form.architecture));
                let codes = if target == Target::ModelOpt { "weight" } else { "weight_packed" };
                let first = &stacked.0[&format!("{}.0.gate_proj.{codes}", form.module)];
                assert_eq!((first.dtype, &first.shape[..]), (Dtype::U8, &[INNER, HIDDEN / 2][..]));
            }
        }
    }
}

/// Pieces of one row read columns one element at a time, and give the same bytes.
#[test]
fn little_memory_gives_the_same_bytes() {
    for form in FORMS {
        let least = Settings { memory: 1, ..to(Target::ModelOpt) };
        let some = converted(form.stacked(Dtype::BF16), &form.config(), &least);
        assert_same(
            &some,
            &converted(form.stacked(Dtype::BF16), &form.config(), &to(Target::ModelOpt)),
            form.architecture,
        );
    }
}

#[test]
fn gate_and_up_of_an_expert_share_a_scale_and_experts_have_their_own() {
    let form = FORMS[1];
    let (tensors, _) = converted(form.stacked(Dtype::BF16), &form.config(), &to(Target::ModelOpt));
    let scale = |expert: usize, projection: &str| {
        let tensor = &tensors[&format!("{}.{expert}.{projection}.weight_scale_2", form.module)];
        f32::from_le_bytes(tensor.bytes[..].try_into().unwrap())
    };
    for expert in 0..EXPERTS {
        let values = ["gate_proj", "up_proj"].map(|p| Form::values(p, expert).2).concat();
        let amax = values.iter().map(|v| bf16::from_f32(v.abs()).to_f32()).fold(0.0, f32::max);
        assert_eq!((scale(expert, "gate_proj"), scale(expert, "up_proj")), (amax / 2688.0, amax / 2688.0));
    }
    assert_ne!(scale(0, "up_proj"), scale(1, "up_proj"));
}

/// Experts that a selection leaves out stay in one tensor, byte for byte, and servers are told.
#[test]
fn experts_that_are_left_out_stay_in_one_tensor() {
    for form in FORMS {
        for pattern in ["*.experts.*", "*.experts.*.up_proj"] {
            let skip = vec![
                pattern.parse().unwrap(),
                "*.gate_proj".parse().unwrap(),
                "*.experts.*.down_proj".parse().unwrap(),
            ];
            let selection = Selection { skip, ..Selection::default() };
            let settings = Settings { selection, ..to(Target::ModelOpt) };
            let source = form.stacked(Dtype::BF16);
            let (written, config) = converted(source.clone(), &form.config(), &settings);
            for (name, _) in form.tensors {
                assert_eq!(written[*name].bytes, source[*name].bytes, "{name}");
            }
            let ignore = config["quantization_config"]["ignore"].as_array().unwrap();
            assert!(ignore.contains(&json!(form.module)), "{ignore:?}");
        }
    }
}

fn reasons(tensors: &Tensors, config: &Value) -> Vec<String> {
    let dir = Folder::new();
    folder(&dir.join("in"), std::slice::from_ref(tensors), config);
    let selection = Selection::default();
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let checkpoint = split_experts(checkpoint, &selection, Target::ModelOpt, None).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let plan = Plan::new(&model, &selection, Target::ModelOpt).unwrap();
    plan.copied.iter().map(|copied| copied.reason.clone()).collect()
}

#[test]
fn experts_that_no_server_reads_in_nvfp4_stay_and_say_why() {
    let form = FORMS[1];
    let said = |tensors: &Tensors, architecture: &str| reasons(tensors, &json!({ "architectures": [architecture] }));
    let mut stacked = form.stacked(Dtype::BF16);
    assert_eq!(said(&stacked, "Llama4ForConditionalGeneration"), [""; 0]);
    assert_eq!(said(&stacked, "GptOssForCausalLM"), ["vLLM 0.32 has no loader for GPT-OSS's experts in NVFP4"; 2]);
    let dbrx: Tensors = [
        ("transformer.blocks.0.ffn.experts.mlp.w1".to_string(), random(Dtype::BF16, &[96, 64], 1)),
        ("transformer.blocks.0.norm_attn_norm.attn.out_proj.weight".to_string(), random(Dtype::BF16, &[64, 64], 2)),
    ]
    .into();
    assert_eq!(said(&dbrx, "DbrxForCausalLM"), ["vLLM 0.32 has no loader for DBRX's experts in NVFP4"]);
    let down = stacked.remove(form.tensors[1].0).unwrap();
    assert_eq!(
        said(&stacked, "Llama4ForConditionalGeneration"),
        ["experts in one tensor, without the other projections of the same experts"]
    );
    stacked.insert(form.tensors[1].0.to_string(), Tensor { shape: vec![EXPERTS, INNER / 2, 2 * HIDDEN], ..down });
    assert_eq!(
        said(&stacked, "Llama4ForConditionalGeneration"),
        ["experts in one tensor whose sizes do not fit each other"; 2]
    );
}

/// One of the projections cannot be quantized, so none is: a server reads all of an expert in the same way.
#[test]
fn experts_with_a_projection_that_stays_stay_whole() {
    let names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"];
    let tensors: Tensors = [
        (names[0].to_string(), random(Dtype::BF16, &[2, 40, 64], 1)),
        (names[1].to_string(), random(Dtype::BF16, &[2, 64, 20], 2)),
        ("model.layers.0.self_attn.o_proj.weight".to_string(), random(Dtype::BF16, &[64, 64], 3)),
    ]
    .into();
    let said = reasons(&tensors, &llama_config());
    assert_eq!(said, ["20 columns, not a multiple of 16", "experts in one tensor, of which another projection stays"]);
    let (written, _) = converted(tensors.clone(), &llama_config(), &to(Target::ModelOpt));
    assert!(names.iter().all(|name| written[*name].bytes == tensors[*name].bytes));
}

/// The error of a conversion is that of its experts, and a comparison finds them in the source.
#[test]
fn the_result_is_compared_with_the_tensor_that_it_came_from() {
    let form = FORMS[1];
    let dir = Folder::new();
    folder(&dir.join("in"), &[form.stacked(Dtype::BF16)], &form.config());
    let summary = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let second = Checkpoint::open(&dir.join("out")).unwrap();
    let first = split_like(Checkpoint::open(&dir.join("in")).unwrap(), &second).unwrap();
    let compared = compare(&Model::new(&first).unwrap(), &Model::new(&second).unwrap(), 1).unwrap();
    assert_eq!((compared.only_first.len(), compared.only_second.len()), (0, 0));
    assert_eq!(compared.weights.len(), 3 * EXPERTS + 1);
    for (compared, finished) in compared.weights.iter().zip(&summary.quantized) {
        assert!((compared.measure.relative_error() - finished.measure.relative_error()).abs() < 1e-9);
    }
}
