//! Products on a GPU, beside those of cuBLAS.

mod check;
pub(super) mod fp8;
mod matrix;

pub use matrix::Matrix;

use super::{Format, Sizes};
use crate::bench::median;
use crate::bench::style::Style;
use crate::table::{Table, right};
use anyhow::{Context, Result};
use half::bf16;
use matrix::Form;
use nvfp4_kernels::cuda::{Buffer, Device, Recycled, Stream, time_interleaved};
use nvfp4_kernels::dequantize::cuda::dequantize;
use nvfp4_kernels::gemm::cuda::{Cublas, PreparedWeight, Product, describe, gemm};
use serde::Serialize;
use std::io::Write;

/// Sets of weights: calls take turns among them, so that none finds in the GPU's cache what the one
/// before left there.
const SETS: usize = 4;
const TURNS: usize = 11;
/// Rows of activations that keep every multiprocessor busy: a rate of cuBLAS is measured with them
/// in any case.
const BUSY: usize = 4096;
/// Bytes of a copy: several times the cache.
const COPIED: usize = 1 << 28;
/// Two of them are a NaN in bf16.
const POISON: u8 = 0xFF;

#[derive(Serialize)]
struct Row {
    m: usize,
    n: usize,
    k: usize,
    weight_only: Ours,
    nvfp4: Ours,
    cublas_us: Option<f64>,
    decode_weights_us: Option<f64>,
    decode_both_us: Option<f64>,
}

/// A product of ours.
#[derive(Serialize)]
struct Ours {
    us: f64,
    of_cublas: Option<f64>,
    of_floor: f64,
    kernel: String,
}

/// Microseconds of the products of one M.
#[derive(Clone, Copy)]
struct Times {
    m: usize,
    weight_only: f64,
    nvfp4: f64,
    cublas: Option<CublasTimes>,
}

#[derive(Clone, Copy)]
struct CublasTimes {
    bf16: f64,
    decode_weights: f64,
    decode_both: f64,
}

pub fn run(device: Device, sizes: &Sizes, format: Format) -> Result<()> {
    device.make_current()?;
    let cublas = Cublas::open(device).map_err(|reason| crate::say::say(format_args!("without cuBLAS: {reason}"))).ok();
    let mut out = std::io::stdout().lock();
    if format.style() != Style::Json {
        let (major, minor) = device.capability();
        let library = cublas.as_ref().map_or("no cuBLAS".to_string(), |cublas| format!("cuBLAS {}", cublas.version()));
        let Sizes { n, k, .. } = sizes;
        writeln!(out, "N = {n}, K = {k}, {}, compute capability {major}.{minor}, {library}", device.name())?;
    }
    let stream = Stream::new(device)?;
    let mut bench = Bench::new(&stream, sizes, cublas)?;
    for (at, &m) in sizes.m.iter().enumerate() {
        bench.check(&stream, m, at % SETS)?;
    }
    // Only now is anything timed, so that the GPU does not idle between one product and the next.
    let mut speeds = bench.speeds(&stream)?;
    let times = sizes.m.iter().map(|&m| bench.time(&stream, m)).collect::<Result<Vec<Times>>>()?;
    for (m, cublas) in times.iter().filter_map(|times| Some((times.m, times.cublas?))) {
        speeds.saw_cublas(operations(m, sizes.n, sizes.k) / cublas.bf16);
    }
    let rows = times.iter().map(|times| bench.row(device, times, &speeds)).collect::<Result<Vec<Row>>>()?;
    match format.style() {
        Style::Json => crate::json::print("bench gemm", &rows)?,
        Style::Text | Style::Markdown => print(&mut out, &rows, &speeds, format)?,
    }
    Ok(())
}

