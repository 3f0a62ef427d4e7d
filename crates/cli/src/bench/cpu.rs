//! The bench of the CPU: operation and copy in turns.

use super::operations::{Buffers, Kind, Operation, PLAIN, Side, Source};
use super::style::{Columns, Style};
use super::{fp8, median};
use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_kernels::quantize::{Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values, amax, dequantize};
use nvfp4_spec::{Element, Specials, matrix};
use rayon::prelude::*;
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

#[derive(Serialize)]
struct Row {
    name: &'static str,
    ms: f64,
    gbps: f64,
    copies: f64,
}

pub fn run(
    size: usize,
    implementation: Implementation,
    operations: &[&Operation],
    fp8_operations: &[&fp8::Operation],
    style: Style,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let table = Columns { style, columns: &[("operation", -36), ("ms", 9), ("GB/s", 9), ("copies", 8)] };
    if style != Style::Json {
        let threads = match rayon::current_num_threads() {
            1 => "1 thread".to_string(),
            n => format!("{n} threads"),
        };
        writeln!(out, "{size} × {size} bf16, {implementation}, {threads}")?;
        table.headings(&mut out)?;
    }
    let mut bench = Bench::new(size, implementation)?;
    let mut rows = Vec::new();
    let mut print = |row: Row| -> Result<()> {
        let Row { name, ms, gbps, copies } = row;
        let cells = [name.to_string(), format!("{ms:.3}"), format!("{gbps:.2}"), format!("{copies:.2}")];
        table.row(&mut out, &cells)?;
        rows.push(row);
        Ok(())
    };
    let wrong = |name| move || format!("{name}: the result is wrong");
    for operation in operations {
        bench.check(operation).with_context(wrong(operation.name))?;
        print(bench.time(operation)?)?;
    }
    for operation in fp8_operations {
        bench.check_fp8(operation).with_context(wrong(operation.name))?;
        print(bench.time_fp8(operation)?)?;
    }
    if style == Style::Json {
        crate::json::print("bench", &rows)?;
    }
    Ok(())
}

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

impl Bench {
    fn new(size: usize, implementation: Implementation) -> Result<Self> {
        let x = crate::normal::with_outliers(size, size, 1)?;
        Ok(Bench {
            size,
            implementation,
            amax: [x.iter().fold(0.0, |m, x| x.to_f32().abs().max(m))],
            copy: x.clone(),
            x,
            row: Buffers::new(size, size, Layout::Linear)?,
            col: Buffers::new(size, size, Layout::Linear)?,
            decoded: Vec::new(),
            decoded_bf16: Vec::new(),
        })
    }

    /// Runs an operation on the first rows of the input and compares with the scalar
    /// implementation, which is `spec`.
    fn check(&mut self, operation: &Operation) -> Result<()> {
        // More than one panel of the column direction.
        let (rows, cols) = (self.size.min(272), self.size);
        let input = Input::new(Values::Bf16(&self.x[..rows * cols]), rows, cols)?;
        match &operation.kind {
            Kind::Amax => {
                let mut found = [0.0; 2];
                for (value, implementation) in found.iter_mut().zip([self.implementation, Implementation::Scalar]) {
                    let wanted = amax::Outputs { tensor: Some(value), ..Default::default() };
                    amax::amax(implementation, &input, Specials::Kernel, wanted)?;
                }
                ensure!(found[0] == found[1], "amax {} instead of {}", found[0], found[1]);
            }
            Kind::Quantize(settings) => {
                let given = (settings.amax == Source::Given).then_some(&self.amax[..]);
                let got = Buffers::quantize(self.implementation, &input, settings, given)?;
                let expected = Buffers::quantize(Implementation::Scalar, &input, settings, given)?;
                got.iter().zip(&expected).try_for_each(|(got, expected)| got.check_equal(expected))?;
            }
            Kind::DequantizeBf16 => self.check_decoded::<bf16>(rows)?,
            Kind::DequantizeF32 => self.check_decoded::<f32>(rows)?,
        }
        Ok(())
    }

