//! What `--json` prints: one object, which begins with the version of its form and the command.
//! `crates/cli/schema/output.json` describes it.

use crate::until_closed;
use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{Write, stdout};

/// The version of the form. It grows when a field is removed or gets another meaning, not when one
/// is added.
const SCHEMA: u32 = 1;

/// Whether the words of a command ask for JSON. That must be known even if the rest of them cannot
/// be parsed.
pub fn is_asked_for(words: &[OsString]) -> bool {
    words.iter().take_while(|word| *word != "--").any(|word| word == "--json")
}

/// Prints what a command found. Rows without anything around them are under `rows`.
pub fn print(command: &str, report: &impl Serialize) -> Result<()> {
    let mut object = Map::from_iter([("schema".to_string(), json!(SCHEMA)), ("command".to_string(), json!(command))]);
    match serde_json::to_value(report)? {
        Value::Object(fields) => object.extend(fields),
        rows => drop(object.insert("rows".to_string(), rows)),
    }
    let text = plain(&serde_json::to_string_pretty(&object)?);
    until_closed(writeln!(stdout().lock(), "{text}").map_err(Into::into))
}

/// The error of a command, beside its text on standard error.
pub fn print_error(command: Option<&str>, message: &str, hint: Option<&str>, exit_code: u8) -> Result<()> {
    let report = json!({ "error": { "message": message, "hint": hint, "exit_code": exit_code } });
    print(command.unwrap_or_default(), &report)
}

/// JSON without characters that a terminal acts on. They are in strings only, where JSON can escape
/// them.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => plain.push(c),
            _ if crate::names::acts(c) => drop(write!(plain, "\\u{:04x}", u32::from(c))),
            _ => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_escaped_and_read_as_it_was() {
        let value = json!({ "name": "a\u{1b}[31m\u{9b}\u{7f}\u{202e}b – ä" });
        let text = plain(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.contains(['\u{1b}', '\u{9b}', '\u{7f}', '\u{202e}']), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn json_is_asked_for_by_its_flag_and_not_by_a_file_of_that_name() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(is_asked_for(&words("nvfp4 plan x --json")));
        assert!(!is_asked_for(&words("nvfp4 plan -- --json")));
    }
}
