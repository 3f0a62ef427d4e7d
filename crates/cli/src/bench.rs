//! `nvfp4 bench`: every operation as a multiple of a memory copy of its input, measured in the same run.

use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values, amax, dequantize};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::{self, View};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::{Random, Stream};
use nvfp4_spec::{Bound, Edge, Element, ErrorPath, GlobalScale, Metric, Mode, Rounding, ScaleRule, Tile, e2m1};
use rayon::prelude::*;
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Measure every operation against a memory copy of its input.
///
/// Operation and copy are timed in turns, on the same threads; printed are medians: milliseconds, GB of the bf16 matrix per second
/// (what is read, or for dequantize what is restored), and the multiple of the copy of that matrix. Each operation's result is first checked against the rules on part of the input.
#[derive(clap::Args)]
pub struct Args {
    /// Rows and columns of the bf16 matrix.
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// Only operations whose name contains this text.
    #[arg(long, default_value = "")]
    filter: String,
    /// Threads to use. Default: one per core.
    #[arg(long)]
    threads: Option<usize>,
    /// Implementation: scalar or avx2. Default: the fastest.
    #[arg(long)]
    implementation: Option<Implementation>,
    /// Print JSON: an array of {name, ms, gbps, copies}.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    ms: f64,
    gbps: f64,
    copies: f64,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    ensure!(
        args.size > 0 && args.size.is_multiple_of(16) && args.size <= 1 << 15,
        "--size: expected a multiple of 16 up to 32768, got {}",
        args.size
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(args.threads.unwrap_or(0)).build()?;
    crate::until_closed(pool.install(|| {
        let implementation = args.implementation.unwrap_or_else(Implementation::best);
        let operations: Vec<&Operation> = OPERATIONS.iter().filter(|o| o.name.contains(&args.filter)).collect();
        ensure!(!operations.is_empty(), "--filter: no operation's name contains '{}'", args.filter);
        let mut out = std::io::stdout().lock();
        if !args.json {
            let threads = match rayon::current_num_threads() {
                1 => "1 thread".to_string(),
                n => format!("{n} threads"),
            };
            writeln!(out, "{0} × {0} bf16, {implementation}, {threads}", args.size)?;
            writeln!(out, "{:<36} {:>9} {:>9} {:>8}", "operation", "ms", "GB/s", "copies")?;
        }
        let mut bench = Bench::new(args.size, implementation);
        let mut rows = Vec::new();
        for operation in operations {
            bench.check(operation).with_context(|| format!("{}: the result is wrong", operation.name))?;
            let row = bench.time(operation)?;
            if !args.json {
                writeln!(out, "{:<36} {:>9.3} {:>9.2} {:>8.2}", row.name, row.ms, row.gbps, row.copies)?;
            }
            rows.push(row);
        }
        if args.json {
            writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        }
        Ok(())
    }))?;
    Ok(ExitCode::SUCCESS)
}

struct Operation {
    name: &'static str,
    kind: Kind,
}

enum Kind {
    Amax,
    Quantize(Settings),
    DequantizeBf16,
    DequantizeF32,
}

struct Settings {
    mode: Mode,
    amax: Source,
    row: bool,
    col: bool,
    transform: Option<Signs>,
    stochastic: bool,
}

#[derive(PartialEq)]
enum Source {
    Given,
    Computed,
}

const fn mode(tile: Tile, rule: ScaleRule) -> Mode {
    Mode {
        tile,
        global: GlobalScale::PerTensor,
        rule,
        edge: Edge::Kernel,
        profile: nvfp4_spec::Profile::TransformerEngine,
    }
}

const fn rows_of(mode: Mode) -> Settings {
    Settings { mode, amax: Source::Computed, row: true, col: false, transform: None, stochastic: false }
}

const fn four_over_six(name: &'static str, tile: Tile, metric: Metric, error: ErrorPath) -> Operation {
    let rule = ScaleRule::FourOverSix { metric, error, bound: Bound::E256 };
    Operation { name, kind: Kind::Quantize(rows_of(mode(tile, rule))) }
}

const PLAIN: Mode = mode(Tile::Row16, ScaleRule::Six);

const OPERATIONS: [Operation; 18] = {
    use {ErrorPath::*, Kind::*, Metric::*, Tile::*};
    [
        Operation { name: "amax", kind: Amax },
        Operation {
            name: "quantize 1x16 amax-given",
            kind: Quantize(Settings { amax: Source::Given, ..rows_of(PLAIN) }),
        },
        Operation { name: "quantize 1x16", kind: Quantize(rows_of(PLAIN)) },
        Operation {
            name: "quantize 1x16 row-scaled",
            kind: Quantize(rows_of(Mode { global: GlobalScale::PerRow, ..PLAIN })),
        },
        Operation { name: "quantize 16x16", kind: Quantize(rows_of(mode(Square16, ScaleRule::Six))) },
        Operation { name: "quantize 1x16 both", kind: Quantize(Settings { col: true, ..rows_of(PLAIN) }) },
        four_over_six("quantize 1x16 4over6-mae-strict", Row16, Mae, Strict),
        four_over_six("quantize 1x16 4over6-mae-fast", Row16, Mae, Fast),
        four_over_six("quantize 1x16 4over6-mse-strict", Row16, Mse, Strict),
        four_over_six("quantize 1x16 4over6-mse-fast", Row16, Mse, Fast),
        four_over_six("quantize 16x16 4over6-mae-strict", Square16, Mae, Strict),
        four_over_six("quantize 16x16 4over6-mae-fast", Square16, Mae, Fast),
        four_over_six("quantize 16x16 4over6-mse-strict", Square16, Mse, Strict),
        four_over_six("quantize 16x16 4over6-mse-fast", Square16, Mse, Fast),
        Operation { name: "quantize 1x16 stochastic", kind: Quantize(Settings { stochastic: true, ..rows_of(PLAIN) }) },
        Operation {
            name: "quantize 1x16 hadamard-column",
            kind: Quantize(Settings { row: false, col: true, transform: Some(Signs::FIXED), ..rows_of(PLAIN) }),
        },
        Operation { name: "dequantize bf16", kind: DequantizeBf16 },
        Operation { name: "dequantize f32", kind: DequantizeF32 },
    ]
};

/// The input, its copy's destination, and outputs large enough for every operation.
struct Bench {
    size: usize,
    implementation: Implementation,
    x: Vec<bf16>,
    /// The amax of `x`, for operations that are given it.
    amax: [f32; 1],
    copy: Vec<bf16>,
    row: Buffers,
    col: Buffers,
    decoded: Vec<f32>,
    decoded_bf16: Vec<bf16>,
}

struct Buffers {
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Vec<f32>,
}

impl Buffers {
    fn new(rows: usize, cols: usize) -> Self {
        // A pattern, so that pages exist and a byte that is not written shows.
        Buffers {
            codes: vec![0xA5; rows * e2m1::packed_len(cols)],
            scales: vec![0xA5; rows * cols.div_ceil(16)],
            amax: vec![f32::NAN; rows],
        }
    }

