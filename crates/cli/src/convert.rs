//! `nvfp4 convert`: a checkpoint becomes an NVFP4 checkpoint that servers load.

use crate::device::Device;
use crate::interrupt::interrupts;
use crate::page::{self, Replaces};
use crate::progress::{Progress, Voice};
use crate::say::{out, say};
use crate::sizes::counted;
use crate::source::{self, From, Weights};
use crate::writing::Writing;
use crate::{Host, exit, plan, report, sizes, until_closed, verify};
use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use nvfp4::Profile;
use nvfp4_checkpoint::gguf::GgufFile;
use nvfp4_checkpoint::{
    Action, Acts, Checkpoint, Existing, Finished, KvCache, Model, Outcome, Plan, ScaleChoice, Settings, Severity,
    Shards, Statistics, Summary, Target,
};
use nvfp4_files::regular;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

/// Convert a checkpoint to NVFP4, without a GPU and without loading it.
///
/// Reads BF16, F16, F32, FP8 with block scales, MXFP4 experts, and NVFP4 of other dialects (which keeps its codes). The
/// target appears when it is whole; an interrupted conversion is continued with --resume, to the same bytes.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Folder to write; with --to gguf, a file.
    target: PathBuf,
    /// Whose checkpoint to write: modelopt (vLLM, SGLang, TensorRT-LLM), compressed-tensors (vLLM, transformers) or gguf
    /// (llama.cpp; Llama and Qwen).
    #[arg(long, default_value = "modelopt")]
    to: Target,
    /// Whose checkpoint the source is, if it does not say.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Scales of activations: none (W4A16), const or const=VALUE, or a JSON file of the amax of each module, as
    /// {"model.layers.0.mlp.up_proj": 12.5}; amax / 2688 becomes its scale.
    #[arg(long, default_value = "none")]
    acts: ActsArg,
    #[command(flatten)]
    weights: Weights,
    /// How block scales are chosen.
    #[arg(long, value_enum, default_value = "max")]
    scale: ScaleArg,
    /// Whose arithmetic, to the bit [default: modelopt; with --scale 4over6: transformer-engine].
    #[arg(long, value_enum)]
    profile: Option<ProfileArg>,
    /// How servers keep keys and values: none says nothing, fp8-cast says FP8 with the scale 1.
    #[arg(long, value_enum, default_value = "none")]
    kv: KvArg,
    /// Where weights are quantized, to the same bytes: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Split the output as the source is split.
    #[arg(long, conflicts_with = "max_shard")]
    keep_shards: bool,
    /// Number of threads [default: one per core].
    #[arg(long)]
    threads: Option<usize>,
    /// Write a page about the errors, scales and codes of all weights.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Show the plan and stop.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    writing: Writing,
}

#[derive(Clone, Copy, ValueEnum)]
enum KvArg {
    None,
    Fp8Cast,
}

#[derive(Clone, Copy, ValueEnum)]
enum ScaleArg {
    Max,
    Mse,
    #[value(name = "4over6")]
    FourOverSix,
}

#[derive(Clone, Copy, ValueEnum)]
enum ProfileArg {
    Modelopt,
    TransformerEngine,
    LlmCompressor,
    Torchao,
}

/// `--acts` before files are read.
#[derive(Clone)]
enum ActsArg {
    None,
    Constant(f32),
    File(PathBuf),
}

impl FromStr for ActsArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("const=")) {
            ("none", _) => Ok(ActsArg::None),
            ("const", _) => Ok(ActsArg::Constant(1.0)),
            (_, Some(value)) => match value.parse::<f32>() {
                Ok(scale) if scale.is_finite() && scale > 0.0 => Ok(ActsArg::Constant(scale)),
                _ => Err(format!("expected a positive number after const=, got '{value}'")),
            },
            (file, None) if file.ends_with(".json") => Ok(ActsArg::File(file.into())),
            _ => Err("expected none, const, const=VALUE or a .json file".to_string()),
        }
    }
}

