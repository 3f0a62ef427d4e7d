//! What can go wrong says what to change.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use nvfp4_nn::*;
use nvfp4_recipe::{Capabilities, Model, Plan};

#[test]
fn a_shape_that_does_not_fit_the_tiles() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu);
    let linear = Linear::new(&place.child("fc"), 64, 48, Bias::With).unwrap();
    session.apply(&recipe("nvfp4")).unwrap();
    let x = Tensor::ones((17, 64), DType::F32, &Device::Cpu).unwrap();
    let message = linear.forward(&x).unwrap_err().to_string();
    assert!(message.starts_with("fc:input, 17 × 64 as nvfp4(hadamard): "), "{message}");
    assert!(message.contains("multiple of 16"), "{message}");
    let message = linear.forward(&Tensor::ones((16, 32), DType::F32, &Device::Cpu).unwrap()).unwrap_err().to_string();
    assert!(message.starts_with("fc: expected 64 features, got 32"), "{message}");
}

#[test]
fn a_plan_that_is_missing_or_of_another_model() {
    let case = Case::new("linear", DType::F32, 1);
    let message = case.module.forward(&case.x.var).unwrap_err().to_string();
    assert!(message.starts_with("there is no plan yet: call `Session::apply`"), "{message}");
    let mut other = Model::new();
    other.nest("layers.0", &nvfp4_recipe::TransformerLayer::default());
    let plan = Plan::build(&other, &recipe("nvfp4"), &Capabilities::software()).unwrap();
    let message = case.session.apply_plan(plan).unwrap_err().to_string();
    let start = "the plan of recipe 'nvfp4' is for another model: the model has m:grad_output, the plan has layers.0.";
    assert!(message.starts_with(start), "{message}");
    // A module that was made after the plan.
    case.session.apply(&recipe("nvfp4")).unwrap();
    let place = case.session.place(DType::F32, &Device::Cpu);
    let late = Linear::new(&place.child("late"), 64, 48, Bias::With).unwrap();
    let message = late.forward(&case.x.var).unwrap_err().to_string();
    assert!(message.contains("the model has late:input"), "{message}");
}

#[test]
fn two_modules_at_one_place() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu).child("fc");
    Linear::new(&place, 64, 48, Bias::With).unwrap();
    let message = Linear::new(&place, 64, 48, Bias::With).unwrap_err().to_string();
    assert_eq!(
        message,
        "there are two parameters 'fc.weight': give each module a place of its own with `Place::child`"
    );
}

#[test]
fn heads_that_do_not_divide() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu);
    let config = LayerConfig { heads: 5, ..LayerConfig::gpt(64, 4) };
    let message = TransformerLayer::new(&place.child("a"), config).unwrap_err().to_string();
    assert!(message.starts_with("a.self_attention: expected heads that divide 64 features, got 5"), "{message}");
    let config = LayerConfig { groups: 3, ..LayerConfig::gpt(64, 4) };
    let message = TransformerLayer::new(&place.child("b"), config).unwrap_err().to_string();
    assert!(
        message.starts_with("b.self_attention.core_attention: expected groups that divide 4 heads, got 3"),
        "{message}"
    );
    let attention = AttentionConfig { heads: 4, groups: 4, head_size: 16, mask: Mask::Causal };
    let attention = DotProductAttention::new(&place.child("c"), attention).unwrap();
    session.apply(&recipe("nvfp4")).unwrap();
    let message = attention.forward(&Tensor::ones((2, 16, 64), DType::F32, &Device::Cpu).unwrap()).unwrap_err();
    assert!(message.to_string().starts_with("c: expected [batch, sequence, 192], got [2, 16, 64]"), "{message}");
}

#[test]
fn codes_of_binary64() {
    let case = Case::new("linear", DType::F64, 1);
    case.session.apply(&recipe("nvfp4")).unwrap();
    let message = case.module.forward(&case.x.var).unwrap_err().to_string();
    assert!(message.starts_with("tensors of type F64 cannot be quantized: use F32, BF16 or F16"), "{message}");
}

/// The loss says the step, the layer and the tensor that went first.
#[test]
fn a_loss_that_is_not_a_number() {
    for (preset, parameter, module, statistic) in [
        ("nvfp4", "m.layernorm_mlp.fc1.weight", "m.layernorm_mlp.fc1", "weight"),
        ("nvfp4", "m.self_attention.linear_qkv.bias", "m.self_attention.linear_qkv", "output"),
        ("high_precision", "m.layernorm_mlp.fc1.weight", "m.layernorm_mlp.fc1", "output"),
        ("mxfp8", "m.self_attention.linear_qkv.layer_norm_weight", "m.self_attention.linear_qkv", "input"),
    ] {
        let case = Case::with("gpt layer", &recipe(preset), 1);
        case.run();
        case.session.next_step().unwrap();
        let var = case.session.parameters()[parameter].clone();
        let spoilt = (var.as_detached_tensor() * f64::NAN).unwrap();
        var.set(&spoilt).unwrap();
        let (_, loss) = case.loss();
        match case.session.backward(&loss).unwrap_err() {
            Error::NotFinite { step: 1, loss, first: Some(fault) } => {
                assert_eq!(loss.is_nan(), preset != "nvfp4", "NaN as a code of NVFP4 is 6");
                assert_eq!((fault.module.as_str(), fault.statistic.as_str()), (module, statistic), "{preset}");
                assert_eq!(fault.step, 1);
            }
            other => panic!("{preset}: {other}"),
        }
        assert_eq!(case.session.fault().unwrap().unwrap().module, module);
    }
}

/// A NaN scale of MXFP8 or NVFP4 cannot hide it: what is looked at are tensors before they are quantized.
#[test]
fn gradients_that_are_not_finite() {
    let case = Case::with("linear", &recipe("nvfp4"), 1);
    let (y, _) = case.loss();
    let loss = ((&y - &y.detach()).unwrap().sqr().unwrap().sum_all().unwrap().sqrt()).unwrap(); // √0
    let message = case.session.backward(&loss).unwrap_err().to_string();
    assert!(
        message.starts_with(
            "step 0, loss 0: the first tensor that is not finite is grad_output of m at step 0: NaN at index [0, 0]; "
        ),
        "{message}"
    );
    // Without the watch only gradients of parameters are looked at.
    let case = Case::with("linear", &recipe("high_precision"), 1);
    case.session.set_watch(Watch::Off);
    let (y, _) = case.loss();
    let loss = ((&y - &y.detach()).unwrap().sqr().unwrap().sum_all().unwrap().sqrt()).unwrap();
    let message = case.session.backward(&loss).unwrap_err().to_string();
    assert!(
        message.starts_with("step 0, loss 0: the first tensor that is not finite is gradient of m.bias"),
        "{message}"
    );
}

/// The backward pass belongs to the step of its forward pass.
#[test]
fn a_backward_pass_after_its_step() {
    let case = Case::with("linear", &recipe("nvfp4"), 1);
    let (_, loss) = case.loss();
    case.session.next_step().unwrap();
    let message = case.session.backward(&loss).unwrap_err().to_string();
    assert!(message.starts_with("m: its forward pass belongs to step 0, but it is step 1"), "{message}");
}
