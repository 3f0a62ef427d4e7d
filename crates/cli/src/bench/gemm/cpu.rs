//! Products on the CPU, beside the same product in binary32.

use super::{Format, Sizes};
use crate::bench::baseline::{F32, NOT_BUILT};
use crate::bench::median;
use crate::say::say;
use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_kernels::gemm::{Operand, Product, gemm};
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::gemm::{Accumulate, Interval, Sums};
use nvfp4_spec::matrix::{Matrix, View};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Bound, GlobalScale, Mode, Rounding};
use rayon::prelude::*;
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

#[derive(Serialize)]
struct Row {
    m: usize,
    n: usize,
    k: usize,
    /// Not measured without the feature `baseline`; the speedups then are not known either.
    f32_ms: Option<f64>,
    nvfp4_ms: f64,
    nvfp4_speedup: Option<f64>,
    nvfp4_of_floor: f64,
    weight_only_ms: f64,
    weight_only_speedup: Option<f64>,
    weight_only_of_floor: f64,
}

pub fn run(sizes: &Sizes, implementation: Implementation, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let json = format == Format::Json;
    if F32.is_none() {
        say(NOT_BUILT);
    }
    if !json {
        let threads = rayon::current_num_threads();
        writeln!(out, "N = {}, K = {}, {implementation}, threads: {threads}", sizes.n, sizes.k)?;
        writeln!(
            out,
            "{:>6} {:>9} {:>9} {:>8} {:>9} {:>12} {:>8} {:>9}",
            "M", "f32 ms", "NVFP4 ms", "× f32", "of floor", "weight-only", "× f32", "of floor"
        )?;
    }
    let weights = Quantized::new(sizes.n, sizes.k, 1)?;
    let mut rows = Vec::new();
    for &m in &sizes.m {
        let row = measure(implementation, m, &weights)?;
        if !json {
            let known =
                |value: Option<f64>, digits: usize| value.map_or("-".to_string(), |value| format!("{value:.digits$}"));
            writeln!(
                out,
                "{:>6} {:>9} {:>9.3} {:>8} {:>9.2} {:>12.3} {:>8} {:>9.2}",
                row.m,
                known(row.f32_ms, 3),
                row.nvfp4_ms,
                known(row.nvfp4_speedup, 2),
                row.nvfp4_of_floor,
                row.weight_only_ms,
                known(row.weight_only_speedup, 2),
                row.weight_only_of_floor
            )?;
        }
        rows.push(row);
    }
    if json {
        crate::json::print("bench gemm", &rows)?;
    }
    Ok(())
}

/// A matrix in bf16, in f32 and quantized.
struct Quantized {
    rows: usize,
    cols: usize,
    values: Vec<bf16>,
    wide: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: [f32; 1],
}

impl Quantized {
    fn new(rows: usize, cols: usize, seed: u64) -> Result<Self> {
        let values: Vec<bf16> = crate::normal::standard(rows, cols, seed)?;
        let wide = values.iter().map(|x| x.to_f32()).collect();
        let mut codes = vec![0; rows * cols.div_ceil(2)];
        let mut scales = vec![0; Layout::Linear.scale_len(rows, cols)?];
        let mut amax = [0.0];
        let row = Direction {
            mode: Mode::default(),
            rounding: Rounding::NearestEven,
            transform: None,
            layout: Layout::Linear,
            amax: Amax::Compute(&mut amax),
            codes: &mut codes,
            scales: &mut scales,
        };
        quantize(Implementation::best(), &Input::new(Values::Bf16(&values), rows, cols)?, Some(row), None)?;
        Ok(Quantized { rows, cols, values, wide, codes, scales, amax })
    }

    fn view(&self) -> View<'_> {
        View {
            rows: self.rows,
            cols: self.cols,
            codes: &self.codes,
            scales: &self.scales,
            stored: &self.amax,
            global: GlobalScale::PerTensor,
            unit: Unit::Amax(Bound::E448),
        }
    }

    fn input(&self) -> Result<Input<'_>> {
        Ok(Input::new(Values::Bf16(&self.values), self.rows, self.cols)?)
    }

    /// Bytes in NVFP4.
    fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len()
    }
}

