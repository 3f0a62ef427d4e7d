//! Modules learn.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4_nn::*;

/// test_training_loop_loss_decreases: a layer learns to turn its input around, under every preset; half of the loss is gone after 40 steps.
#[test]
fn half_of_the_loss_goes_under_every_preset() {
    for preset in presets() {
        let session = Session::new(7);
        let place = session.place(DType::F32, &Device::Cpu);
        let layer = TransformerLayer::new(&place.child("m"), LayerConfig::llama(32, 2, 1, 64)).unwrap();
        session.apply(&recipe(&preset)).unwrap();
        let config = ParamsAdamW { lr: 0.01, ..Default::default() };
        let mut optimizer = AdamW::new(session.parameters(), config).unwrap();
        let x = Tensor::from_vec(numbers(2 * 16 * 32, 1), (2, 16, 32), &Device::Cpu).unwrap();
        let target = x.neg().unwrap();
        let mut losses = Vec::new();
        for _ in 0..40 {
            let loss = candle_nn::loss::mse(&layer.forward(&x).unwrap(), &target).unwrap();
            session.backward(&loss).unwrap();
            optimizer.step(&session.gradients().unwrap()).unwrap();
            session.next_step().unwrap();
            losses.push(values(&loss)[0]);
        }
        let (first, last) = (losses[0], losses[39]);
        assert!(last < first / 2.0, "{preset}: {first} to {last}");
    }
}
