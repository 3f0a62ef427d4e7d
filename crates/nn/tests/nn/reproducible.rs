//! A run follows from its seed, on any number of threads.

use crate::cases::*;
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4_nn::AdamW;

/// Three steps of an optimizer.
fn train(kind: &str, preset: &str, seed: u64) -> Vec<Outcome> {
    let case = Case::with(kind, &recipe(preset), seed);
    let config = ParamsAdamW { lr: 0.01, ..Default::default() };
    let mut optimizer = AdamW::new(case.session.parameters(), config).unwrap();
    let steps = (0..3).map(|_| {
        let outcome = case.run();
        optimizer.step(&case.session.gradients().unwrap()).unwrap();
        case.session.next_step().unwrap();
        outcome
    });
    steps.collect()
}

#[test]
fn the_seed_decides() {
    for kind in ["linear", "gpt layer", "grouped linear"] {
        assert!(train(kind, "nvfp4", 5) == train(kind, "nvfp4", 5), "{kind}");
        assert!(train(kind, "nvfp4", 5) != train(kind, "nvfp4", 6), "{kind}");
    }
}

#[test]
fn threads_do_not() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    for kind in KINDS {
        for preset in ["nvfp4", "nvfp4_row_scaled", "delayed_scaling+attention", "mxfp8+attention", "high_precision"] {
            let [one, three] = [1, 3].map(|threads| pool(threads).install(|| train(kind, preset, 5)));
            assert!(one == three, "{kind}, {preset}");
        }
    }
}

/// Numbers of an evaluation that are not finite are its own: they end no step.
#[test]
fn faults_of_an_evaluation_stay_with_it() {
    let case = Case::with("linear", &recipe("nvfp4"), 2);
    let good = case.x.var.as_detached_tensor().copy().unwrap();
    case.x.var.set(&(&good / 0.0).unwrap()).unwrap();
    let inside = case.session.evaluate(|| {
        case.loss();
        case.session.fault()
    });
    assert_eq!(inside.unwrap().unwrap().statistic, "input");
    assert_eq!(case.session.fault().unwrap(), None);
    case.x.var.set(&good).unwrap();
    case.run();
    case.session.next_step().unwrap();
    // A weight's is still there when the step reads it.
    let weight = case.session.parameters()["m.weight"].clone();
    weight.set(&(weight.as_detached_tensor() / 0.0).unwrap()).unwrap();
    case.session.evaluate(|| nvfp4_nn::Result::Ok(case.loss())).unwrap();
    for _ in 0..2 {
        let (_, loss) = case.loss();
        case.session.backward(&loss).unwrap_err();
        assert_eq!(case.session.fault().unwrap().unwrap().statistic, "weight");
        case.session.drop_gradients().unwrap();
    }
}

/// Evaluation between steps changes nothing, with stochastic forward passes too.
#[test]
fn evaluation_leaves_no_trace() {
    let recipe = operands("nvfp4(stochastic)", "nvfp4(16x16)", "nvfp4(stochastic)");
    let [with, without] = [true, false].map(|evaluate| {
        let case = Case::with("gpt layer", &recipe, 2);
        let steps = (0..2).map(|_| {
            if evaluate {
                let y = case.session.evaluate(|| nvfp4_nn::Result::Ok(case.loss().0)).unwrap();
                assert!(values(&y).iter().all(|y| y.is_finite()));
                assert_eq!(case.session.kept_bytes(), 0);
            }
            let outcome = case.run();
            case.session.next_step().unwrap();
            outcome
        });
        steps.collect::<Vec<_>>()
    });
    assert!(with == without);
}
