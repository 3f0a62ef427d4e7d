//! The results of runs, as data: written by `--json`, read by `--merge`, and summed up in one
//! table.

use crate::recipes::BASELINE;
use crate::table::{Table, left, right};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::Write;
use std::path::Path;

const FORMAT: &str = "nvfp4-train";
const VERSION: u32 = 1;
/// The largest file of results that is read.
const MAX_FILE: u64 = 1 << 30;

/// Everything that the losses depend on beside recipe and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub text: String,
    pub vocabulary: String,
    pub vocabulary_size: usize,
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub context: usize,
    pub batch: usize,
    pub steps: u64,
    pub lr: f64,
}

impl Settings {
    /// The model and its steps in a line.
    pub fn describe(&self) -> String {
        let Settings { vocabulary, layers, width, heads, context, batch, steps, lr, .. } = self;
        format!(
            "{layers} layers of width {width} with {heads} heads, vocabulary {vocabulary}, \
             {steps} steps of {batch} × {context} tokens, learning rate {lr}"
        )
    }

    /// An error, unless others are the same.
    pub fn check(&self, other: &Settings) -> Result<()> {
        let fields = |settings: &Settings| match serde_json::to_value(settings) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => unreachable!("settings are an object"),
        };
        let (ours, theirs) = (fields(self), fields(other));
        match ours.iter().find(|&(name, value)| theirs.get(name) != Some(value)) {
            None => Ok(()),
            Some((name, value)) => {
                let other = theirs.get(name).cloned().unwrap_or_default();
                bail!(
                    "made with {name} = {other}, but {name} = {value} was asked for: give the same \
                     settings, or start over"
                )
            }
        }
    }
}

/// A loss after some steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub step: u64,
    pub loss: f32,
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunResult {
    pub recipe: String,
    pub seed: u64,
    pub steps: u64,
    /// Means over stretches of steps.
    pub train: Vec<Point>,
    pub held_out: Vec<Point>,
    pub tokens_per_second: f64,
    /// Why it ended before its last step.
    pub error: Option<String>,
}

impl RunResult {
    /// The held-out loss after the last step, if the run reached it.
    pub fn last(&self, steps: u64) -> Option<f64> {
        let last = self.held_out.last().filter(|point| self.error.is_none() && point.step == steps);
        last.map(|point| f64::from(point.loss))
    }
}

/// All runs of a command, or of several.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    format: String,
    version: u32,
    pub settings: Settings,
    pub runs: Vec<RunResult>,
}

/// One recipe over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub recipe: String,
    pub seeds: usize,
    /// Mean, smallest and largest held-out loss.
    pub held_out: Spread,
    /// The same of the gap to the baseline from the same seed, in percent.
    pub gap_percent: Option<Spread>,
    pub tokens_per_second: f64,
}

/// Mean, smallest and largest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Option<Self> {
        let fold = |f: fn(f64, f64) -> f64| values.iter().copied().reduce(f);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Some(Spread { mean, min: fold(f64::min)?, max: fold(f64::max)? })
    }
}

impl Results {
    pub fn new(settings: Settings, runs: Vec<RunResult>) -> Self {
        Results { format: FORMAT.to_string(), version: VERSION, settings, runs }
    }

    /// The results of several files, or of all files `*.json` of folders, which must have the same
    /// settings.
    pub fn merged(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut all: Option<Results> = None;
        for path in files(paths)? {
            let json: Value =
                nvfp4_files::regular::read_json(&path, MAX_FILE).map_err(|error| anyhow!("--merge {error}"))?;
            let found: Results = serde_json::from_value(json)
                .with_context(|| format!("{}: not what `nvfp4 train --json` writes", path.display()))?;
            ensure!(
                found.format == FORMAT && found.version == VERSION,
                "{}: expected {FORMAT} version {VERSION}, got {} version {}; merge it with the program that wrote it",
                path.display(),
                found.format,
                found.version
            );
            let all = all.get_or_insert_with(|| Results::new(found.settings.clone(), vec![]));
            all.settings.check(&found.settings).with_context(|| path.display().to_string())?;
            for run in found.runs {
                let mut losses = run.train.iter().chain(&run.held_out).map(|point| point.loss);
                if let Some(loss) = losses.find(|loss| !loss.is_finite()) {
                    bail!("{}: {} from seed {} has the loss {loss}", path.display(), run.recipe, run.seed);
                }
                let twice = all.runs.iter().any(|other| (&other.recipe, other.seed) == (&run.recipe, run.seed));
                ensure!(!twice, "{}: {} from seed {} stands twice", path.display(), run.recipe, run.seed);
                all.runs.push(run);
            }
        }
        let mut all =
            all.context("--merge: there are no results; name files that `nvfp4 train --json` wrote, or their folder")?;
        let order =
            |recipe: &str| super::recipes::ABLATIONS.iter().position(|name| *name == recipe).unwrap_or(usize::MAX);
        all.runs.sort_by_key(|run| (order(&run.recipe), run.recipe.clone(), run.seed));
        Ok(all)
    }

