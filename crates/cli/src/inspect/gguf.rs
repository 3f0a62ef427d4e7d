//! `nvfp4 inspect` of a GGUF file.

use super::rows::{self, Row};
use super::statistics::{print_statistics, scale_bytes};
use super::{Args, only};
use crate::names::shown;
use crate::sizes::counted;
use crate::{json, sizes, verify};
use anyhow::{Result, ensure};
use nvfp4_checkpoint::Statistics;
use nvfp4_checkpoint::gguf::{self, GgufFile, GgufTensor, Type, Value};
use nvfp4_spec::{BLOCK, e2m1, e4m3};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;

/// A block: its row, and its number in the row.
type Block = Option<(usize, usize)>;

/// The whole file, or one tensor of it.
pub fn show(out: &mut impl Write, file: &GgufFile, args: &Args) -> Result<()> {
    match args.tensor.as_deref() {
        None => show_file(out, file, args),
        Some(name) => {
            let exact = file.get(name).or_else(|| file.get(&format!("{name}.weight")));
            let all = file.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor));
            let tensor = exact.map_or_else(|| only(name, all), Ok)?;
            show_tensor(out, file, tensor, args.block, args.json)
        }
    }
}

/// Rows before columns: GGUF has the sides of a tensor in the opposite order.
fn shape(dims: &[u64]) -> Vec<usize> {
    dims.iter().rev().map(|&side| side as usize).collect()
}

fn show_file(out: &mut impl Write, file: &GgufFile, args: &Args) -> Result<()> {
    let (mut total, mut globals, mut elements, mut bytes) = (Statistics::default(), Vec::new(), 0, 0);
    let mut rows = Vec::new();
    for tensor in file.tensors() {
        let mut row = Row {
            name: tensor.name.clone(),
            shape: shape(&tensor.dims),
            format: tensor.kind.to_string(),
            globals: Vec::new(),
            statistics: None,
            group: None,
        };
        if tensor.kind == Type::NVFP4 {
            let (statistics, scales) = (file.statistics(tensor)?, file.scales(tensor)?);
            total.add(&statistics);
            globals.extend_from_slice(&scales);
            elements += tensor.dims.iter().product::<u64>();
            bytes += tensor.len;
            (row.globals, row.statistics) = (scales, Some(statistics));
        }
        rows.push(row);
    }
    if !args.verbose {
        rows.clear();
    }
    let mut types: BTreeMap<String, u64> = BTreeMap::new();
    file.tensors().iter().for_each(|t| *types.entry(t.kind.to_string()).or_default() += t.len);
    let least = globals.iter().copied().reduce(f32::min);
    let range = least.zip(globals.iter().copied().reduce(f32::max));
    let findings = gguf::verify(file)?;
    let quantized = file.nvfp4().count();
    let bits = 8.0 * bytes as f64 / elements.max(1) as f64;
    let tokenizer = file.values().get("tokenizer.ggml.model").and_then(Value::text);
    if args.json {
        let findings: Vec<_> = findings.iter().map(verify::to_json).collect();
        let mut report = json!({
            "dialect": "GGUF", "architecture": file.architecture(), "tensors": file.tensors().len(),
            "bytes": file.byte_len(), "bytes_by_type": types, "nvfp4_weights": quantized,
            "bits_per_weight": (quantized > 0).then_some(bits), "global_range": range.map(|(a, b)| [a, b]),
            "scale_bytes": scale_bytes(&total), "codes": total.codes, "tokenizer": tokenizer, "findings": findings,
        });
        if !rows.is_empty() {
            report["weights"] = rows.iter().map(Row::json).collect();
        }
        return json::print("inspect", &report);
    }
    writeln!(out, "dialect  GGUF  {}", shown(file.architecture().unwrap_or_default()))?;
    let list: Vec<String> = types.iter().map(|(t, n)| format!("{t} {}", sizes::show(*n))).collect();
    writeln!(out, "tensors  {} in {}: {}", file.tensors().len(), sizes::show(file.byte_len()), list.join(", "))?;
    writeln!(out, "keys     {}, tokenizer {}", file.values().len(), shown(tokenizer.unwrap_or("missing")))?;
    if quantized > 0 {
        writeln!(out, "nvfp4    {}, {bits:.3} bits per weight", counted(quantized, "weight"))?;
        print_statistics(out, &total, range)?;
    }
    if !rows.is_empty() {
        rows::print(out, &rows)?;
    }
    verify::print(out, &findings)
}

fn show_tensor(out: &mut impl Write, file: &GgufFile, tensor: &GgufTensor, block: Block, as_json: bool) -> Result<()> {
    let GgufTensor { name, kind, dims, .. } = tensor;
    let Some((row, block)) = block else {
        if as_json {
            let (kind, shape) = (kind.to_string(), shape(dims));
            return json::print(
                "inspect",
                &json!({
                    "module": name, "shape": shape, "format": kind, "tensor": name, "type": kind, "dims": dims
                }),
            );
        }
        return Ok(writeln!(out, "{}  {kind} {dims:?}", shown(name))?);
    };
    let blocks = tensor.cols().div_ceil(BLOCK);
    ensure!(row < tensor.rows() && block < blocks, "--block: {name} has {} rows of {blocks} blocks", tensor.rows());
    let columns = block * BLOCK..((block + 1) * BLOCK).min(tensor.cols());
    let values = file.floats(tensor, row..row + 1)?[columns.clone()].to_vec();
    let mut own = serde_json::Value::Null;
    let mut lines = vec![format!("{}  row {row}, columns {}..{}", shown(name), columns.start, columns.end)];
    if *kind == Type::NVFP4 {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        file.codes_and_scales(tensor, row..row + 1, &mut codes, &mut scales)?;
        let codes: Vec<u8> = columns.map(|i| e2m1::code_at(&codes, i)).collect();
        let (byte, global) = (scales[block], file.scales(tensor)?[row * tensor.matrices() / tensor.rows()]);
        own = json!({ "codes": codes, "scale_byte": byte, "scale": e4m3::decode(byte), "global": global });
        let hex: Vec<String> = codes.iter().map(|c| format!("{c:x}")).collect();
        lines.push(format!("codes    {}", hex.join(" ")));
        lines.push(format!("scale    {byte:#04x} = {}   tensor scale {global:e}", e4m3::decode(byte)));
    }
    if as_json {
        let report =
            json!({ "module": name, "tensor": name, "row": row, "block": block, "nvfp4": own, "values": values });
        return json::print("inspect", &report);
    }
    let values: Vec<String> = values.iter().map(|v| format!("{v:.4e}")).collect();
    lines.push(format!("values   {}", values.join(" ")));
    Ok(lines.iter().try_for_each(|line| writeln!(out, "{line}"))?)
}
