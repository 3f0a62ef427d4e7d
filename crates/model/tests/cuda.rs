//! Products of a model on a GPU against those of the CPU: within the bound of their sums, for weights in every form, and with the same
//! codes of activations. Without a GPU every test is skipped.
#![cfg(feature = "cuda")]

mod generated;

use generated::*;
use half::{bf16, f16};
use nvfp4::cuda::{Device, Gpu};
use nvfp4::{GlobalScale, Profile, Quantizer, Side, TensorRef};
use nvfp4_checkpoint::{Acts, Checkpoint, Selection, Settings, Target};
use nvfp4_model::{
    ActivationScale, Activations, Divergence, Evaluate, Evaluation, FourBit, KeysValues, Lanes, Matrix, Place,
    Progress, Projection, Run, Source, StateFile, Weights, calibrate, input_scale, open,
};
use nvfp4_spec::gemm::bound;
use nvfp4_testing::{Need, missing};
use safetensors::Dtype;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The first GPU, if there is one.
fn place() -> Option<Place> {
    let device = Device::open(0).inspect_err(|reason| missing(Need::Gpu, reason)).ok()?;
    Some(Place::Gpu(Gpu::new(device).unwrap().into()))
}

/// A checkpoint for every form of weights.
fn forms(dir: &Folder) -> Vec<PathBuf> {
    let (llama, moe) = (dir.join("llama"), dir.join("moe"));
    model(&llama, &with(config(), "intermediate_size", json!(128)), usual);
    model(&moe, &moe_config(32), usual);
    let mut made = vec![llama.clone(), moe.clone()];
    let mut convert = |source: &Path, settings: Settings| {
        let folder = dir.join(&format!("form-{}", made.len()));
        converted(source, &folder, &settings);
        made.push(folder);
    };
    convert(&llama, Settings { acts: Acts::Constant(0.003), ..to(Target::ModelOpt) });
    convert(&moe, Settings { acts: Acts::Constant(3.7), ..to(Target::CompressedTensors) });
    for (target, path, form) in [
        (Target::ModelOpt, "*", "fp8-tensor"),
        (Target::CompressedTensors, "*", "fp8-channel"),
        (Target::ModelOpt, "*.down_proj", "fp8-block"),
        (Target::ModelOpt, "*", "mxfp8"),
    ] {
        convert(&llama, Settings { selection: only(path, form), ..to(target) });
    }
    let selection = Selection { rules: "experts+fp8".parse().unwrap(), ..Selection::default() };
    convert(&moe, Settings { selection, ..to(Target::ModelOpt) });
    let bytes = |dtype: Dtype, x: bf16| match dtype {
        Dtype::F32 => x.to_f32().to_le_bytes().to_vec(),
        _ => f16::from_f32(x.to_f32()).to_le_bytes().to_vec(),
    };
    for (name, dtype) in [("f32", Dtype::F32), ("f16", Dtype::F16)] {
        let tensors = tensors(&config(), usual).into_iter().map(|(name, (_, shape, values))| {
            let values = values.as_chunks::<2>().0.iter().flat_map(|&x| bytes(dtype, bf16::from_le_bytes(x)));
            (name, (dtype, shape, values.collect()))
        });
        write(&dir.join(name), &config(), &tensors.collect());
        made.push(dir.join(name));
    }
    let (config, tensors) = oss();
    write(&dir.join("oss"), &config, &tensors);
    made.push(dir.join("oss"));
    made
}

/// Rows of activations whose sizes differ.
fn activations(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| usual("activations", i) * 2f32.powi((i / 16 % 7) as i32 - 3)).collect()
}

