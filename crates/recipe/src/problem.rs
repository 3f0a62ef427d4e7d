//! What can be wrong with a recipe, a model or both together. Each problem says where, what, why
//! and what to change.

use super::attention::{AttentionMode, AttentionPrecision};
use super::consumers::Use;
use super::decision::Reason;
use super::fold::fold;
use super::path::ModulePath;
use super::role::{AttentionSlot, Site, Slot};
use nvfp4::Side;
use nvfp4::format::{Conflict, Family, QuantSpec};
use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

/// All problems that were found, in the order of the model or file.
#[derive(Clone, Debug, PartialEq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// The same problems, as those of this file.
    pub(super) fn in_file(mut self, path: &Path) -> Self {
        for problem in &mut self.0 {
            if let Problem::File { file, .. } = problem {
                *file = Some(path.to_path_buf());
            }
        }
        self
    }

    /// The problems as text. Those that differ only in the number of a layer, or of an expert,
    /// share a line.
    pub fn lines(&self) -> Vec<String> {
        fold(self.0.iter().map(Problem::to_string))
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [problem] => problem.fmt(f),
            problems => {
                write!(f, "{} problems:", problems.len())?;
                self.lines().iter().try_for_each(|line| write!(f, "\n  {line}"))
            }
        }
    }
}

impl std::error::Error for Problems {}

/// An operand of a product that cannot be computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The tensor.
    pub slot: Slot,
    /// The direction that the product reads.
    pub side: Side,
    /// How the tensor is quantized.
    pub spec: QuantSpec,
    /// What that follows from.
    pub reason: Reason,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} is {}", self.slot, self.side, self.spec.format(self.side))
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A path that is not one.
    #[error("'{path}' is not a module path: use names of letters, digits, `_` and `-`, joined by dots")]
    Path {
        /// The path.
        path: ModulePath,
    },

    /// Two modules of one path.
    #[error("{path}: two modules have this path, so their tensors cannot be told apart; rename one")]
    DuplicatePath {
        /// The path.
        path: ModulePath,
    },

    /// Two slots of one name in a user's module.
    #[error("{site}: the module lists this slot twice; rename one")]
    DuplicateSlot {
        /// The slot.
        site: Site,
    },

    /// A setting of a module that names a slot which the module does not have.
    #[error("{site}: {what} names this tensor, which the model does not have; {fix}")]
    UnknownSite {
        /// The slot.
        site: Site,
        /// Who names it.
        what: &'static str,
        /// What to change.
        fix: &'static str,
    },

    /// The recipe gave no spec.
    #[error("{site}: the recipe has no spec for this tensor: {reason}")]
    NoSpec {
        /// The tensor.
        site: Site,
        /// What the recipe says.
        reason: String,
    },

    /// A product of operands that do not go together.
    #[error(
        "{path} {product}: {left} but {right}; {}. Change {}",
        conflict.rule(), change(left, right)
    )]
    Product {
        /// The module.
        path: ModulePath,
        /// The product.
        product: Cow<'static, str>,
        /// The left operand.
        left: Box<Found>,
        /// The right operand.
        right: Box<Found>,
        /// Why they do not go together.
        conflict: Conflict,
    },

    /// Tensors of attention in formats that attention does not read.
    #[error(
        "{path}: attention reads high precision, FP8 with one scale per tensor, or MXFP8, but {}. Change {}",
        listed(tensors),
        reasons(reason)
    )]
    AttentionFormat {
        /// The module.
        path: ModulePath,
        /// The tensors and their specs.
        tensors: Vec<(AttentionSlot, QuantSpec)>,
        /// What the specs follow from, each once.
        reason: Vec<Reason>,
    },

    /// Tensors of attention that want different arithmetic.
    #[error(
        "{path}: {} is {} but {} is {}; each pass of attention runs in one precision. Change {}",
        left.0.name(), left.1, right.0.name(), right.1, reasons(reason)
    )]
    AttentionMixed {
        /// The module.
        path: ModulePath,
        /// One tensor and its spec.
        left: (AttentionSlot, QuantSpec),
        /// Another one.
        right: (AttentionSlot, QuantSpec),
        /// What they follow from, each once.
        reason: Vec<Reason>,
    },

    /// Attention with a quantized backward pass alone.
    #[error(
        "{path}: {} is {spec} for the backward pass, but the forward pass is in high precision; attention cannot be quantized \
         backward alone. Quantize its forward tensors too, or leave its gradients in high precision: change {reason}",
        slot.name()
    )]
    AttentionOnlyBackward {
        /// The module.
        path: ModulePath,
        /// A tensor that the backward pass reads quantized.
        slot: AttentionSlot,
        /// Its spec.
        spec: QuantSpec,
        /// What that follows from.
        reason: Reason,
    },

    /// Attention that does not have the precision that the recipe requires.
    #[error(
        "{path}: the recipe requires {required} attention, but its specs give {found} ({}). \
         Change {} or what is required",
        listed(tensors),
        reasons(reason)
    )]
    AttentionRequired {
        /// The module.
        path: ModulePath,
        /// What is required.
        required: AttentionPrecision,
        /// What there is.
        found: AttentionMode,
        /// The forward tensors and their specs.
        tensors: Vec<(AttentionSlot, QuantSpec)>,
        /// What the specs follow from, each once.
        reason: Vec<Reason>,
    },

    /// Experts that differ.
    #[error(
        "{site}: the spec is {spec}, but expert 0 has {first}; the experts of one layer are computed together and need one spec. \
         Change {reason}"
    )]
    Grouped {
        /// The first expert that differs.
        site: Site,
        /// Its spec.
        spec: QuantSpec,
        /// The spec of expert 0.
        first: QuantSpec,
        /// What the expert's spec follows from.
        reason: Reason,
    },

    /// A tensor handed over in another format than its consumer reads.
    #[error(
        "{from} → {to}: the tensor is handed over as {given}, but the consumer reads {read}. Change {}, so that both have one \
         spec, or drop the edge, so that it is handed over in high precision",
        reasons(reason)
    )]
    HandOver {
        /// Who makes it.
        from: Site,
        /// Who takes it.
        to: Site,
        /// What it is quantized to.
        given: QuantSpec,
        /// What is expected.
        read: QuantSpec,
        /// What the two follow from, each once.
        reason: Vec<Reason>,
    },

    /// A use that a spec does not allow.
    #[error("{site}: {spec} does not allow {usage} ({side} direction): {fix}")]
    Use {
        /// The tensor.
        site: Site,
        /// Its spec.
        spec: QuantSpec,
        /// The use.
        usage: Use,
        /// The direction in question.
        side: Side,
        /// What to change.
        fix: &'static str,
    },

    /// An input that is kept unquantized, but cannot be quantized again to the same bytes.
    #[error(
        "{site}: the input is to be kept unquantized and quantized again in the backward pass, but {spec} would not give the \
         same bytes. Make the column direction from the original, or keep the quantized input"
    )]
    Replay {
        /// The tensor.
        site: Site,
        /// Its spec.
        spec: QuantSpec,
    },

    /// A format that the device cannot run, nor software for it.
    #[error("{site}: {spec} needs {family}, {}", missing(family, reason))]
    Device {
        /// The tensor.
        site: Site,
        /// Its spec.
        spec: QuantSpec,
        /// The formats in question.
        family: Family,
        /// What the spec follows from.
        reason: Reason,
    },

    /// Something wrong in a rule file.
    #[error("{}{reason}", place(file.as_deref(), *line))]
    File {
        /// Which file, if it is one.
        file: Option<PathBuf>,
        /// Where.
        line: usize,
        /// What, and what to write instead.
        reason: String,
    },

    /// Something wrong in an environment variable.
    #[error("{variable}: {reason}")]
    Variable {
        /// Which.
        variable: &'static str,
        /// What, and what to write instead.
        reason: String,
    },

    /// A change of plan for another model.
    #[error("{path}: only one of the two plans has this module; a change of recipe needs plans of one model")]
    OtherModel {
        /// The module.
        path: ModulePath,
    },

    /// A change of the format of a weight that exists in its old format alone.
    #[error(
        "{site}: the weight is stored as {from} alone, so it cannot become {to} without loss. \
         Keep its spec, or load it in high precision first"
    )]
    StoredWeight {
        /// The weight.
        site: Site,
        /// Its spec in the old plan.
        from: QuantSpec,
        /// Its spec in the new plan.
        to: QuantSpec,
    },

    /// A change of plan in the middle of a step.
    #[error(
        "{site}: an amax was recorded since the last update and would be lost; finish the step with `update` first"
    )]
    UnfinishedStep {
        /// The tensor.
        site: Site,
    },
}

