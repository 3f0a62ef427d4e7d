//! Products of modules are what their operands decode to, multiplied exactly and scaled, within the derived bound.
//!
//! A linear layer is held against that product by product, under every preset; every other module is, bit for bit, made of linear layers,
//! norms, activations and attention.

use crate::cases::*;
use candle_core::{DType, Device, Module, Tensor};
use nvfp4::{Direction, Directions, Generator, Options, Product, QuantTensor, Rounding, Side, TensorRef};
use nvfp4_nn::*;
use nvfp4_recipe::{LinearSlot, Plan, Site, States};
use nvfp4_spec::gemm::{Accumulate, Interval, Operand, Sums};
use nvfp4_spec::{fp8, matrix};

/// What the oracle takes for a direction.
enum Held<'a> {
    Nvfp4(matrix::View<'a>),
    Fp8(fp8::View<'a>),
    Plain(matrix::Matrix),
}

impl<'a> Held<'a> {
    fn new(direction: &'a Direction) -> Self {
        match direction {
            Direction::Nvfp4(d) => Held::Nvfp4(matrix::View {
                rows: d.rows(),
                cols: d.cols(),
                codes: d.codes(),
                scales: d.scales(),
                stored: d.stored(),
                global: d.global(),
                unit: d.unit(),
            }),
            Direction::Fp8(d) => {
                // The oracle takes tiles as they lie in memory.
                let (rows, cols) = match d.tile() {
                    nvfp4::Fp8Tile::Column32 => (d.cols(), d.rows()),
                    _ => (d.rows(), d.cols()),
                };
                Held::Fp8(fp8::View {
                    rows,
                    cols,
                    format: d.code(),
                    tile: d.tile(),
                    codes: d.codes(),
                    scales: d.scales(),
                })
            }
            Direction::Plain(_) => {
                let values = direction.dequantize::<f32>().unwrap();
                Held::Plain(matrix::Matrix::new(direction.rows(), direction.cols(), &values).unwrap())
            }
        }
    }

    fn operand(&self) -> Operand<'_> {
        match self {
            Held::Nvfp4(view) => view.into(),
            Held::Fp8(view) => view.into(),
            Held::Plain(matrix) => matrix.into(),
        }
    }
}

fn check(a: &Direction, b: &Direction, bias: Option<&[f32]>, got: &[f64], what: &str) {
    let (a, b) = (Held::new(a), Held::new(b));
    let (a, b) = (a.operand(), b.operand());
    assert_eq!(got.len(), a.rows() * b.rows());
    let (sums, product) = (Sums::new(&a, &b, Accumulate::Exact), Product::<f32> { bias, ..Product::default() });
    for (at, got) in got.iter().enumerate() {
        let (i, j) = (at / b.rows(), at % b.rows());
        let interval = Interval::new((&a, i), (&b, j), &product, &sums);
        assert!(interval.holds(*got as f32), "{what} ({i}, {j}): {got} for {interval:?}");
    }
}

/// What the plan makes of a matrix, in both directions.
fn quantized(plan: &Plan, slot: LinearSlot, x: &[f32], shape: &[usize], generator: &mut Generator) -> QuantTensor {
    let (site, scales) = (Site::new("m", slot), States::new(plan).unwrap().scales());
    let spec = plan.spec(&site).unwrap();
    let quantizer = nvfp4::Quantizer::with_scales(spec, Directions::Both, |side| scales.get(&site, side)).unwrap();
    let randomness = (quantizer.rounding() == Rounding::Stochastic).then(|| generator.draw().unwrap());
    let x = TensorRef::new(x, shape).unwrap();
    quantizer.quantize_with(&x, &Options { randomness, ..Options::default() }).unwrap()
}

