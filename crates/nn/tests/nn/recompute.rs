//! A forward pass that is run again gives the same bytes.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use nvfp4_nn::*;
use nvfp4_recipe::Recipe;
use std::sync::Arc;

/// A module that can be shared.
#[derive(Clone)]
struct Shared(Arc<dyn Module + Send + Sync>);

impl Module for Shared {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.forward(x)
    }
}

fn mlp(place: &Place) -> Shared {
    let config =
        MlpConfig { hidden: 32, inner: 48, norm: NormKind::LayerNorm, activation: Activation::Gelu, bias: Bias::With };
    Shared(Arc::new(LayerNormMlp::new(place, config).unwrap()))
}

fn layer(place: &Place) -> Shared {
    Shared(Arc::new(TransformerLayer::new(place, LayerConfig::llama(32, 2, 1, 48)).unwrap()))
}

fn linear(place: &Place) -> Shared {
    Shared(Arc::new(Linear::new(place, 32, 32, Bias::With).unwrap()))
}

fn grouped(place: &Place) -> Shared {
    let layer = GroupedLinear::new(place, 2, 32, 32, Bias::With).unwrap();
    let shaped = move |x: &Tensor| layer.routed(&[20, 12]).forward(&x.flatten(0, 1)?)?.reshape(x.shape());
    Shared(Arc::new(shaped))
}

#[derive(Clone, Copy)]
enum Wrapped {
    No,
    Each,
    Nested,
}

/// Two steps of two modules one after the other.
fn run(recipe: &Recipe, make: fn(&Place) -> Shared, wrapped: Wrapped) -> (Vec<Outcome>, [u64; 4]) {
    let session = Session::new(17);
    let place = session.place(DType::F32, &Device::Cpu);
    let x = place.parameter("x", (2, 16, 32), Init::Normal(1.0)).unwrap();
    let modules = [make(&place.child("a")), make(&place.child("b"))];
    let wrap = |module: Shared| Shared(Arc::new(Recompute::new(&place, module).unwrap()));
    let modules = match wrapped {
        Wrapped::No => modules,
        Wrapped::Each => modules.map(wrap),
        Wrapped::Nested => modules.map(|module| wrap(wrap(module))),
    };
    session.apply(recipe).unwrap();
    let module = move |x: &Tensor| modules[1].forward(&modules[0].forward(x)?);
    let case = Case { session, module: Box::new(module), x };
    let outcomes = (0..2).map(|_| {
        let outcome = case.run();
        case.session.next_step().unwrap();
        outcome
    });
    (outcomes.collect(), case.session.generator().state())
}

/// TestHybridActivationRecompute, test_identity_activation_recompute_matches_bf16_bitwise, test_activation_recompute_matches_no_checkpoint:
/// every preset, and forward passes that are rounded stochastically; also the generator ends where it would have.
#[test]
fn recomputed_is_the_same() {
    let stochastic = operands("nvfp4(stochastic)", "nvfp4(stochastic)", "nvfp4(stochastic)");
    let recipes = presets().into_iter().map(|preset| recipe(&preset)).chain([stochastic]);
    for recipe in recipes {
        for (name, make) in
            [("mlp", mlp as fn(&Place) -> Shared), ("layer", layer), ("linear", linear), ("grouped", grouped)]
        {
            let plain = run(&recipe, make, Wrapped::No);
            assert!(plain == run(&recipe, make, Wrapped::Each), "{name}, {recipe:?}");
            assert!(plain == run(&recipe, make, Wrapped::Nested), "{name} twice, {recipe:?}");
        }
    }
}

#[test]
fn nothing_but_the_input_is_kept() {
    let session = Session::new(1);
    let place = session.place(DType::F32, &Device::Cpu);
    let (plain, wrapped) = (mlp(&place.child("a")), Recompute::new(&place, mlp(&place.child("b"))).unwrap());
    session.apply(&recipe("nvfp4")).unwrap();
    let x = Tensor::ones((2, 16, 32), DType::F32, &Device::Cpu).unwrap();
    let y = wrapped.forward(&x).unwrap();
    assert_eq!(session.kept_bytes(), 0);
    session.backward(&y.sum_all().unwrap()).unwrap(); // also where nothing before it has a gradient
    assert_eq!(session.gradients().unwrap().get_ids().count(), 6);
    let y = plain.forward(&x).unwrap();
    assert!(session.kept_bytes() > 0 && y.elem_count() > 0);
}
