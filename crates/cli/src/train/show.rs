//! The progress of runs, on standard error: a bar for each on a terminal, lines elsewhere.

use super::results::Point;
use crate::progress::Voice;
use crate::say::say;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};

/// All runs.
pub struct Show {
    voice: Voice,
    bars: Option<MultiProgress>,
}

/// One run.
pub struct Line {
    name: String,
    steps: u64,
    voice: Voice,
    bar: Option<ProgressBar>,
}

impl Show {
    pub fn new(voice: Voice) -> Self {
        let bars = (voice == Voice::Normal && stderr().is_terminal())
            .then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));
        Show { voice, bars }
    }

    /// Something about a run, above the bars.
    pub fn say(&self, message: &str) {
        match &self.bars {
            Some(bars) => drop(bars.println(message)),
            None if self.voice == Voice::Normal => say(message),
            None => {}
        }
    }

    pub fn line(&self, recipe: &str, seed: u64, steps: u64, begun_at: u64) -> Line {
        let name = format!("{recipe}, seed {seed}");
        let style = ProgressStyle::with_template("{prefix:34} {bar:20} {pos}/{len}  {msg}  {eta} left");
        let style = style.expect("the template is well formed");
        let bar = self.bars.as_ref().map(|bars| {
            bars.add(ProgressBar::new(steps).with_style(style).with_prefix(name.clone()).with_position(begun_at))
        });
        Line { name, steps, voice: self.voice, bar }
    }
}

impl Line {
    /// After a step; `held_out` is the last known.
    pub fn stepped(&self, step: u64, losses: &[f32], held_out: Option<&Point>, tokens_per_second: f64) {
        let recent = &losses[losses.len().saturating_sub(20)..];
        let loss = recent.iter().sum::<f32>() / recent.len() as f32;
        let held = held_out.map_or(String::new(), |point| format!("  held-out {:.4}", point.loss));
        let message = format!("loss {loss:.4}{held}  {tokens_per_second:.0} tokens/s");
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(message);
            }
            None if self.voice == Voice::Normal && held_out.is_some_and(|point| point.step == step) => {
                say(format_args!("{}  step {step}/{}  {message}", self.name, self.steps));
            }
            None => {}
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}