fn print(out: &mut impl Write, rows: &[Row], speeds: &Speeds, format: Format) -> Result<()> {
    let number = |x: Option<f64>, digits: usize| x.map_or("-".to_string(), |x| format!("{x:.digits$}"));
    let rate = match speeds.operations {
        Some(rate) => format!("cuBLAS at best {:.0} TFLOP/s", rate / 1e6),
        None => "operations not counted".to_string(),
    };
    writeln!(out, "checked: about 200 outputs of each; floor: copy {:.2} TB/s, {rate}", speeds.bytes / 1e6)?;
    let columns = [
        "M",
        "bf16 × NVFP4",
        "/cuBLAS",
        "of floor",
        "NVFP4 × NVFP4",
        "/cuBLAS",
        "of floor",
        "cuBLAS bf16",
        "W decoded",
        "both decoded",
    ];
    let mut table = Table::new(columns.map(right));
    for Row { m, weight_only, nvfp4, cublas_us, decode_weights_us, decode_both_us, .. } in rows {
        table.row([
            m.to_string(),
            format!("{:.1}", weight_only.us),
            number(weight_only.of_cublas, 2),
            format!("{:.2}", weight_only.of_floor),
            format!("{:.1}", nvfp4.us),
            number(nvfp4.of_cublas, 2),
            format!("{:.2}", nvfp4.of_floor),
            number(*cublas_us, 1),
            number(*decode_weights_us, 1),
            number(*decode_both_us, 1),
        ]);
    }
    if format.style() == Style::Markdown {
        return Ok(table.write_markdown(out)?);
    }
    let mut lines = table.lines().into_iter();
    lines.by_ref().take(1).try_for_each(|heading| writeln!(out, "{heading}"))?;
    for (line, Row { weight_only, nvfp4, .. }) in lines.zip(rows) {
        writeln!(out, "{line}")?;
        if format == Format::Verbose {
            writeln!(out, "       bf16 × NVFP4: {}; NVFP4 × NVFP4: {}", weight_only.kernel, nvfp4.kernel)?;
        }
    }
    Ok(())
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// A copy of [`COPIED`] bytes.
    Copy,
    /// bf16 × NVFP4.
    WeightOnly,
    /// NVFP4 × NVFP4.
    Nvfp4,
    /// bf16 × bf16 by cuBLAS.
    Cublas,
    /// The same, of weights that are decoded before.
    DecodeWeights,
    /// The same, both sides decoded.
    DecodeBoth,
}

/// Operands, outputs and whatever else work needs.
struct Bench {
    /// The activations; a product takes the first rows of them.
    x: Matrix,
    weights: Vec<(Matrix, PreparedWeight)>,
    decoded_x: Buffer<bf16>,
    decoded_weights: Buffer<bf16>,
    out: Buffer<bf16>,
    from: Buffer<u8>,
    to: Buffer<u8>,
    cublas: Option<Cublas>,
    scratch: Recycled,
}

impl Bench {
    fn new(stream: &Stream, sizes: &Sizes, cublas: Option<Cublas>) -> Result<Self> {
        let (device, Sizes { m, n, k }) = (stream.device(), sizes);
        let m = m.iter().copied().fold(BUSY, usize::max);
        let weights = |seed| -> Result<_> {
            let matrix = Matrix::new(stream, *n, *k, seed)?;
            let prepared = PreparedWeight::new(stream, &matrix.view(*n), &device)?;
            Ok((matrix, prepared))
        };
        let mut bench = Bench {
            x: Matrix::new(stream, m, *k, 0)?,
            weights: (1..=SETS as u64).map(weights).collect::<Result<_>>()?,
            decoded_x: device.alloc(m * k)?,
            decoded_weights: device.alloc(n * k)?,
            out: device.alloc(m * n)?,
            from: device.alloc(COPIED)?,
            to: device.alloc(COPIED)?,
            cublas,
            scratch: Recycled::default(),
        };
        stream.fill_bytes(bench.from.slice_mut(), 1)?;
        Ok(bench)
    }

