//! The choices of NVFP4, one enum each.

use super::side::Side;
use nvfp4_spec::hadamard::Signs;

/// How a scaled value becomes a code. Random numbers are passed with each call: see [`Options`](crate::Options).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down with a probability given by the position between the neighbours.
    Stochastic,
}

/// The randomized Hadamard transform of the column direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Transform {
    /// No transform.
    #[default]
    None,
    /// With TransformerEngine's fixed signs.
    FixedSigns,
    /// With the caller's own signs.
    Signs(Signs),
}

impl Transform {
    /// The signs; `None` for no transform.
    pub fn signs(self) -> Option<Signs> {
        match self {
            Transform::None => None,
            Transform::FixedSigns => Some(Signs::FIXED),
            Transform::Signs(signs) => Some(signs),
        }
    }
}

/// Which directions are produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Directions {
    /// Blocks along the rows.
    #[default]
    Row,
    /// Blocks along the columns: the transposed matrix.
    Column,
    /// Both, from the same values: the column direction is never made from the row direction's codes.
    Both,
}

impl Directions {
    /// Those of the two that are wanted, if any.
    pub fn of(row: bool, col: bool) -> Option<Self> {
        match (row, col) {
            (true, true) => Some(Directions::Both),
            (true, false) => Some(Directions::Row),
            (false, true) => Some(Directions::Column),
            (false, false) => None,
        }
    }

    /// Whether a side is among them.
    pub fn has(self, side: Side) -> bool {
        matches!(
            (self, side),
            (Directions::Both, _) | (Directions::Row, Side::Row) | (Directions::Column, Side::Column)
        )
    }
}

/// What to do about NaN and infinities in the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Finite {
    /// Keep the format's and the profile's behaviour: NaN and infinities become codes.
    #[default]
    Keep,
    /// Refuse the tensor, naming the index of the first bad value; and a given amax that is not finite.
    Refuse,
}
