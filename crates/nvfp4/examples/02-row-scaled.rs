//! One global scale per row ("row-scaled", per token): what a single large row does to its neighbours.
//!
//! `cargo run -p nvfp4 --example 02-row-scaled`

use nvfp4::{GlobalScale, Quantizer, Side, TensorRef};

fn main() -> nvfp4::Result<()> {
    let (rows, cols) = (8, 256);
    // Ordinary rows, and one that is a million times larger.
    let scale = |row: usize| if row == 3 { 1e6 } else { 1.0 };
    let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.7).sin() * scale(i / cols)).collect();
    let tensor = TensorRef::new(&x[..], &[rows, cols])?;

    for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
        let q = Quantizer::builder().global_scale(global).build()?.quantize(&tensor)?;
        let decoded: Vec<f32> = q.dequantize(Side::Row)?;
        let lost = (0..cols).filter(|&c| decoded[c] == 0.0).count();
        let error: f32 = (0..cols).map(|c| (decoded[c] - x[c]).powi(2)).sum::<f32>().sqrt();
        let norm: f32 = x[..cols].iter().map(|x| x * x).sum::<f32>().sqrt();
        println!("{global:?}: {lost} of {cols} values of row 0 became zero, relative error {:.3}", error / norm);
    }
    Ok(())
}
