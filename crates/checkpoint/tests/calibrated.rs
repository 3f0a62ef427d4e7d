//! Conversions by statistics of activations: what they gain, that their bytes depend on nothing else,
//! and what is refused.

mod generated;

use generated::*;
use nvfp4_checkpoint::*;
use nvfp4_spec::gptq::Order;
use safetensors::Dtype;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const TOKENS: usize = 256;
const GPTQ: Round = Round::Gptq { order: Order::Natural, damping: 0.01 };

/// Inputs of a layer that depend on each other, some columns larger than others.
fn inputs(cols: usize, seed: u64) -> Vec<f32> {
    let (own, shared) = (values(TOKENS * cols, seed), values(TOKENS * 4, seed + 1));
    let input = |t: usize, c: usize| (0.5 * own[t * cols + c] + shared[t * 4 + c % 4]) * [1.0, 0.3, 4.0][c % 3];
    (0..TOKENS * cols).map(|i| input(i / cols, i % cols)).collect()
}

/// The mean of the products of some columns.
fn products(x: &[f32], cols: usize, i: usize, j: usize) -> f32 {
    (x.chunks_exact(cols).map(|x| f64::from(x[i]) * f64::from(x[j])).sum::<f64>() / TOKENS as f64) as f32
}

/// The modules of a layer with columns, each with the seed of its inputs.
fn modules(layer: usize) -> Vec<(String, usize, u64)> {
    let all = [("self_attn.q_proj", 64, 1), ("self_attn.k_proj", 64, 1), ("self_attn.v_proj", 64, 1)];
    let more =
        [("self_attn.o_proj", 64, 2), ("mlp.gate_proj", 64, 3), ("mlp.up_proj", 64, 3), ("mlp.down_proj", 96, 4)];
    let named = |(name, cols, seed): (&str, usize, u64)| {
        (format!("model.layers.{layer}.{name}"), cols, 10 * seed + layer as u64)
    };
    all.into_iter().chain(more).map(named).collect()
}

/// Statistics of both layers, with whole matrices.
fn statistics() -> Tensors {
    let mut tensors = Tensors::new();
    for (module, cols, seed) in modules(0).into_iter().chain(modules(1)) {
        let x = inputs(cols, seed);
        let squares: Vec<f32> = (0..cols).map(|i| products(&x, cols, i, i)).collect();
        tensors.insert(format!("{module}{}", Moments::MEAN_SQUARES), tensor(Dtype::F32, &[cols], &squares));
        if !module.ends_with("q_proj") && !module.ends_with("v_proj") && !module.ends_with("up_proj") {
            let all: Vec<f32> = (0..cols * cols).map(|at| products(&x, cols, at / cols, at % cols)).collect();
            tensors.insert(format!("{module}{}", Moments::HESSIAN), tensor(Dtype::F32, &[cols, cols], &all));
        }
    }
    tensors
}

fn write(path: &Path, tensors: &Tensors) {
    let same = |l: usize| {
        let module = |name: &str| format!("model.layers.{l}.{name}");
        [
            ("self_attn.q_proj", "self_attn.k_proj"),
            ("self_attn.v_proj", "self_attn.k_proj"),
            ("mlp.up_proj", "mlp.gate_proj"),
        ]
        .map(|(a, b)| (module(a), json!(module(b))))
    };
    let same: serde_json::Map<String, serde_json::Value> = same(0).into_iter().chain(same(1)).collect();
    save_with(path, tensors, &[(Moments::MARK, &json!({ "version": 1, "same_input": same }).to_string())]);
}

fn made(source: &Path, target: &Path, settings: &Settings) -> Result<Summary> {
    convert(source, target, settings, &(), &AtomicBool::new(false))
}

