//! Products of FP8 and MXFP8 on a GPU, beside bf16 products of cuBLAS.

use super::{TURNS, calls};
use crate::bench::gemm::{Operands, Sizes};
use crate::bench::median;
use crate::bench::style::Style;
use crate::table::{Table, right};
use anyhow::{Context, Result};
use half::bf16;
use nvfp4::cuda::{Device, Gpu, Input, Options, Product, QuantTensor, Values};
use nvfp4::{Accumulator, Directions, QuantSpec, Quantizer, Side};
use nvfp4_kernels::cuda::{Buffer, Recycled, Stream, time_interleaved};
use nvfp4_kernels::gemm::cuda::Cublas;
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;

#[derive(Serialize)]
struct Row {
    m: usize,
    n: usize,
    k: usize,
    operands: &'static str,
    accumulator: &'static str,
    us: f64,
    cublas_us: Option<f64>,
    /// How many times faster than bf16 by cuBLAS.
    speedup: Option<f64>,
}

/// What is timed.
#[derive(Clone, Copy)]
enum Work {
    Ours(Accumulator),
    Bf16,
}

struct Bench {
    gpu: Arc<Gpu>,
    x: Buffer<bf16>,
    w: Buffer<bf16>,
    a: QuantTensor,
    b: QuantTensor,
    out: Buffer<bf16>,
    shape: (usize, usize, usize),
    cublas: Option<Cublas>,
    scratch: Recycled,
}

impl Operands {
    /// The specs of activations and weights.
    fn specs(self) -> Result<[QuantSpec; 2]> {
        let text = match self {
            Operands::Nvfp4 => ["nvfp4", "nvfp4"],
            Operands::Fp8 => ["fp8", "fp8"],
            Operands::Fp8Block => ["fp8-block(1x128)", "fp8-block(128x128)"],
            Operands::Mxfp8 => ["mxfp8", "mxfp8"],
        };
        Ok([text[0].parse()?, text[1].parse()?])
    }

    /// The accumulators that differ.
    fn accumulators(self) -> &'static [(Accumulator, &'static str)] {
        const ALL: [(Accumulator, &str); 3] =
            [(Accumulator::Precise, "precise"), (Accumulator::Split, "split"), (Accumulator::Fast, "fast")];
        match self {
            Operands::Nvfp4 | Operands::Mxfp8 => &ALL[..1],
            Operands::Fp8Block => &ALL[..2],
            Operands::Fp8 => &ALL,
        }
    }
}

pub fn run(device: Device, sizes: &Sizes, operands: Operands, style: Style) -> Result<()> {
    device.make_current()?;
    let mut rows = Vec::new();
    for &m in &sizes.m {
        let cublas = Cublas::open(device).ok();
        let gpu = Arc::new(Gpu::with(Stream::new(device)?, Recycled::default()));
        let mut bench = Bench::new(gpu.clone(), (m, sizes.n, sizes.k), operands, cublas)?;
        rows.extend(bench.rows(gpu.stream(), operands)?);
    }
    if style == Style::Json {
        return crate::json::print("bench gemm", &rows);
    }
    let mut out = std::io::stdout().lock();
    let number = |x: Option<f64>, digits: usize| x.map_or("-".to_string(), |x| format!("{x:.digits$}"));
    writeln!(out, "{}: N = {}, K = {}, {}", operands.name(), sizes.n, sizes.k, device.name())?;
    let mut table = Table::new(["M", "accumulator", "µs", "cuBLAS bf16", "× bf16"].map(right));
    for Row { m, accumulator, us, cublas_us, speedup, .. } in &rows {
        let (cublas, speedup) = (number(*cublas_us, 1), number(*speedup, 2));
        table.row([m.to_string(), accumulator.to_string(), format!("{us:.1}"), cublas, speedup]);
    }
    match style {
        Style::Markdown => table.write_markdown(&mut out)?,
        Style::Text | Style::Json => table.write(&mut out)?,
    }
    Ok(())
}

impl Bench {
    fn new(
        gpu: Arc<Gpu>,
        (m, n, k): (usize, usize, usize),
        operands: Operands,
        cublas: Option<Cublas>,
    ) -> Result<Self> {
        let stream = gpu.stream();
        let x = stream.to_device(&crate::normal::standard::<bf16>(m, k, 1)?)?;
        let w = stream.to_device(&crate::normal::standard::<bf16>(n, k, 2)?)?;
        let [left, right] = operands.specs()?;
        let quantize = |values: &Buffer<bf16>, rows: usize, spec: QuantSpec| -> Result<QuantTensor> {
            let input = Input::new(Values::Bf16(values.slice()), rows, k)?;
            let quantizer = Quantizer::new(spec, Directions::Row)?;
            Ok(quantizer.observe_on(&gpu, &input, &Options::default())?.tensor)
        };
        let (a, b) = (quantize(&x, m, left)?, quantize(&w, n, right)?);
        let out = stream.device().alloc(m * n)?;
        Ok(Bench { x, w, a, b, out, shape: (m, n, k), cublas, scratch: Recycled::default(), gpu })
    }

    fn rows(&mut self, stream: &Stream, operands: Operands) -> Result<Vec<Row>> {
        let (m, n, k) = self.shape;
        let mut works: Vec<Work> = operands.accumulators().iter().map(|(sums, _)| Work::Ours(*sums)).collect();
        if self.cublas.is_some() {
            works.push(Work::Bf16);
        }
        let times = time_interleaved(stream, self, &works, TURNS, Bench::record)?;
        let times = times.into_iter().map(|times| median(times.into_iter().map(f64::from).collect()) / calls(m) as f64);
        let times: Vec<f64> = times.collect();
        let cublas_us = self.cublas.is_some().then(|| times[times.len() - 1]);
        let row = |((_, accumulator), us): (&(Accumulator, &'static str), f64)| Row {
            m,
            n,
            k,
            operands: operands.name(),
            accumulator,
            us,
            cublas_us,
            speedup: cublas_us.map(|cublas| cublas / us),
        };
        Ok(operands.accumulators().iter().zip(times).map(row).collect())
    }

    fn record(&mut self, stream: &Stream, work: Work) -> Result<()> {
        for _ in 0..calls(self.shape.0) {
            match work {
                Work::Ours(accumulator) => {
                    let product = Product { accumulator, ..Product::default() };
                    let (a, b) = (self.a.direction(Side::Row)?, self.b.direction(Side::Row)?);
                    self.gpu.matmul(a, b, &product, self.out.slice_mut())?;
                }
                Work::Bf16 => {
                    let cublas = self.cublas.as_ref().context("cuBLAS is missing")?;
                    let (x, w) = (self.x.slice(), self.w.slice());
                    cublas.matmul_bf16(stream, x, w, self.shape, self.out.slice_mut(), &self.scratch)?;
                }
            }
        }
        Ok(())
    }
}
