//! The two directions of a tensor.

use std::fmt;

/// One of a tensor's two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Blocks along the rows.
    #[doc(alias = "rowwise")]
    Row,
    /// Blocks along the columns.
    #[doc(alias = "columnwise")]
    Column,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Row => "row",
            Side::Column => "column",
        })
    }
}
