//! One run: a model of one recipe from one seed, trained step by step.

use super::recipes::Named;
use super::results::{Point, RunResult, Settings};
use super::show::Show;
use super::text::Corpus;
use anyhow::{Context, Result, bail};
use candle_core::DType;
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4_nn::{AdamW, Gpt, GptConfig, Session};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What a run is to do.
pub struct Job<'a> {
    pub recipe: &'a Named,
    pub seed: u64,
    pub settings: &'a Settings,
    pub corpus: &'a Corpus,
    /// Steps between two evaluations on the held-out part.
    pub eval_every: u64,
    /// Where its state is kept, if anywhere.
    pub checkpoint: Option<Kept>,
    /// A step to stop at, before the last one.
    pub stop_at: Option<u64>,
    /// Set by Ctrl-C.
    pub stop: &'a AtomicBool,
}

/// A folder for the state of a run.
#[derive(Clone)]
pub struct Kept {
    pub folder: PathBuf,
    /// Steps between two writes.
    pub every: u64,
    pub begin: Begin,
}

/// How a run begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// At step 0; the folder must not exist.
    Anew,
    /// Where the folder's state ends; at step 0 where there is none.
    Resume,
}

/// What a checkpoint says beside the session's own state.
#[derive(Serialize, Deserialize)]
struct Notes {
    settings: Settings,
    seed: u64,
    history: History,
}

/// Losses so far.
#[derive(Clone, Default, Serialize, Deserialize)]
struct History {
    /// Of every step.
    train: Vec<f32>,
    held_out: Vec<Point>,
    /// The time that the steps took.
    seconds: f64,
}

impl Job<'_> {
    /// Trains to the last step, or until it is told to stop. A run that an error ends keeps its
    /// losses.
    pub fn run(&self, show: &Show) -> RunResult {
        match Training::new(self) {
            Err(error) => self.result(&History::default(), Some(error)),
            Ok(mut training) => {
                let ended = training.train(self, show);
                self.result(&training.history, ended.err())
            }
        }
    }

    fn result(&self, history: &History, error: Option<anyhow::Error>) -> RunResult {
        RunResult {
            recipe: self.recipe.name.clone(),
            seed: self.seed,
            steps: history.train.len() as u64,
            train: smoothed(&history.train),
            held_out: history.held_out.clone(),
            tokens_per_second: self.tokens_per_second(history),
            error: error.map(|error| format!("{error:#}")),
        }
    }

    fn tokens_per_second(&self, history: &History) -> f64 {
        let tokens = history.train.len() * self.settings.batch * self.settings.context;
        tokens as f64 / history.seconds.max(1e-9)
    }

    /// Whether a run stops before a step.
    fn stops_at(&self, step: u64) -> bool {
        self.stop.load(Ordering::Relaxed) || self.stop_at.is_some_and(|stop| step >= stop)
    }
}

struct Training {
    session: Session,
    model: Gpt,
    optimizer: AdamW,
    history: History,
}

