//! The bench of a GPU: everything in its memory, timed by its own clock.

mod fp8;
mod outputs;

use super::operations::{Buffers, Kind, Operation, PLAIN, POISON, Settings, Side, Source};
use super::style::{Columns, Style};
use super::{fp8 as operations_of_fp8, median};
use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_kernels::amax::cuda as maxima;
use nvfp4_kernels::cuda::{Buffer, Device, Event, Input, Plain, Stream, Values};
use nvfp4_kernels::quantize::Layout;
use nvfp4_kernels::quantize::cuda::quantize;
use nvfp4_kernels::{self as kernels, Implementation};
use nvfp4_spec::{Element, GlobalScale, Specials};
use outputs::{Outputs, codes, scales};
use rayon::prelude::*;
use serde::Serialize;
use std::io::Write;
use std::ops::Range;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Runs before the first batch.
const WARM_UPS: usize = 3;
const BATCHES: usize = 7;
const RUNS_PER_BATCH: usize = 20;
/// Rows of the first check: more than one panel of the column direction.
const PART: usize = 272;

#[derive(Serialize)]
struct Row {
    name: &'static str,
    us: f64,
    bytes: usize,
    tbps: f64,
    of_copy: f64,
    /// "given" or "computed"; none for operations that need none.
    amax: Option<&'static str>,
}

pub fn run(
    device: Device,
    (rows, cols): (usize, usize),
    operations: &[&Operation],
    fp8_operations: &[&operations_of_fp8::Operation],
    style: Style,
) -> Result<()> {
    device.make_current()?;
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
    let reference = Implementation::best();
    let mut out = std::io::stdout().lock();
    let columns = [("operation", -36), ("amax", 9), ("µs", 9), ("MB", 9), ("TB/s", 7), ("of copy", 8)];
    let table = Columns { style, columns: &columns };
    if style != Style::Json {
        let (major, minor) = device.capability();
        let name = device.name();
        writeln!(out, "{rows} × {cols} bf16, {name}, compute capability {major}.{minor}, seed {seed}")?;
    }
    let mut bench = Bench::new(device, rows, cols, seed)?;
    if !fp8_operations.is_empty() {
        bench.fp8 = Some(fp8::Outputs::new(device, rows, cols, bench.sets)?);
    }
    // Always a part; everything where the CPU is fast enough.
    let mut checks = vec![rows.min(PART)];
    if reference != Implementation::Scalar && rows > PART {
        checks.push(rows);
    }
    for operation in operations {
        for &rows in &checks {
            let what = || format!("{}: {rows} × {cols}, seed {seed}, against {reference}", operation.name);
            bench.check(operation, rows, reference).with_context(what)?;
        }
    }
    for operation in fp8_operations {
        for &rows in &checks {
            let what = || format!("{}: {rows} × {cols}, seed {seed}, against {reference}", operation.name);
            bench.check_fp8(operation, rows, reference).with_context(what)?;
        }
    }
    // Only now is anything timed, so that the GPU does not idle between one operation and the next.
    let copy = bench.time_copy()?;
    if style != Style::Json {
        let rows = match checks[..] {
            [part] => format!("{part} rows"),
            _ => format!("the first {PART} rows and on all"),
        };
        writeln!(out, "checked: the bits are those of {reference} on the CPU, on {rows}")?;
        table.headings(&mut out)?;
        table.row(&mut out, &copy.cells())?;
    }
    let mut rows = Vec::new();
    let mut add = |row: Row| -> Result<()> {
        table.row(&mut out, &row.cells())?;
        rows.push(row);
        Ok(())
    };
    for operation in operations {
        add(bench.time_operation(operation, copy.tbps)?)?;
    }
    for operation in fp8_operations {
        add(bench.time_fp8(operation, copy.tbps)?)?;
    }
    if style == Style::Json {
        crate::json::print("bench", &rows)?;
    }
    Ok(())
}

impl Row {
    /// What the table shows.
    fn cells(&self) -> [String; 6] {
        let Row { name, us, tbps, of_copy, .. } = self;
        let (amax, megabytes) = (self.amax.unwrap_or("-"), self.bytes as f64 / 1e6);
        [
            name.to_string(),
            amax.to_string(),
            format!("{us:.1}"),
            format!("{megabytes:.1}"),
            format!("{tbps:.2}"),
            format!("{of_copy:.2}"),
        ]
    }
}