/// Holds outputs against those of the CPU, for the inputs and weights that are multiplied.
fn check(got: &[f32], expected: &[f32], (x, w, k): (&[f64], &[f64], usize), what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let outputs = w.len() / k;
    // All outputs of small products, some of every row and column of large ones.
    let step = if got.len() > 1 << 20 { 61 } else { 1 };
    for (at, (got, expected)) in got.iter().zip(expected).enumerate().step_by(step) {
        let (i, j) = (at / outputs, at % outputs);
        let terms = x[i * k..][..k].iter().zip(&w[j * k..][..k]);
        let magnitude: f64 = terms.map(|(x, w)| (x * w).abs()).sum();
        // The bound of either sum, and a few roundings of the scales after it.
        let allowed = 2.0 * bound(k + 16, magnitude);
        let error = (f64::from(*got) - f64::from(*expected)).abs();
        assert!(error <= allowed, "{what} ({i}, {j}): {got} for {expected}");
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// The values of activations in 4 bits, by another way than the projection's.
fn in_4_bits(x: &[f32], cols: usize, scale: ActivationScale) -> Vec<f64> {
    match scale {
        ActivationScale::Stored(scale) => rounded(x, scale).iter().map(|x| x * f64::from(scale)).collect(),
        ActivationScale::PerRow => {
            let quantizer = Quantizer::builder().profile(Profile::ModelOpt).global_scale(GlobalScale::PerRow).build();
            let x = quantizer.unwrap().quantize(&TensorRef::new(x, &[x.len() / cols, cols]).unwrap()).unwrap();
            wide(&x.direction(Side::Row).unwrap().dequantize::<f32>().unwrap())
        }
    }
}

/// Both projections by some rows of a weight: on the CPU they are exact where both sides are codes.
fn check_matrix(place: &Place, read: impl Fn() -> Matrix, scale: Option<f32>, rows: &[usize], what: &str) {
    let matrix = read();
    let (outputs, cols, has_codes) = (matrix.rows(), matrix.cols(), matrix.codes().is_some());
    let mut w = vec![0.0; outputs * cols];
    matrix.panel(0..outputs, &mut w).unwrap();
    let w = wide(&w);
    let (host, gpu) = (Arc::new(Place::Cpu.hold(matrix).unwrap()), Arc::new(place.hold(read()).unwrap()));
    assert_eq!((gpu.rows(), gpu.cols(), gpu.has_codes()), (outputs, cols, has_codes), "{what}");
    let (cpu, plain) = (Weights(host.clone()), Weights(gpu.clone()));
    for &rows in rows {
        let x = activations(rows, cols);
        let (got, expected) = (plain.apply(&x, rows).unwrap(), cpu.apply(&x, rows).unwrap());
        check(&got, &expected, (&wide(&x), &w, cols), &format!("{what}, {rows} rows"));
        for scale in [scale.map(ActivationScale::Stored), Some(ActivationScale::PerRow)].into_iter().flatten() {
            let own = FourBit::new(gpu.clone(), scale).zip(FourBit::new(host.clone(), scale));
            let Some((gpu, cpu)) = own else {
                assert!(!has_codes, "{what}");
                continue;
            };
            let (got, expected) = (gpu.apply(&x, rows).unwrap(), cpu.apply(&x, rows).unwrap());
            let rounded = in_4_bits(&x, cols, scale);
            check(&got, &expected, (&rounded, &w, cols), &format!("{what}, {scale:?}, {rows} rows"));
        }
    }
}

#[test]
fn every_form_of_weights_is_within_the_bound_of_the_cpu() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-forms");
    let mut seen = BTreeSet::new();
    for folder in forms(&dir) {
        let checkpoint = open(&folder).unwrap();
        let source = Source::new(&checkpoint, None).unwrap();
        for weight in &source.model().weights {
            seen.insert(weight.format());
            let what = format!("{} {} {}", folder.display(), weight.module, weight.format());
            // A matrix of several, as experts are read.
            let rows = 0..weight.rows / weight.matrices().max(1);
            let read = || Matrix::read(weight, rows.clone()).unwrap();
            check_matrix(&place, read, input_scale(weight).unwrap(), &[1, 37], &what);
        }
    }
    for format in ["BF16", "F16", "F32", "FP8", "MXFP4", "MXFP8", "NVFP4"] {
        assert!(seen.contains(format), "no weight was {format}: {seen:?}");
    }
}

/// Sizes for which products of NVFP4 go through tensor cores and the library, and more rows than are multiplied at a time.
#[test]
fn large_matrices_and_many_rows_are_within_the_bound_of_the_cpu() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-large");
    let config = with(config(), "intermediate_size", json!(1040));
    model(&dir.join("in"), &config, usual);
    converted(&dir.join("in"), &dir.join("packed"), &Settings { acts: Acts::Constant(0.003), ..Settings::default() });
    for (folder, module) in
        [("in", "mlp.up_proj"), ("in", "mlp.down_proj"), ("packed", "mlp.up_proj"), ("packed", "mlp.down_proj")]
    {
        let checkpoint = open(&dir.join(folder)).unwrap();
        let source = Source::new(&checkpoint, None).unwrap();
        let weight = source.weight(&format!("model.layers.1.{module}")).unwrap();
        let read = || Matrix::read(weight, 0..weight.rows).unwrap();
        check_matrix(&place, read, input_scale(weight).unwrap(), &[600, 4099], &format!("{folder} {module}"));
    }
}