    fn direction<'a>(&'a mut self, settings: &Settings, amax: &'a [f32], column: bool) -> Direction<'a> {
        let stream = if column { Stream::column(1, 2) } else { Stream::row(1, 2) };
        let count = settings.mode.global.count(self.amax.len());
        Direction {
            mode: settings.mode,
            rounding: match settings.stochastic {
                true => Rounding::Stochastic(Random::Stream(stream)),
                false => Rounding::NearestEven,
            },
            transform: settings.transform.filter(|_| column),
            layout: Layout::Linear,
            amax: match settings.amax {
                Source::Given => Amax::Given(amax),
                Source::Computed => Amax::Compute(&mut self.amax[..count]),
            },
            codes: &mut self.codes,
            scales: &mut self.scales,
        }
    }

    fn view<'a>(&'a self, rows: usize, cols: usize, stored: &'a [f32]) -> View<'a> {
        let (codes, scales) = (&self.codes[..rows * cols / 2], &self.scales[..rows * cols / 16]);
        View { rows, cols, codes, scales, stored, global: GlobalScale::PerTensor, unit: Unit::Amax(Bound::E448) }
    }
}

impl Bench {
    fn new(size: usize, implementation: Implementation) -> Self {
        let x = crate::demo::generate(size, size, 1);
        Bench {
            size,
            implementation,
            amax: [x.iter().fold(0.0, |m, x| x.to_f32().abs().max(m))],
            copy: x.clone(),
            x,
            row: Buffers::new(size, size),
            col: Buffers::new(size, size),
            decoded: Vec::new(),
            decoded_bf16: Vec::new(),
        }
    }

