//! Names that users choose for what this library does not know.

use super::error::{Error, Result};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A user's name for a format, an amax rule, a kind of module or a slot: letters, digits, `_` and `-`.
///
/// Specs are data: they say a name, and the program that runs them knows what stands behind it. So two specs with the same name
/// are equal, and a spec can be saved.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match is_name(text) {
            true => Ok(Name(text.into())),
            false => Err(Error::Setting(format!("'{text}' is not a name: use letters, digits, `_` and `-`"))),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a text can be a name: letters, digits, `_` and `-`, at least one of them.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-')
}
