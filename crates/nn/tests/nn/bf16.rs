//! Models whose own type is bf16.

use crate::cases::*;
use candle_core::{DType, Device, Module};
use nvfp4_nn::*;

/// Every module runs with parameters and activations in bf16, as far as candle's CPU has the operations: gradients are in bf16 too.
#[test]
fn parameters_in_bf16() {
    for kind in KINDS {
        for preset in ["nvfp4", "mxfp8", "current_scaling", "nvfp4_row_scaled"] {
            let case = Case::new(kind, DType::BF16, 3);
            case.session.apply(&recipe(preset)).unwrap();
            let outcome = case.run();
            assert!(outcome.y.iter().all(|y| f64::from_bits(*y).is_finite()), "{kind}, {preset}");
            let gradients = case.session.gradients().unwrap();
            assert_eq!(gradients.get(&case.x.var).unwrap().dtype(), DType::BF16);
        }
    }
}

/// Sums over tokens are taken in binary32: in bf16 a sum of ones would stand still at 256.
#[test]
fn gradients_of_4096_equal_tokens_are_sums_of_them_all() {
    let tokens = 4096;
    let session = Session::new(1);
    let place = session.place(DType::BF16, &Device::Cpu);
    let x = place.parameter("x", (tokens, 32), Init::Constant(0.5)).unwrap();
    let layer = LayerNormLinear::new(&place.child("m"), NormKind::LayerNorm, 32, 16, Bias::With).unwrap();
    let weight = &session.parameters()["m.weight"];
    weight.set(&weight.ones_like().unwrap()).unwrap();
    session.apply(&recipe("nvfp4")).unwrap();
    let y = layer.forward(&x.var).unwrap();
    // The gradient of every output is 1.
    let gradients = session.backward(&y.to_dtype(DType::F32).unwrap().sum_all().unwrap()).map(|()| session.gradients());
    let gradients = gradients.unwrap().unwrap();
    let of = |name: &str| values(gradients.get(&session.parameters()[name]).unwrap());
    assert_eq!(of("m.bias"), [tokens as f64; 16]);
    // Each token's is the sum of a row of the weight's transposed: 16.
    assert_eq!(of("m.layer_norm_bias"), [16.0 * tokens as f64; 32]);
}
