//! `nvfp4 agreement`: how often the fast path of 4over6 picks the scale that the strict one picks.

use crate::device::Device;
use crate::table::{self, left, right};
use crate::{json, normal, until_closed};
use anyhow::Result;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values};
use nvfp4_spec::{BLOCK, Bound, ErrorPath, GlobalScale, Metric, Mode, Rounding, ScaleRule, Tile, area, e2m1, zeros};
use rayon::prelude::*;
use serde::Serialize;
use std::fmt;
use std::io::{Write, stdout};
use std::process::ExitCode;
use std::str::FromStr;

/// Count how often fast 4over6 picks the same E4M3 scale as strict 4over6.
///
/// A matrix of standard normal values is quantized by both paths, for every scaling (one amax per
/// tensor with 1×16 blocks or 16×16 tiles; one amax per row with 1×16 blocks), bound, element type
/// and error metric. A 16×16 tile counts as one scale. Percentages are rounded down, so 100 means
/// all.
#[derive(clap::Args)]
pub struct Args {
    /// Where to quantize: cpu, cuda or cuda:N.
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Rows and columns of the matrix. Default: 4096x4096 on the CPU, 98304x7168 on a GPU.
    #[arg(long, value_name = "ROWSxCOLS")]
    shape: Option<Shape>,
    /// Seed of the generated values.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON: {shape, rows, cols, seed, device, results: [{scaling, bound, type, metric,
    /// equal, total, percent}]}.
    #[arg(long)]
    json: bool,
}

/// The largest matrix: 8.6 GB.
const MAX_ELEMENTS: usize = 1 << 32;

#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    cols: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |n: &str| n.parse().ok().filter(|&n: &usize| n > 0);
        let shape =
            text.split_once('x').and_then(|(rows, cols)| Some(Shape { rows: number(rows)?, cols: number(cols)? }));
        let shape = shape.ok_or("expected ROWSxCOLS, both at least 1, for example 4096x7168")?;
        match shape.rows.checked_mul(shape.cols) {
            Some(n) if n <= MAX_ELEMENTS => Ok(shape),
            _ => Err(format!("expected at most {MAX_ELEMENTS} elements")),
        }
    }
}

#[derive(Serialize)]
struct Table {
    shape: [usize; 2],
    rows: usize,
    cols: usize,
    seed: u64,
    device: String,
    results: Vec<Cell>,
}

