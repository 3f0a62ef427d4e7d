//! The three products of a linear layer y = x·wᵀ, each from the directions it needs.
//!
//! `cargo run -p nvfp4 --example 04-matmul`

use nvfp4::{Directions, Product, Quantizer, Side, TensorRef, Tile, matmul};

fn main() -> nvfp4::Result<()> {
    let (tokens, inputs, outputs) = (32, 64, 48);
    let wave = |n: usize, step: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * step).sin()).collect() };
    let (x, w, dy) = (wave(tokens * inputs, 0.37), wave(outputs * inputs, 0.61), wave(tokens * outputs, 0.83));

    // Weights in 16×16 tiles, so that both directions hold the same values; activations and gradients in 1×16.
    let both = Quantizer::builder().directions(Directions::Both);
    let x = both.build()?.quantize(&TensorRef::new(&x[..], &[tokens, inputs])?)?;
    let w = both.tile(Tile::Square16).build()?.quantize(&TensorRef::new(&w[..], &[outputs, inputs])?)?;
    let dy = both.build()?.quantize(&TensorRef::new(&dy[..], &[tokens, outputs])?)?;

    let (row, col) = (Side::Row, Side::Column);
    let bias = vec![0.5; outputs];
    let forward = Product { bias: Some(&bias), ..Product::default() };
    let y: Vec<f32> = matmul(x.direction(row)?, w.direction(row)?, &forward)?;
    let dx: Vec<f32> = matmul(dy.direction(row)?, w.direction(col)?, &Product::default())?;
    let dw: Vec<f32> = matmul(dy.direction(col)?, x.direction(col)?, &Product::default())?;
    println!("y  [{tokens}, {outputs}]: {:8.4?} …", &y[..4]);
    println!("dx [{tokens}, {inputs}]: {:8.4?} …", &dx[..4]);
    println!("dw [{outputs}, {inputs}]: {:8.4?} …", &dw[..4]);
    Ok(())
}
