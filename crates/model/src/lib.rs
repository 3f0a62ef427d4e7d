//! Language models from checkpoints, run layer by layer: what quantization cost, which scales
//! activations need, and what a model says.
//!
//! No module imports what imports it. Read in this order:
//!
//! 1. what is read: `fields`, `rope` and `config` (settings), `matrix` (a weight in memory) and `gpu`
//!    (one in a GPU's), `place` (which of both), `source` (a checkpoint by names), `tokens` (text);
//! 2. what is computed: `projection` and `linear`, `norm`, `attention`, `mlp`, `decoder` (a layer
//!    over the hidden states of all rows);
//! 3. what is found out: `score` (logits, of which none is kept), `drift` and `saturation`,
//!    `summary`, `evaluate` (with `state`, to continue, and `memory`), `calibrate`
//!    (with `hessian`), `generate`.
//!
//! A forward pass has one layer in memory, and the hidden states of all tokens. Products with weights
//! are computed on the CPU, or with the feature `cuda` on a GPU.

#![forbid(unsafe_code)]

mod attention;
mod calibrate;
mod config;
mod decoder;
mod drift;
mod evaluate;
mod fields;
mod generate;
#[cfg(feature = "cuda")]
mod gpu;
mod hessian;
mod linear;
mod matrix;
mod memory;
mod mlp;
mod norm;
mod place;
mod projection;
mod rope;
mod saturation;
mod score;
mod source;
mod state;
mod summary;
mod tokens;

pub use attention::{Attention, Cache};
pub use calibrate::{Calibration, amaxes, cache_scales, calibrate, calibrate_with};
pub use config::{Activation, Config, Experts, Family, FeedForward, Norms, Routing};
pub use decoder::{Decoder, Layer, Rows};
pub use drift::Drift;
pub use evaluate::{Evaluate, Evaluation, Lane, Lanes, Progress};
pub use generate::{Generation, Sampling, generate};
#[cfg(feature = "cuda")]
pub use gpu::GpuMatrix;
pub use hessian::Hessians;
pub use linear::{Activations, KeysValues, Linear, Run, Watch};
pub use matrix::Matrix;
pub use nvfp4_checkpoint::{Error, Result};
pub use place::{Place, Placed};
pub use projection::{ActivationScale, FourBit, Projection, Weights};
pub use rope::Rope;
pub use saturation::Blocks;
pub use score::{Said, Speaker, logits, positions, score};
pub use source::{Source, input_scale, open};
pub use state::StateFile;
pub use summary::{Divergence, Mean, agreement, perplexity, ratio, verdict};
pub use tokens::Tokens;

/// A request that cannot be carried out.
fn refused(reason: impl Into<String>) -> Error {
    Error::Refused(reason.into())
}
