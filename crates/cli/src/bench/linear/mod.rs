//! `nvfp4 bench linear`: a layer's forward and backward pass under a recipe, beside the same
//! without quantization.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::place::{Place, check_size};
use super::style::Style;
use crate::device::Device;
use crate::table::{Table, left, right};
use anyhow::{Result, ensure};
use nvfp4::Quantizer;
use nvfp4_recipe::{Accumulators, Capabilities, LinearSlot, Model, Module, Plan, Recipe, Site, States};
use serde::Serialize;
use serde_json::{Map, Value};
use std::io::Write;
use std::process::ExitCode;

/// Measure a linear layer's forward and backward pass.
///
/// M tokens of K features go through weights of N × K: y = x·wᵀ, dx = dy·w, dw = dyᵀ·x. The recipe
/// says how x, w and dy are quantized; weights are quantized anew in every pass, as in a step of
/// one batch. With --groups the tokens are spread evenly over this many experts, each with weights
/// of its own.
///
/// On a GPU all data is in its memory in bf16 and the results are bf16. Each part is timed by
/// itself, and five whole steps one after the other, at the clock that they sustain, in CUDA graphs
/// that run in turns. The table shows medians, of one step. cuBLAS on bf16, on the CPU the `gemm`
/// crate on f32, is timed beside them, with every operand in the order that suits it best. `of
/// plain` is the time of the whole over that of the product without quantization, `of first` that
/// over the first recipe's.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// Tokens, a list. Default: 512, or on a GPU 8192.
    #[arg(long, value_delimiter = ',')]
    m: Vec<usize>,
    /// Rows of the weights: features that come out. Default: 2048, or on a GPU 8192.
    #[arg(long)]
    n: Option<usize>,
    /// Columns of the weights: features that go in. Default: 2048, or on a GPU 8192.
    #[arg(long)]
    k: Option<usize>,
    /// Experts, a list.
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    groups: Vec<usize>,
    /// Leave the sizes of the experts' batches in the GPU's memory, as a router does. Nothing waits
    /// for them, and one launch multiplies for all experts.
    #[arg(long)]
    routed: bool,
    /// A preset or a rule file; several are measured in turns.
    #[arg(long, default_values_t = ["nvfp4".to_string()])]
    recipe: Vec<String>,
    /// Print JSON: rows of {m, n, k, groups, recipe, unit, parts: {name: time}, whole, plain_parts,
    /// plain_whole, of_plain, of_first}.
    #[arg(long)]
    json: bool,
    /// Print the table in Markdown.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

/// What is multiplied.
#[derive(Clone, Copy)]
struct Sizes {
    m: usize,
    n: usize,
    k: usize,
    groups: usize,
    /// Whether the sizes of groups lie in the GPU's memory.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "there is no GPU"))]
    routed: bool,
}

/// The parts of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Quantize(LinearSlot),
    Forward,
    InputGradient,
    WeightGradient,
}

impl Part {
    const ALL: [Part; 6] = [
        Part::Quantize(LinearSlot::Input),
        Part::Quantize(LinearSlot::Weight),
        Part::Quantize(LinearSlot::GradOutput),
        Part::Forward,
        Part::InputGradient,
        Part::WeightGradient,
    ];
    #[cfg(feature = "cuda")]
    const PRODUCTS: [Part; 3] = [Part::Forward, Part::InputGradient, Part::WeightGradient];

    fn name(self) -> &'static str {
        match self {
            Part::Quantize(LinearSlot::Input) => "quantize x",
            Part::Quantize(LinearSlot::Weight) => "quantize w",
            Part::Quantize(_) => "quantize dy",
            Part::Forward => "y = x·wᵀ",
            Part::InputGradient => "dx = dy·w",
            Part::WeightGradient => "dw = dyᵀ·x",
        }
    }
}

/// Times of a step, and of some of its parts.
struct Times {
    whole: f64,
    parts: Vec<(Part, f64)>,
}

impl Times {
    fn by_name(&self) -> Map<String, Value> {
        self.parts.iter().map(|(part, time)| (part.name().to_string(), (*time).into())).collect()
    }
}

#[derive(Serialize)]
struct Row {
    m: usize,
    n: usize,
    k: usize,
    groups: usize,
    recipe: String,
    unit: &'static str,
    parts: Map<String, Value>,
    whole: f64,
    plain_parts: Map<String, Value>,
    plain_whole: Option<f64>,
    of_plain: Option<f64>,
    of_first: f64,
}

/// How the three tensors of the layer are quantized.
struct Quantizers {
    recipe: String,
    input: Quantizer,
    weight: Quantizer,
    grad_output: Quantizer,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs"))]
    accumulators: Accumulators,
}

impl Quantizers {
    fn new(name: &str) -> Result<Self> {
        let recipe: Recipe = crate::recipe::read(name)?;
        let mut model = Model::new();
        model.add(Module::linear("layer"));
        let plan = Plan::build(&model, &recipe, &Capabilities::software())?;
        let scales = States::new(&plan)?.scales();
        let quantizer = |slot| plan.quantizer(&Site::new("layer", slot), &scales);
        Ok(Quantizers {
            recipe: name.to_string(),
            input: quantizer(LinearSlot::Input)?,
            weight: quantizer(LinearSlot::Weight)?,
            grad_output: quantizer(LinearSlot::GradOutput)?,
            accumulators: plan.accumulators(),
        })
    }

