//! The model and the text of commands that run one.

use crate::progress::Voice;
use crate::source::From;
use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvfp4_files::regular;
use nvfp4_model::{Config, Progress, Rows, Tokens};
use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};

/// The largest text that is read.
const LARGEST: u64 = 1 << 30;

/// Which text, and in what pieces.
#[derive(clap::Args)]
pub struct Text {
    /// File of text (UTF-8).
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens in a row; each row is a context of its own [default: 512, or what the model knows].
    #[arg(long)]
    context: Option<usize>,
    /// Rows to read at most [default: the whole text].
    #[arg(long)]
    rows: Option<usize>,
    /// Format of whichever checkpoint cannot be detected.
    #[arg(long, value_enum)]
    pub from: Option<From>,
}

impl Text {
    /// The text as rows of a model's tokens, and how many positions of a row are given.
    pub fn rows(&self, model: &Path, config: &Config) -> Result<(Rows, usize)> {
        let context = self.context.unwrap_or(config.positions.min(512));
        ensure!(
            context <= config.positions,
            "--context {context}: the model knows {} positions; take a shorter one",
            config.positions
        );
        let text = regular::read_text(&self.text, LARGEST)?;
        Ok(Tokens::read(model)?.rows(&text, context, self.rows)?)
    }

    /// What a request is known by.
    pub fn request(&self) -> String {
        format!("{:?} {:?}", self.context, self.rows)
    }
}

/// A bar with the time that is left, if standard error is a terminal.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new(voice: Voice) -> Self {
        let hidden = voice == Voice::Quiet || !stderr().is_terminal();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template("{msg:12} {bar:24} {percent}%  {eta} left").expect("well formed");
        Bar(ProgressBar::with_draw_target(Some(0), target).with_style(style))
    }

    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl Progress for Bar {
    fn begin(&mut self, work: u64) {
        self.0.set_length(work);
    }

    fn advance(&mut self, work: u64, what: &str) {
        self.0.inc(work);
        self.0.set_message(what.to_string());
    }
}