/// Every layer of a model, for the input that the pass on the GPU had.
#[test]
fn every_layer_of_a_pass_on_a_gpu_is_within_the_bound_of_the_cpu() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-layers");
    for folder in forms(&dir) {
        let checkpoint = open(&folder).unwrap();
        let cpu = Source::new(&checkpoint, None).unwrap();
        let gpu = Source::new(&checkpoint, None).unwrap().on(place.clone());
        let seen = Seen::default();
        let run = Run { activations: Activations::AsStored, keys_values: KeysValues::AsStored, watch: &seen };
        let all = logits_from(&gpu, &run).unwrap();
        assert!(all.iter().all(|z| z.is_finite()) && all.iter().any(|&z| z != all[0]));
        let seen = seen.0.into_inner().unwrap();
        assert!(seen.len() >= 3 * 4, "{}", folder.display());
        for (module, (x, y)) in seen {
            // GPT-OSS's experts have one name, and are multiplied in turn.
            let Some(weight) = cpu.find(&module).filter(|weight| weight.matrices() <= 1) else { continue };
            let matrix = Matrix::read(weight, 0..weight.rows).unwrap();
            let mut w = vec![0.0; weight.rows * weight.cols];
            matrix.panel(0..weight.rows, &mut w).unwrap();
            let scale = input_scale(weight).unwrap().map(ActivationScale::Stored);
            let (rows, matrix) = (x.len() / weight.cols, Arc::new(Place::Cpu.hold(matrix).unwrap()));
            let (expected, x) = match scale.and_then(|scale| FourBit::new(matrix.clone(), scale).zip(Some(scale))) {
                Some((projection, scale)) => (projection.apply(&x, rows).unwrap(), in_4_bits(&x, weight.cols, scale)),
                None => (Weights(matrix).apply(&x, rows).unwrap(), wide(&x)),
            };
            check(&y, &expected, (&x, &wide(&w), weight.cols), &format!("{} {module}", folder.display()));
        }
    }
}

fn evaluated(
    (reference, model): (&Source<'_>, &Source<'_>),
    state: Option<&StateFile>,
    progress: &mut dyn Progress,
    stop: &AtomicBool,
) -> nvfp4_model::Result<Evaluation> {
    let rows = rows();
    let (activations, lanes) = (Activations::AsStored, Lanes::Each);
    let evaluate = Evaluate { reference: Some(reference), model, rows: &rows, given: 0, activations, lanes, state };
    assert!(evaluate.gpu_peak().is_some());
    evaluate.run(progress, stop)
}

#[test]
fn evaluations_on_a_gpu_are_repeated_and_continued_to_the_same_numbers() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-eval");
    let (here, packed) = (dir.join("in"), dir.join("packed"));
    model(&here, &config(), usual);
    converted(&here, &packed, &Settings { acts: Acts::Constant(0.003), ..Settings::default() });
    let (first, second) = (Checkpoint::open(&here).unwrap(), Checkpoint::open(&packed).unwrap());
    let source = |checkpoint| Source::new(checkpoint, None).unwrap().on(place.clone());
    let (reference, model) = (source(&first), source(&second));
    let same = evaluated((&reference, &reference), None, &mut (), &GO).unwrap();
    assert!(Divergence::of(&same.said[0].1, &same.said[1].1).mean.mean < 1e-12);
    assert!(same.drift.iter().all(|drift| drift.relative_error() == 0.0));
    let whole = evaluated((&reference, &model), None, &mut (), &GO).unwrap();
    assert!(Divergence::of(&whole.said[0].1, &whole.said[1].1).mean.mean > 1e-5);
    let (stop, state) = (AtomicBool::new(false), StateFile::new(&dir.join("state"), "this".to_string()));
    let stopped = evaluated((&reference, &model), Some(&state), &mut StopAfter(&stop, "layer 2"), &stop);
    assert!(matches!(stopped.unwrap_err(), nvfp4_model::Error::Interrupted));
    let continued = evaluated((&reference, &model), Some(&state), &mut (), &GO).unwrap();
    assert_eq!(continued.said, whole.said);
}

/// The input of the first layer is computed on the CPU alone, so its statistics are those of the CPU.
#[test]
fn calibration_on_a_gpu_sees_every_module() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-calibrate");
    model(&dir.join("in"), &moe_config(32), usual);
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let amaxes = |source: Source<'_>| calibrate(&source, &rows(), &mut (), &GO).unwrap().amaxes(&source);
    let cpu = amaxes(Source::new(&checkpoint, None).unwrap());
    let gpu = amaxes(Source::new(&checkpoint, None).unwrap().on(place));
    assert!(cpu.keys().eq(gpu.keys()) && gpu.values().all(|amax| amax.is_finite() && *amax > 0.0));
    let first = "model.layers.0.self_attn.q_proj";
    assert_eq!(cpu[first], gpu[first]);
}

/// A token at a time, with keys and values kept, gives what the whole context gives.
#[test]
fn generation_on_a_gpu_continues_with_the_most_likely_token_of_the_whole_context() {
    let Some(place) = place() else { return };
    let dir = Folder::new("gpu-generate");
    let here = dir.join("in");
    model(&here, &config(), usual);
    let checkpoint = Checkpoint::open(&here).unwrap();
    let source = Source::new(&checkpoint, None).unwrap().on(place);
    greedy_tokens_are_the_most_likely(&source);
}
