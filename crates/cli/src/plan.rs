//! `nvfp4 plan`: what a conversion would do to each weight, and why.

use crate::say::out;
use crate::source::{self, From, Weights};
use crate::{names, sizes, until_closed};
use anyhow::Result;
use nvfp4::checkpoint::{Action, Checkpoint, Item, Model, Plan, Target};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what `convert` would do to each weight, and why. Nothing is written.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Whose checkpoint would be written: modelopt, compressed-tensors or gguf.
    #[arg(long, default_value = "modelopt")]
    to: Target,
    #[command(flatten)]
    weights: Weights,
    /// Whose checkpoint the source is, if it does not say.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Print JSON: {dialect, weights: [{module, shape, format, action, group, why, bytes, new_bytes}], bytes, new_bytes}; new_bytes are
    /// estimates.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let checkpoint = Checkpoint::open(&args.source)?;
    let model = source::model(&checkpoint, args.from)?;
    let plan = Plan::new(&model, &args.weights.selection()?, args.to)?;
    let mut out = out();
    until_closed(if args.json { print_json(&mut out, &model, &plan) } else { print(&mut out, &model, &plan) })?;
    Ok(ExitCode::SUCCESS)
}

/// Bytes that a weight will take, about: each target has a few numbers beside it that are not counted here.
fn new_bytes(item: &Item<'_>) -> u64 {
    let elements = item.weight.elements();
    match item.action {
        Action::Quantize | Action::Relabel | Action::Rescale => elements / 2 + elements / 16 + 4,
        Action::Decode(_) => elements * 2,
        Action::Keep(_) => item.weight.byte_len(),
    }
}

/// Why a weight of an NVFP4 source is expressed anew.
pub const RESCALE: &str = "NVFP4 with another tensor scale than what it is joined with";

/// The word for an action, and why.
fn words<'a>(item: &'a Item<'_>) -> (&'static str, &'a str) {
    match &item.action {
        Action::Quantize => ("nvfp4", ""),
        Action::Relabel => ("relabel", "NVFP4 already"),
        Action::Rescale => ("rescale", RESCALE),
        Action::Decode(why) => ("decode", why),
        Action::Keep(why) => ("keep", why),
    }
}

fn totals(model: &Model<'_>, plan: &Plan<'_>) -> (u64, u64) {
    let others: u64 = model.others.iter().map(|t| t.info.len).sum();
    (model.checkpoint.byte_len(), others + plan.items.iter().map(new_bytes).sum::<u64>())
}

/// One line per weight, then the rest and the sum. `convert --dry-run` prints it too.
pub fn print(out: &mut impl Write, model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    let width = names::width(plan.items.iter().map(|i| i.weight.module.as_str()), 4);
    let name = names::padded("NAME", width);
    writeln!(out, "{name}  {:>13}  {:5}  {:17}  {:>19}  WHY", "SHAPE", "TYPE", "ACTION", "SIZE")?;
    for item in &plan.items {
        let weight = &item.weight;
        let (word, why) = words(item);
        let group = item.group.map(|g| format!(" ({})", plan.groups[g].kind)).unwrap_or_default();
        let (old, new) = (weight.byte_len(), new_bytes(item));
        let size = if old == new { sizes::show(old) } else { format!("{} -> {}", sizes::show(old), sizes::show(new)) };
        let shape = format!("{}x{}", weight.rows, weight.cols);
        let line = format!(
            "{}  {shape:>13}  {:5}  {:17}  {size:>19}  {}",
            names::padded(&weight.module, width),
            weight.format(),
            format!("{word}{group}"),
            names::shown(why)
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    let (others, bytes) = (model.others.len(), model.others.iter().map(|t| t.info.len).sum());
    let copied = if others == 1 { "is copied" } else { "are copied" };
    writeln!(out, "{}, {}, {copied}", sizes::counted(others, "other tensor"), sizes::show(bytes))?;
    let (before, after) = totals(model, plan);
    writeln!(out, "total {} -> about {}", sizes::show(before), sizes::show(after))?;
    Ok(())
}

fn print_json(out: &mut impl Write, model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    let weight = |item: &Item<'_>| {
        let (action, why) = words(item);
        json!({
            "module": item.weight.module,
            "shape": [item.weight.rows, item.weight.cols],
            "format": item.weight.format(),
            "action": action,
            "group": item.group,
            "why": why,
            "bytes": item.weight.byte_len(),
            "new_bytes": new_bytes(item),
        })
    };
    let weights: Vec<_> = plan.items.iter().map(weight).collect();
    let (before, after) = totals(model, plan);
    let report = json!({
        "dialect": model.dialect.to_string(), "weights": weights, "bytes": before, "new_bytes": after
    });
    Ok(writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?)
}