#[derive(Serialize)]
struct Cell {
    scaling: &'static str,
    bound: u32,
    r#type: &'static str,
    metric: &'static str,
    equal: usize,
    total: usize,
    percent: f64,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let default = match args.device {
        Device::Cpu => Shape { rows: 4096, cols: 4096 },
        Device::Cuda(_) => Shape { rows: 98304, cols: 7168 },
    };
    let Shape { rows, cols } = args.shape.unwrap_or(default);
    let engine = Engine::open(args.device)?;
    let table = Table {
        shape: [rows, cols],
        rows,
        cols,
        seed: args.seed,
        device: engine.to_string(),
        results: compare(&engine, rows, cols, args.seed)?,
    };
    match args.json {
        true => json::print("agreement", &table)?,
        false => until_closed(print(&mut stdout().lock(), &table))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What a row of the table is for.
const SCALINGS: [(&str, GlobalScale, Tile); 3] = [
    ("tensor 1-D", GlobalScale::PerTensor, Tile::Row16),
    ("tensor 2-D", GlobalScale::PerTensor, Tile::Square16),
    ("row 1-D", GlobalScale::PerRow, Tile::Row16),
];
const BOUNDS: [(u32, Bound); 2] = [(256, Bound::E256), (448, Bound::E448)];
/// What a column is for.
const TYPES: [&str; 2] = ["bf16", "f16"];
const METRICS: [(&str, Metric); 2] = [("MAE", Metric::Mae), ("MSE", Metric::Mse)];

/// The cells, a row of the table after the other within each type.
fn compare(engine: &Engine, rows: usize, cols: usize, seed: u64) -> Result<Vec<Cell>> {
    let steps = TYPES.len() * SCALINGS.len() * BOUNDS.len() * METRICS.len();
    // Drawn on standard error, and only where that is a terminal.
    let progress = ProgressBar::new(steps as u64).with_message("generating");
    progress.set_style(ProgressStyle::with_template("{bar:20} {pos}/{len}  {msg}")?);
    progress.tick();
    let mut cells = Vec::new();
    let scales = || zeros(area(rows, cols.div_ceil(BLOCK))?, rows, cols);
    let (mut strict, mut fast) = (scales()?, scales()?);
    for name in TYPES {
        progress.set_message(format!("{name} values"));
        let mut matrix = engine.matrix(name, rows, cols, seed)?;
        for (scaling, global, tile) in SCALINGS {
            for (bound, bound_rule) in BOUNDS {
                for (metric, metric_rule) in METRICS {
                    progress.set_message(format!("{name} {scaling} {bound} {metric}"));
                    for (error, scales) in [(ErrorPath::Strict, &mut strict), (ErrorPath::Fast, &mut fast)] {
                        let rule = ScaleRule::FourOverSix { metric: metric_rule, error, bound: bound_rule };
                        matrix(Mode { tile, global, rule, ..Mode::default() }, scales)?;
                    }
                    let (equal, total) = count_equal(&strict, &fast, cols.div_ceil(BLOCK), tile);
                    let percent = 100.0 * equal as f64 / total as f64;
                    cells.push(Cell { scaling, bound, r#type: name, metric, equal, total, percent });
                    progress.inc(1);
                }
            }
        }
    }
    progress.finish_and_clear();
    Ok(cells)
}

/// How many scales are equal, and how many there are; those of a tile, which has one for each of
/// its rows, count once.
fn count_equal(a: &[u8], b: &[u8], blocks_per_row: usize, tile: Tile) -> (usize, usize) {
    let every = match tile {
        Tile::Row16 => 1,
        Tile::Square16 => BLOCK,
    };
    let rows = a.par_chunks(blocks_per_row).zip(b.par_chunks(blocks_per_row)).step_by(every);
    rows.map(|(a, b)| (a.iter().zip(b).filter(|(a, b)| a == b).count(), a.len()))
        .reduce(|| (0, 0), |x, y| (x.0 + y.0, x.1 + y.1))
}

fn print(out: &mut impl Write, table: &Table) -> Result<()> {
    let Table { rows, cols, seed, device, results, .. } = table;
    writeln!(
        out,
        "{rows} × {cols} standard normal values, seed {seed}, {device}: scales that fast 4over6 picks as strict does\n"
    )?;
    let columns = || TYPES.iter().flat_map(|t| METRICS.map(|(m, _)| right(format!("{t} {m}"))));
    let mut shares = table::Table::new([left("scaling"), right("bound")].into_iter().chain(columns()));
    let mut counts =
        table::Table::new([left("scaling"), right("bound")].into_iter().chain(columns()).chain([right("total")]));
    for (scaling, ..) in SCALINGS {
        for (bound, _) in BOUNDS {
            let row: Vec<&Cell> = results.iter().filter(|c| (c.scaling, c.bound) == (scaling, bound)).collect();
            let about = || [scaling.to_string(), bound.to_string()].into_iter();
            shares.row(about().chain(row.iter().map(|c| format!("{} %", percent(c.equal, c.total)))));
            let total = row.first().map(|c| c.total.to_string());
            counts.row(about().chain(row.iter().map(|c| c.equal.to_string())).chain(total));
        }
    }
    shares.write(out)?;
    writeln!(out, "\nequal, of total")?;
    Ok(counts.write(out)?)
}

/// With four decimals, rounded down, so that 100 means all.
fn percent(equal: usize, total: usize) -> String {
    let parts = equal as u128 * 1_000_000 / (total as u128).max(1);
    format!("{}.{:04}", parts / 10_000, parts % 10_000)
}

/// What quantizes.
enum Engine {
    Cpu(Implementation),
    #[cfg(feature = "cuda")]
    Cuda(nvfp4_kernels::cuda::Device),
}

/// A matrix that can be quantized again and again: writes the scales of a mode.
type Quantize = Box<dyn FnMut(Mode, &mut [u8]) -> Result<()>>;

impl Engine {
    #[cfg(feature = "cuda")]
    fn open(device: Device) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Engine::Cpu(Implementation::best()),
            Device::Cuda(ordinal) => Engine::Cuda(crate::device::open(ordinal)?),
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn open(device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Engine::Cpu(Implementation::best())),
            Device::Cuda(_) => anyhow::bail!(crate::device::NOT_BUILT),
        }
    }

    /// Standard normal values of a type.
    fn matrix(&self, name: &str, rows: usize, cols: usize, seed: u64) -> Result<Quantize> {
        let values = match name {
            "bf16" => Matrix::Bf16(normal::standard(rows, cols, seed)?),
            _ => Matrix::F16(normal::standard(rows, cols, seed)?),
        };
        match *self {
            Engine::Cpu(implementation) => on_cpu(implementation, values, rows, cols),
            #[cfg(feature = "cuda")]
            Engine::Cuda(device) => on_gpu(device, values, rows, cols),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Engine::Cpu(implementation) => write!(f, "{implementation}"),
            #[cfg(feature = "cuda")]
            Engine::Cuda(device) => f.write_str(device.name()),
        }
    }
}

enum Matrix {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

fn on_cpu(implementation: Implementation, matrix: Matrix, rows: usize, cols: usize) -> Result<Quantize> {
    let mut codes = zeros(area(rows, e2m1::packed_len(cols))?, rows, cols)?;
    let mut amax = zeros(rows, rows, cols)?;
    Ok(Box::new(move |mode, scales| {
        let values = match &matrix {
            Matrix::Bf16(x) => Values::Bf16(x),
            Matrix::F16(x) => Values::F16(x),
        };
        let row = Direction {
            mode,
            rounding: Rounding::NearestEven,
            transform: None,
            layout: Layout::Linear,
            amax: Amax::Compute(&mut amax[..mode.global.count(rows)]),
            codes: &mut codes,
            scales,
        };
        Ok(quantize(implementation, &Input::new(values, rows, cols)?, Some(row), None)?)
    }))
}

/// The values are copied to the GPU once, and only scales come back.
#[cfg(feature = "cuda")]
fn on_gpu(device: nvfp4_kernels::cuda::Device, matrix: Matrix, rows: usize, cols: usize) -> Result<Quantize> {
    use nvfp4_kernels::cuda::{Buffer, Input, Stream, Values};
    use nvfp4_kernels::quantize::cuda::{Amax, Direction, Written, quantize};
    enum OnGpu {
        Bf16(Buffer<bf16>),
        F16(Buffer<f16>),
    }
    let stream = Stream::new(device)?;
    let matrix = match matrix {
        Matrix::Bf16(x) => OnGpu::Bf16(stream.to_device(&x)?),
        Matrix::F16(x) => OnGpu::F16(stream.to_device(&x)?),
    };
    let mut codes = device.alloc::<u8>(rows * e2m1::packed_len(cols))?;
    let mut on_gpu = device.alloc::<u8>(rows * cols.div_ceil(BLOCK))?;
    let mut amax = device.alloc::<f32>(rows)?;
    Ok(Box::new(move |mode, scales| {
        let values = match &matrix {
            OnGpu::Bf16(x) => Values::Bf16(x.slice()),
            OnGpu::F16(x) => Values::F16(x.slice()),
        };
        let row = Direction {
            mode,
            rounding: Rounding::NearestEven,
            transform: None,
            layout: Layout::Linear,
            amax: Amax::Compute(amax.slice_mut().range(0..mode.global.count(rows))),
            to: Written::Codes { codes: codes.slice_mut(), scales: on_gpu.slice_mut() },
        };
        quantize(&stream, &Input::new(values, rows, cols)?, Some(row), None)?;
        Ok(stream.download(on_gpu.slice(), scales)?)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_rounded_down() {
        assert_eq!(percent(3, 3), "100.0000");
        assert_eq!(percent(44_040_191, 44_040_192), "99.9999");
        assert_eq!(percent(0, 7), "0.0000");
        assert_eq!(percent(1, 3), "33.3333");
        assert_eq!(percent(999_001, 1_000_000), "99.9001");
    }

    #[test]
    fn a_tile_counts_once() {
        // 33 rows of 2 blocks: three rows of tiles, the last one cut short.
        let (a, mut b) = ([7; 66], [7; 66]);
        b[2 * 16 + 1] = 8;
        assert_eq!(count_equal(&a, &b, 2, Tile::Row16), (65, 66));
        assert_eq!(count_equal(&a, &b, 2, Tile::Square16), (5, 6));
    }
}