    /// Recipes in the order in which they were given.
    pub fn recipes(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for run in &self.runs {
            if !names.contains(&run.recipe.as_str()) {
                names.push(&run.recipe);
            }
        }
        names
    }

    pub fn of<'a>(&'a self, recipe: &'a str) -> impl Iterator<Item = &'a RunResult> {
        self.runs.iter().filter(move |run| run.recipe == recipe)
    }

    /// A row per recipe that reached the last step from some seed.
    pub fn rows(&self) -> Vec<Row> {
        let last = |run: &RunResult| run.last(self.settings.steps);
        let baseline = |seed: u64| self.of(BASELINE).find(|run| run.seed == seed).and_then(last);
        let row = |recipe: &str| {
            let runs: Vec<&RunResult> = self.of(recipe).filter(|run| last(run).is_some()).collect();
            let losses: Vec<f64> = runs.iter().filter_map(|run| last(run)).collect();
            let gaps = runs.iter().filter_map(|run| Some(100.0 * (last(run)? / baseline(run.seed)? - 1.0)));
            let gaps: Vec<f64> = if recipe == BASELINE { vec![] } else { gaps.collect() };
            let speed = runs.iter().map(|run| run.tokens_per_second).sum::<f64>() / runs.len() as f64;
            let (seeds, recipe) = (runs.len(), recipe.to_string());
            Some(Row {
                recipe,
                seeds,
                held_out: Spread::of(&losses)?,
                gap_percent: Spread::of(&gaps),
                tokens_per_second: speed,
            })
        };
        self.recipes().into_iter().filter_map(row).collect()
    }

    /// All of it as JSON, the table included.
    pub fn to_json(&self) -> Result<Value> {
        let mut value = serde_json::to_value(self)?;
        value["table"] = serde_json::to_value(self.rows())?;
        Ok(value)
    }

    /// Writes the table in Markdown, which a terminal shows as well.
    pub fn write_table(&self, out: &mut impl Write) -> Result<()> {
        let spread = "smallest–largest";
        let gap = format!("gap to {BASELINE}");
        let numbers = ["seeds", "held-out loss", spread, &gap, spread, "tokens/s"];
        let mut table = Table::new([left("recipe")].into_iter().chain(numbers.map(right)));
        for Row { recipe, seeds, held_out, gap_percent, tokens_per_second } in self.rows() {
            let (gap, gaps) = match gap_percent {
                None => ("–".to_string(), "–".to_string()),
                Some(Spread { mean, min, max }) => (format!("{mean:+.2} %"), format!("{min:+.2} to {max:+.2} %")),
            };
            let Spread { mean, min, max } = held_out;
            let (loss, losses) = (format!("{mean:.4}"), format!("{min:.4}–{max:.4}"));
            table.row([recipe, seeds.to_string(), loss, losses, gap, gaps, format!("{tokens_per_second:.0}")]);
        }
        Ok(table.markdown().iter().try_for_each(|line| writeln!(out, "{line}"))?)
    }
}

fn files(paths: &[impl AsRef<Path>]) -> Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for path in paths.iter().map(AsRef::as_ref) {
        if !path.is_dir() {
            files.push(path.to_path_buf());
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
        let entries = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        files.extend(entries.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "json")));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(losses: &[(&str, u64, f32)]) -> Results {
        let settings = Settings {
            text: String::new(),
            vocabulary: "bytes".into(),
            vocabulary_size: 256,
            layers: 1,
            width: 32,
            heads: 1,
            context: 16,
            batch: 1,
            steps: 10,
            lr: 1e-3,
        };
        let run = |&(recipe, seed, loss): &(&str, u64, f32)| RunResult {
            recipe: recipe.to_string(),
            seed,
            steps: 10,
            train: vec![],
            held_out: vec![Point { step: 10, loss }],
            tokens_per_second: 100.0,
            error: None,
        };
        Results::new(settings, losses.iter().map(run).collect())
    }

    #[test]
    fn gaps_are_of_runs_from_the_same_seed() {
        let rows = results(&[("bf16", 1, 2.0), ("bf16", 2, 4.0), ("nvfp4", 1, 2.5), ("nvfp4", 2, 4.0)]).rows();
        assert_eq!((rows[0].held_out.mean, rows[0].gap_percent), (3.0, None));
        assert_eq!(rows[1].gap_percent, Some(Spread { mean: 12.5, min: 0.0, max: 25.0 }));
    }

    #[test]
    fn what_did_not_come_to_its_end_does_not_count() {
        let mut all = results(&[("bf16", 1, 2.0), ("nvfp4", 1, 2.5), ("nvfp4", 2, 3.0)]);
        all.runs[1].error = Some("stopped".into());
        assert_eq!(all.rows()[1].seeds, 1);
        assert_eq!(all.rows()[1].gap_percent, None, "there is no baseline from seed 2");
    }

    #[test]
    fn other_settings_are_told_by_name() {
        let (a, mut b) = (results(&[]).settings, results(&[]).settings);
        b.width = 64;
        assert!(a.check(&a.clone()).is_ok());
        assert_eq!(
            a.check(&b).unwrap_err().to_string(),
            "made with width = 64, but width = 32 was asked for: give the same settings, or start over"
        );
    }
}
