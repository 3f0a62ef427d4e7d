//! `nvfp4 convert`: a checkpoint becomes an NVFP4 checkpoint that servers load.

use crate::calibrated::{Calibrated, ScaleArg};
use crate::device::Device;
use crate::interrupt::interrupts;
use crate::page::{self, Replaces};
use crate::progress::{Progress, Voice};
use crate::report::Subject;
use crate::say::{out, say};
use crate::sizes::counted;
use crate::source::{self, From, Weights};
use crate::writing::Writing;
use crate::{Host, exit, json, part, plan, report, sizes, until_closed, verify};
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use nvfp4::Profile;
use nvfp4_checkpoint::gguf::GgufFile;
use nvfp4_checkpoint::{
    Action, Acts, Checkpoint, Existing, Finished, KvCache, Model, Outcome, Plan, Portion, Settings, Severity, Shards,
    Statistics, Summary, Target, check_free,
};
use nvfp4_files::regular;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

/// Convert a checkpoint to NVFP4; needs no GPU and little memory.
///
/// Reads BF16, F16, F32, FP8, MXFP8, MXFP4 experts, and NVFP4 in other formats (the
/// codes are kept). The target appears under its name only when it is complete. --resume continues
/// an interrupted conversion, to the same bytes. --part and --finish convert on several machines.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or safetensors file.
    source: PathBuf,
    /// Folder to write; with --to gguf or comfyui, a file.
    target: PathBuf,
    /// Output format: modelopt (vLLM, SGLang, TensorRT-LLM), compressed-tensors (vLLM,
    /// transformers), deepseek-v4 (vLLM; DeepSeek-V4's own), gguf (llama.cpp; Llama and Qwen) or
    /// comfyui (one safetensors file).
    #[arg(long, default_value = "modelopt")]
    to: Target,
    /// Format of the source, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Activation scales: none (W4A16), const (1) or const=VALUE, or a JSON file with the largest
    /// absolute value (amax) of each module's input, such as {"model.layers.0.mlp.up_proj": 12.5};
    /// the scale is amax / 2688. Or a .safetensors file that `nvfp4 calibrate` wrote.
    #[arg(long, default_value = "none")]
    acts: ActsArg,
    #[command(flatten)]
    weights: Weights,
    #[command(flatten)]
    calibrated: Calibrated,
    /// Reproduce this library's rounding exactly [default: modelopt; with --scale 4over6:
    /// transformer-engine].
    #[arg(long, value_enum)]
    profile: Option<ProfileArg>,
    /// KV cache format to record for servers: none (not recorded), fp8 (with the scales of keys and
    /// values in the --acts file of `nvfp4 calibrate`), fp8-cast (FP8 with a scale of 1) or nvfp4-cast
    /// (NVFP4 with a tensor scale of 1; modelopt alone).
    #[arg(long, value_enum, default_value = "none")]
    kv: KvArg,
    /// Where to quantize: cpu, cuda or cuda:N. The bytes are the same.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Split the output into the same files as the source.
    #[arg(long, conflicts_with = "max_shard")]
    keep_shards: bool,
    /// Number of threads [default: one per core].
    #[arg(long)]
    threads: Option<usize>,
    /// Write an HTML report on the errors, scales and codes of all weights.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Show the plan and stop.
    #[arg(long)]
    dry_run: bool,
    /// Do part I of N, counted from 0, and stop: 0/8 to 7/8. Parts may run on any machines that see
    /// the same files, in any order, at the same time and more than once; one that was stopped
    /// continues. Give all of them the same options, then run --finish.
    #[arg(long, value_name = "I/N", conflicts_with_all = ["finish", "dry_run", "report"])]
    part: Option<Portion>,
    /// Make the target from all parts: the bytes that one process would have written. Takes the
    /// options that the parts had. Refuses, and names them, if some are missing.
    #[arg(long, conflicts_with = "dry_run")]
    finish: bool,
    #[command(flatten)]
    writing: Writing,
}

