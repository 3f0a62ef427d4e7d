//! How far a long command is, on standard error: a bar on a terminal, a line per weight elsewhere.

use crate::sizes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvfp4::checkpoint::{Finished, Observer, Pass};
use std::io::{IsTerminal, stderr};
use std::sync::Mutex;

/// How much is said.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Voice {
    /// A bar where there is a terminal, lines elsewhere.
    Normal,
    /// Nothing.
    Quiet,
}

pub struct Progress {
    voice: Voice,
    bar: Mutex<ProgressBar>,
    done: Mutex<usize>,
    weights: usize,
}

impl Progress {
    pub fn new(voice: Voice, weights: usize) -> Self {
        Progress { voice, bar: Mutex::new(ProgressBar::hidden()), done: Mutex::new(0), weights }
    }

    pub fn finish(&self) {
        self.bar().finish_and_clear();
    }

    fn bar(&self) -> ProgressBar {
        self.bar.lock().expect("no holder of the bar panics").clone()
    }
}

/// A bar over bytes, if standard error is a terminal.
pub fn bar(voice: Voice, title: &'static str, bytes: u64) -> ProgressBar {
    if voice == Voice::Quiet || !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix:18} {bar:24} {bytes}/{total_bytes}  {bytes_per_sec}  {msg}");
    let style = style.expect("the template is well formed");
    ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr()).with_style(style).with_prefix(title)
}

impl Observer for Progress {
    fn begin(&self, pass: Pass, bytes: u64) {
        let title = match pass {
            Pass::Amax => "pass 1/2 amax",
            Pass::Write => "pass 2/2 quantize",
        };
        let mut current = self.bar.lock().expect("no holder of the bar panics");
        current.finish_and_clear();
        *current = bar(self.voice, title, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn quantized(&self, w: &Finished) {
        if self.voice == Voice::Quiet {
            return;
        }
        let mut done = self.done.lock().expect("no holder of the count panics");
        *done += 1;
        let line = format!(
            "[{:>4}/{}] {}  {}x{}  {} -> {}  relerr {:.4}",
            *done,
            self.weights,
            w.module,
            w.rows,
            w.cols,
            sizes::show(w.before),
            sizes::show(w.after),
            w.measure.relative_error()
        );
        match self.bar() {
            bar if bar.is_hidden() => eprintln!("{line}"),
            bar => bar.set_message(line),
        }
    }
}
