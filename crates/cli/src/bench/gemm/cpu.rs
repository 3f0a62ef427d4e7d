//! Products on the CPU, beside the same product in binary32.

use super::Sizes;
use crate::bench::baseline::{F32, NOT_BUILT};
use crate::bench::median;
use crate::bench::style::{Columns, Style};
use crate::say::say;
use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_kernels::fp8::quantize as fp8_quantize;
use nvfp4_kernels::gemm::{Operand, Product, gemm, gemm_prepared, prepare};
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::fp8::{self, ScaleVec, Scales, Scaling, Side};
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
    /// Both sides in MXFP8, or in FP8 with a scale per tensor.
    mxfp8_ms: f64,
    mxfp8_speedup: Option<f64>,
    fp8_ms: f64,
    fp8_speedup: Option<f64>,
    /// The time that a copy takes to read and write as many bytes as NVFP4 weights have.
    weights_floor_ms: f64,
}

pub fn run(sizes: &Sizes, implementation: Implementation, style: Style) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let columns = [
        ("M", 6),
        ("f32 ms", 9),
        ("NVFP4 ms", 9),
        ("× f32", 8),
        ("of floor", 9),
        ("weight-only", 12),
        ("× f32", 8),
        ("of floor", 9),
        ("MXFP8 ms", 9),
        ("× f32", 8),
        ("FP8 ms", 9),
        ("× f32", 8),
    ];
    let table = Columns { style, columns: &columns };
    if F32.is_none() {
        say(NOT_BUILT);
    }
    if style != Style::Json {
        let threads = rayon::current_num_threads();
        writeln!(out, "N = {}, K = {}, {implementation}, threads: {threads}", sizes.n, sizes.k)?;
    }
    let weights = Weights::new(implementation, sizes.n, sizes.k)?;
    let copy = copy_seconds_per_byte();
    if style != Style::Json {
        let floor = weights.nvfp4[0].bytes() as f64 * copy;
        writeln!(
            out,
            "copy: {:.1} GB/s read and written, {:.3} ms for the bytes of NVFP4 weights; sets of weights: {}",
            1e-9 / copy,
            floor * 1e3,
            weights.nvfp4.len()
        )?;
        table.headings(&mut out)?;
    }
    let mut rows = Vec::new();
    for &m in &sizes.m {
        let row = measure(implementation, m, &weights, copy)?;
        table.row(&mut out, &row.cells())?;
        rows.push(row);
    }
    if style == Style::Json {
        crate::json::print("bench gemm", &rows)?;
    }
    Ok(())
}

impl Row {
    /// What the table shows.
    fn cells(&self) -> [String; 12] {
        let known =
            |value: Option<f64>, digits: usize| value.map_or("-".to_string(), |value| format!("{value:.digits$}"));
        [
            self.m.to_string(),
            known(self.f32_ms, 3),
            format!("{:.3}", self.nvfp4_ms),
            known(self.nvfp4_speedup, 2),
            format!("{:.2}", self.nvfp4_of_floor),
            format!("{:.3}", self.weight_only_ms),
            known(self.weight_only_speedup, 2),
            format!("{:.2}", self.weight_only_of_floor),
            format!("{:.3}", self.mxfp8_ms),
            known(self.mxfp8_speedup, 2),
            format!("{:.3}", self.fp8_ms),
            known(self.fp8_speedup, 2),
        ]
    }
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

/// Weights in every format. Those in NVFP4 are there several times, so that a product does not find
/// them in cache.
struct Weights {
    nvfp4: Vec<Quantized>,
    /// Those, prepared, where the implementation has an order of its own.
    prepared: Vec<Option<Vec<u8>>>,
    mxfp8: Fp8,
    fp8: Fp8,
}

impl Weights {
    /// More than the last cache of most CPUs.
    const ENOUGH: usize = 64 << 20;
    const MOST_SETS: usize = 16;

    fn new(implementation: Implementation, rows: usize, cols: usize) -> Result<Self> {
        let first = Quantized::new(rows, cols, 1)?;
        let (mxfp8, fp8) = (Fp8::new(&first, Scaling::Mx)?, Fp8::new(&first, ONE_SCALE)?);
        let sets = Self::ENOUGH.div_ceil(first.bytes()).clamp(1, Self::MOST_SETS);
        let again = |_| Quantized {
            values: Vec::new(),
            wide: Vec::new(),
            codes: first.codes.clone(),
            scales: first.scales.clone(),
            ..first
        };
        let others: Vec<Quantized> = (1..sets).map(again).collect();
        let nvfp4: Vec<Quantized> = std::iter::once(first).chain(others).collect();
        let prepared = nvfp4.iter().map(|q| prepare(implementation, &q.view())).collect::<Result<_, _>>()?;
        Ok(Weights { nvfp4, prepared, mxfp8, fp8 })
    }
}

/// A scale per tensor, of data whose largest magnitude is about 6.
const ONE_SCALE: Scaling = Scaling::Tensor { scale: 64.0 };

/// A matrix in FP8.
struct Fp8 {
    mode: fp8::Mode,
    shape: (usize, usize),
    codes: Vec<u8>,
    scales: ScaleVec,
}

impl Fp8 {
    fn new(x: &Quantized, scaling: Scaling) -> Result<Self> {
        let mode = fp8::Mode { format: fp8::Format::E4m3, scaling };
        let count = mode.tile(Side::Row).scale_count(x.rows, x.cols)?;
        let mut codes = vec![0; x.values.len()];
        let mut scales = match scaling.is_mx() {
            true => Scales::E8m0(vec![0; count]),
            false => Scales::F32(vec![0.0; count]),
        };
        let to = match &mut scales {
            Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
            Scales::F32(scales) => Scales::F32(&mut scales[..]),
        };
        let row = fp8_quantize::Direction { codes: &mut codes, scales: to };
        let outputs = fp8_quantize::Outputs { row: Some(row), ..Default::default() };
        fp8_quantize::quantize(Implementation::best(), &x.input()?, &mode, outputs)?;
        Ok(Fp8 { mode, shape: (x.rows, x.cols), codes, scales })
    }