fn measure(implementation: Implementation, m: usize, weights: &Quantized) -> Result<Row> {
    let x = Quantized::new(m, weights.cols, 2)?;
    let (n, k) = (weights.rows, weights.cols);
    check(implementation, &x, weights)?;
    let (a, b, plain) = (x.view(), weights.view(), x.input()?);
    let mut out = vec![0f32; m * n];
    let mut copied = vec![0u8; weights.bytes()];
    let (mut copies, mut times) = (Vec::new(), [const { Vec::new() }; 3]);
    let start = Instant::now();
    while copies.len() < 7 || (start.elapsed() < Duration::from_secs(2) && copies.len() < 51) {
        let time = |work: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
            let once = Instant::now();
            work()?;
            Ok(once.elapsed().as_secs_f64())
        };
        let product = Product::default();
        if let Some(multiply) = F32 {
            times[0].push(time(&mut || {
                multiply(&x.wide, &weights.wide, (m, n, k), &mut out);
                Ok(())
            })?);
        }
        times[1].push(time(&mut || Ok(gemm(implementation, &a, &b, &product, &mut out)?))?);
        times[2].push(time(&mut || Ok(gemm(implementation, &plain, &b, &product, &mut out)?))?);
        copies.push(time(&mut || {
            let parts = copied.par_chunks_mut(1 << 16).zip(weights.codes.par_chunks(1 << 16));
            parts.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
            Ok(())
        })?);
    }
    let [f32_times, nvfp4, weight_only] = times;
    let f32_time = F32.map(|_| median(f32_times));
    let [nvfp4, weight_only] = [nvfp4, weight_only].map(median);
    // Seconds per byte read and written.
    let copy = median(copies) / (2 * weights.codes.len()) as f64;
    let floor = |activations: usize| (weights.bytes() + activations + 4 * m * n) as f64 * copy;
    Ok(Row {
        m,
        n,
        k,
        f32_ms: f32_time.map(|time| time * 1e3),
        nvfp4_ms: nvfp4 * 1e3,
        nvfp4_speedup: f32_time.map(|time| time / nvfp4),
        nvfp4_of_floor: floor(x.bytes()) / nvfp4,
        weight_only_ms: weight_only * 1e3,
        weight_only_speedup: f32_time.map(|time| time / weight_only),
        weight_only_of_floor: floor(2 * x.values.len()) / weight_only,
    })
}

/// The first outputs against the rule and the bound.
fn check(implementation: Implementation, x: &Quantized, weights: &Quantized) -> Result<()> {
    let part = |q: &Quantized, most: usize| -> Result<Quantized> {
        let (rows, cols) = (q.rows.min(most), q.cols);
        let blocks = cols.div_ceil(16);
        Ok(Quantized {
            rows,
            cols,
            values: q.values[..rows * cols].to_vec(),
            wide: Vec::new(),
            codes: q.codes[..rows * cols.div_ceil(2)].to_vec(),
            scales: q.scales[..rows * blocks].to_vec(),
            amax: q.amax,
        })
    };
    let (x, weights) = (part(x, 7)?, part(weights, 40)?);
    let run = |implementation, a: Operand<'_>| -> Result<Vec<f32>> {
        let mut out = vec![f32::NAN; x.rows * weights.rows];
        gemm(implementation, a, &weights.view(), &Product::default(), &mut out)?;
        Ok(out)
    };
    let exact = |implementation| run(implementation, Operand::from(&x.view()));
    ensure!(exact(implementation)? == exact(Implementation::Scalar)?, "NVFP4 × NVFP4: the result is wrong");
    let matrix = Matrix::new(x.rows, x.cols, &x.values)?;
    let (a, b) = ((&matrix).into(), (&weights.view()).into());
    let sums = Sums::new(&a, &b, Accumulate::Exact);
    for (at, got) in run(implementation, (&x.input()?).into())?.into_iter().enumerate() {
        let places = ((&a, at / weights.rows), (&b, at % weights.rows));
        let interval = Interval::new::<f32>(places.0, places.1, &Product::default(), &sums);
        ensure!(interval.holds(got), "bf16 × NVFP4: {got} for {}", interval.exact);
    }
    Ok(())
}