    /// Runs an operation on the first rows of the input and compares with the scalar implementation, which is `spec`.
    fn check(&mut self, operation: &Operation) -> Result<()> {
        // More than one panel of the column direction.
        let (rows, cols) = (self.size.min(272), self.size);
        let x = &self.x[..rows * cols];
        let input = Input::new(Values::Bf16(x), rows, cols)?;
        match &operation.kind {
            Kind::Amax => {
                let mut found = [0.0; 2];
                for (value, implementation) in found.iter_mut().zip([self.implementation, Implementation::Scalar]) {
                    let wanted = amax::Wanted { tensor: Some(value), ..Default::default() };
                    amax::amax(implementation, &input, Edge::Kernel, wanted)?;
                }
                ensure!(found[0] == found[1], "amax {} instead of {}", found[0], found[1]);
            }
            Kind::Quantize(settings) => {
                let given = self.amax;
                let run = |implementation| -> Result<[Buffers; 2]> {
                    let (mut row, mut col) = (Buffers::new(rows, cols), Buffers::new(cols, rows));
                    let row_target = settings.row.then(|| row.direction(settings, &given, false));
                    let col_target = settings.col.then(|| col.direction(settings, &given, true));
                    quantize(implementation, &input, row_target, col_target)?;
                    Ok([row, col])
                };
                for (got, expected) in run(self.implementation)?.iter().zip(run(Implementation::Scalar)?) {
                    ensure!(got.codes == expected.codes, "codes differ");
                    ensure!(got.scales == expected.scales, "scales differ");
                    let bits = |amax: &[f32]| amax.iter().map(|a| a.to_bits()).collect::<Vec<_>>();
                    ensure!(bits(&got.amax) == bits(&expected.amax), "amaxes differ");
                }
            }
            Kind::DequantizeBf16 => self.check_decoded::<bf16>(rows, cols)?,
            Kind::DequantizeF32 => self.check_decoded::<f32>(rows, cols)?,
        }
        Ok(())
    }

    fn check_decoded<T: Element>(&mut self, rows: usize, cols: usize) -> Result<()> {
        self.quantize_all()?;
        let stored = [self.row.amax[0]];
        let view = self.row.view(rows, cols, &stored);
        let mut got = vec![T::default(); rows * cols];
        dequantize::dequantize(self.implementation, &view, &mut got)?;
        let expected: Vec<T> = matrix::dequantize(&view)?;
        ensure!(got == expected, "values differ");
        Ok(())
    }

    /// Leaves the quantized input in the row buffers, for decoding.
    fn quantize_all(&mut self) -> Result<()> {
        let input = Input::new(Values::Bf16(&self.x), self.size, self.size)?;
        let row = self.row.direction(&rows_of(PLAIN), &[], false);
        Ok(quantize(self.implementation, &input, Some(row), None)?)
    }

    fn time(&mut self, operation: &Operation) -> Result<Row> {
        match operation.kind {
            Kind::DequantizeBf16 => self.decoded_bf16.resize(self.x.len(), bf16::ONE),
            Kind::DequantizeF32 => self.decoded.resize(self.x.len(), 1.0),
            _ => {}
        }
        let given = self.amax;
        let (mut copies, mut times) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while times.len() < 7 || (start.elapsed() < Duration::from_millis(1500) && times.len() < 101) {
            copies.push(self.copy());
            let once = Instant::now();
            self.once(operation, &given)?;
            times.push(once.elapsed().as_secs_f64());
        }
        let (copy, time) = (median(copies), median(times));
        let gigabytes = (2 * self.x.len()) as f64 / 1e9;
        Ok(Row { name: operation.name, ms: time * 1e3, gbps: gigabytes / time, copies: time / copy })
    }

    fn once(&mut self, operation: &Operation, given: &[f32]) -> Result<()> {
        let input = Input::new(Values::Bf16(&self.x), self.size, self.size)?;
        match &operation.kind {
            Kind::Amax => {
                let wanted = amax::Wanted { tensor: Some(&mut self.row.amax[0]), ..Default::default() };
                amax::amax(self.implementation, &input, Edge::Kernel, wanted)?;
            }
            Kind::Quantize(settings) => {
                let row = settings.row.then(|| self.row.direction(settings, given, false));
                let col = settings.col.then(|| self.col.direction(settings, given, true));
                quantize(self.implementation, &input, row, col)?;
            }
            Kind::DequantizeBf16 => {
                let view = self.row.view(self.size, self.size, given);
                dequantize::dequantize(self.implementation, &view, &mut self.decoded_bf16)?;
            }
            Kind::DequantizeF32 => {
                let view = self.row.view(self.size, self.size, given);
                dequantize::dequantize(self.implementation, &view, &mut self.decoded)?;
            }
        }
        Ok(())
    }

    /// Copies the input on all threads; seconds.
    fn copy(&mut self) -> f64 {
        let start = Instant::now();
        let part = self.x.len().div_ceil(4 * rayon::current_num_threads()).max(1);
        self.copy.par_chunks_mut(part).zip(self.x.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
        start.elapsed().as_secs_f64()
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