    fn view(&self) -> fp8::View<'_> {
        let (rows, cols) = self.shape;
        let (format, tile) = (self.mode.format, self.mode.tile(Side::Row));
        fp8::View { rows, cols, codes: &self.codes, scales: self.scales.view(), format, tile }
    }
}

/// Seconds per byte that a copy reads and writes, beyond every cache.
fn copy_seconds_per_byte() -> f64 {
    let from = vec![1u8; Weights::ENOUGH];
    let mut to = vec![0u8; from.len()];
    let once = |_| {
        let start = Instant::now();
        to.par_chunks_mut(1 << 16).zip(from.par_chunks(1 << 16)).for_each(|(to, from)| to.copy_from_slice(from));
        start.elapsed().as_secs_f64()
    };
    median((0..11).map(once).collect()) / (2 * from.len()) as f64
}

fn measure(implementation: Implementation, m: usize, all: &Weights, copy: f64) -> Result<Row> {
    let weights = &all.nvfp4[0];
    let x = Quantized::new(m, weights.cols, 2)?;
    let (n, k) = (weights.rows, weights.cols);
    check(implementation, &x, weights)?;
    let (a, plain) = (x.view(), x.input()?);
    let (mxfp8, fp8) = (Fp8::new(&x, Scaling::Mx)?, Fp8::new(&x, ONE_SCALE)?);
    let mut out = vec![0f32; m * n];
    let mut times = [const { Vec::new() }; 5];
    let start = Instant::now();
    while times[1].len() < 7 || (start.elapsed() < Duration::from_secs(2) && times[1].len() < 51) {
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
        let set = |at: usize| (all.nvfp4[at % all.nvfp4.len()].view(), all.prepared[at % all.nvfp4.len()].as_deref());
        let (first, second) = (set(2 * times[1].len()), set(2 * times[1].len() + 1));
        let mut of = |x: Operand<'_>, (w, prepared): &(View<'_>, Option<&[u8]>)| {
            time(&mut || Ok(gemm_prepared(implementation, x, w, *prepared, &product, &mut out)?))
        };
        times[1].push(of((&a).into(), &first)?);
        times[2].push(of((&plain).into(), &second)?);
        times[3].push(time(&mut || Ok(gemm(implementation, &mxfp8.view(), &all.mxfp8.view(), &product, &mut out)?))?);
        times[4].push(time(&mut || Ok(gemm(implementation, &fp8.view(), &all.fp8.view(), &product, &mut out)?))?);
    }
    let [f32_times, nvfp4, weight_only, mxfp8, fp8] = times;
    let f32_time = F32.map(|_| median(f32_times));
    let [nvfp4, weight_only, mxfp8, fp8] = [nvfp4, weight_only, mxfp8, fp8].map(median);
    let floor = |activations: usize| (weights.bytes() + activations + 4 * m * n) as f64 * copy;
    let speedup = |ours: f64| f32_time.map(|time| time / ours);
    Ok(Row {
        m,
        n,
        k,
        f32_ms: f32_time.map(|time| time * 1e3),
        nvfp4_ms: nvfp4 * 1e3,
        nvfp4_speedup: speedup(nvfp4),
        nvfp4_of_floor: floor(x.bytes()) / nvfp4,
        weight_only_ms: weight_only * 1e3,
        weight_only_speedup: speedup(weight_only),
        weight_only_of_floor: floor(2 * x.values.len()) / weight_only,
        mxfp8_ms: mxfp8 * 1e3,
        mxfp8_speedup: speedup(mxfp8),
        fp8_ms: fp8 * 1e3,
        fp8_speedup: speedup(fp8),
        weights_floor_ms: weights.bytes() as f64 * copy * 1e3,
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
        let prepared = prepare(implementation, &weights.view())?;
        gemm_prepared(implementation, a, &weights.view(), prepared.as_deref(), &Product::default(), &mut out)?;
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
