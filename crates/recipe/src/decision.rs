//! A recipe's answers.

use nvfp4::format::QuantSpec;
use std::fmt;
use std::sync::Arc;

/// A recipe's answer, and what it follows from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Decision {
    /// The answer.
    pub spec: QuantSpec,
    /// What to change for another answer.
    pub reason: Reason,
}

/// What a spec follows from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A preset or a function.
    Recipe(Arc<str>),
    /// A rule of a rule file.
    Rule {
        /// Which rule, from 1.
        number: usize,
        /// Where it begins.
        line: usize,
    },
    /// The default of a rule file.
    Default,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Recipe(name) => write!(f, "recipe {name}"),
            Reason::Rule { number, line } => write!(f, "rule {number} (line {line})"),
            Reason::Default => f.write_str("the default"),
        }
    }
}
