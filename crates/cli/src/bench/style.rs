//! How a benchmark prints: a table of text or Markdown, or JSON.

use std::io::{self, Write};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Text,
    /// A table as documents have it.
    Markdown,
    Json,
}

impl Style {
    /// By the options `--json` and `--markdown`, which exclude each other.
    pub fn of(json: bool, markdown: bool) -> Self {
        match (json, markdown) {
            (true, _) => Style::Json,
            (false, true) => Style::Markdown,
            (false, false) => Style::Text,
        }
    }
}

/// The columns of a table whose rows are printed as they are measured: headings, and the widths
/// that they have as text, below zero for words, which begin on the left.
pub struct Columns<'a> {
    pub style: Style,
    pub columns: &'a [(&'a str, isize)],
}

impl Columns<'_> {
    /// Prints the headings.
    pub fn headings(&self, out: &mut impl Write) -> io::Result<()> {
        if self.style == Style::Markdown {
            writeln!(out)?; // ends the paragraph before it
        }
        self.row(out, &self.columns.iter().map(|(heading, _)| heading.to_string()).collect::<Vec<_>>())?;
        match self.style {
            Style::Markdown => writeln!(out, "|{}", "---|".repeat(self.columns.len())),
            Style::Text | Style::Json => Ok(()),
        }
    }

    /// Prints a row.
    pub fn row(&self, out: &mut impl Write, cells: &[String]) -> io::Result<()> {
        let text = |(cell, (_, width)): (&String, &(&str, isize))| match width.unsigned_abs() {
            most if *width < 0 => format!("{cell:<most$}"),
            most => format!("{cell:>most$}"),
        };
        match self.style {
            Style::Text => {
                let cells: Vec<String> = cells.iter().zip(self.columns).map(text).collect();
                writeln!(out, "{}", cells.join(" "))
            }
            Style::Markdown => writeln!(out, "| {} |", cells.join(" | ")),
            Style::Json => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_text_and_of_markdown() {
        let printed = |style| {
            let mut out = Vec::new();
            let table = Columns { style, columns: &[("operation", -12), ("ms", 6)] };
            table.headings(&mut out).unwrap();
            table.row(&mut out, &["copy".to_string(), "1.5".to_string()]).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(printed(Style::Text), "operation        ms\ncopy            1.5\n");
        assert_eq!(printed(Style::Markdown), "\n| operation | ms |\n|---|---|\n| copy | 1.5 |\n");
        assert_eq!(printed(Style::Json), "");
    }
}
