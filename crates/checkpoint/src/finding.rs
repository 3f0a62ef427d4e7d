//! What a check finds, how bad it is, and what removes it.

use super::target::Target;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// It would not load, or load wrongly.
    Problem,
}

/// What removes a finding, so that a program can name its own command for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fix {
    /// Convert the checkpoint to this form.
    Convert(Target),
    /// Convert the checkpoint to this form, with one tensor scale for weights that are joined.
    ConvertWithOneScale(Target),
    /// Decode the checkpoint to plain numbers.
    Decode,
}

/// Something that a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The module or file that it is about.
    pub about: String,
    /// What it is, and what it leads to.
    pub text: String,
    /// What removes it, where a command of this library does.
    pub fix: Option<Fix>,
}

impl Finding {
    /// A finding without a fix.
    pub fn new(severity: Severity, about: impl Into<String>, text: impl Into<String>) -> Self {
        Finding { severity, about: about.into(), text: text.into(), fix: None }
    }

    /// A problem without a fix.
    pub fn problem(about: impl Into<String>, text: impl Into<String>) -> Self {
        Finding::new(Severity::Problem, about, text)
    }

    /// A note without a fix.
    pub fn note(about: impl Into<String>, text: impl Into<String>) -> Self {
        Finding::new(Severity::Note, about, text)
    }

    /// The same with a fix.
    pub fn with(self, fix: impl Into<Option<Fix>>) -> Self {
        Finding { fix: fix.into(), ..self }
    }
}

/// What was found so far.
#[derive(Default)]
pub(super) struct Report {
    pub findings: Vec<Finding>,
}

impl Report {
    pub fn problem(&mut self, about: &str, text: impl Into<String>) {
        self.findings.push(Finding::problem(about, text));
    }

    pub fn fixable(&mut self, about: &str, text: impl Into<String>, fix: impl Into<Option<Fix>>) {
        self.findings.push(Finding::problem(about, text).with(fix));
    }

    pub fn note(&mut self, about: &str, text: impl Into<String>) {
        self.findings.push(Finding::note(about, text));
    }
}
