//! The measurement on a GPU.

use super::{Output, Task};
use crate::bench::{Matrix, median};
use crate::say::{out, say};
use crate::table::{Table, left, right};
use crate::{json, until_closed};
use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_kernels::cuda::{Buffer, Device, Pool, Stream, time_interleaved};
use nvfp4_kernels::gemm::cuda::{
    By, Cost, Costs, Cublas, Form, Kept, Operand, PreparedWeight, Probe, Product, Weights, gemm_by,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

/// Sets of weights: calls take turns among them, so that none finds in the GPU's cache what the one
/// before left there.
const SETS: usize = 8;
/// Calls of a graph: whole rounds over the sets.
const CALLS: usize = 2 * SETS;
/// Turns before any counts: the chip gets as warm as under a lasting load, about ten seconds on an
/// H200.
const WARM_UP: usize = 200;
/// Turns that count.
const TURNS: usize = 51;

#[derive(Serialize)]
struct Report {
    device: String,
    gpu: String,
    capability: String,
    outcome: Outcome,
    file: Option<String>,
    costs: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Kept,
    Measured,
    Removed,
    NothingToRemove,
}

/// A cost as it ships, as it was in use, and as it was measured; `None` where there was none.
#[derive(Serialize)]
struct Row {
    name: String,
    unit: &'static str,
    shipped: Option<f64>,
    before: Option<f64>,
    now: f64,
}

pub fn run(device: Device, task: Task, output: Output) -> Result<()> {
    let (outcome, costs) = match task {
        Task::Reset => match Costs::forget(device).with_context(|| cannot(device, "removed"))? {
            Some(_) => (Outcome::Removed, Vec::new()),
            None => (Outcome::NothingToRemove, Vec::new()),
        },
        Task::DryRun => (Outcome::Measured, compare(device, &measure(device)?)),
        Task::Keep => {
            ensure!(Costs::file(device).is_some(), "there is no folder for the cache: set NVFP4_CACHE_DIR to one");
            let costs = measure(device)?;
            let rows = compare(device, &costs);
            costs.keep(device).with_context(|| cannot(device, "written"))?;
            (Outcome::Kept, rows)
        }
    };
    let (major, minor) = device.capability();
    let report = Report {
        device: format!("cuda:{}", device.ordinal()),
        gpu: device.name().to_string(),
        capability: format!("{major}.{minor}"),
        outcome,
        file: Costs::file(device).map(|path| path.display().to_string()),
        costs,
    };
    match output {
        Output::Json => json::print("tune", &report),
        Output::Text => until_closed(print(&mut out(), report)),
    }
}

/// What the error of a file begins with.
fn cannot(device: Device, what: &str) -> String {
    let file = Costs::file(device).map_or("the file of costs".to_string(), |path| path.display().to_string());
    format!("{file} cannot be {what}")
}

fn print(out: &mut impl Write, report: Report) -> Result<()> {
    let Report { gpu, capability, outcome, file, costs, .. } = report;
    writeln!(out, "{gpu}, compute capability {capability}")?;
    if !costs.is_empty() {
        let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.2}"));
        let mut table = Table::new([left("cost"), left("unit"), right("shipped"), right("before"), right("now")]);
        for Row { name, unit, shipped, before, now } in costs {
            table.row([name, unit.to_string(), number(shipped), number(before), number(Some(now))]);
        }
        table.write(out)?;
    }
    let file = file.unwrap_or_default();
    match outcome {
        Outcome::Kept => writeln!(out, "kept in {file}: programs that start from now on use them")?,
        Outcome::Measured => writeln!(out, "not kept, because of --dry-run")?,
        Outcome::Removed => writeln!(out, "removed {file}: the costs are again those that ship")?,
        Outcome::NothingToRemove => writeln!(out, "nothing to remove: the costs are those that ship")?,
    }
    Ok(())
}

