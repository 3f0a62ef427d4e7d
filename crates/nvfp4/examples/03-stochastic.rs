//! Stochastic rounding: the mean of many roundings is the value itself, and every draw can be repeated.
//!
//! `cargo run -p nvfp4 --example 03-stochastic`

use nvfp4::{Generator, Options, Quantizer, Rounding, Side, TensorRef};

fn main() -> nvfp4::Result<()> {
    // In a block whose largest magnitude is 6, 0.2 lies between the codes 0 and 0.5.
    let mut x = vec![0.2f32; 16 * 1024];
    x.iter_mut().step_by(16).for_each(|x| *x = 6.0);
    let tensor = TensorRef::new(&x[..], &[1024, 16])?;

    let mean = |decoded: &[f32]| {
        let small: Vec<f32> = decoded.iter().copied().filter(|x| x.abs() < 1.0).collect();
        small.iter().sum::<f32>() / small.len() as f32
    };

    let nearest = Quantizer::default().quantize(&tensor)?;
    println!("nearest:    mean of the 0.2s is {:.4}", mean(&nearest.dequantize::<f32>(Side::Row)?));

    let stochastic = Quantizer::builder().rounding(Rounding::Stochastic).build()?;
    let mut generator = Generator::new(42);
    let state = generator.state();
    for _ in 0..3 {
        let options = Options { randomness: Some(generator.draw()?), ..Options::default() };
        let q = stochastic.quantize_with(&tensor, &options)?;
        println!("stochastic: mean of the 0.2s is {:.4}", mean(&q.dequantize::<f32>(Side::Row)?));
    }
    println!("{} offsets consumed", generator.consumed());

    let mut again = Generator::from_state(state)?;
    let options = Options { randomness: Some(again.draw()?), ..Options::default() };
    let first = stochastic.quantize_with(&tensor, &options)?;
    println!("restored:   mean of the 0.2s is {:.4}", mean(&first.dequantize::<f32>(Side::Row)?));
    Ok(())
}
