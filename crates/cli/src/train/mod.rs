//! `nvfp4 train`: small language models, trained side by side in several recipes.

mod recipes;
mod report;
mod results;
mod run;
mod show;
mod text;
mod threads;
mod vocabulary;

use crate::device::Device;
use crate::page::{self, Replaces};
use crate::progress::Voice;
use crate::recipes::BASELINE;
use crate::say::say;
use crate::{Host, exit, interrupt, json, until_closed};
use anyhow::{Context, Result, bail, ensure};
use clap::ArgAction;
use recipes::Named;
use results::{Results, RunResult, Settings};
use run::{Begin, Job, Kept};
use show::Show;
use std::collections::BTreeSet;
use std::io::stdout;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use text::Corpus;
use threads::Threads;
use vocabulary::Vocabulary;

/// Train a small language model with several recipes and compare the held-out losses.
///
/// Every recipe starts from the same seeds and sees the same batches. The model is a GPT:
/// LayerNorm, attention, an MLP with GELU of four times the width; embeddings, the last norm and
/// the head stay in high precision, and so does attention unless the recipe says otherwise. Runs go
/// side by side, as many as there are threads, and no result depends on their number. The last
/// tenth of the text is held out, at most 32,768 tokens. AdamW, a learning rate that warms up in
/// the first twentieth of the steps and then falls along a cosine to a tenth.
///
/// Prints a table: the mean held-out loss of each recipe over the seeds, and its gap to bf16 from
/// the same seed.
#[derive(clap::Args)]
pub struct Args {
    /// A recipe: bf16, a preset such as nvfp4 (see `nvfp4 recipe explain --help`), or a rule file;
    /// may be repeated [default: bf16 and nvfp4].
    #[arg(long = "recipe", value_name = "RECIPE")]
    recipes: Vec<String>,
    /// Train with every recipe of the table in docs/training.md: bf16, nvfp4, and variants of nvfp4
    /// with one change each.
    #[arg(long, conflicts_with = "recipes")]
    ablations: bool,
    /// A seed; may be repeated [default: 1].
    #[arg(long = "seed", value_name = "SEED")]
    seeds: Vec<u64>,
    /// Seeds from 1 to this number.
    #[arg(long = "seeds", value_name = "NUMBER", conflicts_with = "seeds")]
    seeds_up_to: Option<u64>,
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 500)]
    steps: u64,
    /// Text file to train on [default: The Devil's Dictionary by Ambrose Bierce].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens: bytes, or the size of a byte-pair vocabulary made from the text.
    #[arg(long, default_value_t = Vocabulary::Bytes)]
    vocab: Vocabulary,
    /// Number of layers.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Width of the model.
    #[arg(long, default_value_t = 256)]
    width: usize,
    /// Number of attention heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 64)]
    context: usize,
    /// Sequences per step.
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// The largest learning rate.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Steps between evaluations on the held-out part [default: a tenth of the steps].
    #[arg(long, value_name = "STEPS")]
    eval_every: Option<u64>,
    /// Folder for the state of each run; also written on Ctrl-C.
    #[arg(long, value_name = "FOLDER")]
    checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints.
    #[arg(long, value_name = "STEPS", default_value_t = 200)]
    checkpoint_every: u64,
    /// Continue from the state in --checkpoint; the result is the same as without the interruption.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Stop at this step, as Ctrl-C does.
    #[arg(long, value_name = "STEP", requires = "checkpoint")]
    stop_at: Option<u64>,
    /// Where to train: cpu, cuda or cuda:N.
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Threads; runs share them [default: one per core].
    #[arg(long)]
    threads: Option<usize>,
    /// Write an HTML report with the curves and the table.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print JSON: {settings, runs, table}.
    #[arg(long)]
    json: bool,
    /// Do not train: merge results that earlier runs wrote with --json. Files or folders; may be
    /// repeated.
    #[arg(long, value_name = "PATH", action = ArgAction::Append,
          conflicts_with_all = ["recipes", "ablations", "seeds", "seeds_up_to", "checkpoint", "text"])]
    merge: Vec<PathBuf>,
    /// Show no progress.
    #[arg(long, short)]
    quiet: bool,
}

