//! What is written to a terminal: it cannot end a command, and names in a file cannot steer the
//! terminal.

use crate::names;
use std::fmt::Display;
use std::io::{self, StdoutLock, Write, stderr, stdout};

/// Writes a line to standard error. Where that is closed or full, the line is lost and the work
/// goes on.
pub fn say(line: impl Display) {
    let _ = writeln!(Plain(stderr().lock()), "{line}");
}

/// Standard output.
pub fn out() -> Plain<StdoutLock<'static>> {
    Plain(stdout().lock())
}

/// A writer that [shows](names::shown_lines) what a terminal would act on.
pub struct Plain<W>(W);

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // What is formatted comes in whole characters.
        match str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(names::shown_lines(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_not_obeyed() {
        let mut written = Plain(Vec::new());
        writeln!(written, "a\u{1b}[31mb\u{9b}c\rd\te é").unwrap();
        assert_eq!(String::from_utf8(written.0).unwrap(), "a\\u{1b}[31mb\\u{9b}c\\u{d}d\te é\n");
    }
}
