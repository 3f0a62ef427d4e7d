//! What can go wrong, and what to change.

use crate::Fault;
use std::path::PathBuf;

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that a caller, a plan or a file can get wrong.
///
/// Inside candle's graph it travels as a [`candle_core::Error`], which says the same sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// A tensor, or how it is quantized.
    #[error(transparent)]
    Nvfp4(#[from] nvfp4::Error),

    /// A recipe, a plan or a state.
    #[error(transparent)]
    Recipe(#[from] nvfp4_recipe::Error),

    /// A file.
    #[error(transparent)]
    File(#[from] nvfp4_files::Error),

    /// A tensor that its spec cannot quantize, most often for its shape.
    #[error("{site}, {rows} × {cols} as {spec}: {source}")]
    Tensor {
        /// Which tensor.
        site: String,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// How it was to be quantized.
        spec: String,
        /// Why it cannot.
        source: Box<nvfp4::Error>,
    },

    /// A forward pass before there is a plan.
    #[error("there is no plan yet: call `Session::apply` with a recipe once all modules are made")]
    NoPlan,

    /// A plan that lacks what the model has, or has what the model lacks.
    #[error(
        "the plan of recipe '{recipe}' is for another model: the model has {model}, the plan has {plan}; \
         build it from `Session::model`"
    )]
    OtherModel {
        /// The recipe that the plan follows from.
        recipe: String,
        /// A tensor of the model that the plan lacks, or "no more".
        model: String,
        /// A tensor of the plan that the model lacks, or "no more".
        plan: String,
    },

    /// Two parameters of one name.
    #[error("there are two parameters '{0}': give each module a place of its own with `Place::child`")]
    Duplicate(String),

    /// Sizes of a module that do not fit together.
    #[error("{module}: expected {expected}, got {got}; {fix}")]
    Size {
        /// The module's path.
        module: String,
        /// What fits.
        expected: String,
        /// What there is.
        got: String,
        /// What to change.
        fix: &'static str,
    },

    /// A loss or a tensor that is not finite, with the first tensor that was not.
    #[error("step {step}, loss {loss}: {}", went_first(first))]
    NotFinite {
        /// The step.
        step: u64,
        /// The loss.
        loss: f64,
        /// The first tensor that was not finite, if one was seen.
        first: Option<Box<Fault>>,
    },

    /// Codes that their producer did not hand over.
    #[error("{site}: the plan has an edge to it, but nothing was handed over; run the module that hands it over first")]
    NotHandedOver {
        /// Who waits for codes.
        site: String,
    },

    /// A backward pass of a step that is over.
    #[error(
        "{module}: its forward pass belongs to step {forward}, but it is step {now}; \
         call `Session::next_step` after the backward pass"
    )]
    StepOver {
        /// The module.
        module: String,
        /// The step of the forward pass.
        forward: u64,
        /// The step now.
        now: u64,
    },

    /// A backward pass under another plan than the forward pass.
    #[error(
        "{module}: its forward pass had the recipe '{forward}', but now it is '{now}'; \
         change the recipe between a backward pass and the next forward pass"
    )]
    RecipeOver {
        /// The module.
        module: String,
        /// The recipe of the forward pass.
        forward: String,
        /// The recipe now.
        now: String,
    },

    /// A checkpoint that cannot be read.
    #[error("{path}: {reason}")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
}

fn went_first(fault: &Option<Box<Fault>>) -> String {
    match fault {
        Some(fault) => format!(
            "the first tensor that is not finite is {fault}; a smaller learning rate or a wider format there may help"
        ),
        None => "not finite, although all tensors of modules were: look at what computes the loss".to_string(),
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}
