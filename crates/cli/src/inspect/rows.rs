//! `nvfp4 inspect --verbose`: a line for every weight.

use super::statistics::scale_bytes;
use crate::names;
use crate::plan::shape;
use anyhow::Result;
use nvfp4_checkpoint::Statistics;
use serde_json::{Value, json};
use std::io::Write;

/// A weight. What only NVFP4 has is empty for other formats.
pub struct Row {
    pub name: String,
    /// Rows before columns.
    pub shape: Vec<usize>,
    pub format: String,
    /// Tensor scales as they are stored, one for each matrix.
    pub globals: Vec<f32>,
    pub statistics: Option<Statistics>,
    /// The kind of group that servers join it in.
    pub group: Option<String>,
}

impl Row {
    /// The least and the largest tensor scale.
    fn global_range(&self) -> Option<(f32, f32)> {
        let least = self.globals.iter().copied().reduce(f32::min);
        least.zip(self.globals.iter().copied().reduce(f32::max))
    }

    fn global(&self) -> String {
        match self.global_range() {
            None => String::new(),
            Some((least, most)) if least.to_bits() == most.to_bits() => format!("{least:.4e}"),
            Some((least, most)) => format!("{least:.4e} to {most:.4e}"),
        }
    }

    fn bytes(&self) -> String {
        let range = self.statistics.as_ref().and_then(Statistics::scale_range);
        range.map(|(least, most)| format!("{least:#04x} to {most:#04x}")).unwrap_or_default()
    }

    /// The row as JSON.
    pub fn json(&self) -> Value {
        json!({
            "module": self.name, "name": self.name, "shape": self.shape, "format": self.format, "group": self.group, "globals": self.globals,
            "scale_bytes": self.statistics.as_ref().map(scale_bytes), "codes": self.statistics.as_ref().map(|s| s.codes),
        })
    }
}

/// The rows as a table.
pub fn print(out: &mut impl Write, rows: &[Row]) -> Result<()> {
    let width = |of: fn(&Row) -> usize, least: usize| rows.iter().map(of).max().unwrap_or(0).max(least);
    let (name, shape_width) =
        (names::width(rows.iter().map(|r| r.name.as_str()), 4), width(|r| shape(&r.shape).len(), 5));
    let global = width(|r| r.global().len(), 12);
    writeln!(
        out,
        "{}  {:>shape_width$}  {:5}  {:global$}  {:12}  JOINED",
        names::padded("NAME", name),
        "SHAPE",
        "TYPE",
        "TENSOR SCALE",
        "SCALE BYTES"
    )?;
    for row in rows {
        let group = row.group.as_deref().unwrap_or_default();
        let line = format!(
            "{}  {:>shape_width$}  {:5}  {:global$}  {:12}  {group}",
            names::padded(&row.name, name),
            shape(&row.shape),
            row.format,
            row.global(),
            row.bytes()
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
