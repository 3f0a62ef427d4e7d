//! From a plan to tensors.

use nvfp4::{Direction, Directions, Options, Quantizer, Side, TensorRef};
use nvfp4_recipe::*;

const ROWS: usize = 160;
const COLS: usize = 144;

fn values(seed: usize) -> Vec<f32> {
    (0..ROWS * COLS).map(|i| ((i * 7919 + seed * 104729) % 2003) as f32 / 64.0 - 15.0).collect()
}

/// A plan gives every tensor its quantizer; delayed scaling takes its scales from the state and leaves its amaxes there.
#[test]
fn a_plan_drives_its_quantizers() {
    let mut model = Model::new();
    model.add(Module::linear("fc"));
    let plan =
        |recipe: &str| Plan::build(&model, &recipe.parse::<Recipe>().unwrap(), &Capabilities::software()).unwrap();
    let (input, weight) = (Site::new("fc", LinearSlot::Input), Site::new("fc", LinearSlot::Weight));
    let delayed = plan("delayed_scaling");
    let mut states = States::new(&delayed).unwrap();
    let mut scale = 1.0;
    for step in 0..3 {
        let x: Vec<f32> = values(step);
        let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
        let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
        let quantizer = delayed.quantizer(&input, &states.scales()).unwrap();
        assert_eq!(quantizer.directions(), Directions::Both);
        let observed = quantizer.observe(&x, &Options::default()).unwrap();
        assert_eq!((observed.row_amax, observed.col_amax), (Some(amax), Some(amax)));
        let Direction::Fp8(d) = observed.tensor.row().unwrap() else { panic!() };
        assert_eq!(d.scales().factor(0), 1.0 / scale, "step {step}: the scale from before");
        states.observe(&input, &observed).unwrap();
        states.update(Pass::Forward, &SingleProcess).unwrap();
        scale = states.scales().get(&input, Side::Row).unwrap();
        assert_eq!(scale, 448.0 / states.get(&input, Side::Row).unwrap().history().iter().fold(0f32, |m, &a| m.max(a)));
    }
    let x: Vec<f32> = values(9);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    for recipe in ["high_precision", "current_scaling", "float8_block_scaling", "mxfp8", "nvfp4"] {
        let plan = plan(recipe);
        let scales = States::new(&plan).unwrap().scales();
        let quantizer = plan.quantizer(&weight, &scales).unwrap();
        let q = quantizer.quantize(&x).unwrap();
        assert_eq!(
            q,
            Quantizer::new(plan.spec(&weight).unwrap().clone(), Directions::Both).unwrap().quantize(&x).unwrap()
        );
        let none = quantizer.observe(&x, &Options::default()).unwrap();
        assert_eq!((none.row_amax, none.col_amax), (None, None));
    }
    let absent = delayed.quantizer(&Site::new("fd", LinearSlot::Input), &states.scales()).unwrap_err().to_string();
    assert_eq!(absent, "fd:input: the plan has no such tensor");
}

/// Weights in squares beside activations in rows, as TransformerEngine's `enable_2d_quantization` has them.
#[test]
fn a_rule_file_puts_mxfp8_weights_in_squares() {
    let mut model = Model::new();
    model.add(Module::linear("fc"));
    let rules = "[[rule]]\nslot = \"weight\"\nspec = \"mxfp8(32x32)\"\n[default]\npreset = \"mxfp8\"";
    let recipe = Recipe::from_toml(rules).unwrap();
    let plan = Plan::build(&model, &recipe, &Capabilities::software()).unwrap();
    let spec = |slot| plan.spec(&Site::new("fc", slot)).unwrap().to_string();
    assert_eq!(spec(LinearSlot::Weight), "mxfp8(e4m3, 32x32)");
    assert_eq!((spec(LinearSlot::Input), spec(LinearSlot::GradOutput)), ("mxfp8(e4m3)".into(), "mxfp8(e4m3)".into()));
    let quantizer =
        plan.quantizer(&Site::new("fc", LinearSlot::Weight), &States::new(&plan).unwrap().scales()).unwrap();
    let x = values(4);
    let q = quantizer.quantize(&TensorRef::new(&x[..], &[ROWS, COLS]).unwrap()).unwrap();
    let [Direction::Fp8(row), Direction::Fp8(col)] = [Side::Row, Side::Column].map(|side| q.direction(side).unwrap())
    else {
        panic!("{q}")
    };
    assert_eq!(row.codes(), col.codes(), "one scale for a square, whichever way it is read");
}