/// The input, its copy's destination and outputs large enough for every operation, `sets` of each:
/// runs take turns among them, so that none finds in the GPU's cache what the one before left
/// there.
struct Bench {
    stream: Stream,
    rows: usize,
    cols: usize,
    sets: usize,
    host: Vec<bf16>,
    x: Buffer<bf16>,
    /// Takes copies of the input, and decoded values.
    copy: Buffer<bf16>,
    decoded: Buffer<f32>,
    row: Outputs,
    col: Outputs,
    /// Where FP8 is measured.
    fp8: Option<fp8::Outputs>,
}

impl Bench {
    fn new(device: Device, rows: usize, cols: usize, seed: u64) -> Result<Self> {
        let len = rows * cols;
        let sets = (4 * device.properties().l2_cache).div_ceil(2 * len).max(1);
        let outputs = |rows, cols| -> Result<Outputs> {
            // Padding included.
            let swizzled = Layout::Swizzled.scale_len(rows, cols)?;
            let (codes, scales) = (device.alloc(sets * len / 2)?, device.alloc(sets * swizzled)?);
            Ok(Outputs { codes, scales, set: (len, swizzled), amax: device.alloc(rows)? })
        };
        let mut bench = Bench {
            stream: Stream::new(device)?,
            rows,
            cols,
            sets,
            host: crate::normal::with_outliers(rows, cols, seed)?,
            x: device.alloc(sets * len)?,
            copy: device.alloc(sets * len)?,
            decoded: device.alloc(sets * len)?,
            row: outputs(rows, cols)?,
            col: outputs(cols, rows)?,
            fp8: None,
        };
        for set in 0..sets {
            bench.stream.upload(&bench.host, bench.x.slice_mut().range(set * len..(set + 1) * len))?;
        }
        Ok(bench)
    }

    /// Runs an operation on the first `rows` rows, with its outputs poisoned, and compares with an
    /// implementation of the CPU.
    fn check(&mut self, operation: &Operation, rows: usize, reference: Implementation) -> Result<()> {
        let range = 0..rows * self.cols;
        let x = kernels::Input::new(kernels::Values::Bf16(&self.host[range.clone()]), rows, self.cols)?;
        match &operation.kind {
            Kind::Amax => {
                let mut expected = 0.0;
                let wanted = kernels::amax::Outputs { tensor: Some(&mut expected), ..Default::default() };
                kernels::amax::amax(reference, &x, Specials::Kernel, wanted)?;
                self.stream.fill_bytes(self.row.amax.slice_mut(), 0xFF)?;
                self.amax(0, rows)?;
                let got = self.stream.to_host(self.row.amax.slice().range(0..1))?[0];
                ensure!(got.to_bits() == expected.to_bits(), "amax {got} instead of {expected}");
            }
            Kind::Quantize(settings) => {
                // The CPU computes the amaxes in any case, and so has those that the GPU may be
                // given.
                let [row, col] = Buffers::quantize(reference, &x, settings, None)?;
                self.row.poison(&self.stream, &row)?;
                self.col.poison(&self.stream, &col)?;
                let source = source_on_gpu(settings);
                if source == Source::Given {
                    self.row.give(&self.stream, settings, &row)?;
                    self.col.give(&self.stream, settings, &col)?;
                }
                self.quantize(settings, source, 0, rows)?;
                self.row.check_equal(&self.stream, settings, &row).context("row direction")?;
                self.col.check_equal(&self.stream, settings, &col).context("column direction")?;
            }
            Kind::DequantizeBf16 => check_decoded(&self.stream, &mut self.row, &mut self.copy, &x, reference)?,
            Kind::DequantizeF32 => check_decoded(&self.stream, &mut self.row, &mut self.decoded, &x, reference)?,
        }
        Ok(())
    }

    /// Elements of the first `rows` rows of a set.
    fn range(&self, set: usize, rows: usize) -> Range<usize> {
        let start = set * self.rows * self.cols;
        start..start + rows * self.cols
    }

