//! Products: which tensors meet. Which formats may is [`nvfp4::format::multiply`].
//!
//! | product of a linear layer | left | right | sums over |
//! |---|---|---|---|
//! | fprop, `y = x·wᵀ` | input, row | weight, row | input features |
//! | dgrad, `dx = dy·w` | output gradient, row | weight, column | output features |
//! | wgrad, `dw = dyᵀ·x` | output gradient, column | input, column | tokens |

use super::role::{LinearSlot, Slot};
use nvfp4::format::Side;
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

    /// The product of the forward pass and the two of the backward pass, over the slots of one
    /// linear layer.
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