impl Args {
    fn settings(&self) -> Result<Settings> {
        ensure!(self.threads != Some(0), "--threads: expected at least 1");
        let defaults = Settings::default();
        Ok(Settings {
            target: self.to,
            source: self.from.map(From::dialect),
            selection: self.weights.selection()?,
            scale: match self.scale {
                ScaleArg::Max => ScaleChoice::Max,
                ScaleArg::Mse => ScaleChoice::Mse,
                ScaleArg::FourOverSix => ScaleChoice::FourOverSix,
            },
            profile: self.profile.map(|profile| match profile {
                ProfileArg::Modelopt => Profile::ModelOpt,
                ProfileArg::TransformerEngine => Profile::TransformerEngine,
                ProfileArg::LlmCompressor => Profile::LlmCompressor,
                ProfileArg::Torchao => Profile::TorchAo,
            }),
            acts: match &self.acts {
                ActsArg::None => Acts::None,
                ActsArg::Constant(scale) => Acts::Constant(*scale),
                ActsArg::File(path) => Acts::Amaxes(amaxes(path)?),
            },
            kv: match self.kv {
                KvArg::None => KvCache::Unsaid,
                KvArg::Fp8Cast => KvCache::Fp8Cast,
            },
            implementation: self.device.implementation()?,
            shards: if self.keep_shards { Shards::AsSource } else { Shards::AtMost(self.writing.max_shard) },
            threads: self.threads.unwrap_or(defaults.threads),
            memory: self.writing.mem,
            existing: self.writing.existing(),
        })
    }
}

fn amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    // The text has the cause in it; a context would say the path twice.
    let json: Value = regular::read_json(path, source::MAX_LIST).map_err(|error| anyhow!("--acts {error}"))?;
    serde_json::from_value(json)
        .with_context(|| format!("--acts {}: expected an object of module names and amaxes", path.display()))
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let settings = args.settings()?;
    let checkpoint = Checkpoint::open(&args.source)?;
    if let Some(path) = &args.report {
        let replaces = if settings.existing == Existing::Replace { Replaces::Files } else { Replaces::Pages };
        // An index names files beside it, and a cache has links to files elsewhere.
        let inside = page::files(&args.source);
        let mut apart = vec![("source", args.source.as_path()), ("target", &args.target)];
        apart.extend(checkpoint.files().iter().map(|file| ("source", file.path())));
        apart.extend(inside.iter().map(|file| ("source", file.as_path())));
        page::check(path, replaces, &apart)?;
    }
    let model = source::model(&checkpoint, args.from)?;
    let plan = Plan::new(&model, &settings.selection, settings.target)?;
    let mut out = out();
    if args.dry_run {
        until_closed(plan::print(&mut out, &model, &plan))?;
        return Ok(ExitCode::SUCCESS);
    }
    until_closed(introduce(&mut out, args, &model, &plan))?;
    let voice = args.writing.voice();
    let weights = match voice {
        Voice::Verbose => plan.items.len(),
        Voice::Normal | Voice::Quiet => plan.items.iter().filter(|i| i.action == Action::Quantize).count(),
    };
    if let Acts::Amaxes(amaxes) = &settings.acts {
        until_closed(strangers(&mut out, amaxes, &plan))?;
    }
    if voice == Voice::Verbose {
        plan.copied.iter().for_each(|copied| say(plan::copied_line(copied)));
    }
    let progress = Progress::new(voice, weights);
    let start = Instant::now();
    let summary = nvfp4_checkpoint::convert(&args.source, &args.target, &settings, &progress, interrupts(host)?);
    progress.finish();
    let summary = summary?;
    until_closed(conclude(&mut out, args, &summary, start.elapsed().as_secs_f64()))?;
    if let Some(path) = &args.report {
        write_report(path, args, &plan, &summary, &settings)?;
        until_closed(writeln!(out, "report   {}", path.display()).map_err(Into::into))?;
    }
    check(&mut out, args, &summary)
}

/// Says which names of `--acts` are of no weight that is quantized: they may be mistyped.
fn strangers(out: &mut impl Write, amaxes: &BTreeMap<String, f32>, plan: &Plan<'_>) -> Result<()> {
    let known: BTreeSet<&str> = plan.quantized().map(|item| item.weight.module.as_str()).collect();
    let strangers: Vec<&str> = amaxes.keys().map(String::as_str).filter(|name| !known.contains(name)).collect();
    if let Some(first) = strangers.first() {
        let count = counted(strangers.len(), "name");
        writeln!(out, "acts     {count} of no quantized weight, as '{first}'")?;
    }
    Ok(())
}

fn write_report(path: &Path, args: &Args, plan: &Plan<'_>, summary: &Summary, settings: &Settings) -> Result<()> {
    let mut total = Statistics::default();
    if settings.target == Target::Gguf {
        let written = GgufFile::open(&args.target)?;
        written.nvfp4().try_for_each(|t| written.statistics(t).map(|s| total.add(&s)))?;
    } else {
        let written = Checkpoint::open(&args.target)?;
        let counts = nvfp4_checkpoint::statistics(&Model::new(&written)?, settings.threads)?;
        counts.iter().flatten().for_each(|s| total.add(s));
    }
    let title = args.source.file_name().unwrap_or_default().to_string_lossy();
    report::write(path, &title, plan, summary, &total)
}