    fn amax(&mut self, set: usize, rows: usize) -> Result<()> {
        let x = Input::new(Values::Bf16(self.x.slice().range(self.range(set, rows))), rows, self.cols)?;
        let tensor = Some(self.row.amax.slice_mut().range(0..1));
        maxima::amax(&self.stream, &x, Specials::Kernel, maxima::Outputs { tensor, ..Default::default() })?;
        Ok(())
    }

    fn quantize(&mut self, settings: &Settings, source: Source, set: usize, rows: usize) -> Result<()> {
        let (range, cols) = (self.range(set, rows), self.cols);
        let x = Input::new(Values::Bf16(self.x.slice().range(range.clone())), rows, cols)?;
        let row =
            settings.row.then(|| self.row.direction(settings, Side::Row, source, rows, range.clone())).transpose()?;
        let col = settings.col.then(|| self.col.direction(settings, Side::Column, source, cols, range)).transpose()?;
        Ok(quantize(&self.stream, &x, row, col)?)
    }

    /// One run on a whole set.
    fn once(&mut self, kind: &Kind, set: usize) -> Result<()> {
        let (rows, cols, range) = (self.rows, self.cols, self.range(set, self.rows));
        match kind {
            Kind::Amax => self.amax(set, rows),
            Kind::Quantize(settings) => self.quantize(settings, source_on_gpu(settings), set, rows),
            Kind::DequantizeBf16 => {
                let out = self.copy.slice_mut().range(range.clone());
                self.row.dequantize(&self.stream, rows, cols, range, out)
            }
            Kind::DequantizeF32 => {
                let out = self.decoded.slice_mut().range(range.clone());
                self.row.dequantize(&self.stream, rows, cols, range, out)
            }
        }
    }

    fn time_copy(&mut self) -> Result<Row> {
        let copy = |bench: &mut Bench, set| {
            let range = bench.range(set, bench.rows);
            Ok(bench.stream.copy(bench.x.slice().range(range.clone()), bench.copy.slice_mut().range(range))?)
        };
        // Long enough for the GPU's clocks to rise.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            (0..RUNS_PER_BATCH).try_for_each(|run| copy(self, run % self.sets))?;
            self.stream.synchronize()?;
        }
        let (us, bytes) = (self.time(copy)?, 4 * self.rows * self.cols);
        Ok(Row { name: "copy", us, bytes, tbps: tbps(bytes, us), of_copy: 1.0, amax: None })
    }

    /// `copy` is the copy's TB/s.
    fn time_operation(&mut self, operation: &Operation, copy: f64) -> Result<Row> {
        // What the operation is given.
        match &operation.kind {
            Kind::Amax => {}
            Kind::Quantize(settings) => self.quantize(settings, Source::Computed, 0, self.rows)?,
            Kind::DequantizeBf16 | Kind::DequantizeF32 => {
                (0..self.sets).try_for_each(|set| self.quantize(&PLAIN, Source::Computed, set, self.rows))?;
            }
        }
        let us = self.time(|bench, set| bench.once(&operation.kind, set))?;
        let bytes = least_bytes(&operation.kind, self.rows * self.cols);
        let amax = match &operation.kind {
            Kind::Quantize(settings) if source_on_gpu(settings) == Source::Given => Some("given"),
            Kind::Quantize(_) => Some("computed"),
            _ => None,
        };
        let tbps = tbps(bytes, us);
        Ok(Row { name: operation.name, us, bytes, tbps, of_copy: tbps / copy, amax })
    }

    /// Microseconds of a run, which is told the set to work on.
    fn time(&mut self, mut once: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<f64> {
        let device = self.stream.device();
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        let mut sets = (0..self.sets).cycle();
        let mut run = |bench: &mut Self| once(bench, sets.next().expect("there is at least one set"));
        (0..WARM_UPS).try_for_each(|_| run(self))?;
        let mut times = Vec::new();
        for _ in 0..BATCHES {
            // While this one runs, the CPU gets ahead of the GPU, which then never waits for work.
            run(self)?;
            start.record(&self.stream)?;
            (0..RUNS_PER_BATCH).try_for_each(|_| run(self))?;
            end.record(&self.stream)?;
            times.push(f64::from(end.elapsed_us(&start)?) / RUNS_PER_BATCH as f64);
        }
        Ok(median(times))
    }
}