#[derive(Clone, Copy, ValueEnum)]
enum KvArg {
    None,
    Fp8,
    Fp8Cast,
    Nvfp4Cast,
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
            (file, None) if file.ends_with(".json") || file.ends_with(".safetensors") => Ok(ActsArg::File(file.into())),
            _ => {
                Err("expected none, const, const=VALUE, a .json file or a .safetensors file of `calibrate`".to_string())
            }
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
            scale: self.calibrated.scale(),
            round: self.calibrated.round(),
            statistics: self.calibrated.statistics(match &self.acts {
                ActsArg::File(path) => Some(path),
                ActsArg::None | ActsArg::Constant(_) => None,
            }),
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
                KvArg::Fp8 => KvCache::Fp8(self.cache_scales()?),
                KvArg::Fp8Cast => KvCache::Fp8Cast,
                KvArg::Nvfp4Cast => KvCache::Nvfp4Cast,
            },
            implementation: self.device.implementation()?,
            shards: if self.keep_shards { Shards::AsSource } else { Shards::AtMost(self.writing.max_shard) },
            threads: self.threads.unwrap_or(defaults.threads),
            memory: self.writing.mem,
            existing: self.writing.existing(),
        })
    }
}

impl Args {
    /// The scales of keys and values, from the statistics of `--acts`.
    fn cache_scales(&self) -> Result<BTreeMap<String, f32>> {
        match &self.acts {
            ActsArg::File(path) if path.extension().is_some_and(|extension| extension == "safetensors") => {
                nvfp4_model::cache_scales(path).map_err(|error| anyhow!("--acts {error}"))
            }
            _ => bail!(
                "--kv fp8 takes the scales that `nvfp4 calibrate` finds: give --acts FILE.safetensors, or --kv \
                 fp8-cast, which needs none"
            ),
        }
    }

    /// How the checkpoint was made, for its report.
    fn made(&self, summary: &Summary) -> Vec<(&'static str, String)> {
        let word = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map_or(String::new(), |value| value.get_name().to_string())
        };
        let acts = match &self.acts {
            ActsArg::None => "none (W4A16)".to_string(),
            ActsArg::Constant(scale) => format!("{scale}"),
            ActsArg::File(path) => path.display().to_string(),
        };
        let problems = summary.findings.iter().filter(|f| f.severity == Severity::Problem).count();
        let checks = match problems {
            0 => format!("ok: {}", checked(self.to)),
            _ => counted(problems, "problem"),
        };
        let profile = self.profile.unwrap_or(match self.calibrated.scale_arg() {
            ScaleArg::FourOverSix => ProfileArg::TransformerEngine,
            _ => ProfileArg::Modelopt,
        });
        let mut made = vec![
            ("program", format!("nvfp4 {}", env!("CARGO_PKG_VERSION"))),
            ("source", self.source.display().to_string()),
            ("target", self.target.display().to_string()),
            ("--to", self.to.to_string()),
            ("--profile", word(&|| profile.to_possible_value())),
            ("--acts", acts),
            ("--kv", word(&|| self.kv.to_possible_value())),
        ];
        made.extend(self.calibrated.chosen());
        made.extend(self.weights.chosen());
        made.push(("checks", checks));
        made
    }
}

fn amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        return nvfp4_model::amaxes(path).map_err(|error| anyhow!("--acts {error}"));
    }
    // The text has the cause in it; a context would say the path twice.
    let json: Value = regular::read_json(path, source::MAX_LIST).map_err(|error| anyhow!("--acts {error}"))?;
    serde_json::from_value(json)
        .with_context(|| format!("--acts {}: expected an object of module names and amaxes", path.display()))
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let (report, passed) = match args.writing.json {
        true => perform(args, host, &mut std::io::sink())?,
        false => perform(args, host, &mut out())?,
    };
    if args.writing.json {
        json::print("convert", &report)?;
    }
    Ok(exit::checked(passed))
}

