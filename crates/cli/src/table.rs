//! Tables of text: a heading and rows, in columns as wide as what stands in them.

use crate::names::shown;
use std::io::{self, Write};
use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Padding, Style};

/// The widest column. Longer cells stand over the next one, so that one long name does not fill
/// every other row with spaces.
const WIDEST: usize = 120;

/// Stands where a long cell was cut, in one place. No cell has it, because all are [`shown`].
const CUT: char = '\0';

/// A column's heading and the side that its cells are on.
pub struct Column {
    heading: String,
    alignment: Alignment,
}

/// A column of words.
pub fn left(heading: impl Into<String>) -> Column {
    Column { heading: heading.into(), alignment: Alignment::left() }
}

/// A column of numbers.
pub fn right(heading: impl Into<String>) -> Column {
    Column { heading: heading.into(), alignment: Alignment::right() }
}

pub struct Table {
    cells: Builder,
    alignments: Vec<Alignment>,
    /// What was cut off, in the order of the cells.
    rests: Vec<String>,
}

impl Table {
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        let (headings, alignments): (Vec<_>, _) = columns.into_iter().map(|c| (c.heading, c.alignment)).unzip();
        let mut table = Self { cells: Builder::new(), alignments, rests: Vec::new() };
        table.row(headings);
        table
    }

    /// Adds a row. Cells are [`shown`] as a terminal may show them.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cut = |cell: String| {
            let mut cell = shown(&cell).into_owned();
            if let Some((at, _)) = cell.char_indices().nth(WIDEST - 1) {
                self.rests.push(cell.split_off(at));
                cell.push(CUT);
            }
            cell
        };
        self.cells.push_record(cells.into_iter().map(cut));
    }

    /// The heading and the rows, a line each, with two spaces between columns.
    pub fn lines(self) -> Vec<String> {
        self.laid_out(|table| {
            table.with(Style::empty()).with(Padding::new(0, 2, 0, 0));
        })
    }

    /// The same in Markdown, which a terminal shows as well.
    pub fn markdown(self) -> Vec<String> {
        self.laid_out(|table| {
            table.with(Style::markdown());
        })
    }

    pub fn write(self, out: &mut impl Write) -> io::Result<()> {
        self.lines().iter().try_for_each(|line| writeln!(out, "{line}"))
    }

    /// Writes it in Markdown, as a paragraph of its own.
    pub fn write_markdown(self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out)?;
        self.markdown().iter().try_for_each(|line| writeln!(out, "{line}"))
    }

    fn laid_out(self, style: impl FnOnce(&mut tabled::Table)) -> Vec<String> {
        let mut table = self.cells.build();
        style(&mut table);
        for (column, alignment) in self.alignments.into_iter().enumerate() {
            table.modify(Columns::one(column), alignment);
        }
        let text = table.to_string();
        let mut pieces = text.split(CUT);
        let mut whole = pieces.next().unwrap_or_default().to_string();
        for (rest, piece) in self.rests.iter().zip(pieces) {
            whole.extend([rest, piece]);
        }
        whole.lines().map(|line| line.trim_end().to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(columns: [Column; 3], rows: &[[&str; 3]]) -> Vec<String> {
        let mut table = Table::new(columns);
        rows.iter().for_each(|row| table.row(row.map(String::from)));
        table.lines()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let columns = || [left("NAME"), right("× µs"), left("WHY")];
        assert_eq!(lines(columns(), &[]), ["NAME  × µs  WHY"]);
        // 重 takes two places of a terminal.
        let rows = [["a", "1.25", "small"], ["model.é", "1000.5", ""], ["重", "-", "  as\u{1b}is "], ["", "", ""]];
        assert_eq!(
            lines(columns(), &rows),
            ["NAME       × µs  WHY", "a          1.25  small", "model.é  1000.5", r"重            -    as\u{1b}is", "",]
        );
    }

    #[test]
    fn long_cells_are_whole_and_widen_no_other_row() {
        let (long, widest) = ("n".repeat(70_000), "w".repeat(WIDEST));
        let columns = [left("NAME"), right("SIZE"), left("WHY")];
        let found = lines(columns, &[["a", "1", &long], [&long, "22", "b"], [&widest, "3", "c"], ["a\nb\0", "4", "d"]]);
        assert_eq!(found.len(), 5);
        assert_eq!(found[0], format!("NAME{}  SIZE  WHY", " ".repeat(WIDEST - 4)));
        assert_eq!(found[1], format!("a{}     1  {long}", " ".repeat(WIDEST - 1)));
        assert_eq!(found[2], format!("{long}    22  b"));
        assert_eq!(found[3], format!("{widest}     3  c"));
        assert_eq!(found[4], format!(r"a\u{{a}}b\u{{0}}{}     4  d", " ".repeat(WIDEST - 12)));
    }

    #[test]
    fn markdown_has_a_line_below_the_heading() {
        let mut table = Table::new([left("recipe"), right("loss")]);
        table.row(["nvfp4".to_string(), "1.25000".to_string()]);
        assert_eq!(table.markdown(), ["| recipe |    loss |", "|--------|---------|", "| nvfp4  | 1.25000 |"]);
    }
}
