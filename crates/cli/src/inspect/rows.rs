//! `nvfp4 inspect --verbose`: a line for every weight.

use super::statistics::scale_bytes;
use crate::plan::shape;
use crate::table::{Table, left, right};
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
    let columns =
        [left("NAME"), right("SHAPE"), left("TYPE"), left("TENSOR SCALE"), left("SCALE BYTES"), left("JOINED")];
    let mut table = Table::new(columns);
    for row in rows {
        let group = row.group.clone().unwrap_or_default();
        table.row([row.name.clone(), shape(&row.shape), row.format.clone(), row.global(), row.bytes(), group]);
    }
    Ok(table.write(out)?)
}
