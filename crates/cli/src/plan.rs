//! `nvfp4 plan`: what a conversion would do to each weight, and why.

use crate::fold::{Row, each, fold};
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From, Weights};
use crate::table::{Table, left, right};
use crate::{json, names, order, shares, sizes, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::{
    Action, Checkpoint, Client, Copied, Eight, Item, Model, Plan, Portion, Settings, Severity, Shards, Target, loading,
};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what convert would do to each weight, and why; writes nothing.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Output format: modelopt, compressed-tensors, deepseek-v4 or gguf.
    #[arg(long, default_value = "modelopt")]
    to: Target,
    #[command(flatten)]
    weights: Weights,
    /// Format of the source, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Show what each of N parts has to do (convert --part): bytes, and an estimate of the time.
    #[arg(long, value_name = "N", value_parser = count)]
    parts: Option<usize>,
    /// With --parts: largest size of an output file.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = sizes::parse, requires = "parts")]
    max_shard: u64,
    /// With --parts: split the output into the same files as the source.
    #[arg(long, conflicts_with = "max_shard", requires = "parts")]
    keep_shards: bool,
    /// List every weight; otherwise those that are alike have one line, if there are many.
    #[arg(long)]
    each: bool,
    /// Print JSON: {dialect, weights: [{module, shape, format, action, group, why, bytes,
    /// new_bytes}], bytes, new_bytes, parts}; new_bytes and seconds are estimates.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let selection = args.weights.selection()?;
    let checkpoint = source::split(Checkpoint::open(&args.source)?, &selection, args.to, args.from)?;
    let model = source::model(&checkpoint, args.from)?;
    let plan = Plan::new(&model, &selection, args.to)?;
    let shards = if args.keep_shards { Shards::AsSource } else { Shards::AtMost(args.max_shard) };
    let settings = Settings { target: args.to, shards, ..Settings::default() };
    let parts = args.parts.map(|parts| nvfp4_checkpoint::shares(&model, &plan, &settings, parts)).transpose()?;
    match (args.json, parts) {
        (true, parts) => {
            let mut report = to_json(&model, &plan);
            if let Some(parts) = parts {
                report["parts"] = shares::to_json(&parts, settings.threads);
            }
            json::print("plan", &report)?
        }
        (false, None) => {
            let lines = if args.each { Lines::Each } else { Lines::Folded };
            until_closed(print(&mut out(), &model, &plan, lines))?
        }
        (false, Some(parts)) => until_closed(shares::print(&mut out(), &parts, settings.threads))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A number of parts.
fn count(text: &str) -> Result<usize, String> {
    format!("0/{text}").parse().map(Portion::of).map_err(|_| "expected a number of parts, such as 8".to_string())
}

/// About how many bytes a weight will take: the few numbers that each target has beside it are not
/// counted.
fn new_bytes(item: &Item<'_>) -> u64 {
    let elements = item.weight.elements();
    match item.action {
        Action::Quantize | Action::Relabel | Action::Rescale => elements / 2 + elements / 16 + 4,
        Action::Eight(Eight::Tensor | Eight::Channel | Eight::Block) => elements,
        Action::Eight(Eight::Mx) => elements + elements / 32,
        Action::Decode(_) => elements * 2,
        Action::Keep(_) | Action::Retain(_) | Action::RetainMxFp4 => item.weight.byte_len(),
    }
}

/// Why a weight of an NVFP4 source gets another tensor scale.
pub const RESCALE: &str = "NVFP4 with another tensor scale than the weights it is joined with";

/// The word for a form of FP8, as rules have it.
pub fn form(eight: Eight) -> &'static str {
    match eight {
        Eight::Tensor => "fp8-tensor",
        Eight::Channel => "fp8-channel",
        Eight::Block => "fp8-block",
        Eight::Mx => "mxfp8",
    }
}

/// Why a weight keeps its bytes.
fn retained(eight: Eight) -> &'static str {
    match eight {
        Eight::Mx => "MXFP8 already",
        Eight::Tensor | Eight::Channel | Eight::Block => "FP8 already",
    }
}

