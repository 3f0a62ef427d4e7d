//! `nvfp4 inspect`: the format of a checkpoint, statistics of its bytes, and anything unusual.

use crate::names::shown;
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From};
use crate::{json, sizes, until_closed, verify};
use anyhow::{Context, Result, ensure};
use nvfp4_checkpoint::gguf::{GgufFile, is_gguf};
use nvfp4_checkpoint::{Buffer, Checkpoint, Client, Dialect, Finding, Model, Statistics, Stored, Weight};
use nvfp4_spec::{BLOCK, e2m1, e4m3};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

mod gguf;
mod rows;
mod statistics;

use rows::Row;
use statistics::{print_statistics, scale_bytes};

/// Show the format of a checkpoint, statistics of its scales and codes, and anything unusual.
///
/// Recognizes ModelOpt, compressed-tensors, torchao, ComfyUI and GGUF; refuses to guess. Exits with
/// 0 whatever it finds: use `verify` to check.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or file.
    path: PathBuf,
    /// Show one weight, given its name or a unique part of it.
    #[arg(long)]
    tensor: Option<String>,
    /// Show one block of that weight, given its row and its index in the row.
    #[arg(long, value_name = "ROW,BLOCK", requires = "tensor", value_parser = block_at)]
    block: Option<(usize, usize)>,
    /// Format of the checkpoint, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Print one line per weight: shape, type, tensor scale and scale bytes.
    #[arg(long, short, conflicts_with = "tensor")]
    verbose: bool,
    /// Print JSON; with --verbose, include every weight.
    #[arg(long)]
    json: bool,
}