    /// Checks all products of one M.
    fn check(&mut self, stream: &Stream, m: usize, set: usize) -> Result<()> {
        let mut products = vec![(Work::WeightOnly, Form::Bf16, Form::Nvfp4), (Work::Nvfp4, Form::Nvfp4, Form::Nvfp4)];
        if self.cublas.is_some() {
            products.push((Work::Cublas, Form::Bf16, Form::Bf16));
        }
        for (work, left, right) in products {
            let n = self.weights[set].0.rows;
            stream.fill_bytes(self.out.slice_mut().range(0..m * n), POISON)?;
            let checked = self.call(stream, work, m, set).and_then(|()| {
                let out = self.out.slice().range(0..m * n);
                check::check(stream, (&self.x, left), (&self.weights[set].0, right), out)
            });
            checked.with_context(|| format!("{work:?}, M = {m}"))?;
        }
        Ok(())
    }

    /// Gives one piece of work to the stream.
    fn call(&mut self, stream: &Stream, work: Work, m: usize, set: usize) -> Result<()> {
        let (matrix, prepared) = &self.weights[set];
        let (n, k) = (matrix.rows, matrix.cols);
        let out = self.out.slice_mut().range(0..m * n);
        let product = Product::default();
        if let Work::DecodeWeights | Work::DecodeBoth = work {
            dequantize(stream, &matrix.view(n), self.decoded_weights.slice_mut())?;
        }
        if work == Work::DecodeBoth {
            dequantize(stream, &self.x.view(m), self.decoded_x.slice_mut().range(0..m * k))?;
        }
        let (a, b) = match work {
            Work::Copy => return Ok(stream.copy(self.from.slice(), self.to.slice_mut())?),
            Work::WeightOnly => {
                return Ok(gemm(stream, self.x.input(m)?, prepared, &product, out, &self.scratch)?);
            }
            Work::Nvfp4 => return Ok(gemm(stream, self.x.view(m), prepared, &product, out, &self.scratch)?),
            Work::Cublas => (self.x.values(m), matrix.values(n)),
            Work::DecodeWeights => (self.x.values(m), self.decoded_weights.slice()),
            Work::DecodeBoth => (self.decoded_x.slice().range(0..m * k), self.decoded_weights.slice()),
        };
        let cublas = self.cublas.as_ref().context("cuBLAS is missing")?;
        Ok(cublas.matmul_bf16(stream, a, b, (m, n, k), out, &self.scratch)?)
    }

    /// Gives a graph's worth of work to the stream.
    fn calls(&mut self, stream: &Stream, (work, m): (Work, usize)) -> Result<()> {
        (0..calls(m)).try_for_each(|call| self.call(stream, work, m, call % SETS))
    }

    /// Median microseconds of one call of each.
    fn medians<const N: usize>(&mut self, stream: &Stream, m: usize, works: [Work; N]) -> Result<[f64; N]> {
        let times = time_interleaved(stream, self, &works.map(|work| (work, m)), TURNS, Bench::calls)?;
        let mut medians = [0.0; N];
        for (to, times) in medians.iter_mut().zip(times) {
            *to = median(times.into_iter().map(f64::from).collect()) / calls(m) as f64;
        }
        Ok(medians)
    }

    fn speeds(&mut self, stream: &Stream) -> Result<Speeds> {
        let bytes = |us: f64| 2.0 * COPIED as f64 / us;
        if self.cublas.is_none() {
            let [copy] = self.medians(stream, BUSY, [Work::Copy])?;
            return Ok(Speeds { bytes: bytes(copy), operations: None });
        }
        let [copy, cublas] = self.medians(stream, BUSY, [Work::Copy, Work::Cublas])?;
        let (n, k) = (self.weights[0].0.rows, self.weights[0].0.cols);
        Ok(Speeds { bytes: bytes(copy), operations: Some(operations(BUSY, n, k) / cublas) })
    }

    fn time(&mut self, stream: &Stream, m: usize) -> Result<Times> {
        use Work::{Cublas, DecodeBoth, DecodeWeights, Nvfp4, WeightOnly};
        if self.cublas.is_none() {
            let [weight_only, nvfp4] = self.medians(stream, m, [WeightOnly, Nvfp4])?;
            return Ok(Times { m, weight_only, nvfp4, cublas: None });
        }
        let works = [WeightOnly, Nvfp4, Cublas, DecodeWeights, DecodeBoth];
        let [weight_only, nvfp4, bf16, decode_weights, decode_both] = self.medians(stream, m, works)?;
        Ok(Times { m, weight_only, nvfp4, cublas: Some(CublasTimes { bf16, decode_weights, decode_both }) })
    }

