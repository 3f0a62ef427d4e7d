//! Products: which tensors meet, and which formats may.
//!
//! | product of a linear layer | left | right | sums over |
//! |---|---|---|---|
//! | fprop, `y = x·wᵀ` | input, row | weight, row | input features |
//! | dgrad, `dx = dy·w` | output gradient, row | weight, column | output features |
//! | wgrad, `dw = dyᵀ·x` | output gradient, column | input, column | tokens |

use super::format::{Family, Format};
use super::role::{LinearSlot, Slot};
use crate::{Side, Signs};
use std::borrow::Cow;

/// One side of a product: a direction of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The tensor.
    pub slot: Slot,
    /// The direction that the product reads.
    pub side: Side,
}

impl Operand {
    /// A direction of a tensor.
    pub fn new(slot: impl Into<Slot>, side: Side) -> Self {
        Operand { slot: slot.into(), side }
    }
}

/// A product inside a module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Its name in messages.
    pub name: Cow<'static, str>,
    /// The left operand.
    pub left: Operand,
    /// The right operand.
    pub right: Operand,
}

impl Product {
    /// A product of a user's module.
    pub fn new(name: &str, left: Operand, right: Operand) -> Self {
        Product { name: Cow::Owned(name.to_string()), left, right }
    }

    /// The product of the forward pass and the two of the backward pass, over the slots of one linear layer.
    pub(super) fn of_linear(slot: impl Fn(LinearSlot) -> Slot) -> [Product; 3] {
        use LinearSlot::*;
        let product = |name, left, left_side, right, right_side| Product {
            name: Cow::Borrowed(name),
            left: Operand { slot: slot(left), side: left_side },
            right: Operand { slot: slot(right), side: right_side },
        };
        [
            product("fprop", Input, Side::Row, Weight, Side::Row),
            product("dgrad", GradOutput, Side::Row, Weight, Side::Column),
            product("wgrad", GradOutput, Side::Column, Input, Side::Column),
        ]
    }
}

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
