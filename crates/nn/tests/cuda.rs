//! Modules on a GPU beside the same modules on the CPU. Without a GPU every test is skipped.
#![cfg(feature = "nn-cuda")]

use candle_core::{DType, Device, Module, Tensor};
use nvfp4::Side;
use nvfp4_nn::{Bias, GroupedLinear, LayerConfig, Linear, Recompute, Session, TransformerLayer};
use nvfp4_recipe::{LinearSlot, Preset, Recipe, Site};
use nvfp4_testing::{Need, missing};

fn gpu() -> Option<Device> {
    Device::new_cuda(0).inspect_err(|reason| missing(Need::Gpu, reason)).ok()
}

fn values(rows: usize, cols: usize, seed: usize) -> Tensor {
    let value = |i: usize| ((i * 7919 + seed * 104729) % 2003) as f32 / 1001.0 - 1.0;
    Tensor::from_vec((0..rows * cols).map(value).collect(), (rows, cols), &Device::Cpu).unwrap()
}

/// Output, input gradient and weight gradient of a linear layer.
fn linear(recipe: &str, device: &Device, dtype: DType) -> [Vec<f32>; 3] {
    let session = Session::new(3);
    let place = session.place(dtype, device);
    let layer = Linear::new(&place.child("fc"), 96, 64, Bias::With).unwrap();
    let weight = values(64, 96, 1).to_dtype(dtype).unwrap().to_device(device).unwrap();
    session.parameters()["fc.weight"].set(&weight).unwrap();
    session.apply(&recipe.parse::<Preset>().unwrap().into()).unwrap();
    let x = candle_core::Var::from_tensor(&values(128, 96, 2).to_dtype(dtype).unwrap().to_device(device).unwrap());
    let x = x.unwrap();
    let y = layer.forward(&x).unwrap();
    let by = values(128, 64, 3).to_dtype(dtype).unwrap().to_device(device).unwrap();
    let loss = y.mul(&by).unwrap().sum_all().unwrap().to_dtype(DType::F32).unwrap();
    let gradients = loss.backward().unwrap();
    let dx = gradients.get(&x).unwrap().clone();
    let weight = &session.parameters()["fc.weight"];
    let dw = match gradients.get(weight) {
        // The recipe leaves everything alone, and all gradients are candle's.
        Some(dw) => dw.clone(),
        None => session.gradients().unwrap().get(weight).unwrap().clone(),
    };
    let host = |x: &Tensor| x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    [host(&y), host(&dx), host(&dw)]
}