const GB: u128 = 1_000_000_000;
/// What a run may need. Beyond it the system would end the program instead of an error.
const MOST_BYTES: u128 = 64 * GB;

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    if let Some(path) = &args.report {
        page::check(path, Replaces::Pages, &[])?;
    }
    let (results, expected) = match args.merge.is_empty() {
        false => {
            let results = Results::merged(&args.merge)?;
            let expected = results.runs.len();
            (results, expected)
        }
        true => {
            args.check()?;
            let recipes = args.recipes()?;
            args.make_checkpoint()?;
            let expected = recipes.len() * args.seeds().len();
            let threads = match host {
                Host::Program => Threads::share(args.threads(), expected),
                Host::Library => Threads::share(args.threads(), 1),
            };
            if host == Host::Program
                && let Some(ended) = threads.enforce()?
            {
                return Ok(ended);
            }
            (train(args, &recipes, threads, host)?, expected)
        }
    };
    match args.json {
        true => json::print("train", &results.to_json()?)?,
        false => until_closed(results.write_table(&mut stdout().lock()))?,
    }
    if let Some(path) = &args.report {
        report::write(path, &results)?;
    }
    let failed: Vec<&RunResult> = results.runs.iter().filter(|run| run.error.is_some()).collect();
    for RunResult { recipe, seed, error, .. } in &failed {
        say(format_args!("error: {recipe}, seed {seed}: {}", error.as_deref().unwrap_or_default()));
    }
    let finished = results.runs.iter().filter(|run| run.error.is_none() && run.steps == results.settings.steps).count();
    let unfinished = expected - finished - failed.len();
    if unfinished > 0 {
        match &args.checkpoint {
            Some(folder) => say(format_args!(
                "{unfinished} of {expected} runs stopped; the same command with --resume continues from {}",
                folder.display()
            )),
            None if args.merge.is_empty() => say(format_args!(
                "{unfinished} of {expected} runs stopped, and are lost: --checkpoint FOLDER would have kept them"
            )),
            None => say(format_args!("{unfinished} of {expected} runs were stopped before their last step")),
        }
    }
    Ok(match (failed.is_empty(), unfinished) {
        (true, 0) => ExitCode::SUCCESS,
        (true, _) if args.merge.is_empty() => ExitCode::from(interrupt::status()),
        _ => exit::error(),
    })
}

fn train(args: &Args, recipes: &[Named], threads: Threads, host: Host) -> Result<Results> {
    let text = text::read(args.text.as_deref())?;
    let settings = args.settings(&text);
    let corpus = Corpus::new(args.vocab.encode(&text)?, args.batch, args.context, args.device.try_into()?)?;
    let (show, stop) = (Show::new(if args.quiet { Voice::Quiet } else { Voice::Normal }), interrupt::interrupts(host)?);
    if !args.quiet {
        let (train, held_out) = corpus.sizes();
        say(format_args!("{train} tokens to train on, {held_out} held out; {}", settings.describe()));
    }
    let jobs: Vec<Job<'_>> = args
        .seeds()
        .into_iter()
        .flat_map(|seed| recipes.iter().map(move |recipe| (seed, recipe)))
        .map(|(seed, recipe)| Job {
            recipe,
            seed,
            settings: &settings,
            corpus: &corpus,
            eval_every: args.eval_every.unwrap_or((args.steps / 10).max(1)),
            checkpoint: args.kept(recipe, seed),
            stop_at: args.stop_at,
            stop,
        })
        .collect();
    let runs = run_all(&jobs, &show, threads, stop)?;
    Ok(Results::new(settings.clone(), runs))
}

/// Runs all jobs, some at a time.
fn run_all(jobs: &[Job<'_>], show: &Show, threads: Threads, stop: &AtomicBool) -> Result<Vec<RunResult>> {
    let waiting = Mutex::new(0..jobs.len());
    let done: Mutex<Vec<(usize, RunResult)>> = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.each).build()?;
        loop {
            let next = waiting.lock().expect("no holder panics").next();
            let Some(i) = next.filter(|_| !stop.load(Ordering::Relaxed)) else { return Ok(()) };
            // A run that fails does not end the others.
            let result = pool.install(|| jobs[i].run(show));
            done.lock().expect("no holder panics").push((i, result));
        }
    };
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for _ in 0..threads.runs {
            match thread::Builder::new().spawn_scoped(scope, work) {
                Ok(worker) => workers.push(worker),
                Err(error) if workers.is_empty() => return Err(error).context("cannot start a thread"),
                // No result depends on how many there are.
                Err(_) => break,
            }
        }
        workers.into_iter().try_for_each(|worker| worker.join().expect("a run does not panic"))
    })?;
    let mut done = done.into_inner().expect("no holder panics");
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

