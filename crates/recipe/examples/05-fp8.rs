//! FP8, MXFP8 and high precision: any format by its spec, each direction in its own, and what may be multiplied.
//!
//! `cargo run -p nvfp4-recipe --example 05-fp8`

use nvfp4::{Directions, Options, Product, Quantizer, Side, TensorRef, matmul};
use nvfp4_recipe::{
    Capabilities, LinearSlot, Model, Module, Pass, Plan, QuantSpec, Recipe, SingleProcess, Site, States,
};

fn main() -> nvfp4_recipe::Result<()> {
    let (tokens, inputs, outputs) = (64, 256, 128);
    let wave = |n: usize, step: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * step).sin()).collect() };
    let (x, w) = (wave(tokens * inputs, 0.37), wave(outputs * inputs, 0.61));
    let (x, w) = (TensorRef::new(&x[..], &[tokens, inputs])?, TensorRef::new(&w[..], &[outputs, inputs])?);

    // One format after the other, for both operands.
    for text in ["high-precision", "fp8", "fp8-block(128x128)", "mxfp8", "nvfp4"] {
        let quantizer = Quantizer::new(text.parse::<QuantSpec>()?, Directions::Both)?;
        let (x, w) = (quantizer.quantize(&x)?, quantizer.quantize(&w)?);
        let y: Vec<f32> = x.matmul(&w)?;
        println!("{text:20} {:6} bytes of w, y = {:8.4?} …", w.byte_len(), &y[..4]);
    }

    // MXFP8 forward, NVFP4 backward: a format for each direction.
    let split = Quantizer::new("mxfp8 / nvfp4".parse::<QuantSpec>()?, Directions::Both)?;
    let (x_split, w_split) = (split.quantize(&x)?, split.quantize(&w)?);
    println!("{x_split}");
    let (row, col) = (w_split.direction(Side::Row)?, w_split.direction(Side::Column)?);
    let _: Vec<f32> = matmul(x_split.direction(Side::Row)?, row, &Product::default())?;
    println!("{}", matmul::<f32>(row, col, &Product::default()).unwrap_err());

    // Delayed scaling: the scale of a step comes from the steps before.
    let mut model = Model::new();
    model.add(Module::linear("fc"));
    let plan = Plan::build(&model, &"delayed_scaling".parse::<Recipe>()?, &Capabilities::software())?;
    let (mut states, input) = (States::new(&plan)?, Site::new("fc", LinearSlot::Input));
    for step in 0..3 {
        let observed = plan.quantizer(&input, &states.scales())?.observe(&x, &Options::default())?;
        println!("step {step}: scale {:?}, saw {:?}", states.scales().get(&input, Side::Row), observed.row_amax);
        states.observe(&input, &observed)?;
        states.update(Pass::Forward, &SingleProcess)?;
    }
    Ok(())
}