/// Converts, and writes what was done. Returns the same as JSON, and whether the result has no
/// problem.
pub fn perform(args: &Args, host: Host, out: &mut impl Write) -> Result<(Value, bool)> {
    let settings = args.settings()?;
    // An end that was stopped when the target had its name has something to clear away.
    if !args.dry_run && !args.finish {
        check_free(&args.target, &settings)?;
    }
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
    let checkpoint = source::split(checkpoint, &settings.selection, settings.target, args.from)?;
    let model = source::model(&checkpoint, args.from)?;
    let plan = Plan::new(&model, &settings.selection, settings.target)?;
    if args.dry_run {
        until_closed(plan::print(out, &model, &plan, plan::Lines::Folded))?;
        return Ok((plan::to_json(&model, &plan), true));
    }
    until_closed(introduce(out, args, &model, &plan))?;
    let voice = args.writing.voice();
    let weights = match voice {
        Voice::Verbose => plan.items.len(),
        Voice::Normal | Voice::Quiet => plan.items.iter().filter(|i| i.action.is_made()).count(),
    };
    if let Acts::Amaxes(amaxes) = &settings.acts {
        until_closed(strangers(out, amaxes, &plan))?;
    }
    if voice == Voice::Verbose {
        plan.copied.iter().for_each(|copied| say(plan::copied_line(copied)));
    }
    if let Some(portion) = args.part {
        let job = part::Job { source: &args.source, target: &args.target, settings: &settings, portion };
        return Ok((job.perform(voice, (&model, &plan), host, out)?, true));
    }
    let progress = Progress::new(voice, weights);
    let start = Instant::now();
    let act = if args.finish { nvfp4_checkpoint::finish } else { nvfp4_checkpoint::convert };
    let summary = act(&args.source, &args.target, &settings, &progress, interrupts(host)?);
    progress.finish();
    let summary = summary?;
    let seconds = start.elapsed().as_secs_f64();
    until_closed(conclude(out, args, &summary, seconds))?;
    if let Some(path) = &args.report {
        write_report(path, args, &plan, &summary, &settings)?;
        until_closed(writeln!(out, "report   {}", path.display()).map_err(Into::into))?;
    }
    let passed = check(out, args, &summary)?;
    Ok((to_json(args, &model, &summary, seconds, passed), passed))
}

/// What was written and what was found in it, as JSON.
pub fn written(source: &Path, target: &Path, summary: &Summary) -> Value {
    let outcome = match summary.outcome {
        Outcome::Written => "written",
        Outcome::AlreadyThere => "complete already",
    };
    json!({
        "source": source, "target": target, "outcome": outcome, "files": summary.files,
        "bytes": summary.before, "new_bytes": summary.after,
        "findings": summary.findings.iter().map(verify::to_json).collect::<Vec<Value>>(),
    })
}

fn to_json(args: &Args, model: &Model<'_>, summary: &Summary, seconds: f64, passed: bool) -> Value {
    let weight = |w: &Finished| {
        json!({
            "module": w.module, "shape": [w.rows, w.cols], "group": w.group, "bytes": w.before, "new_bytes": w.after,
            "relerr": w.measure.relative_error(), "sqnr_db": w.measure.sqnr()
        })
    };
    let list = |weights: &[Finished]| weights.iter().map(weight).collect::<Vec<Value>>();
    let mut report = written(&args.source, &args.target, summary);
    report["dialect"] = json!(model.dialect.to_string());
    report["to"] = json!(args.to.to_string());
    report["relerr"] = json!(total_error(summary));
    report["seconds"] = json!(seconds);
    report["passed"] = json!(passed);
    report["unserved"] = json!(summary.unserved.as_ref().map(verify::to_json));
    report["report"] = json!(args.report);
    report["weights"] = json!(list(&summary.quantized));
    report["rescaled"] = json!(list(&summary.rescaled));
    report["plain"] = json!(summary.plain);
    report
}

/// The relative error of all weights that were quantized; none where there are none.
fn total_error(summary: &Summary) -> Option<f64> {
    let mut total = nvfp4_checkpoint::Measure::default();
    summary.quantized.iter().for_each(|w| total.add(&w.measure));
    (!summary.quantized.is_empty()).then(|| total.relative_error())
}