/// The squared error of all outputs of all layers.
fn output_error(source: &Path, target: &Path) -> f64 {
    let decoded = |path: &Path| -> Vec<(String, Vec<f32>)> {
        let checkpoint = Checkpoint::open(path).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        let numbers = |weight: &Weight<'_>| {
            let mut buffer = Buffer::default();
            let values = weight.values(0..weight.rows, &mut buffer).unwrap();
            (weight.module.clone(), (0..values.len()).map(|i| values.get(i)).collect())
        };
        model.weights.iter().map(numbers).collect()
    };
    let (before, after) = (decoded(source), decoded(target));
    let number =
        |all: &[(String, Vec<f32>)], module: &str| all.iter().find(|(name, _)| name == module).unwrap().1.clone();
    let mut sum = 0.0;
    for (module, cols, seed) in modules(0).into_iter().chain(modules(1)) {
        let (x, a, b) = (inputs(cols, seed), number(&before, &module), number(&after, &module));
        for (a, b) in a.chunks_exact(cols).zip(b.chunks_exact(cols)) {
            let d: Vec<f64> = a.iter().zip(b).map(|(a, b)| f64::from(a - b)).collect();
            sum += x
                .chunks_exact(cols)
                .map(|x| x.iter().zip(&d).map(|(&x, d)| f64::from(x) * d).sum::<f64>().powi(2))
                .sum::<f64>();
        }
    }
    sum
}

struct Prepared {
    dir: Folder,
    source: PathBuf,
    stats: PathBuf,
}

fn prepared() -> Prepared {
    let dir = Folder::new();
    let (source, stats) = (dir.join("llama"), dir.join("stats.safetensors"));
    folder(&source, &llama(Dtype::BF16), &llama_config());
    write(&stats, &statistics());
    Prepared { dir, source, stats }
}

fn settings(stats: &Path, scale: ScaleChoice, round: Round) -> Settings {
    let reads = matches!(scale, ScaleChoice::Imatrix | ScaleChoice::LocalHessian) || round != Round::Nearest;
    Settings { scale, round, statistics: reads.then(|| stats.to_path_buf()), ..Settings::default() }
}

#[test]
fn what_reads_statistics_has_less_error_in_outputs() {
    let Prepared { dir, source, stats } = prepared();
    let mut count = 0;
    let mut error = |scale: ScaleChoice, round: Round| {
        count += 1;
        let target = dir.join(&format!("to-{count}"));
        let summary = made(&source, &target, &settings(&stats, scale, round)).unwrap();
        assert!(summary.plain.is_empty());
        output_error(&source, &target)
    };
    let (max, mse) = (error(ScaleChoice::Max, Round::Nearest), error(ScaleChoice::Mse, Round::Nearest));
    let sweep = error(ScaleChoice::ModelOptMse, Round::Nearest);
    let (imatrix, local) =
        (error(ScaleChoice::Imatrix, Round::Nearest), error(ScaleChoice::LocalHessian, Round::Nearest));
    let gptq = error(ScaleChoice::Max, GPTQ);
    let ordered = error(ScaleChoice::Max, Round::Gptq { order: Order::Activation, damping: 0.01 });
    let (gptq_mse, gptq_local) = (error(ScaleChoice::Mse, GPTQ), error(ScaleChoice::LocalHessian, GPTQ));
    let all = format!("{max} {mse} {sweep} {imatrix} {local} {gptq} {ordered} {gptq_mse} {gptq_local}");
    assert!(imatrix < 0.95 * mse && local < 0.9 * sweep && mse < max, "{all}");
    assert!(gptq < 0.5 * max && ordered < 0.5 * max && gptq_mse < 0.6 * mse && gptq_local < 0.8 * local, "{all}");
}