impl Training {
    fn new(job: &Job<'_>) -> Result<Self> {
        let Settings { layers, width, heads, context, .. } = *job.settings;
        let session = Session::new(job.seed);
        let config = GptConfig { vocabulary: job.settings.vocabulary_size, context, layers, width, heads };
        let model = Gpt::new(&session.place(DType::F32, job.corpus.device()), config)?;
        session.apply(&job.recipe.recipe)?;
        let settings = ParamsAdamW { lr: job.settings.lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let optimizer = AdamW::new(session.parameters(), settings)?;
        Ok(Training { session, model, optimizer, history: History::default() })
    }

    /// Loads what an earlier process saved.
    fn begin(&mut self, job: &Job<'_>, show: &Show) -> Result<()> {
        let Some(Kept { folder, begin, .. }) = &job.checkpoint else { return Ok(()) };
        match (begin, Session::is_saved(folder)?) {
            (Begin::Anew, true) => {
                bail!(
                    "{}: it already holds a checkpoint; continue it with --resume, or name another folder",
                    folder.display()
                )
            }
            (Begin::Anew, false) => Ok(()),
            (Begin::Resume, false) => {
                show.say(&format!("{}: no checkpoint, so it starts at step 0", folder.display()));
                Ok(())
            }
            (Begin::Resume, true) => {
                let notes = Session::notes(folder)?;
                let notes = notes.get("train").map_or("", String::as_str);
                let notes: Notes = serde_json::from_str(notes)
                    .with_context(|| format!("{}: not a checkpoint of `nvfp4 train`", folder.display()))?;
                job.settings.check(&notes.settings).with_context(|| folder.display().to_string())?;
                self.session.load(folder, &mut self.optimizer)?;
                self.history = notes.history;
                Ok(())
            }
        }
    }

    fn train(&mut self, job: &Job<'_>, show: &Show) -> Result<()> {
        self.begin(job, show)?;
        let line = show.line(&job.recipe.name, job.seed, job.settings.steps, self.session.step());
        let ended = self.go_on(job, &line);
        line.finish();
        ended
    }

    fn go_on(&mut self, job: &Job<'_>, line: &super::show::Line) -> Result<()> {
        let (steps, mut kept_at) = (job.settings.steps, self.session.step());
        while self.session.step() < steps {
            if job.stops_at(self.session.step()) {
                self.keep(job, kept_at)?;
                return Ok(());
            }
            let begun = Instant::now();
            let loss = self.step(job)?;
            self.history.train.push(loss);
            self.history.seconds += begun.elapsed().as_secs_f64();
            let step = self.session.step();
            if step == steps || step.is_multiple_of(job.eval_every) {
                let held_out = self.held_out(job.corpus)?;
                self.history.held_out.push(Point { step, loss: held_out });
            }
            line.stepped(step, &self.history.train, self.history.held_out.last(), job.tokens_per_second(&self.history));
            if let Some(kept) = &job.checkpoint
                && step.is_multiple_of(kept.every)
            {
                self.keep(job, kept_at)?;
                kept_at = step;
            }
        }
        self.keep(job, kept_at)
    }

    /// One step of the optimizer. Returns the loss before it.
    fn step(&mut self, job: &Job<'_>) -> Result<f32> {
        let step = self.session.step();
        let batch = job.corpus.batch(job.seed, step)?;
        let loss = self.model.loss(&batch.tokens, &batch.next)?;
        self.session.backward(&loss)?;
        self.optimizer.set_learning_rate(learning_rate(job.settings.lr, step, job.settings.steps));
        self.optimizer.step(&self.session.gradients()?)?;
        self.session.next_step()?;
        Ok(loss.to_scalar::<f32>()?)
    }

    /// The mean loss over the held-out part.
    fn held_out(&self, corpus: &Corpus) -> Result<f32> {
        self.session.evaluate(|| {
            let (mut sum, mut count) = (0.0, 0.0);
            for batch in corpus.held_out() {
                let batch = batch?;
                sum += f64::from(self.model.loss(&batch.tokens, &batch.next)?.to_scalar::<f32>()?);
                count += 1.0;
            }
            let loss = sum / count;
            if !loss.is_finite() {
                let (step, first) = (self.session.step(), self.session.fault()?.map(Box::new));
                return Err(nvfp4_nn::Error::NotFinite { step, loss, first }).context("held-out text");
            }
            Ok(loss as f32)
        })
    }

    fn keep(&self, job: &Job<'_>, kept_at: u64) -> Result<()> {
        let Some(Kept { folder, .. }) = &job.checkpoint else { return Ok(()) };
        if kept_at == self.session.step() && folder.exists() {
            return Ok(());
        }
        if let Some(parent) = folder.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("--checkpoint {}", parent.display()))?;
        }
        let notes = Notes { settings: job.settings.clone(), seed: job.seed, history: self.history.clone() };
        let notes = BTreeMap::from([("train".to_string(), serde_json::to_string(&notes)?)]);
        if let Some(old) = self.session.save(folder, &self.optimizer, &notes)? {
            eprintln!("note: the checkpoint that was replaced cannot be removed, and is at {}", old.display());
        }
        Ok(())
    }
}

/// From 0 to the peak in the first twentieth of the steps, then down along a cosine to a tenth of
/// it.
fn learning_rate(peak: f64, step: u64, steps: u64) -> f64 {
    let warm = (steps / 20).max(1);
    if step < warm {
        return peak * (step + 1) as f64 / warm as f64;
    }
    let done = (step - warm) as f64 / (steps - warm).max(1) as f64;
    peak * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
}

/// Means over some two hundred stretches, each at its last step.
fn smoothed(losses: &[f32]) -> Vec<Point> {
    let stretch = losses.len().div_ceil(200).max(1);
    let mean = |part: &[f32]| (part.iter().map(|&loss| f64::from(loss)).sum::<f64>() / part.len() as f64) as f32;
    let points = losses.chunks(stretch).enumerate();
    points.map(|(i, part)| Point { step: (i * stretch + part.len()) as u64, loss: mean(part) }).collect()
}

/// The folder of a run in the folder of all.
pub fn folder(all: &Path, recipe: &str, seed: u64) -> PathBuf {
    all.join(format!("{recipe}-seed-{seed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_warms_up_then_falls_to_a_tenth() {
        let rate = |step| learning_rate(2.0, step, 1000);
        assert_eq!((rate(0), rate(24), rate(49), rate(50)), (0.04, 1.0, 2.0, 2.0));
        assert!((50..1000).all(|step| rate(step + 1) < rate(step)) && (rate(1000) - 0.2).abs() < 1e-12);
        assert_eq!(learning_rate(2.0, 0, 1), 2.0);
    }

    #[test]
    fn curves_are_means_of_stretches() {
        let curve = smoothed(&(0..1000).map(|step| step as f32).collect::<Vec<_>>());
        assert_eq!(
            (curve.len(), curve[0], curve[199]),
            (200, Point { step: 5, loss: 2.0 }, Point { step: 1000, loss: 997.0 })
        );
        assert_eq!(smoothed(&[1.0, 2.0]).len(), 2);
    }
}
