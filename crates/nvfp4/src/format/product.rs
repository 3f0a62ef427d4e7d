//! Which formats a product can read together.

use super::side::Side;
use super::{Family, Format};
use nvfp4_spec::hadamard::Signs;

/// How two operands are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Neither is quantized.
    HighPrecision,
    /// One is, and is decoded in the product: the arithmetic of a layer whose weights alone are quantized.
    Mixed,
    /// Both are, in formats of one family.
    Quantized,
}

/// Why two operands cannot be multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Conflict {
    /// No product reads both formats.
    Formats,
    /// The Hadamard transforms differ, so they do not cancel.
    Rotation {
        /// Signs of the left operand.
        left: Option<Signs>,
        /// Signs of the right operand.
        right: Option<Signs>,
    },
}

impl Conflict {
    /// What a product asks for.
    pub fn rule(self) -> &'static str {
        match self {
            Conflict::Formats => "a product reads one format, or one beside high precision",
            Conflict::Rotation { .. } => "Hadamard transforms cancel only if both operands have the same",
        }
    }
}

/// Whether two directions can be multiplied. FP8 codes may differ, and so may current and delayed scaling, or the tiles of one
/// family: a product takes each operand's scales as they come.
pub fn multiply(left: (&Format, Side), right: (&Format, Side)) -> Result<Arithmetic, Conflict> {
    let rotations = (left.0.rotation(left.1), right.0.rotation(right.1));
    let arithmetic = left.0.family().with(&right.0.family()).ok_or(Conflict::Formats)?;
    match rotations.0 == rotations.1 {
        true => Ok(arithmetic),
        false => Err(Conflict::Rotation { left: rotations.0, right: rotations.1 }),
    }
}

impl Family {
    /// How a product multiplies it with another; `None` where it cannot.
    pub fn with(&self, other: &Family) -> Option<Arithmetic> {
        match (self, other) {
            (Family::HighPrecision, Family::HighPrecision) => Some(Arithmetic::HighPrecision),
            (Family::Custom(a), Family::Custom(b)) => (a == b).then_some(Arithmetic::Quantized),
            (Family::Custom(_), _) | (_, Family::Custom(_)) => None,
            (Family::HighPrecision, _) | (_, Family::HighPrecision) => Some(Arithmetic::Mixed),
            (a, b) => (a == b).then_some(Arithmetic::Quantized),
        }
    }
}