/// Decodes on the GPU, in the first set, what the CPU quantized, and compares with what the CPU
/// decodes.
fn check_decoded<T: Element + Plain>(
    stream: &Stream,
    row: &mut Outputs,
    out: &mut Buffer<T>,
    x: &kernels::Input<'_>,
    reference: Implementation,
) -> Result<()> {
    let (rows, cols) = (x.rows(), x.cols());
    let range = 0..rows * cols;
    let [quantized, _] = Buffers::quantize(reference, x, &PLAIN, None)?;
    let mut expected = vec![T::default(); range.len()];
    kernels::dequantize::dequantize(reference, &quantized.view(rows, &quantized.amax[..1]), &mut expected)?;

    stream.upload(&quantized.codes, row.codes.slice_mut().range(codes(&range)))?;
    stream.upload(&quantized.scales, row.scales.slice_mut().range(scales(&range)))?;
    row.give(stream, &PLAIN, &quantized)?;
    stream.fill_bytes(out.slice_mut().range(range.clone()), POISON)?;
    row.dequantize(stream, rows, cols, range.clone(), out.slice_mut().range(range.clone()))?;
    let got = stream.to_host(out.slice().range(range))?;
    let differs = |(a, b): (&T, &T)| a.to_f32().to_bits() != b.to_f32().to_bits();
    if let Some(at) = got.par_iter().zip(&expected).position_first(differs) {
        anyhow::bail!("values differ: number {at} is {:?} instead of {:?}", got[at], expected[at]);
    }
    Ok(())
}

fn source_on_gpu(settings: &Settings) -> Source {
    match settings.amax {
        Source::Given | Source::GivenOnGpu => Source::Given,
        Source::Computed => Source::Computed,
    }
}

/// The bytes that an operation on a bf16 matrix of `len` elements cannot do without. A row can be
/// kept on the chip until its amax is known; a matrix cannot.
fn least_bytes(kind: &Kind, len: usize) -> usize {
    let quantized = len / 2 + len / 16;
    match kind {
        Kind::Amax => 2 * len,
        Kind::Quantize(settings) => {
            let passes = match (source_on_gpu(settings), settings.mode.global) {
                (Source::Computed, GlobalScale::PerTensor) => 2,
                _ => 1,
            };
            let directions = usize::from(settings.row) + usize::from(settings.col);
            passes * 2 * len + directions * quantized
        }
        Kind::DequantizeBf16 => quantized + 2 * len,
        Kind::DequantizeF32 => quantized + 4 * len,
    }
}

fn tbps(bytes: usize, us: f64) -> f64 {
    bytes as f64 / us / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::operations::select;

    /// The figures of the goals: 16384 × 6144.
    #[test]
    fn least_bytes_are_those_that_the_goals_count() {
        let megabytes = |name: &str| {
            let operations = select(crate::device::Device::Cuda(0), name);
            let operation = operations.iter().find(|o| o.name == name).unwrap();
            (least_bytes(&operation.kind, 16384 * 6144) as f64 / 1e6).round()
        };
        for (name, expected) in [
            ("amax", 201.0),
            ("quantize 1x16 amax-given", 258.0),
            ("quantize 1x16", 459.0),
            ("quantize 1x16 swizzled", 258.0),
            ("quantize 1x16 row-scaled", 258.0),
            ("quantize 16x16", 258.0),
            ("quantize 1x16 both", 516.0),
            ("quantize 1x16 both amax-given", 315.0),
            ("quantize 16x16 4over6-mse-fast", 258.0),
            ("quantize 1x16 stochastic", 258.0),
            ("quantize 1x16 hadamard-column", 258.0),
            ("quantize 1x16 row+hadamard-column", 315.0),
            ("dequantize bf16", 258.0),
            ("dequantize f32", 459.0),
        ] {
            assert_eq!(megabytes(name), expected, "{name}");
        }
    }
}