    fn check_decoded<T: Element>(&mut self, rows: usize) -> Result<()> {
        self.quantize_all()?;
        let stored = [self.row.amax[0]];
        let view = self.row.view(rows, &stored);
        let mut got = vec![T::default(); rows * self.size];
        dequantize::dequantize(self.implementation, &view, &mut got)?;
        let expected: Vec<T> = matrix::dequantize(&view)?;
        ensure!(got == expected, "values differ");
        Ok(())
    }

    /// Leaves the quantized input in the row buffers, for decoding.
    fn quantize_all(&mut self) -> Result<()> {
        let input = Input::new(Values::Bf16(&self.x), self.size, self.size)?;
        let row = self.row.direction(&PLAIN, Side::Row, None);
        Ok(quantize(self.implementation, &input, Some(row), None)?)
    }

    fn time(&mut self, operation: &Operation) -> Result<Row> {
        match operation.kind {
            Kind::DequantizeBf16 => self.decoded_bf16.resize(self.x.len(), bf16::ONE),
            Kind::DequantizeF32 => self.decoded.resize(self.x.len(), 1.0),
            _ => {}
        }
        let (given, mut copy) = (self.amax, std::mem::take(&mut self.copy));
        let x = std::mem::take(&mut self.x);
        let row = measure(operation.name, &x, &mut copy, || self.once(&x, operation, &given));
        (self.x, self.copy) = (x, copy);
        row
    }

    fn check_fp8(&self, operation: &fp8::Operation) -> Result<()> {
        // More than one panel of the column direction.
        let (rows, cols) = (self.size.min(272), self.size);
        fp8::Run::check(operation, self.implementation, &self.x[..rows * cols], (rows, cols), self.amax[0])
    }

    fn time_fp8(&mut self, operation: &fp8::Operation) -> Result<Row> {
        let shape = (self.size, self.size);
        let mut run = fp8::Run::new(operation, self.implementation, &self.x, shape, self.amax[0])?;
        measure(operation.name, &self.x, &mut self.copy, || run.once())
    }

    fn once(&mut self, x: &[bf16], operation: &Operation, given: &[f32]) -> Result<()> {
        let input = Input::new(Values::Bf16(x), self.size, self.size)?;
        match &operation.kind {
            Kind::Amax => {
                let wanted = amax::Outputs { tensor: Some(&mut self.row.amax[0]), ..Default::default() };
                amax::amax(self.implementation, &input, Specials::Kernel, wanted)?;
            }
            Kind::Quantize(settings) => {
                let given = (settings.amax == Source::Given).then_some(given);
                let row = settings.row.then(|| self.row.direction(settings, Side::Row, given));
                let col = settings.col.then(|| self.col.direction(settings, Side::Column, given));
                quantize(self.implementation, &input, row, col)?;
            }
            Kind::DequantizeBf16 => {
                let view = self.row.view(self.size, given);
                dequantize::dequantize(self.implementation, &view, &mut self.decoded_bf16)?;
            }
            Kind::DequantizeF32 => {
                let view = self.row.view(self.size, given);
                dequantize::dequantize(self.implementation, &view, &mut self.decoded)?;
            }
        }
        Ok(())
    }
}

/// Runs an operation and a copy of the matrix in turns.
fn measure(name: &'static str, x: &[bf16], to: &mut [bf16], mut once: impl FnMut() -> Result<()>) -> Result<Row> {
    let (mut copies, mut times) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while times.len() < 7 || (start.elapsed() < Duration::from_millis(1500) && times.len() < 101) {
        copies.push(copy(x, to));
        let start = Instant::now();
        once()?;
        times.push(start.elapsed().as_secs_f64());
    }
    let (copy, time) = (median(copies), median(times));
    let gigabytes = size_of_val(x) as f64 / 1e9;
    Ok(Row { name, ms: time * 1e3, gbps: gigabytes / time, copies: time / copy })
}

/// Copies the input on all threads. Returns the seconds.
fn copy(x: &[bf16], to: &mut [bf16]) -> f64 {
    let start = Instant::now();
    let part = x.len().div_ceil(4 * rayon::current_num_threads()).max(1);
    to.par_chunks_mut(part).zip(x.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
    start.elapsed().as_secs_f64()
}