fn introduce(out: &mut impl Write, args: &Args, model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    let checkpoint = model.checkpoint;
    let name = model.architecture().unwrap_or("unnamed");
    let (files, size) = (checkpoint.files().len(), sizes::show(checkpoint.byte_len()));
    writeln!(out, "source   {name}  {}  {size}  {}", counted(files, "file"), model.dialect)?;
    let algorithm = if matches!(args.acts, ActsArg::None) { "W4A16" } else { "W4A4" };
    writeln!(out, "target   {} {algorithm}, blocks of 16", args.to)?;
    let parameters: u64 = plan.quantized().map(|i| i.weight.elements()).sum();
    let (quantized, kept) = (plan.quantized().count(), plan.items.len() - plan.quantized().count());
    writeln!(
        out,
        "plan     {} -> NVFP4 ({:.2} M parameters), {} kept",
        counted(quantized, "weight"),
        parameters as f64 / 1e6,
        counted(kept + model.others.len(), "other tensor")
    )?;
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    plan.groups.iter().for_each(|g| *kinds.entry(&g.kind).or_default() += 1);
    if !kinds.is_empty() {
        let kinds: Vec<String> = kinds.iter().map(|(kind, n)| format!("{n} x {kind}")).collect();
        writeln!(out, "         {} share one tensor scale", kinds.join(", "))?;
    }
    if let Some(stays) = plan::stays(model, plan) {
        writeln!(out, "         {stays}; `nvfp4 plan` says why")?;
    }
    Ok(out.flush()?)
}

fn conclude(out: &mut impl Write, args: &Args, summary: &Summary, seconds: f64) -> Result<()> {
    let mut worst: Vec<&Finished> = summary.quantized.iter().collect();
    worst.sort_by(|a, b| b.measure.relative_error().total_cmp(&a.measure.relative_error()));
    for (i, w) in worst.iter().take(3).enumerate() {
        let title = if i == 0 { "worst" } else { "" };
        writeln!(
            out,
            "{title:<8} {}  relerr {:.4}  SQNR {:.1} dB",
            w.module,
            w.measure.relative_error(),
            w.measure.sqnr()
        )?;
    }
    if args.weights.fix_scales() {
        writeln!(out, "{:<8} {}", "fixed", report::fixed(summary))?;
    }
    let ratio = summary.before as f64 / summary.after.max(1) as f64;
    let mut total = nvfp4_checkpoint::Measure::default();
    summary.quantized.iter().for_each(|w| total.add(&w.measure));
    let error =
        if summary.quantized.is_empty() { String::new() } else { format!(", relerr {:.4}", total.relative_error()) };
    // Another tensor scale or other names change no size.
    let smaller = if ratio < 1.05 { String::new() } else { format!(", {ratio:.1}x smaller") };
    let size = sizes::show(summary.after);
    let there = if summary.outcome == Outcome::AlreadyThere { "complete already: " } else { "" };
    writeln!(out, "result   {}: {there}{size}{smaller}{error}, {seconds:.1} s", args.target.display())?;
    Ok(out.flush()?)
}

/// What was found when the result was read back.
fn check(out: &mut impl Write, args: &Args, summary: &Summary) -> Result<ExitCode> {
    let findings = &summary.findings;
    let problems = findings.iter().filter(|f| f.severity == Severity::Problem).count();
    if problems > 0 {
        until_closed(verify::print(out, findings))?;
        say(format_args!("{} in the result; see above", counted(problems, "problem")));
        return Ok(exit::checked(false));
    }
    let (checked, next) = match args.to {
        Target::Gguf => ("names, types, scales, scale bytes, tokenizer", "llama-cli -m"),
        _ => ("names, shapes, layers, shared scales, scale bytes, index, configuration", "vllm serve"),
    };
    let next = match &summary.unserved {
        Some(finding) => finding.text.clone(),
        None => format!("{next} {}", args.target.display()),
    };
    until_closed(verify::print(out, findings))?;
    until_closed(writeln!(out, "checks   ok: {checked}\nnext     {next}").map_err(Into::into))?;
    Ok(ExitCode::SUCCESS)
}
