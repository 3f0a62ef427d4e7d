//! Quantize a matrix, look at a block, decode it again, save and load it.
//!
//! `cargo run -p nvfp4 --example 01-quantize`

use nvfp4::{Quantizer, Side, TensorRef, load, save};

fn main() -> nvfp4::Result<()> {
    let (rows, cols) = (64, 128);
    let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();

    let q = Quantizer::default().quantize(&TensorRef::new(&x[..], &[rows, cols])?)?;

    let row = q.nvfp4(Side::Row)?;
    println!("first block: scale byte {:#04x}, packed codes {:02x?}", row.scales()[0], &row.codes()[..8]);
    println!("global scale: {:?}, meaning {:?}", row.stored(), row.unit());
    println!(
        "{} bytes for {} values: {:.2} bits each",
        q.byte_len(),
        x.len(),
        8.0 * q.byte_len() as f64 / x.len() as f64
    );

    let decoded: Vec<f32> = q.dequantize(Side::Row)?;
    for (x, y) in x.iter().zip(&decoded).take(4) {
        println!("{x:8.4} became {y:8.4}");
    }

    let path = std::env::temp_dir().join("nvfp4-example-01.safetensors");
    save(&path, [("x", &q)])?;
    assert_eq!(load(&path)?["x"], q);
    std::fs::remove_file(&path).ok();
    println!("saved and loaded without a changed byte");
    Ok(())
}
