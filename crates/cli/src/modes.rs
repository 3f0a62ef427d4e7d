//! `nvfp4 modes`: quantizes a generated matrix in every mode and prints what it costs.

use crate::{json, normal, until_closed};
use anyhow::{Result, ensure};
use half::bf16;
use nvfp4::*;
use nvfp4_spec::matrix::{self, Matrix};
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::Instant;

/// The largest matrix; with its transformed and decoded copies it takes about 5 GB.
const MAX_ELEMENTS: usize = 1 << 28;

/// Quantize a generated matrix in every mode and print error, size and time.
///
/// The matrix is bf16, standard normal with a few large outliers, as activations are.
#[derive(clap::Args)]
pub struct Args {
    /// Rows of the matrix; a multiple of 16.
    #[arg(long, default_value_t = 1024)]
    rows: usize,
    /// Columns of the matrix.
    #[arg(long, default_value_t = 1024)]
    cols: usize,
    /// Seed of the generated values and of stochastic rounding.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON: {shape, seed, modes: [{mode, relerr, sqnr_db, bits_per_value, ms}]}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let Args { rows, cols, seed, json: as_json } = *args;
    ensure!(rows > 0 && cols > 0, "--rows and --cols must be at least 1");
    ensure!(rows.is_multiple_of(16), "--rows: the Hadamard transform needs a multiple of 16, got {rows}");
    ensure!(
        rows.checked_mul(cols).is_some_and(|n| n <= MAX_ELEMENTS),
        "--rows and --cols: expected at most {MAX_ELEMENTS} elements, got {rows} × {cols}"
    );
    let mut measured = Vec::new();
    match as_json {
        true => print_table(&mut std::io::sink(), rows, cols, seed, &mut measured)?,
        false => until_closed(print_table(&mut stdout().lock(), rows, cols, seed, &mut measured))?,
    }
    if as_json {
        json::print("modes", &json!({ "shape": [rows, cols], "seed": seed, "modes": measured }))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_table(out: &mut impl Write, rows: usize, cols: usize, seed: u64, measured: &mut Vec<Value>) -> Result<()> {
    let x = normal::with_outliers(rows, cols, seed)?;
    writeln!(out, "{rows} × {cols} bf16, standard normal with 1 outlier in 1000 (× 20), seed {seed}\n")?;
    writeln!(out, "{:<44} {:>8} {:>9} {:>10} {:>10}", "mode", "relerr", "SQNR dB", "bits/value", "time ms")?;
    for (name, builder, side) in modes() {
        let Measured { relative_error: relerr, bits, milliseconds } =
            measure(&x, rows, cols, seed, builder.build()?, side)?;
        let sqnr = -20.0 * relerr.log10();
        measured.push(json!({
            "mode": name, "relerr": relerr, "sqnr_db": sqnr, "bits_per_value": bits, "ms": milliseconds
        }));
        writeln!(out, "{name:<44} {relerr:>8.4} {sqnr:>9.2} {bits:>10.3} {milliseconds:>10.2}")?;
    }
    writeln!(
        out,
        "\nrelerr is the norm of the error over the norm of the values, SQNR the same in decibels; time is one quantization"
    )?;
    writeln!(out, "with the amax computed. The Hadamard rows are measured on the transformed values.")?;
    Ok(())
}

fn modes() -> Vec<(&'static str, QuantizerBuilder, Side)> {
    let plain = Quantizer::builder();
    let square = plain.tile(Tile::Square16);
    let column = plain.directions(Directions::Column);
    let four = |metric, error, bound| ScaleRule::FourOverSix { metric, error, bound };
    use {Bound::*, ErrorPath::*, Metric::*};
    vec![
        ("1×16, per tensor", plain, Side::Row),
        ("1×16, per row", plain.global_scale(GlobalScale::PerRow), Side::Row),
        ("1×16, column direction", column, Side::Column),
        ("16×16, per tensor", square, Side::Row),
        ("1×16, 4over6 MAE strict 256", plain.scale_rule(four(Mae, Strict, E256)), Side::Row),
        ("1×16, 4over6 MSE strict 256", plain.scale_rule(four(Mse, Strict, E256)), Side::Row),
        ("1×16, 4over6 MSE strict 448", plain.scale_rule(four(Mse, Strict, E448)), Side::Row),
        ("1×16, 4over6 MAE fast 256", plain.scale_rule(four(Mae, Fast, E256)), Side::Row),
        ("1×16, 4over6 MSE fast 256", plain.scale_rule(four(Mse, Fast, E256)), Side::Row),
        (
            "1×16, per row, 4over6 MSE strict 256",
            plain.global_scale(GlobalScale::PerRow).scale_rule(four(Mse, Strict, E256)),
            Side::Row,
        ),
        ("16×16, 4over6 MAE strict 256", square.scale_rule(four(Mae, Strict, E256)), Side::Row),
        ("16×16, 4over6 MSE strict 256", square.scale_rule(four(Mse, Strict, E256)), Side::Row),
        ("1×16, stochastic", plain.rounding(Rounding::Stochastic), Side::Row),
        ("1×16, Hadamard, column direction", column.transform(Transform::FixedSigns), Side::Column),
        (
            "1×16, Hadamard, stochastic, column direction",
            column.transform(Transform::FixedSigns).rounding(Rounding::Stochastic),
            Side::Column,
        ),
        ("1×16, ModelOpt's bytes", plain.profile(Profile::ModelOpt), Side::Row),
        ("1×16, llm-compressor's bytes", plain.profile(Profile::LlmCompressor), Side::Row),
        ("1×16, torchao's bytes", plain.profile(Profile::TorchAo), Side::Row),
    ]
}

struct Measured {
    relative_error: f64,
    bits: f64,
    milliseconds: f64,
}

fn measure(x: &[bf16], rows: usize, cols: usize, seed: u64, quantizer: Quantizer, side: Side) -> Result<Measured> {
    let tensor = TensorRef::new(x, &[rows, cols])?;
    let randomness = match quantizer.rounding() {
        Rounding::Stochastic => Some(Generator::new(seed).draw()?),
        Rounding::NearestEven => None,
    };
    let start = Instant::now();
    let q = quantizer.quantize_with(&tensor, &Options { randomness, ..Options::default() })?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;

    let direction = q.direction(side)?;
    let original = match side {
        Side::Row => Matrix::new(rows, cols, x)?,
        Side::Column => matrix::columns(&Matrix::new(rows, cols, x)?, direction.rotation())?,
    };
    let decoded: Vec<f32> = direction.dequantize()?;
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = &mut original.data().iter().zip(&decoded).map(|(&x, &y)| f64::from(x) - f64::from(y));
    let error = squares(differences);
    let norm = squares(&mut original.data().iter().map(|&x| f64::from(x)));
    Ok(Measured {
        relative_error: (error / norm).sqrt(),
        bits: 8.0 * q.byte_len() as f64 / (rows * cols) as f64,
        milliseconds,
    })
}
