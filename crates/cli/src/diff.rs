//! `nvfp4 diff`: the error of one checkpoint against another, or whether their bytes are the same.

use crate::names::shown;
use crate::say::out;
use crate::sizes::counted;
use crate::source::From;
use crate::table::{Table, left, right};
use crate::{exit, json, until_closed};
use anyhow::{Result, ensure};
use nvfp4_checkpoint::{
    Checkpoint, Compared, Comparison, Difference, Measure, Model, compare, detect, differences, split_like,
};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compare two checkpoints: the error of each weight, worst first.
///
/// With --bits, compares bytes and exits with 1 if any differ.
#[derive(clap::Args)]
pub struct Args {
    /// The original checkpoint.
    first: PathBuf,
    /// The checkpoint to compare with it.
    second: PathBuf,
    /// Format of whichever checkpoint cannot be detected.
    #[arg(long, value_enum, conflicts_with = "bits")]
    from: Option<From>,
    /// How many weights to show.
    #[arg(long, default_value_t = 20)]
    top: usize,
    /// Compare bytes instead of errors.
    #[arg(long)]
    bits: bool,
    /// Print JSON, with all weights.
    #[arg(long)]
    json: bool,
}

/// The relative error that NVFP4 has on normal data, for comparison.
pub const NORMAL_DATA: f64 = 0.095;

pub fn run(args: &Args) -> Result<ExitCode> {
    let (report, passed) = match args.json {
        true => perform(args, &mut std::io::sink())?,
        false => perform(args, &mut out())?,
    };
    if args.json {
        json::print("diff", &report)?;
    }
    Ok(exit::checked(passed))
}

/// Compares, and writes what differs. Returns the same as JSON, and with --bits whether the bytes
/// are the same.
pub fn perform(args: &Args, out: &mut impl Write) -> Result<(Value, bool)> {
    let (first, second) = (Checkpoint::open(&args.first)?, Checkpoint::open(&args.second)?);
    if args.bits {
        let found = differences(&first, &second)?;
        until_closed(print_bits(out, &found, first.tensors().count()))?;
        return Ok((bits_json(&found), found.is_empty()));
    }
    // A conversion splits experts that lie in one tensor.
    let first = split_like(first, &second)?;
    let second = split_like(second, &first)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // --from is for the checkpoint that cannot be detected; the other one is detected.
    let model = |checkpoint| match (detect(checkpoint), args.from) {
        (Err(_), Some(from)) => Model::with_dialect(checkpoint, from.dialect()),
        (found, _) => Model::with_dialect(checkpoint, found?),
    };
    let comparison = compare(&model(&first)?, &model(&second)?, threads)?;
    if comparison.weights.is_empty() {
        // Nothing is quantized, so there are no errors to show: compare bytes.
        let found = differences(&first, &second)?;
        ensure!(
            found.is_empty(),
            "no weight of the same name is quantized in either checkpoint, and {}; --bits lists what differs",
            differ(found.len())
        );
        until_closed(print_bits(out, &found, first.tensors().count()))?;
        return Ok((bits_json(&found), true));
    }
    until_closed(print(out, &comparison, args.top))?;
    Ok((to_json(&comparison), true))
}

fn print(out: &mut impl Write, comparison: &Comparison, top: usize) -> Result<()> {
    let mut weights: Vec<&Compared> = comparison.weights.iter().collect();
    weights.sort_by(|a, b| b.measure.relative_error().total_cmp(&a.measure.relative_error()));
    let numbers = ["relerr", "SQNR dB", "max|e|", "cosine", "clipped", "zeroed"];
    let mut table = Table::new([left("WEIGHT")].into_iter().chain(numbers.map(right)));
    for w in weights.iter().take(top) {
        let m = &w.measure;
        let share = |n: u64| 100.0 * n as f64 / m.elements.max(1) as f64;
        table.row([
            w.module.clone(),
            format!("{:.4}", m.relative_error()),
            format!("{:.1}", m.sqnr()),
            format!("{:.3e}", m.largest),
            format!("{:.5}", m.cosine()),
            format!("{:.3}%", share(m.clipped)),
            format!("{:.2}%", share(m.zeroed)),
        ]);
    }
    table.write(out)?;
    if weights.len() > top {
        writeln!(out, "… and {} more (--top)", weights.len() - top)?;
    }
    for (only, which) in [(&comparison.only_first, "first"), (&comparison.only_second, "second")] {
        if let Some(name) = only.first() {
            writeln!(out, "{} only in the {which}, such as {}", counted(only.len(), "weight"), shown(name))?;
        }
    }
    let quantile = |q: f64| weights[((1.0 - q) * (weights.len() - 1) as f64) as usize].measure.relative_error();
    writeln!(
        out,
        "summary  {}, relerr {:.4}, median {:.4}, worst {:.4}; NVFP4 of normal data has {NORMAL_DATA}",
        counted(weights.len(), "weight"),
        total(comparison).relative_error(),
        quantile(0.5),
        quantile(1.0)
    )?;
    Ok(())
}

fn total(comparison: &Comparison) -> Measure {
    let mut total = Measure::default();
    comparison.weights.iter().for_each(|w| total.add(&w.measure));
    total
}

fn to_json(comparison: &Comparison) -> Value {
    let figures = |m: &Measure| {
        json!({
            "relerr": m.relative_error(), "sqnr_db": m.sqnr(), "max_error": m.largest, "cosine": m.cosine(),
            "clipped": m.clipped, "zeroed": m.zeroed, "elements": m.elements
        })
    };
    let weight = |w: &Compared| json!({ "module": w.module, "format": w.format, "error": figures(&w.measure) });
    json!({
        "weights": comparison.weights.iter().map(weight).collect::<Vec<Value>>(),
        "only_first": comparison.only_first,
        "only_second": comparison.only_second,
        "total": figures(&total(comparison)),
    })
}

/// `3 tensors differ`.
fn differ(count: usize) -> String {
    let verb = if count == 1 { "differs" } else { "differ" };
    format!("{} {verb}", counted(count, "tensor"))
}

fn print_bits(out: &mut impl Write, found: &[Difference], tensors: usize) -> Result<()> {
    for difference in found {
        match difference {
            Difference::OnlyFirst(name) => writeln!(out, "{}: only in the first", shown(name))?,
            Difference::OnlySecond(name) => writeln!(out, "{}: only in the second", shown(name))?,
            Difference::Form(name, how) => writeln!(out, "{}: {how}", shown(name))?,
            Difference::Bytes { name, count, first } => {
                let name = shown(name);
                writeln!(out, "{name}: {count} bytes differ, the first at {first}")?
            }
        }
    }
    match found.len() {
        0 => writeln!(out, "identical: {}", counted(tensors, "tensor"))?,
        n => writeln!(out, "{}", differ(n))?,
    }
    Ok(())
}

fn bits_json(found: &[Difference]) -> Value {
    let entry = |d: &Difference| match d {
        Difference::OnlyFirst(name) => json!({ "tensor": name, "only": "first" }),
        Difference::OnlySecond(name) => json!({ "tensor": name, "only": "second" }),
        Difference::Form(name, how) => json!({ "tensor": name, "form": how }),
        Difference::Bytes { name, count, first } => json!({ "tensor": name, "bytes": count, "first": first }),
    };
    json!({ "identical": found.is_empty(), "differences": found.iter().map(entry).collect::<Vec<Value>>() })
}