/// The word for an action, and why.
fn words<'a>(item: &'a Item<'_>) -> (&'static str, &'a str) {
    match &item.action {
        Action::Quantize => ("nvfp4", ""),
        Action::Eight(eight) => (form(*eight), ""),
        Action::Retain(eight) => ("retain", retained(*eight)),
        Action::RetainMxFp4 => ("retain", "MXFP4 already"),
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

/// Every weight and every tensor that looks like one, layer by layer.
fn rows<'p>(plan: &'p Plan<'_>) -> Vec<Row<'p>> {
    let weight = |item: &'p Item<'_>| {
        let (action, why) = words(item);
        Row {
            name: &item.weight.module,
            shape: vec![item.weight.rows, item.weight.cols],
            format: item.weight.format(),
            action,
            group: item.group,
            why,
            bytes: item.weight.byte_len(),
            new_bytes: new_bytes(item),
        }
    };
    let copied = |copied: &'p Copied<'_>| {
        let info = copied.tensor.info;
        Row {
            name: &info.name,
            shape: info.shape.clone(),
            format: format!("{:?}", info.dtype),
            action: "keep",
            group: None,
            why: &copied.reason,
            bytes: info.len,
            new_bytes: info.len,
        }
    };
    let mut rows: Vec<Row<'p>> = plan.items.iter().map(weight).chain(plan.copied.iter().map(copied)).collect();
    rows.sort_by(|a, b| order::natural(a.name, b.name));
    rows
}

/// The smallest share of a model that is reported if it stays as it is.
const MUCH: f64 = 0.3;

/// How much stays as it is, if it is much: embeddings of a small model, or experts in one tensor.
pub fn stays(model: &Model<'_>, plan: &Plan<'_>) -> Option<String> {
    let share = plan.kept_share(model);
    (share >= MUCH).then(|| format!("{:.0} % of the source's bytes stay as they are", 100.0 * share))
}

/// `64x128`.
pub fn shape(sides: &[usize]) -> String {
    sides.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// What `convert -v` says about a tensor that looks like a weight and is copied.
pub fn copied_line(copied: &Copied<'_>) -> String {
    format!("{}  {}  keep: {}", names::shown(&copied.tensor.info.name), shape(&copied.tensor.info.shape), copied.reason)
}

/// How many lines are printed one by one.
const MANY: usize = 200;

/// Whether weights that are alike have one line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lines {
    /// They do, where there are many weights.
    Folded,
    /// Each has its own.
    Each,
}

/// One line per weight, or per kind of weight where there are many, then the rest and the sum.
/// `convert --dry-run` prints it too.
pub fn print(out: &mut impl Write, model: &Model<'_>, plan: &Plan<'_>, lines: Lines) -> Result<()> {
    let kind = |row: &Row<'_>| row.group.map(|g| plan.groups[g].kind.as_str());
    let rows = rows(plan);
    let folds = if lines == Lines::Folded && rows.len() > MANY { fold(&rows, kind) } else { each(&rows) };
    let counts = folds.iter().any(|fold| fold.rows.len() > 1);
    let columns = [left("NAME"), right("SHAPE"), left("TYPE"), left("ACTION"), right("SIZE"), left("WHY")];
    let mut table = Table::new(counts.then(|| right("COUNT")).into_iter().chain(columns));
    for fold in &folds {
        let row = fold.rows[0];
        let group = kind(row).map(|kind| format!(" ({kind})")).unwrap_or_default();
        let sum = |bytes: fn(&Row<'_>) -> u64| fold.rows.iter().map(|row| bytes(row)).sum::<u64>();
        let (old, new) = (sum(|row| row.bytes), sum(|row| row.new_bytes));
        let size = if old == new { sizes::show(old) } else { format!("{} -> {}", sizes::show(old), sizes::show(new)) };
        let (count, action) = (counts.then(|| fold.rows.len().to_string()), format!("{}{group}", row.action));
        let cells = [fold.name.clone(), shape(&row.shape), row.format.clone(), action, size, row.why.to_string()];
        table.row(count.into_iter().chain(cells));
    }
    table.write(out)?;
    if let Some(unknown) = loading(model, Client::Vllm).filter(|finding| finding.severity == Severity::Note) {
        writeln!(out, "{}; which weights stay was decided by general rules", unknown.text)?;
    }
    if counts {
        let (lines, weights) = (folds.len(), rows.len());
        writeln!(out, "{weights} weights in {lines} lines; --each lists every weight, --json too")?;
    }
    let bytes = model.others.iter().map(|t| t.info.len).sum::<u64>();
    let listed = plan.copied.iter().map(|c| c.tensor.info.len).sum::<u64>();
    let others = counted(model.others.len() - plan.copied.len(), "other tensor");
    writeln!(out, "{others} copied, {}", sizes::show(bytes - listed))?;
    let (before, after) = totals(model, plan);
    let stays = stays(model, plan).map(|stays| format!("; {stays}")).unwrap_or_default();
    writeln!(out, "total {} -> about {}{stays}", sizes::show(before), sizes::show(after))?;
    Ok(())
}

/// The plan as JSON. `convert --dry-run` prints it too.
pub fn to_json(model: &Model<'_>, plan: &Plan<'_>) -> Value {
    let row = |row: Row<'_>| {
        json!({
            "module": row.name,
            "shape": row.shape,
            "format": row.format,
            "action": row.action,
            "group": row.group,
            "why": row.why,
            "bytes": row.bytes,
            "new_bytes": row.new_bytes,
        })
    };
    let weights: Vec<_> = rows(plan).into_iter().map(row).collect();
    let (before, after) = totals(model, plan);
    json!({ "dialect": model.dialect.to_string(), "weights": weights, "bytes": before, "new_bytes": after })
}