/// Says which names of `--acts` match no quantized weight: they may be mistyped.
fn strangers(out: &mut impl Write, amaxes: &BTreeMap<String, f32>, plan: &Plan<'_>) -> Result<()> {
    let known: BTreeSet<&str> = plan.quantized().map(|item| item.weight.module.as_str()).collect();
    let strangers: Vec<&str> = amaxes.keys().map(String::as_str).filter(|name| !known.contains(name)).collect();
    if let Some(first) = strangers.first() {
        let count = counted(strangers.len(), "name");
        writeln!(out, "acts     {count} for no quantized weight, such as '{first}'")?;
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
    let subject = Subject { title: &title, made: args.made(summary), plan, summary, statistics: &total };
    report::write(path, &subject)
}

/// How many weights, and elements of them, become what.
fn forms(plan: &Plan<'_>) -> BTreeMap<String, (usize, u64)> {
    let mut forms: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    // Said also where there are none: it is what the program is for.
    if !plan.is_mixed() {
        forms.insert("NVFP4".to_string(), (0, 0));
    }
    for item in plan.items.iter().filter(|item| item.action.is_quantized()) {
        let form = match item.action {
            Action::RetainMxFp4 => "MXFP4".to_string(),
            _ => item.action.eight().map_or("NVFP4".to_string(), |eight| eight.to_string()),
        };
        let (count, elements) = forms.entry(form).or_default();
        *count += 1;
        *elements += item.weight.elements();
    }
    forms
}

fn introduce(out: &mut impl Write, args: &Args, model: &Model<'_>, plan: &Plan<'_>) -> Result<()> {
    let checkpoint = model.checkpoint;
    let name = model.architecture().unwrap_or("unnamed");
    let (files, size) = (checkpoint.files().len(), sizes::show(checkpoint.byte_len()));
    writeln!(out, "source   {name}  {}  {size}  {}", counted(files, "file"), model.dialect)?;
    let algorithm = if matches!(args.acts, ActsArg::None) { "W4A16" } else { "W4A4" };
    match plan.is_mixed() {
        false => writeln!(out, "target   {} {algorithm}, blocks of 16", args.to)?,
        true => writeln!(out, "target   {}, in the forms of the plan", args.to)?,
    }
    let kept = plan.items.iter().filter(|i| !i.action.is_quantized()).count();
    let forms: Vec<String> = forms(plan)
        .into_iter()
        .map(|(form, (count, parameters))| {
            format!("{} -> {form} ({:.2} M parameters)", counted(count, "weight"), parameters as f64 / 1e6)
        })
        .collect();
    writeln!(out, "plan     {}, {} kept", forms.join(", "), counted(kept + model.others.len(), "other tensor"))?;
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
    for (i, (module, reason)) in summary.plain.iter().enumerate().take(3) {
        let more = if i == 2 && summary.plain.len() > 3 {
            format!(", and {} more", summary.plain.len() - 3)
        } else {
            String::new()
        };
        writeln!(out, "{:<8} {module} without statistics: {reason}{more}", if i == 0 { "plain" } else { "" })?;
    }
    let ratio = summary.before as f64 / summary.after.max(1) as f64;
    let error = total_error(summary).map_or(String::new(), |error| format!(", relerr {error:.4}"));
    // Another tensor scale or other names change no size.
    let smaller = if ratio < 1.05 { String::new() } else { format!(", {ratio:.1}x smaller") };
    let size = sizes::show(summary.after);
    let there = if summary.outcome == Outcome::AlreadyThere { "complete already: " } else { "" };
    writeln!(out, "result   {}: {there}{size}{smaller}{error}, {seconds:.1} s", args.target.display())?;
    Ok(out.flush()?)
}

/// What is looked at when a result is read back.
fn checked(target: Target) -> &'static str {
    match target {
        Target::Gguf => "names, types, scales, scale bytes, tokenizer",
        Target::ComfyUi => "names, shapes, scale bytes, markers",
        _ => "names, shapes, layers, shared scales, scale bytes, index, configuration",
    }
}

/// Prints what was found when the result was read back. Returns whether there is no problem.
fn check(out: &mut impl Write, args: &Args, summary: &Summary) -> Result<bool> {
    let findings = &summary.findings;
    let problems = findings.iter().filter(|f| f.severity == Severity::Problem).count();
    if problems > 0 {
        until_closed(verify::print(out, findings))?;
        say(format_args!("{} in the result; see above", counted(problems, "problem")));
        return Ok(false);
    }
    let next = match args.to {
        Target::Gguf => "llama-cli -m",
        Target::ComfyUi => "load it in ComfyUI:",
        _ => "vllm serve",
    };
    let checked = checked(args.to);
    let next = match &summary.unserved {
        Some(finding) => verify::sentence(finding),
        None => format!("{next} {}", args.target.display()),
    };
    until_closed(verify::print(out, findings))?;
    until_closed(writeln!(out, "checks   ok: {checked}\nnext     {next}").map_err(Into::into))?;
    Ok(true)
}