/// What was measured beside what ships and what was in use.
fn compare(device: Device, now: &Costs) -> Vec<Row> {
    if let Kept::Ignored(path, reason) = Costs::kept(device) {
        say(format_args!("{} was ignored, because {reason}", path.display()));
    }
    rows([Costs::shipped(device), Costs::of(device), now].map(|costs| costs.list(device)))
}

fn rows([shipped, before, now]: [Vec<Cost>; 3]) -> Vec<Row> {
    let of = |costs: &[Cost], name: &str| costs.iter().find(|cost| cost.name == name).map(|cost| cost.value);
    let row = |Cost { name, unit, value }| Row {
        shipped: of(&shipped, &name),
        before: of(&before, &name),
        now: value,
        name,
        unit,
    };
    now.into_iter().map(row).collect()
}

fn measure(device: Device) -> Result<Costs> {
    device.make_current()?;
    say(format_args!("measuring on {}; nothing else should run there", device.name()));
    let costs = Costs::measure(device, |probes| time(&Stream::new(device)?, probes))?;
    ensure!(
        costs.is_plausible(),
        "the times contradict each other ({}), so nothing is kept: run it again while nothing else uses the GPU",
        costs.list(device).iter().map(|cost| format!("{}: {}", cost.name, cost.value)).collect::<Vec<_>>().join("; ")
    );
    Ok(costs)
}

/// Median nanoseconds of each product, in turns.
fn time(stream: &Stream, probes: &[Probe]) -> Result<Vec<f64>> {
    let mut bench = Bench::new(stream, probes)?;
    let times = time_interleaved(stream, &mut bench, probes, WARM_UP + TURNS, Bench::calls)?;
    let call = |times: Vec<f32>| median(times[WARM_UP..].iter().map(|&us| f64::from(us)).collect()) / CALLS as f64;
    Ok(times.into_iter().map(|times| 1000.0 * call(times)).collect())
}

/// Operands and outputs of every product.
struct Bench {
    /// By K.
    operands: BTreeMap<usize, Operands>,
    out: Buffer<bf16>,
    cublas: Option<Cublas>,
}

/// A product takes the first rows of both.
struct Operands {
    x: Matrix,
    weights: Vec<Weight>,
}

struct Weight {
    matrix: Matrix,
    /// Its first rows in the order of the tensor cores, by their number.
    prepared: BTreeMap<usize, PreparedWeight>,
}

impl Bench {
    fn new(stream: &Stream, probes: &[Probe]) -> Result<Self> {
        let device = stream.device();
        let cublas = probes.iter().any(|probe| probe.by == By::Library).then(|| Cublas::open(device)).transpose()?;
        if cublas.is_none() {
            say("cuBLAS is not used here, so its costs stay those that ship");
        }
        let outputs = probes.iter().map(|probe| probe.sizes[0] * probe.sizes[1]).max().unwrap_or(0);
        let depths: BTreeSet<usize> = probes.iter().map(|probe| probe.sizes[2]).collect();
        let operands = depths.into_iter().map(|k| {
            let these: Vec<&Probe> = probes.iter().filter(|probe| probe.sizes[2] == k).collect();
            Ok((k, Operands::new(stream, &these, k)?))
        });
        Ok(Bench { operands: operands.collect::<Result<_>>()?, out: device.alloc(outputs)?, cublas })
    }

    /// Gives a graph's worth of work to the stream.
    fn calls(&mut self, stream: &Stream, probe: Probe) -> Result<()> {
        (0..CALLS).try_for_each(|call| self.call(stream, probe, call % SETS))
    }