impl Args {
    fn check(&self) -> Result<()> {
        let sizes = [
            ("--layers", self.layers as u64, 1 << 10),
            ("--width", self.width as u64, 1 << 16),
            ("--heads", self.heads as u64, 1 << 16),
            ("--context", self.context as u64, 1 << 20),
            ("--batch", self.batch as u64, 1 << 20),
            ("--steps", self.steps, 1 << 40),
            ("--seeds", self.seeds_up_to.unwrap_or(1), 1000),
            ("--eval-every", self.eval_every.unwrap_or(1), u64::MAX),
            ("--checkpoint-every", self.checkpoint_every, u64::MAX),
            ("--threads", self.threads.unwrap_or(1) as u64, 1 << 16),
        ];
        for (name, size, most) in sizes {
            ensure!(size > 0, "{name}: expected at least 1, got 0");
            ensure!(size <= most, "{name}: expected at most {most}, got {size}");
        }
        ensure!(
            self.width.is_multiple_of(self.heads),
            "--heads: expected a number that divides --width {}, got {}",
            self.width,
            self.heads
        );
        let least = self.least_bytes();
        ensure!(
            least <= MOST_BYTES,
            "a run needs at least {} GB of memory, and at most {} GB are taken: expected smaller \
             --layers, --width, --heads, --context, --batch or --vocab",
            least.div_ceil(GB),
            MOST_BYTES / GB
        );
        ensure!(self.lr.is_finite() && self.lr > 0.0, "--lr: expected a number above 0, got {}", self.lr);
        Ok(())
    }

    /// Bytes that a run holds at least, in float32: parameters with their gradients and the
    /// optimizer's two means, and of a batch the probabilities of attention in every layer and the
    /// logits.
    fn least_bytes(&self) -> u128 {
        let [layers, width, heads, context, batch, vocabulary] =
            [self.layers, self.width, self.heads, self.context, self.batch, self.vocab.size()].map(|n| n as u128);
        let parameters = (2 * vocabulary + context) * width + 12 * layers * width * width;
        let activations = layers * batch * heads * context * context + batch * context * vocabulary;
        4 * (4 * parameters + activations)
    }

    fn recipes(&self) -> Result<Vec<Named>> {
        let chosen: Vec<&str> = match (self.ablations, self.recipes.is_empty()) {
            (true, _) => recipes::ABLATIONS.to_vec(),
            (false, true) => vec![BASELINE, "nvfp4"],
            (false, false) => self.recipes.iter().map(String::as_str).collect(),
        };
        let found = chosen.into_iter().map(recipes::find).collect::<Result<Vec<_>>>()?;
        let mut names = BTreeSet::new();
        match found.iter().find(|named| !names.insert(&named.name)) {
            Some(twice) => bail!("--recipe: two recipes are called '{}'; rename one of the files", twice.name),
            None => Ok(found),
        }
    }

    fn seeds(&self) -> Vec<u64> {
        match self.seeds_up_to {
            Some(last) => (1..=last).collect(),
            None if self.seeds.is_empty() => vec![1],
            None => self.seeds.iter().copied().collect::<BTreeSet<u64>>().into_iter().collect(),
        }
    }

    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Makes the folder for the state of each run. Where that fails, a training would be lost.
    fn make_checkpoint(&self) -> Result<()> {
        let Some(folder) = &self.checkpoint else { return Ok(()) };
        ensure!(!folder.is_file(), "--checkpoint {}: this is a file; name a folder", folder.display());
        std::fs::create_dir_all(folder).with_context(|| format!("--checkpoint {}", folder.display()))
    }

    fn kept(&self, recipe: &Named, seed: u64) -> Option<Kept> {
        let begin = if self.resume { Begin::Resume } else { Begin::Anew };
        let folder = run::folder(self.checkpoint.as_ref()?, &recipe.name, seed);
        Some(Kept { folder, every: self.checkpoint_every, begin })
    }

    fn settings(&self, text: &[u8]) -> Settings {
        let name = self.text.as_ref().and_then(|path| path.file_name());
        let name = name.map_or("The Devil's Dictionary".into(), |name| name.to_string_lossy());
        Settings {
            text: format!("{name}, {} bytes, {:016x}", text.len(), nvfp4_files::fingerprint(text.iter().copied())),
            vocabulary: self.vocab.to_string(),
            vocabulary_size: self.vocab.size(),
            layers: self.layers,
            width: self.width,
            heads: self.heads,
            context: self.context,
            batch: self.batch,
            steps: self.steps,
            lr: self.lr,
        }
    }
}
