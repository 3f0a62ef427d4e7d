//! `nvfp4 eval`: what quantization cost a model, on a text.

mod report;

use crate::device::Device;
use crate::interrupt::interrupts;
use crate::page::{self, Replaces};
use crate::progress::Voice;
use crate::say::out;
use crate::sizes::{self, counted};
use crate::text::{Bar, Text};
use crate::{Host, json, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::Checkpoint;
use nvfp4_model::{
    Activations, Blocks, Divergence, Drift, Evaluate, Evaluation, Lane, Lanes, Mean, Source, StateFile, agreement,
    open, perplexity, ratio, verdict,
};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Measure what quantization cost: perplexity, KL divergence and drift per layer, on a CPU or a GPU.
///
/// Runs both models a layer at a time, side by side, and keeps no logits. With one model, prints
/// its perplexity. Ctrl-C stops; with --state the same command continues.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the original model; or of the only one.
    reference: PathBuf,
    /// Folder of the quantized model.
    model: Option<PathBuf>,
    #[command(flatten)]
    text: Text,
    /// Activations: as the checkpoint says, always plain, or in 4 bits with a scale per row.
    #[arg(long, value_enum, default_value = "stored")]
    acts: ActsArg,
    /// Run the model as it is served only, not also to see what weights and activations cost each.
    #[arg(long)]
    served_only: bool,
    /// Where products with weights are computed: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Keep states in this file, to continue from after Ctrl-C.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Write an HTML report.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Say how much memory it needs, and stop.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Show no progress.
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ActsArg {
    Stored,
    Plain,
    PerRow,
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    let report = match args.json {
        true => perform(args, host, &mut std::io::sink())?,
        false => perform(args, host, &mut out())?,
    };
    if args.json {
        json::print("eval", &report)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What a state belongs to.
fn request(args: &Args, checkpoints: &[&Checkpoint], tokens: &[u32]) -> String {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    let files = checkpoints.iter().flat_map(|c| c.files()).map(|file| {
        let about = std::fs::metadata(file.path()).ok();
        format!("{} {:?}", file.path().display(), about.map(|about| (about.len(), about.modified().ok())))
    });
    let text = nvfp4_files::fingerprint(bytes);
    format!(
        "{text:x} {} {:?} {} {}{}",
        args.text.request(),
        args.acts,
        args.served_only,
        files.collect::<Vec<_>>().join(" "),
        // The order of sums differs.
        match args.device {
            Device::Cpu => "",
            Device::Cuda(_) => " cuda",
        }
    )
}

fn perform(args: &Args, host: Host, out: &mut impl Write) -> Result<Value> {
    let place = args.device.place()?;
    let (first, second) = (open(&args.reference)?, args.model.as_deref().map(open).transpose()?);
    if let Some(path) = &args.report {
        let models = [Some(args.reference.as_path()), args.model.as_deref()];
        page::check(
            path,
            Replaces::Pages,
            &models.into_iter().flatten().map(|path| ("model", path)).collect::<Vec<_>>(),
        )?;
    }
    let source = |checkpoint| {
        let dialect = args.text.from.filter(|_| nvfp4_checkpoint::detect(checkpoint).is_err());
        Ok::<_, anyhow::Error>(Source::new(checkpoint, dialect.map(|from| from.dialect()))?.on(place.clone()))
    };
    let (reference, model) = (source(&first)?, second.as_ref().map(source).transpose()?);
    let (rows, given) = args.text.rows(&args.reference, reference.config())?;
    let checkpoints: Vec<&Checkpoint> = [Some(&first), second.as_ref()].into_iter().flatten().collect();
    let state = args.state.as_ref().map(|path| StateFile::new(path, request(args, &checkpoints, rows.tokens())));
    let evaluate = Evaluate {
        reference: model.as_ref().map(|_| &reference),
        model: model.as_ref().unwrap_or(&reference),
        rows: &rows,
        given,
        activations: match args.acts {
            ActsArg::Stored => Activations::AsStored,
            ActsArg::Plain => Activations::Plain,
            ActsArg::PerRow => Activations::PerRow,
        },
        lanes: if args.served_only { Lanes::Served } else { Lanes::Each },
        state: state.as_ref(),
    };
    let (tokens, peak) = (rows.tokens().len(), evaluate.peak());
    if args.dry_run {
        let runs = counted(evaluate.lanes().len(), "run");
        let gpu = evaluate.gpu_peak();
        let on_gpu = gpu.map(|bytes| format!(", {} of a GPU's", sizes::show(bytes))).unwrap_or_default();
        let memory = sizes::show(peak);
        let text = format!(
            "{} in {}, {runs}, at most {memory} of memory{on_gpu}",
            counted(tokens, "token"),
            counted(rows.count(), "row")
        );
        until_closed(writeln!(out, "{text}").map_err(Into::into))?;
        return Ok(json!({
            "tokens": tokens, "rows": rows.count(), "runs": evaluate.lanes(), "memory": peak, "gpu_memory": gpu
        }));
    }
    let start = Instant::now();
    let mut bar = Bar::new(if args.quiet { Voice::Quiet } else { Voice::Normal });
    let found = evaluate.run(&mut bar, interrupts(host)?);
    bar.finish();
    let found = Found { evaluation: found?, tokens, seconds: start.elapsed().as_secs_f64() };
    until_closed(found.print(out))?;
    if let Some(path) = &args.report {
        report::write(path, &title(args.model.as_deref().unwrap_or(&args.reference)), &found)?;
        until_closed(writeln!(out, "report   {}", path.display()).map_err(Into::into))?;
    }
    Ok(found.to_json())
}

fn title(model: &Path) -> String {
    model.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What was found.
pub struct Found {
    evaluation: Evaluation,
    tokens: usize,
    seconds: f64,
}

impl Found {
    fn said(&self, lane: Lane) -> Option<&[nvfp4_model::Said]> {
        self.evaluation.said.iter().find(|(own, _)| *own == lane).map(|(_, said)| &said[..])
    }

    /// What each way to run costs, in the order in which they add up.
    fn costs(&self) -> Vec<(Lane, Divergence, Mean)> {
        let Some(reference) = self.said(Lane::Reference) else { return Vec::new() };
        let others = self.evaluation.said.iter().filter(|(lane, _)| *lane != Lane::Reference);
        others.map(|(lane, said)| (*lane, Divergence::of(reference, said), ratio(reference, said))).collect()
    }

    /// The verdict.
    fn verdict(&self) -> Option<String> {
        let (reference, model) = (self.said(Lane::Reference)?, self.said(Lane::Served)?);
        let (divergence, same) = (Divergence::of(reference, model), agreement(reference, model));
        let ratio = ratio(reference, model);
        Some(format!(
            "{}: KL divergence {:.5}, the same top token in {:.2}% of positions, perplexity x {:.4} ± {:.4}",
            verdict(divergence.mean.mean),
            divergence.mean.mean,
            100.0 * same.mean,
            ratio.mean,
            ratio.error
        ))
    }

    /// Layers by how much the error of the state grows in them, most first.
    fn worst(&self) -> Vec<(usize, f64, &Drift)> {
        let drift = &self.evaluation.drift;
        let before = |i: usize| if i == 0 { 0.0 } else { drift[i - 1].relative_error() };
        let mut order: Vec<_> = drift.iter().enumerate().map(|(i, d)| (i, d.relative_error() - before(i), d)).collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1));
        order
    }

    fn blocks(&self) -> Blocks {
        self.evaluation.blocks.values().fold(Blocks::default(), |sum, own| Blocks {
            count: sum.count + own.count,
            saturated: sum.saturated + own.saturated,
            underflowed: sum.underflowed + own.underflowed,
        })
    }

    fn print(&self, out: &mut impl Write) -> Result<()> {
        if let Some(verdict) = self.verdict() {
            writeln!(out, "verdict  {verdict}")?;
        }
        for (lane, said) in &self.evaluation.said {
            let Mean { mean, error } = perplexity(said);
            let name = match lane {
                Lane::Reference => "reference",
                Lane::Weights => "weights alone",
                Lane::Activations => "weights and activations",
                Lane::Served => "model",
            };
            writeln!(out, "ppl      {mean:.5} ± {error:.5}  {name}")?;
        }
        for (lane, divergence, _) in self.costs() {
            let Mean { mean, error } = divergence.mean;
            let title = match lane {
                Lane::Served => "model",
                Lane::Weights => "weights alone",
                _ => "weights and activations",
            };
            writeln!(out, "KL       {mean:.6} ± {error:.6}, median {:.6}  {title}", divergence.median())?;
            if lane == Lane::Served {
                let shown = divergence.percentiles.iter().map(|(share, kl)| format!("{share}% {kl:.5}"));
                writeln!(out, "         {}", shown.collect::<Vec<_>>().join("  "))?;
                for (from, to, count, mean) in divergence.by_confidence.iter().filter(|band| band.2 > 0) {
                    writeln!(
                        out,
                        "         {mean:.6} where the reference gives {from:.1} to {to:.1} to its top token ({count})"
                    )?;
                }
            }
        }
        for (i, (layer, growth, drift)) in self.worst().into_iter().take(3).enumerate() {
            let title = if i == 0 { "worst" } else { "" };
            let (error, cosine) = (drift.relative_error(), drift.cosine());
            writeln!(out, "{title:<8} layer {layer}: relerr {error:.4} ({growth:+.4}), cosine {cosine:.5}")?;
        }
        let blocks = self.blocks();
        if blocks.count > 0 {
            let share = |n: u64| 100.0 * n as f64 / blocks.count as f64;
            let (saturated, underflowed) = (share(blocks.saturated), share(blocks.underflowed));
            writeln!(out, "acts     {saturated:.3}% of blocks saturated, {underflowed:.3}% underflowed")?;
        }
        let (tokens, seconds) = (counted(self.tokens, "token"), self.seconds);
        writeln!(out, "done     {tokens}, {seconds:.1} s, {:.1} tokens/s", self.tokens as f64 / seconds.max(1e-9))?;
        Ok(out.flush()?)
    }

    fn to_json(&self) -> Value {
        let runs = self.evaluation.said.iter().map(|(lane, said)| {
            let compared = self.said(Lane::Reference).filter(|_| *lane != Lane::Reference).map(|reference| {
                json!({
                    "ratio": ratio(reference, said), "divergence": Divergence::of(reference, said),
                    "agreement": agreement(reference, said)
                })
            });
            json!({ "run": lane, "perplexity": perplexity(said), "compared": compared })
        });
        let layer = |(i, drift): (usize, &Drift)| json!({ "layer": i, "relerr": drift.relative_error(), "cosine": drift.cosine() });
        json!({
            "tokens": self.tokens, "seconds": self.seconds, "verdict": self.verdict(), "runs": runs.collect::<Vec<_>>(),
            "layers": self.evaluation.drift.iter().enumerate().map(layer).collect::<Vec<_>>(),
            "blocks": self.evaluation.blocks
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        args: Args,
    }

    /// Sums of a GPU have another order, so states of a CPU are not continued there.
    #[test]
    fn states_belong_to_a_kind_of_device() {
        let request = |device: &str| {
            let words = ["eval", "model", "--text", "text", "--device", device];
            request(&Words::parse_from(words).args, &[], &[1, 2])
        };
        assert_eq!(request("cuda"), request("cuda:1"));
        assert_ne!(request("cuda"), request("cpu"));
    }
}