/// What to change, where any of several may be what is wrong.
fn reasons(reason: &[Reason]) -> String {
    reason.iter().map(Reason::to_string).collect::<Vec<_>>().join(" or ")
}

/// Why formats cannot be run, and what to change.
fn missing(family: &Family, reason: &Reason) -> String {
    match family {
        Family::Custom(_) => format!(
            "a format of your own. Say that your program runs it (`Capabilities::with_custom`), or change {reason}"
        ),
        _ => format!("which this build cannot run. Change {reason}"),
    }
}

/// `recipe.toml:3: ` or `line 3: `.
fn place(file: Option<&Path>, line: usize) -> String {
    match file {
        Some(file) => format!("{}:{line}: ", file.display()),
        None => format!("line {line}: "),
    }
}

/// `qkv is a, s is b`.
fn listed(tensors: &[(AttentionSlot, QuantSpec)]) -> String {
    tensors.iter().map(|(slot, spec)| format!("{} is {spec}", slot.name())).collect::<Vec<_>>().join(", ")
}

/// What to change so that two operands go together.
fn change(left: &Found, right: &Found) -> String {
    match left.reason == right.reason {
        true => format!("{} for {} or {}", left.reason, left.slot, right.slot),
        false => format!("{} for {} or {} for {}", left.reason, left.slot, right.reason, right.slot),
    }
}