fn floats(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// test_nvfp4_linear_versus_reference, test_nvfp4_layernorm_linear_versus_reference, test_nvfp4_linear_row_scaled_versus_reference: all
/// three products, stochastic gradients included, of which the session's generator gives the random numbers in order.
#[test]
fn three_products_under_every_preset() {
    for preset in presets() {
        for kind in ["linear", "layer norm linear", "rms norm linear"] {
            let case = Case::with(kind, &recipe(&preset), 8);
            let plan = case.session.plan().unwrap();
            let parameters = case.session.parameters();
            let get = |name: &str| parameters.get(name).map(|var| var.as_detached_tensor());
            let x = case.x.var.as_detached_tensor();
            let x = match (get("m.layer_norm_weight"), get("m.layer_norm_bias")) {
                (Some(w), Some(b)) => candle_nn::ops::layer_norm_slow(&x, &w, &b, 1e-5).unwrap(),
                (Some(w), None) => candle_nn::ops::rms_norm_slow(&x, &w, 1e-5).unwrap(),
                _ => x,
            };
            let (y, loss) = case.loss();
            case.session.backward(&loss).unwrap();
            let (tokens, outputs) = (BATCH * TOKENS, 48);
            let mut generator = Generator::new(8);
            let x = quantized(&plan, LinearSlot::Input, &floats(&x), &[tokens, HIDDEN], &mut generator);
            let weight = get("m.weight").unwrap();
            let w = quantized(&plan, LinearSlot::Weight, &floats(&weight), &[outputs, HIDDEN], &mut generator);
            let dy = floats(&weights_like(&y));
            let dy = quantized(&plan, LinearSlot::GradOutput, &dy, &[tokens, outputs], &mut generator);

            let bias = get("m.bias").map(|bias| floats(&bias));
            let what = |product: &str| format!("{kind}, {preset}, {product}");
            let (row, col) = (Side::Row, Side::Column);
            check(x.direction(row).unwrap(), w.direction(row).unwrap(), bias.as_deref(), &values(&y), &what("fprop"));
            let found = case.session.gradients().unwrap();
            let dw = values(found.get(&parameters["m.weight"]).unwrap());
            check(dy.direction(col).unwrap(), x.direction(col).unwrap(), None, &dw, &what("wgrad"));
            if kind == "linear" {
                let dx = values(found.get(&case.x.var).unwrap());
                check(dy.direction(row).unwrap(), w.direction(col).unwrap(), None, &dx, &what("dgrad"));
            }
        }
    }
}

/// Parts with the parameters of a whole, in a session of their own.
fn copy(from: &Session, to: &Session, names: &[(&str, &str)]) {
    let (from, to) = (from.parameters(), to.parameters());
    for (whole, part) in names {
        to[*part].set(&from[*whole].as_detached_tensor().copy().unwrap()).unwrap();
    }
}

/// An MLP is a norm with a linear layer, an activation and a linear layer.
#[test]
fn an_mlp_is_its_parts() {
    for preset in presets() {
        for (norm, activation) in [(NormKind::LayerNorm, Activation::Gelu), (NormKind::RmsNorm, Activation::SwiGlu)] {
            let kind = if activation == Activation::Gelu { "gelu mlp" } else { "swiglu mlp" };
            let whole = Case::with(kind, &recipe(&preset), 9);
            let parts = Session::new(9);
            let place = parts.place(DType::F32, &Device::Cpu);
            let inner = 96 * activation.gates();
            let first = LayerNormLinear::new(&place.child("fc1"), norm, HIDDEN, inner, Bias::With).unwrap();
            let second = Linear::new(&place.child("fc2"), 96, HIDDEN, Bias::With).unwrap();
            parts.apply(&recipe(&preset)).unwrap();
            copy(
                &whole.session,
                &parts,
                &[
                    ("m.fc1.weight", "fc1.weight"),
                    ("m.fc1.bias", "fc1.bias"),
                    ("m.fc2.weight", "fc2.weight"),
                    ("m.fc2.bias", "fc2.bias"),
                ],
            );
            let (y, loss) = whole.loss();
            whole.session.backward(&loss).unwrap();
            let h = activation.forward(&first.forward(&whole.x.var).unwrap()).unwrap();
            let expected = second.forward(&h).unwrap();
            assert!(bits(&y) == bits(&expected), "{kind}, {preset}");
            // So is its backward pass.
            parts.backward(&expected.mul(&weights_like(&y)).unwrap().sum_all().unwrap()).unwrap();
            let (found, expected) = (whole.session.gradients().unwrap(), parts.gradients().unwrap());
            for (ours, theirs) in
                [("m.fc1.weight", "fc1.weight"), ("m.fc2.weight", "fc2.weight"), ("m.fc1.bias", "fc1.bias")]
            {
                let ours = found.get(&whole.session.parameters()[ours]).unwrap();
                let theirs = expected.get(&parts.parameters()[theirs]).unwrap();
                assert!(bits(ours) == bits(theirs), "{kind}, {preset}: {ours:?}");
            }
        }
    }
}