    fn call(&mut self, stream: &Stream, probe: Probe, set: usize) -> Result<()> {
        let Probe { sizes: [m, n, k], a, b, by } = probe;
        let Operands { x, weights } = &self.operands[&k];
        let Weight { matrix, prepared } = &weights[set];
        let out = self.out.slice_mut().range(0..m * n);
        let weights: Weights<'_> = match b {
            Form::Prepared => (&prepared[&n]).into(),
            Form::Nvfp4 => matrix.view(n).into(),
            Form::Bf16 => {
                let cublas = self.cublas.as_ref().context("cuBLAS is missing")?;
                return Ok(cublas.matmul_bf16(stream, x.values(m), matrix.values(n), (m, n, k), out, &Pool)?);
            }
        };
        let tokens: Operand<'_> = match a {
            Form::Bf16 => x.input(m)?.into(),
            Form::Nvfp4 | Form::Prepared => x.view(m).into(),
        };
        Ok(gemm_by(stream, by, (tokens, weights), &Product::default(), out, &Pool)?)
    }
}

impl Operands {
    /// Those of products that all have the same K.
    fn new(stream: &Stream, probes: &[&Probe], k: usize) -> Result<Self> {
        let most = |side: usize| probes.iter().map(|probe| probe.sizes[side]).max().unwrap_or(0);
        let prepared = probes.iter().filter(|probe| probe.b == Form::Prepared).map(|probe| probe.sizes[1]);
        let prepared: BTreeSet<usize> = prepared.collect();
        let weight = |seed| -> Result<Weight> {
            let matrix = Matrix::new(stream, most(1), k, seed)?;
            let prepare = |&rows| Ok((rows, PreparedWeight::new(stream, &matrix.view(rows), &stream.device())?));
            let prepared = prepared.iter().map(prepare).collect::<Result<_>>()?;
            Ok(Weight { matrix, prepared })
        };
        Ok(Operands {
            x: Matrix::new(stream, most(0), k, 0)?,
            weights: (1..=SETS as u64).map(weight).collect::<Result<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(name: &str, value: f64) -> Cost {
        Cost { name: name.to_string(), unit: "ns", value }
    }

    fn report() -> Report {
        let before = vec![cost("step", 82.0), cost("split", 1500.0)];
        let now = vec![cost("step", 81.234), cost("split", 0.0), cost("library step", 652.5)];
        Report {
            device: "cuda:0".to_string(),
            gpu: "NVIDIA H200".to_string(),
            capability: "9.0".to_string(),
            outcome: Outcome::Kept,
            file: Some("/cache/costs.txt".to_string()),
            costs: rows([before.clone(), before, now]),
        }
    }

    #[test]
    fn the_table_has_what_ships_what_was_and_what_is() {
        let mut text = Vec::new();
        print(&mut text, report()).unwrap();
        let expected = "NVIDIA H200, compute capability 9.0\n\
                        cost          unit  shipped   before     now\n\
                        step          ns      82.00    82.00   81.23\n\
                        split         ns    1500.00  1500.00    0.00\n\
                        library step  ns          -        -  652.50\n\
                        kept in /cache/costs.txt: programs that start from now on use them\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn json_has_the_fields_of_the_schema() {
        let schema: serde_json::Value = serde_json::from_str(include_str!("../../schema/output.json")).unwrap();
        let (form, report) = (&schema["$defs"]["tune"], serde_json::to_value(report()).unwrap());
        let required =
            |form: &serde_json::Value| -> Vec<String> { serde_json::from_value(form["required"].clone()).unwrap() };
        for field in required(form).iter().filter(|field| !["schema", "command"].contains(&field.as_str())) {
            assert!(report.get(field).is_some(), "{field}");
        }
        for field in required(&form["properties"]["costs"]["items"]) {
            assert!(report["costs"][2].get(&field).is_some(), "{field}");
        }
        let outcomes: Vec<serde_json::Value> = form["properties"]["outcome"]["enum"].as_array().unwrap().clone();
        for outcome in [Outcome::Kept, Outcome::Measured, Outcome::Removed, Outcome::NothingToRemove] {
            assert!(outcomes.contains(&serde_json::to_value(outcome).unwrap()), "{outcome:?}");
        }
    }
}
