//! Another backward pass for any recipe: the forward pass is quantized, the backward pass is not.

use super::role::Pass;
use crate::Result;
use nvfp4::Side;
use nvfp4::format::{ColumnSource, Format, QuantSpec};

/// What the backward pass computes with. It changes specs and nothing else, so it applies to every
/// kind of module, and a recipe that says the same in its specs is the same recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum BackwardOverride {
    /// What the recipe says.
    #[default]
    None,
    /// The original tensors: nothing is quantized in the backward pass.
    HighPrecision,
    /// What the forward pass saw, decoded: only the row direction's codes are kept.
    Dequantized,
}

impl BackwardOverride {
    /// The spec of a tensor made in this pass.
    pub fn apply(self, pass: Pass, spec: QuantSpec) -> Result<QuantSpec> {
        let source = match self {
            BackwardOverride::None => return Ok(spec),
            BackwardOverride::HighPrecision => ColumnSource::Original,
            BackwardOverride::Dequantized => ColumnSource::RowDequantized,
        };
        match (pass, spec.format(Side::Row)) {
            (Pass::Backward, _) => Ok(QuantSpec::HIGH_PRECISION),
            (Pass::Forward, row @ Format::HighPrecision(_)) => Ok(row.into()),
            (Pass::Forward, row) => Ok(QuantSpec::split(row, Format::HIGH_PRECISION, source)?),
        }
    }
}
