//! Roles: which tensor of which module a quantizer is for.
//!
//! A [`Slot`] is a kind of tensor in a kind of module, a [`Site`] is that slot in one module of a
//! model, and a [`Role`] adds who takes the tensor over, where the module hands it on quantized.
//! Nothing here is a position in a list, and no two sites of a model are alike. [`Role::legacy`]
//! gives the words that TransformerEngine uses for the same tensor.

use super::path::ModulePath;
use nvfp4::format::{Name, Result};
use std::fmt;

/// The half of a training step that makes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// From inputs to the loss.
    Forward,
    /// From the loss to gradients.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        })
    }
}

/// A tensor of a linear layer `y = x·wᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearSlot {
    /// `x`.
    Input,
    /// `w`.
    Weight,
    /// `y`, where it is handed on quantized.
    Output,
    /// `dy`.
    GradOutput,
    /// `dx`, where it is handed on quantized.
    GradInput,
}

impl LinearSlot {
    /// All of them.
    pub const ALL: [LinearSlot; 5] = {
        use LinearSlot::*;
        [Input, Weight, Output, GradOutput, GradInput]
    };

    /// The pass that makes it.
    pub const fn pass(self) -> Pass {
        match self {
            LinearSlot::Input | LinearSlot::Weight | LinearSlot::Output => Pass::Forward,
            LinearSlot::GradOutput | LinearSlot::GradInput => Pass::Backward,
        }
    }

    /// Its name in rule files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            LinearSlot::Input => "input",
            LinearSlot::Weight => "weight",
            LinearSlot::Output => "output",
            LinearSlot::GradOutput => "grad_output",
            LinearSlot::GradInput => "grad_input",
        }
    }
}

/// A tensor of attention, `O = softmax(Q·Kᵀ)·V`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AttentionSlot {
    /// Queries, keys and values.
    Qkv,
    /// The probabilities `S`.
    S,
    /// The output.
    O,
    /// The gradient of the output.
    DO,
    /// The gradient of the probabilities.
    DP,
    /// The gradients of queries, keys and values.
    DQkv,
}

impl AttentionSlot {
    /// All of them.
    pub const ALL: [AttentionSlot; 6] = {
        use AttentionSlot::*;
        [Qkv, S, O, DO, DP, DQkv]
    };

    /// The pass that makes it.
    pub const fn pass(self) -> Pass {
        match self {
            AttentionSlot::Qkv | AttentionSlot::S | AttentionSlot::O => Pass::Forward,
            AttentionSlot::DO | AttentionSlot::DP | AttentionSlot::DQkv => Pass::Backward,
        }
    }

    /// Its name in rule files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionSlot::Qkv => "qkv",
            AttentionSlot::S => "s",
            AttentionSlot::O => "o",
            AttentionSlot::DO => "do",
            AttentionSlot::DP => "dp",
            AttentionSlot::DQkv => "dqkv",
        }
    }
}

/// A tensor of a module that this library does not know.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExtensionSlot {
    /// The kind of module, for instance `router`.
    pub kind: Name,
    /// The tensor in it, for instance `logits`.
    pub slot: Name,
    /// The pass that makes it.
    pub pass: Pass,
}

impl ExtensionSlot {
    /// A tensor of a user's module; both names are of letters, digits, `_` and `-`.
    pub fn new(kind: &str, slot: &str, pass: Pass) -> Result<Self> {
        Ok(ExtensionSlot { kind: kind.parse()?, slot: slot.parse()?, pass })
    }
}

/// A kind of tensor in a kind of module.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// Of a linear layer.
    Linear(LinearSlot),
    /// Of one of several linear layers that are computed together.
    Grouped {
        /// Which tensor.
        slot: LinearSlot,
        /// Of which expert, from 0.
        expert: u32,
    },
    /// Of attention.
    Attention(AttentionSlot),
    /// Of a user's module.
    Extension(ExtensionSlot),
}

impl Slot {
    /// The pass that makes the tensor.
    pub fn pass(&self) -> Pass {
        match self {
            Slot::Linear(slot) | Slot::Grouped { slot, .. } => slot.pass(),
            Slot::Attention(slot) => slot.pass(),
            Slot::Extension(slot) => slot.pass,
        }
    }
}

impl From<LinearSlot> for Slot {
    fn from(slot: LinearSlot) -> Self {
        Slot::Linear(slot)
    }
}

impl From<AttentionSlot> for Slot {
    fn from(slot: AttentionSlot) -> Self {
        Slot::Attention(slot)
    }
}

impl From<ExtensionSlot> for Slot {
    fn from(slot: ExtensionSlot) -> Self {
        Slot::Extension(slot)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Slot::Linear(slot) => f.write_str(slot.name()),
            Slot::Grouped { slot, expert } => write!(f, "{}[{expert}]", slot.name()),
            Slot::Attention(slot) => f.write_str(slot.name()),
            Slot::Extension(slot) => write!(f, "{}:{}", slot.kind, slot.slot),
        }
    }
}

/// One tensor of one module: what a quantizer, and its state, belong to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// The module.
    pub path: ModulePath,
    /// The tensor in it.
    pub slot: Slot,
}

impl Site {
    /// A slot of a module.
    pub fn new(path: impl Into<ModulePath>, slot: impl Into<Slot>) -> Self {
        Site { path: path.into(), slot: slot.into() }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path, self.slot)
    }
}

/// Who takes over a tensor that a module hands on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Consumer {
    /// These modules, as it is.
    Sites(Vec<Site>),
    /// Something outside the model, as it is.
    Unknown,
    /// Nobody takes the codes: the module that made them decodes them.
    HighPrecision,
}

/// What a recipe is asked about: one tensor of one module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Role {
    /// The module that quantizes the tensor, and which tensor it is.
    pub owner: Site,
    /// Who takes it over; `None` where it never leaves the module.
    pub consumer: Option<Consumer>,
}

impl Role {
    /// The role of a tensor that does not leave its module.
    pub fn new(owner: Site) -> Self {
        Role { owner, consumer: None }
    }

    /// The role of a tensor that its module hands on.
    pub fn handed_on(owner: Site, consumer: Consumer) -> Self {
        Role { owner, consumer: Some(consumer) }
    }

    /// The module.
    pub fn path(&self) -> &ModulePath {
        &self.owner.path
    }

    /// The tensor in the module.
    pub fn slot(&self) -> &Slot {
        &self.owner.slot
    }

    /// The pass that makes the tensor.
    pub fn pass(&self) -> Pass {
        self.owner.slot.pass()
    }

    /// The slot whose needs decide the format: the first consumer's for what a module hands on,
    /// since a hand-over has no second quantization; the owner's otherwise, and always for
    /// attention, whose kernel computes in the format of its own slots.
    pub fn reader(&self) -> &Slot {
        match (&self.owner.slot, &self.consumer) {
            (Slot::Attention(_), _) => &self.owner.slot,
            (_, Some(Consumer::Sites(sites))) if !sites.is_empty() => &sites[0].slot,
            _ => &self.owner.slot,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.owner.fmt(f)?;
        match &self.consumer {
            None | Some(Consumer::HighPrecision) => Ok(()),
            Some(Consumer::Unknown) => f.write_str(" → outside"),
            Some(Consumer::Sites(sites)) => {
                let sites: Vec<String> = sites.iter().map(Site::to_string).collect();
                write!(f, " → {}", sites.join(", "))
            }
        }
    }
}