fn block_at(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once(',').and_then(|(row, block)| Some((row.parse().ok()?, block.parse().ok()?)));
    parts.ok_or_else(|| "expected two numbers with a comma between them, such as 3,7".to_string())
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut out = out();
    if is_gguf(&args.path) {
        let file = GgufFile::open(&args.path)?;
        until_closed(gguf::show(&mut out, &file, args))?;
        return Ok(ExitCode::SUCCESS);
    }
    let checkpoint = Checkpoint::open(&args.path)?;
    let model = source::model(&checkpoint, args.from)?;
    until_closed(match &args.tensor {
        Some(name) => show_weight(&mut out, args, find(&model, name)?),
        None => show_model(&mut out, args, &model),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn find<'m, 'a>(model: &'m Model<'a>, name: &str) -> Result<&'m Weight<'a>> {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    if let Some(weight) = model.weight(name) {
        return Ok(weight);
    }
    only(name, model.weights.iter().map(|w| (w.module.as_str(), w)))
}

/// The only tensor with a text in its name.
fn only<'n, T: Copy>(name: &str, all: impl Iterator<Item = (&'n str, T)>) -> Result<T> {
    let found: Vec<(&str, T)> = all.filter(|(own, _)| own.contains(name)).collect();
    ensure!(
        found.len() < 2,
        "--tensor {name}: matches {} weights, among them {} and {}",
        found.len(),
        found[0].0,
        found[1].0
    );
    found.first().map(|(_, found)| *found).with_context(|| format!("--tensor {name}: no such weight"))
}

fn show_model(out: &mut impl Write, args: &Args, model: &Model<'_>) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let quantized: Vec<&Weight<'_>> = model.weights.iter().filter(|w| matches!(w.stored, Stored::Nvfp4(_))).collect();
    let (mut total, mut globals, mut inputs, mut rows) = (Statistics::default(), Vec::new(), 0, Vec::new());
    for (weight, statistics) in model.weights.iter().zip(nvfp4_checkpoint::statistics(model, threads)?) {
        let mut own = Vec::new();
        if let Stored::Nvfp4(parts) = &weight.stored {
            own = parts.globals(weight)?;
            inputs += usize::from(parts.input.is_some());
        }
        statistics.iter().for_each(|s| total.add(s));
        globals.extend_from_slice(&own);
        rows.push(Row {
            name: weight.module.clone(),
            shape: vec![weight.rows, weight.cols],
            format: weight.format(),
            globals: own,
            statistics,
            group: nvfp4_checkpoint::fused(&weight.module).map(|(_, kind)| kind.to_string()),
        });
    }
    if !args.verbose {
        rows.clear();
    }
    let findings = match model.dialect.is_nvfp4() {
        true => {
            let client = if model.dialect == Dialect::ComfyUi { Client::ComfyUi } else { Client::Vllm };
            nvfp4_checkpoint::verify(model, client, threads)?
        }
        false => Vec::new(),
    };
    let mut formats: BTreeMap<String, u64> = BTreeMap::new();
    for tensor in model.checkpoint.tensors() {
        *formats.entry(format!("{:?}", tensor.info.dtype)).or_default() += tensor.info.len;
    }
    let mut beside: BTreeMap<(&str, String), (usize, u64)> = BTreeMap::new();
    for weight in &model.weights {
        let form = match weight.stored {
            Stored::Fp8 { eight, .. } => ("fp8", format!(" in {eight}")),
            Stored::MxFp4 { .. } => ("mxfp4", String::new()),
            Stored::Plain(_) | Stored::Nvfp4(_) => continue,
        };
        let (count, bytes) = beside.entry(form).or_default();
        *count += 1;
        *bytes += weight.byte_len();
    }
    let elements: u64 = quantized.iter().map(|w| w.elements()).sum();
    let bytes: u64 = quantized.iter().map(|w| w.byte_len()).sum();
    let report = Report {
        model,
        total,
        globals,
        inputs,
        rows,
        findings,
        formats,
        beside,
        quantized: quantized.len(),
        elements,
        bytes,
    };
    if args.json {
        json::print("inspect", &report.json())?
    } else {
        report.print(out)?
    }
    Ok(())
}

struct Report<'m, 'a> {
    model: &'m Model<'a>,
    total: Statistics,
    globals: Vec<f32>,
    inputs: usize,
    /// Empty unless they are asked for.
    rows: Vec<Row>,
    findings: Vec<Finding>,
    formats: BTreeMap<String, u64>,
    /// Weights in FP8, by their scales, and in MXFP4: how many, and their bytes.
    beside: BTreeMap<(&'static str, String), (usize, u64)>,
    quantized: usize,
    elements: u64,
    bytes: u64,
}

impl Report<'_, '_> {
    fn bits(&self) -> f64 {
        8.0 * self.bytes as f64 / self.elements.max(1) as f64
    }

    fn global_range(&self) -> Option<(f32, f32)> {
        let least = self.globals.iter().copied().reduce(f32::min)?;
        Some((least, self.globals.iter().copied().reduce(f32::max)?))
    }

    fn tensors(&self) -> usize {
        self.model.checkpoint.tensors().count()
    }

    fn print(&self, out: &mut impl Write) -> Result<()> {
        let model = self.model;
        writeln!(out, "dialect  {}  {}", model.dialect, shown(model.architecture().unwrap_or_default()))?;
        let formats: Vec<String> = self.formats.iter().map(|(f, n)| format!("{f} {}", sizes::show(*n))).collect();
        let (size, files) = (sizes::show(model.checkpoint.byte_len()), model.checkpoint.files().len());
        writeln!(out, "tensors  {} in {}, {size}: {}", self.tensors(), counted(files, "file"), formats.join(", "))?;
        for ((word, form), (count, bytes)) in &self.beside {
            writeln!(out, "{word:<8} {}{form}, {}", counted(*count, "weight"), sizes::show(*bytes))?;
        }
        if self.quantized == 0 {
            self.print_rows(out)?;
            return verify::print(out, &self.findings);
        }
        let acts = match self.inputs {
            0 => "no activation scales (W4A16)".to_string(),
            n => format!("{} (W4A4)", counted(n, "activation scale")),
        };
        writeln!(out, "nvfp4    {}, {:.3} bits per weight, {acts}", counted(self.quantized, "weight"), self.bits())?;
        print_statistics(out, &self.total, self.global_range())?;
        self.print_rows(out)?;
        verify::print(out, &self.findings)
    }

    fn print_rows(&self, out: &mut impl Write) -> Result<()> {
        if self.rows.is_empty() { Ok(()) } else { rows::print(out, &self.rows) }
    }

    fn json(&self) -> Value {
        let findings: Vec<Value> = self.findings.iter().map(verify::to_json).collect();
        let mut report = json!({
            "dialect": self.model.dialect.to_string(),
            "architecture": self.model.architecture(),
            "tensors": self.tensors(),
            "bytes": self.model.checkpoint.byte_len(),
            "bytes_by_type": self.formats,
            "nvfp4_weights": self.quantized,
            "bits_per_weight": (self.quantized > 0).then(|| self.bits()),
            "activation_scales": self.inputs,
            "global_range": self.global_range().map(|(a, b)| [a, b]),
            "scale_bytes": scale_bytes(&self.total),
            "codes": self.total.codes,
            "findings": findings,
        });
        if !self.rows.is_empty() {
            report["weights"] = self.rows.iter().map(Row::json).collect();
        }
        report
    }
}

fn show_weight(out: &mut impl Write, args: &Args, weight: &Weight<'_>) -> Result<()> {
    let Weight { module, rows, cols, stored } = weight;
    let Some((row, block)) = args.block else {
        let parts: Vec<_> =
            stored.parts().iter().map(|p| (p.info.name.clone(), p.info.dtype, p.info.shape.clone())).collect();
        if args.json {
            let parts: Vec<Value> =
                parts.iter().map(|(n, d, s)| json!({ "name": n, "type": format!("{d:?}"), "shape": s })).collect();
            let report =
                json!({ "module": module, "shape": [rows, cols], "format": weight.format(), "tensors": parts });
            return json::print("inspect", &report);
        }
        writeln!(out, "{}  {rows}x{cols}  {}", shown(module), weight.format())?;
        for (name, dtype, shape) in parts {
            writeln!(out, "  {}  {dtype:?} {shape:?}", shown(&name))?;
        }
        return Ok(());
    };
    ensure!(
        row < *rows && block < cols.div_ceil(BLOCK),
        "--block {row},{block}: {module} has {rows} rows of {} blocks",
        cols.div_ceil(BLOCK)
    );
    let mut buffer = Buffer::default();
    let values = weight.values(row..row + 1, &mut buffer)?;
    let values: Vec<f32> = (block * BLOCK..((block + 1) * BLOCK).min(*cols)).map(|i| values.get(i)).collect();
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut own = Value::Null;
    let mut lines = Vec::new();
    if let Stored::Nvfp4(parts) = stored {
        parts.codes_and_scales(row..row + 1, *cols, &mut codes, &mut scales)?;
        let codes: Vec<u8> = (0..BLOCK).map(|i| e2m1::code_at(&codes, block * BLOCK + i)).collect();
        let (byte, global) = (scales[block], parts.global(row * weight.matrices() / rows)?);
        own = json!({ "codes": codes, "scale_byte": byte, "scale": e4m3::decode(byte), "global": global });
        let hex: Vec<String> = codes.iter().map(|c| format!("{c:x}")).collect();
        lines.push(format!("codes    {}", hex.join(" ")));
        lines.push(format!("scale    {byte:#04x} = {}   tensor scale {global:e}", e4m3::decode(byte)));
    }
    if args.json {
        let report = json!({ "module": module, "row": row, "block": block, "nvfp4": own, "values": values });
        return json::print("inspect", &report);
    }
    let end = block * BLOCK + values.len();
    writeln!(out, "{}  row {row}, columns {}..{end}", shown(module), block * BLOCK)?;
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    let values: Vec<String> = values.iter().map(|v| format!("{v:.4e}")).collect();
    Ok(writeln!(out, "values   {}", values.join(" "))?)
}