#[test]
fn bytes_depend_on_neither_threads_nor_parts() {
    let Prepared { dir, source, stats } = prepared();
    let mut asked = settings(&stats, ScaleChoice::Imatrix, GPTQ);
    made(&source, &dir.join("whole"), &Settings { threads: 3, ..asked.clone() }).unwrap();
    // A factor must fit into the memory.
    made(&source, &dir.join("alone"), &Settings { threads: 1, memory: 1, ..asked.clone() }).unwrap_err();
    made(&source, &dir.join("alone"), &Settings { threads: 1, memory: 200_000, ..asked.clone() }).unwrap();
    let whole = contents(&dir.join("whole"));
    assert!(whole == contents(&dir.join("alone")));
    asked.threads = 2;
    for i in [2, 0, 1] {
        let part = Portion::new(i, 3).unwrap();
        convert_part(&source, &dir.join("parts"), &asked, part, &(), &AtomicBool::new(false)).unwrap();
    }
    finish(&source, &dir.join("parts"), &asked, &(), &AtomicBool::new(false)).unwrap();
    assert!(whole == contents(&dir.join("parts")));
    // Other statistics are another request.
    let stopped = AtomicBool::new(true);
    assert!(matches!(convert(&source, &dir.join("stopped"), &asked, &(), &stopped), Err(Error::Interrupted)));
    let mut other = statistics();
    other.insert("more".to_string(), tensor(Dtype::F32, &[1], &[1.0]));
    write(&stats, &other);
    let resumed = made(&source, &dir.join("stopped"), &Settings { existing: Existing::Resume, ..asked });
    assert!(matches!(resumed, Err(Error::OtherRequest { .. })), "{resumed:?}");
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let Prepared { dir, source, stats } = prepared();
    let refused = |tensors: &Tensors, scale, round| {
        write(&stats, tensors);
        let error = made(&source, &dir.join("refused"), &settings(&stats, scale, round)).unwrap_err().to_string();
        let _ = std::fs::remove_dir_all(dir.join("refused.partial"));
        error
    };
    let with = |name: &str, shape: &[usize], numbers: &[f32]| {
        let mut tensors = statistics();
        tensors.insert(name.to_string(), tensor(Dtype::F32, shape, numbers));
        tensors
    };
    let down = "model.layers.1.mlp.down_proj.input_mean_square";
    let other = refused(&with(down, &[64], &[1.0; 64]), ScaleChoice::Imatrix, Round::Nearest);
    assert!(other.contains(down) && other.contains("[64]") && other.contains("another model"), "{other}");
    let nan = refused(&with(down, &[96], &[f32::NAN; 96]), ScaleChoice::Imatrix, Round::Nearest);
    assert!(nan.contains(down) && nan.contains("NaN"), "{nan}");
    let negative = refused(&with(down, &[96], &[-1.0; 96]), ScaleChoice::Imatrix, Round::Nearest);
    assert!(negative.contains("mean square -1"), "{negative}");
    let mut missing = statistics();
    missing.remove(down);
    let missing = refused(&missing, ScaleChoice::Imatrix, Round::Nearest);
    assert!(missing.contains(down) && missing.contains("calibrate this very model"), "{missing}");
    let mut squares = statistics();
    squares.retain(|name, _| name.ends_with(Moments::MEAN_SQUARES));
    let local = refused(&squares, ScaleChoice::LocalHessian, Round::Nearest);
    assert!(local.contains("calibrate --hessian local"), "{local}");
    let whole = refused(&squares, ScaleChoice::Max, GPTQ);
    assert!(whole.contains("calibrate --hessian full"), "{whole}");
    let name = "model.layers.0.mlp.gate_proj.input_hessian";
    let wide = refused(&with(name, &[32, 128], &[1.0; 4096]), ScaleChoice::Max, GPTQ);
    assert!(wide.contains(name) && wide.contains("[32, 128]"), "{wide}");
    let damping = Round::Gptq { order: Order::Natural, damping: f64::NAN };
    assert!(refused(&statistics(), ScaleChoice::Max, damping).contains("damping"), "a damping that is no number");
    let none = made(&source, &dir.join("none"), &Settings { scale: ScaleChoice::Imatrix, ..Settings::default() });
    assert!(none.unwrap_err().to_string().contains("none are given"));
    let unread = Settings { statistics: Some(stats.clone()), ..Settings::default() };
    assert!(made(&source, &dir.join("none"), &unread).unwrap_err().to_string().contains("neither scales nor codes"));
    save(&stats, &statistics());
    let unmarked = made(&source, &dir.join("none"), &settings(&stats, ScaleChoice::Imatrix, Round::Nearest));
    assert!(unmarked.unwrap_err().to_string().contains("no statistics of activations"));
}

