//! Which version of an operation runs.

use std::fmt;
use std::str::FromStr;

/// A way to compute; all of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Implementation {
    /// The rules as `spec` writes them.
    Scalar,
}

impl Implementation {
    /// The fastest implementation that this machine can run.
    pub fn best() -> Self {
        Implementation::Scalar
    }

    /// Every implementation that this machine can run, the plainest first.
    pub fn available() -> Vec<Self> {
        vec![Implementation::Scalar]
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Implementation::Scalar => "scalar",
        })
    }
}

impl FromStr for Implementation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::available().into_iter().find(|i| i.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = Self::available().iter().map(Self::to_string).collect();
            format!("this machine and build cannot run '{name}'; available: {}", names.join(", "))
        })
    }
}
