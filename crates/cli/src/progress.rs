//! The progress of a long command, on standard error: a bar on a terminal, a line per weight
//! elsewhere.

use crate::names::shown;
use crate::plan::{self, RESCALE};
use crate::say::say;
use crate::sizes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvfp4_checkpoint::{Action, Finished, Observer, Pass};
use std::io::{IsTerminal, stderr};
use std::sync::Mutex;

/// How much is printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Voice {
    /// A bar where there is a terminal, a line per quantized weight elsewhere.
    Normal,
    /// Nothing.
    Quiet,
    /// A line per weight, whatever happens to it, and why.
    Verbose,
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
            Pass::Join => "join parts",
        };
        let mut current = self.bar.lock().expect("no holder of the bar panics");
        current.finish_and_clear();
        *current = bar(self.voice, title, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.bar().inc(bytes);
    }

    fn finished(&self, w: &Finished) {
        let said = match self.voice {
            Voice::Quiet => false,
            Voice::Normal => w.action.is_made(),
            Voice::Verbose => true,
        };
        if !said {
            return;
        }
        let mut done = self.done.lock().expect("no holder of the count panics");
        *done += 1;
        let line = format!("[{:>4}/{}] {}", *done, self.weights, line(w, self.voice));
        match (self.bar(), self.voice) {
            (bar, _) if bar.is_hidden() => say(line),
            (bar, Voice::Verbose) => bar.println(shown(&line)),
            (bar, _) => bar.set_message(shown(&line).into_owned()),
        }
    }
}

/// What happened to a weight.
fn line(w: &Finished, voice: Voice) -> String {
    let (name, m) = (format!("{}  {}x{}", w.module, w.rows, w.cols), &w.measure);
    let sizes = format!("{} -> {}", sizes::show(w.before), sizes::show(w.after));
    match &w.action {
        Action::Quantize | Action::Eight(_) if voice == Voice::Normal => {
            format!("{name}  {sizes}  relerr {:.4}", m.relative_error())
        }
        Action::Quantize | Action::Eight(_) => {
            let form = w.action.eight().map_or("nvfp4", plan::form);
            let shared = w.group.as_ref().map(|kind| format!(", one tensor scale for {kind}")).unwrap_or_default();
            let zeroed = 100.0 * m.zeroed as f64 / m.elements.max(1) as f64;
            format!(
                "{name}  {form}{shared}  {sizes}  relerr {:.4}  SQNR {:.1} dB  max|e| {:.2e}  zeroed {zeroed:.1}%",
                m.relative_error(),
                m.sqnr(),
                m.largest
            )
        }
        Action::Rescale if m.error == 0.0 => format!("{name}  rescale: {RESCALE}  exact"),
        Action::Rescale => format!("{name}  rescale: {RESCALE}  relerr {:.4} to the source", m.relative_error()),
        Action::Retain(eight) => format!("{name}  retain: {eight} already"),
        Action::RetainMxFp4 => format!("{name}  retain: MXFP4 already"),
        Action::Relabel => format!("{name}  relabel: NVFP4 already"),
        Action::Decode(why) => {
            let zeroed = if m.zeroed > 0 { format!(", {} values became 0", m.zeroed) } else { String::new() };
            let error = if m.error == 0.0 { "exact".to_string() } else { format!("relerr {:.1e}", m.relative_error()) };
            format!("{name}  decode: {why}  {sizes}  {error}{zeroed}")
        }
        Action::Keep(why) => format!("{name}  keep: {why}"),
    }
}