#[test]
fn what_gptq_cannot_mend_is_rounded_to_nearest_and_said() {
    let Prepared { dir, source, stats } = prepared();
    let mut tensors = statistics();
    // One matrix was not kept, one cannot be.
    tensors.remove("model.layers.0.mlp.down_proj.input_hessian");
    let name = "model.layers.1.self_attn.o_proj.input_hessian";
    let mut impossible = vec![1.0; 64 * 64];
    impossible[1] = 1e6;
    tensors.insert(name.to_string(), tensor(Dtype::F32, &[64, 64], &impossible));
    write(&stats, &tensors);
    let summary = made(&source, &dir.join("gptq"), &settings(&stats, ScaleChoice::Max, GPTQ)).unwrap();
    let plain: Vec<(&str, &str)> = summary.plain.iter().map(|(module, why)| (module.as_str(), why.as_str())).collect();
    assert_eq!(
        plain,
        [
            ("model.layers.0.mlp.down_proj", "no Hessian of its 96 columns was kept"),
            ("model.layers.1.self_attn.o_proj", "the Hessian of its inputs is not positive definite"),
        ]
    );
    made(&source, &dir.join("max"), &Settings::default()).unwrap();
    let codes = |target: &str, module: &str| {
        let path = dir.join(target).join("model.safetensors");
        let checkpoint = Checkpoint::open(&dir.join(target)).unwrap();
        let tensor = checkpoint.get(&format!("{module}.weight")).unwrap_or_else(|| panic!("{}", path.display()));
        tensor.bytes().unwrap()
    };
    for (module, _) in plain {
        assert_eq!(codes("gptq", module), codes("max", module), "{module}");
    }
    assert_ne!(codes("gptq", "model.layers.0.self_attn.o_proj"), codes("max", "model.layers.0.self_attn.o_proj"));
}

#[test]
fn experts_without_tokens_are_said_and_experts_in_one_tensor_refused() {
    let dir = Folder::new();
    let (source, stats) = (dir.join("moe"), dir.join("stats.safetensors"));
    for_llama_cpp::source(&source, "Qwen3MoeForCausalLM", 2);
    let checkpoint = Checkpoint::open(&source).unwrap();
    let mut tensors = Tensors::new();
    for weight in Model::new(&checkpoint).unwrap().weights.iter().filter(|w| !w.module.contains("experts.1.")) {
        let (x, cols) = (inputs(weight.cols, 5), weight.cols);
        let squares: Vec<f32> = (0..cols).map(|i| products(&x, cols, i, i)).collect();
        tensors.insert(format!("{}{}", weight.module, Moments::MEAN_SQUARES), tensor(Dtype::F32, &[cols], &squares));
    }
    let asked = settings(&stats, ScaleChoice::Imatrix, Round::Nearest);
    write(&stats, &tensors);
    let unknown = made(&source, &dir.join("unknown"), &asked).unwrap_err().to_string();
    assert!(unknown.contains("experts.1.") && unknown.contains("calibrate this very model"), "{unknown}");
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.mlp.experts{}", Moments::EXPERT_TOKENS);
        tensors.insert(name, tensor(Dtype::F32, &[2], &[9.0, 0.0]));
    }
    write(&stats, &tensors);
    let summary = made(&source, &dir.join("said"), &asked).unwrap();
    assert_eq!(summary.plain.len(), 6);
    assert!(summary.plain.iter().all(|(m, why)| m.contains("experts.1.") && why == "no token reached it"));
    let name = format!("model.layers.0.mlp.experts.down_proj{}", Moments::MEAN_SQUARES);
    tensors.insert(name, tensor(Dtype::F32, &[128], &[1.0; 128]));
    write(&stats, &tensors);
    let together = made(&source, &dir.join("together"), &asked).unwrap_err().to_string();
    assert!(together.contains("experts.0.") && together.contains("do not tell their inputs apart"), "{together}");
}