    fn row(&self, device: Device, times: &Times, speeds: &Speeds) -> Result<Row> {
        let (Times { m, cublas, .. }, (matrix, prepared)) = (*times, &self.weights[0]);
        let (n, k, product) = (matrix.rows, matrix.cols, Product::<bf16>::default());
        let ours = |us: f64, form, kernel| Ours {
            us,
            of_cublas: cublas.map(|cublas| us / cublas.bf16),
            of_floor: speeds.floor(least_bytes(form, m, n, k), operations(m, n, k)) / us,
            kernel,
        };
        Ok(Row {
            m,
            n,
            k,
            weight_only: ours(times.weight_only, Form::Bf16, describe(device, self.x.input(m)?, prepared, &product)?),
            nvfp4: ours(times.nvfp4, Form::Nvfp4, describe(device, self.x.view(m), prepared, &product)?),
            cublas_us: cublas.map(|cublas| cublas.bf16),
            decode_weights_us: cublas.map(|cublas| cublas.decode_weights),
            decode_both_us: cublas.map(|cublas| cublas.decode_both),
        })
    }
}

/// Calls of a graph: whole rounds over the sets.
fn calls(m: usize) -> usize {
    if m >= 16384 { 2 * SETS } else { 5 * SETS }
}

/// What the GPU was seen to do, per microsecond.
struct Speeds {
    /// Bytes that a copy reads and writes.
    bytes: f64,
    /// Multiplications and additions of cuBLAS, where it is there: its best.
    operations: Option<f64>,
}

impl Speeds {
    fn saw_cublas(&mut self, operations: f64) {
        self.operations = Some(self.operations.map_or(operations, |best| best.max(operations)));
    }

    /// The least microseconds that moving these bytes and doing these operations takes.
    fn floor(&self, bytes: f64, operations: f64) -> f64 {
        (bytes / self.bytes).max(self.operations.map_or(0.0, |rate| operations / rate))
    }
}

/// Multiplications and additions.
fn operations(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// The bytes that a product of activations in some form and NVFP4 weights cannot do without: both
/// sides, and bf16 outputs.
fn least_bytes(activations: Form, m: usize, n: usize, k: usize) -> f64 {
    (n * Form::Nvfp4.row_bytes(k) + m * activations.row_bytes(k) + 2 * m * n) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of the goals: N = K = 8192 on an H200.
    #[test]
    fn the_floor_is_bytes_for_few_rows_and_operations_for_many() {
        let speeds = Speeds { bytes: 4.06e6, operations: Some(724e6) };
        let floor = |form, m| speeds.floor(least_bytes(form, m, 8192, 8192), operations(m, 8192, 8192));
        assert_eq!(floor(Form::Bf16, 1).round(), 9.0);
        assert_eq!(floor(Form::Nvfp4, 1).round(), 9.0);
        assert_eq!(floor(Form::Bf16, 4096).round(), 759.0);
        let unknown = Speeds { operations: None, ..speeds };
        assert_eq!(unknown.floor(4.06e6, 1e30), 1.0);
    }

    #[test]
    fn the_best_rate_counts() {
        let mut speeds = Speeds { bytes: 1.0, operations: None };
        for rate in [2.0, 5.0, 3.0] {
            speeds.saw_cublas(rate);
        }
        assert_eq!(speeds.operations, Some(5.0));
    }

    #[test]
    fn a_graph_takes_every_set_equally_often() {
        assert_eq!([1, 4096, 16384].map(calls), [20, 20, 8]);
        assert!([1, 4096, 16384].iter().all(|&m| calls(m).is_multiple_of(SETS)));
    }
}
