//! Gradients in high precision against finite differences, in binary64.

use crate::cases::*;
use candle_core::{DType, Device, Module, Var};
use nvfp4_nn::*;

/// The derivative along a direction that changes one parameter, by central differences at two step sizes.
///
/// With a step h the error is C·h² and what rounding does to two losses. The difference between h and h/2 is ¾ of C·h², so it bounds
/// the truncation at h/2, which is ¼. A loss is a sum of terms of magnitude `M` in all, each after fewer than 2000 roundings, so
/// two of them are off by at most 2·2000·2⁻⁵³·M.
fn check(case: &Case, h: f64) {
    let (_, loss) = case.loss();
    case.session.backward(&loss).unwrap();
    let gradients = case.session.gradients().unwrap();
    case.session.drop_gradients().unwrap();
    for (name, var) in case.session.parameters() {
        let Some(gradient) = gradients.get(&var) else { continue };
        let start = var.as_detached_tensor().copy().unwrap();
        let direction = weights_like(&start);
        let at = |step: f64| {
            var.set(&(&start + (&direction * step).unwrap()).unwrap()).unwrap();
            let (y, loss) = case.loss();
            let magnitude: f64 = values(&y.mul(&weights_like(&y)).unwrap()).iter().map(|x| x.abs()).sum();
            (values(&loss)[0], magnitude)
        };
        let slope = |h: f64| {
            let ((up, a), (down, b)) = (at(h), at(-h));
            ((up - down) / (2.0 * h), a.max(b))
        };
        let ((coarse, magnitude), (fine, _)) = (slope(h), slope(h / 2.0));
        var.set(&start).unwrap();
        let exact: f64 = values(&gradient.mul(&direction).unwrap()).iter().sum();
        let rounding = 2.0 * 2000.0 * 2f64.powi(-53) * magnitude / h;
        let allowed = (coarse - fine).abs() + rounding;
        assert!((fine - exact).abs() <= allowed, "{name}: {fine} by differences, {exact} by the graph, ±{allowed}");
    }
}

/// With SiLU in place of GELU, whose gradient has a test of its own.
#[test]
fn every_module() {
    for kind in KINDS {
        let kind = kind.replace("gelu", "silu").replace("gpt", "silu");
        let case = Case::new(&kind, DType::F64, 11);
        case.session.apply(&recipe("high_precision")).unwrap();
        check(&case, 1e-4);
    }
}

#[test]
fn every_activation_in_an_mlp() {
    use Activation::*;
    for activation in [Relu, SquaredRelu, Silu, ReGlu, SwiGlu] {
        let session = Session::new(3);
        let place = session.place(DType::F64, &Device::Cpu);
        let x = place.parameter("x", (16, 32), Init::Normal(1.0)).unwrap();
        let config = MlpConfig { hidden: 32, inner: 24, norm: NormKind::RmsNorm, activation, bias: Bias::With };
        let module: Box<dyn Module> = Box::new(LayerNormMlp::new(&place.child("m"), config).unwrap());
        session.apply(&recipe("high_precision")).unwrap();
        // Differences across the kink of a ReLU say nothing; with a step this small none is crossed.
        let h = if matches!(activation, Relu | ReGlu | SquaredRelu) { 1e-7 } else { 1e-4 };
        check(&Case { session, module, x }, h);
    }
}

/// candle's gradients of GELU have constants of six digits: each is off by less than 5·10⁻⁷, and the derivative by less than twice that,
/// since what they are multiplied with (x·sech² and x·e^(−x²/2)) is below 1. Truncation is below h² times a sixth of the third derivative,
/// which is below 4; rounding below 2⁻⁵⁰·5/h.
#[test]
fn gelu_within_the_digits_of_candle() {
    let points: Vec<f64> = (-500..=500).map(|i| f64::from(i) / 100.0).collect();
    let at = |points: Vec<f64>| Var::new(points.as_slice(), &Device::Cpu).unwrap();
    for activation in [Activation::Gelu, Activation::GeluErf] {
        let x = at(points.clone());
        let sum = activation.forward(&x).unwrap().sum_all().unwrap();
        let gradient = values(sum.backward().unwrap().get(&x).unwrap());
        let h = 1e-4;
        let moved = |by: f64| values(&activation.forward(&at(points.iter().map(|x| x + by).collect())).unwrap());
        for ((up, down), (gradient, x)) in moved(h).iter().zip(moved(-h)).zip(gradient.iter().zip(&points)) {
            let (slope, allowed) = ((up - down) / (2.0 * h), 1e-6 + h * h + 2f64.powi(-50) * 5.0 / h);
            assert!((slope - gradient).abs() < allowed, "{activation:?} at {x}: {slope}, {gradient}");
        }
    }
}

/// In a node of its own, with operands that its spec leaves as they are, a module has the gradients of candle's graph, bit for bit.
#[test]
fn nodes_have_the_gradients_of_the_graph() {
    for kind in KINDS.into_iter().filter(|kind| !kind.contains("layer") || kind.contains("layer norm")) {
        let plain = Case::with(kind, &recipe("high_precision"), 4).run();
        let node = Case::with(kind, &all("high-precision(f32)"), 4).run();
        assert_eq!(plain.y, node.y, "{kind}");
        for (name, gradient) in &plain.gradients {
            assert!(node.gradients[name] == *gradient, "{kind}: {name}");
        }
        assert_eq!(plain.gradients.len(), node.gradients.len());
    }
}