/// Amaxes stay on the GPU until a step ends; then its history and scales are those of the CPU, bit for bit.
#[test]
fn delayed_scaling_remembers_what_it_does_on_the_cpu() {
    let Some(device) = gpu() else { return };
    let scales = |device: &Device| {
        let session = Session::new(3);
        let layer = Linear::new(&session.place(DType::F32, device).child("fc"), 96, 64, Bias::With).unwrap();
        session.parameters()["fc.weight"].set(&values(64, 96, 1).to_device(device).unwrap()).unwrap();
        session.apply(&"delayed_scaling".parse::<Preset>().unwrap().into()).unwrap();
        (0..3)
            .map(|step| {
                layer.forward(&values(128, 96, 2 + step).to_device(device).unwrap()).unwrap();
                session.next_step().unwrap();
                let states = session.states().unwrap().unwrap();
                [LinearSlot::Input, LinearSlot::Weight].map(|slot| {
                    let state = states.get(&Site::new("fc", slot), Side::Row).unwrap();
                    (state.scale().to_bits(), state.history().to_vec())
                })
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(scales(&device), scales(&Device::Cpu));
}

/// Codes have the same bits, so that results differ by what sums in binary32 may be off: K terms of magnitude below 4.
#[test]
fn a_linear_layer_is_that_of_the_cpu_within_the_bound() {
    let Some(device) = gpu() else { return };
    for recipe in
        ["high_precision", "nvfp4", "nvfp4_row_scaled", "nvfp4_4over6", "mxfp8", "current_scaling", "delayed_scaling"]
    {
        let (there, here) = (linear(recipe, &device, DType::F32), linear(recipe, &Device::Cpu, DType::F32));
        for ((name, k), (there, here)) in [("y", 96), ("dx", 64), ("dw", 128)].into_iter().zip(there.iter().zip(&here))
        {
            let allowed = 2.0 * nvfp4_spec::gemm::bound(k, 4.0 * k as f64);
            let most = there.iter().zip(here).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            assert!(most <= allowed, "{recipe} {name}: {most} is more than {allowed}");
        }
    }
}

#[test]
fn a_transformer_layer_trains_under_every_preset() {
    let Some(device) = gpu() else { return };
    for preset in Preset::names() {
        let session = Session::new(3);
        let place = session.place(DType::BF16, &device);
        let layer = TransformerLayer::new(&place.child("layer"), LayerConfig::gpt(64, 4)).unwrap();
        let recipe: Recipe = preset.parse::<Preset>().unwrap().into();
        session.apply(&recipe).unwrap();
        let x =
            values(128, 64, 5).reshape((2, 64, 64)).unwrap().to_dtype(DType::BF16).unwrap().to_device(&device).unwrap();
        for _ in 0..2 {
            let loss = layer.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap().to_dtype(DType::F32).unwrap();
            session.backward(&loss).unwrap_or_else(|error| panic!("{preset}: {error}"));
            assert!(loss.to_scalar::<f32>().unwrap().is_finite(), "{preset}");
            session.next_step().unwrap();
        }
    }
}

/// The tensor and the place that are named are those of the CPU, though the GPU is asked at the end of the pass only.
#[test]
fn the_first_number_that_is_not_finite_is_that_of_the_cpu() {
    let Some(device) = gpu() else { return };
    let fault = |device: &Device, preset: &str| {
        let session = Session::new(3);
        let layer =
            TransformerLayer::new(&session.place(DType::BF16, device).child("layer"), LayerConfig::gpt(64, 4)).unwrap();
        session.apply(&preset.parse::<Preset>().unwrap().into()).unwrap();
        let weight = &session.parameters()["layer.layernorm_mlp.fc1.weight"];
        let (rows, cols) = weight.dims2().unwrap();
        let mut spoilt = values(rows, cols, 1).flatten_all().unwrap().to_vec1::<f32>().unwrap();
        (spoilt[70 * cols + 9], spoilt[71 * cols]) = (f32::NEG_INFINITY, f32::NAN);
        let spoilt = Tensor::from_vec(spoilt, (rows, cols), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        weight.set(&spoilt.to_device(device).unwrap()).unwrap();
        let x = values(128, 64, 5).reshape((2, 64, 64)).unwrap().to_dtype(DType::BF16).unwrap();
        let y = layer.forward(&x.to_device(device).unwrap()).unwrap();
        let error = session.backward(&y.sqr().unwrap().mean_all().unwrap().to_dtype(DType::F32).unwrap()).unwrap_err();
        assert!(error.to_string().contains("not finite"), "{error}");
        let fault = session.fault().unwrap().unwrap();
        session.drop_gradients().unwrap();
        assert_eq!(session.fault().unwrap(), None);
        fault
    };
    for preset in ["nvfp4", "mxfp8"] {
        let there = fault(&device, preset);
        assert_eq!(
            (there.statistic.as_str(), &there.index[..], there.value),
            ("weight", &[70, 9][..], f32::NEG_INFINITY)
        );
        assert_eq!(there, fault(&Device::Cpu, preset), "{preset}");
    }
}

/// A layer that is computed again has the gradients of one that is kept, bit for bit; and experts run there, an empty one among them.
#[test]
fn recomputation_and_experts() {
    let Some(device) = gpu() else { return };
    let gradients = |recompute: bool| {
        let session = Session::new(3);
        let place = session.place(DType::BF16, &device).child("layer");
        let layer = TransformerLayer::new(&place, LayerConfig::gpt(64, 4)).unwrap();
        session.apply(&"nvfp4".parse::<Preset>().unwrap().into()).unwrap();
        let x = values(128, 64, 5).reshape((2, 64, 64)).unwrap().to_dtype(DType::BF16).unwrap();
        let x = x.to_device(&device).unwrap();
        let y = if recompute { Recompute::new(&place, layer).unwrap().forward(&x) } else { layer.forward(&x) };
        session.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap().to_dtype(DType::F32).unwrap()).unwrap();
        let found = session.gradients().unwrap();
        let numbers = |var: &candle_core::Var| {
            let gradient = found.get(var).unwrap().to_dtype(DType::F32).unwrap();
            gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        session.parameters().iter().map(|(name, var)| (name.clone(), numbers(var))).collect::<Vec<_>>()
    };
    assert!(gradients(true) == gradients(false));

    let session = Session::new(3);
    let place = session.place(DType::BF16, &device).child("experts");
    let experts = GroupedLinear::new(&place, 3, 64, 32, Bias::With).unwrap();
    session.apply(&"nvfp4".parse::<Preset>().unwrap().into()).unwrap();
    let x = values(96, 64, 5).to_dtype(DType::BF16).unwrap().to_device(&device).unwrap();
    let y = experts.routed(&[70, 0, 26]).forward(&x).unwrap();
    session.backward(&y.sqr().unwrap().mean_all().unwrap().to_dtype(DType::F32).unwrap()).unwrap();
    assert_eq!(y.dims(), [96, 32]);
}
