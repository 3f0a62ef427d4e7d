//! Gradients in high precision against finite differences, in binary64.

use crate::cases::*;
use candle_core::{DType, Device, Module};
use nvfp4_nn::*;

/// The derivative along a direction that changes one parameter, by central differences at two step sizes.
///
/// With a step h the error is C·h² and what rounding does to two losses. The difference between h and h/2 is ¾ of C·h², so it bounds
/// the truncation at h/2, which is ¼. A loss is a sum of terms of magnitude `M` in all, each after fewer than 2000 roundings, so
/// two of them are off by at most 2·2000·2⁻⁵³·M.
fn check(case: &Case, h: f64, constants: f64) {
    let (_, loss) = case.loss();
    case.session.backward(&loss).unwrap();
    let gradients = case.session.gradients().unwrap();
    case.session.drop_gradients();
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
        let terms = values(&gradient.mul(&direction).unwrap());
        let exact: f64 = terms.iter().sum();
        let size: f64 = terms.iter().map(|x| x.abs()).sum();
        let rounding = 2.0 * 2000.0 * 2f64.powi(-53) * magnitude / h;
        let allowed = (coarse - fine).abs() + rounding + constants * size;
        assert!((fine - exact).abs() <= allowed, "{name}: {fine} by differences, {exact} by the graph, ±{allowed}");
    }
}

/// candle's gradient of GELU has constants of six digits, each off by less than 10⁻⁶ of itself, of which a derivative has two.
const GELU: f64 = 2e-6;

#[test]
fn every_module() {
    for kind in KINDS {
        let case = Case::new(kind, DType::F64, 11);
        case.session.apply(&recipe("high_precision")).unwrap();
        println!("{kind}");
        check(&case, 1e-4, if kind.contains("gpt") || kind.contains("gelu") { 20.0 * GELU } else { 0.0 });
    }
}

#[test]
fn every_activation() {
    use Activation::*;
    for activation in [Gelu, GeluErf, Relu, SquaredRelu, Silu, GeGlu, ReGlu, SwiGlu] {
        let session = Session::new(3);
        let place = session.place(DType::F64, &Device::Cpu);
        let x = place.parameter("x", (16, 32), Init::Normal(1.0)).unwrap();
        let config = MlpConfig { hidden: 32, inner: 24, norm: NormKind::RmsNorm, activation, bias: Bias::With };
        let module: Box<dyn Module> = Box::new(LayerNormMlp::new(&place.child("m"), config).unwrap());
        session.apply(&recipe("high_precision")).unwrap();
        // Differences across the kink of a ReLU say nothing; with a step this small none is crossed.
        let h = if matches!(activation, Relu | ReGlu | SquaredRelu) { 1e-7 } else { 1e-4 };
        let constants = if matches!(activation, Gelu | GeluErf | GeGlu) { 20.0 * GELU } else { 0.0 };
        check(&Case { session, module, x }, h, constants);
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