    fn of(&self, slot: LinearSlot) -> &Quantizer {
        match slot {
            LinearSlot::Weight => &self.weight,
            LinearSlot::GradOutput => &self.grad_output,
            _ => &self.input,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (m, n_and_k) = if args.place.device == Device::Cpu { (512, 2048) } else { (8192, 8192) };
    let (n, k) = (args.n.unwrap_or(n_and_k), args.k.unwrap_or(n_and_k));
    ensure!(!args.routed || args.place.device != Device::Cpu, "--routed: name a GPU with --device cuda");
    let mut sizes = Vec::new();
    let tokens = if args.m.is_empty() { vec![m] } else { args.m.clone() };
    for m in tokens {
        for &groups in &args.groups {
            for (name, value, most) in [("--m", m, 1 << 20), ("--n", n, 1 << 16), ("--k", k, 1 << 16)] {
                check_size(name, value, most)?;
            }
            ensure!(
                groups > 0 && m.is_multiple_of(16 * groups),
                "--groups: {m} tokens do not make {groups} groups of a multiple of 16"
            );
            sizes.push(Sizes { m, n, k, groups, routed: args.routed });
        }
    }
    let recipes = args.recipe.iter().map(|name| Quantizers::new(name)).collect::<Result<Vec<_>>>()?;
    let printer = || Printer { style: Style::of(args.json, args.markdown), rows: Vec::new() };
    crate::until_closed(
        args.place
            .run(|| cpu::run(&sizes, &recipes, printer()), |ordinal| run_on_gpu(ordinal, &sizes, &recipes, printer())),
    )?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "cuda")]
fn run_on_gpu(ordinal: usize, sizes: &[Sizes], recipes: &[Quantizers], printer: Printer) -> Result<()> {
    cuda::run(crate::device::open(ordinal)?, sizes, recipes, printer)
}

#[cfg(not(feature = "cuda"))]
fn run_on_gpu(_: usize, _: &[Sizes], _: &[Quantizers], _: Printer) -> Result<()> {
    anyhow::bail!(crate::device::NOT_BUILT)
}

/// Prints tables as they come, or JSON at the end.
struct Printer {
    style: Style,
    rows: Vec<Row>,
}

/// What is timed beside the recipes, and the unit of the times.
struct Labels {
    machine: String,
    plain: &'static str,
    unit: &'static str,
}

impl Printer {
    /// The times of each recipe, and those without quantization.
    fn add(
        &mut self,
        labels: &Labels,
        sizes: Sizes,
        recipes: &[Quantizers],
        times: &[Times],
        plain: Option<&Times>,
    ) -> Result<()> {
        let Sizes { m, n, k, groups, .. } = sizes;
        let rows = recipes.iter().zip(times).map(|(recipe, times_of)| Row {
            m,
            n,
            k,
            groups,
            recipe: recipe.recipe.clone(),
            unit: labels.unit,
            parts: times_of.by_name(),
            whole: times_of.whole,
            plain_parts: plain.map(Times::by_name).unwrap_or_default(),
            plain_whole: plain.map(|plain| plain.whole),
            of_plain: plain.map(|plain| times_of.whole / plain.whole),
            of_first: times_of.whole / times[0].whole,
        });
        let rows: Vec<Row> = rows.collect();
        match self.style {
            Style::Json => self.rows.extend(rows),
            style => print(&mut std::io::stdout().lock(), labels, &rows, style)?,
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        if self.style == Style::Json {
            crate::json::print("bench linear", &self.rows)?;
        }
        Ok(())
    }
}

fn print(out: &mut impl Write, labels: &Labels, rows: &[Row], style: Style) -> Result<()> {
    let Row { m, n, k, groups, plain_parts, plain_whole, .. } = &rows[0];
    let experts = if *groups == 1 { String::new() } else { format!(", {groups} experts") };
    writeln!(out, "M = {m}, N = {n}, K = {k}{experts}, {}", labels.machine)?;
    let number = |value: Option<f64>, digits: usize| value.map_or("-".to_string(), |time| format!("{time:.digits$}"));
    let recipes = rows.iter().map(|row| right(short(&row.recipe)));
    let mut table = Table::new([left(labels.unit)].into_iter().chain(recipes).chain([right(labels.plain)]));
    let mut line = |name: &str, value: &dyn Fn(&Row) -> String, plain: String| {
        table.row([name.to_string()].into_iter().chain(rows.iter().map(value)).chain([plain]));
    };
    for part in Part::ALL {
        let of = |parts: &Map<String, Value>| number(parts.get(part.name()).and_then(Value::as_f64), 1);
        line(part.name(), &|row| of(&row.parts), of(plain_parts));
    }
    line("whole", &|row| number(Some(row.whole), 1), number(*plain_whole, 1));
    line("of plain", &|row| number(row.of_plain, 3), String::new());
    line("of first", &|row| number(Some(row.of_first), 3), String::new());
    match style {
        Style::Markdown => table.write_markdown(out)?,
        Style::Text | Style::Json => table.write(out)?,
    }
    Ok(())
}

/// The end of a name that may be a path.
fn short(recipe: &str) -> &str {
    let name = recipe.rsplit('/').next().unwrap_or(recipe);
    name.strip_suffix(".toml").unwrap_or(name)
}
