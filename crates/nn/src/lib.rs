//! Transformer modules that train in NVFP4, on candle: its tensors, autograd, losses and optimizers.
//!
//! A [`Session`] is a training run. Modules are made at a [`Place`] of it, a recipe then says which of their tensors are quantized how
//! ([`Session::apply`]), and every module is a [`candle_core::Module`]. See [`Session`] for a whole loop, and `docs/training.md`.
//!
//! A module whose tensors the plan leaves alone is candle's own graph, bit for bit. Any other is one node of that graph, which keeps
//! the codes that its backward pass reads.
//!
//! Reading order: `linear.rs`, `projection.rs`, `operand.rs`, `session.rs`, then the other modules.

#![forbid(unsafe_code)]

mod adamw;
mod error;
mod graph;
mod linear;
mod operand;
mod place;
mod projection;
mod session;
mod values;

pub use adamw::AdamW;
pub use error::{Error, Result};
pub use graph::graph_bytes;
pub use linear::Linear;
pub use place::{Init, Parameter, Place};
pub use projection::Bias;
pub use session::{Fault, Session, Watch};
