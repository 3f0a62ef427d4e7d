//! Which tensor of which layer is quantized how.
//!
//! A [`Model`] lists its modules; each tensor that they quantize has a [`Role`]. A [`Recipe`]
//! answers each role with a [`QuantSpec`], which is data. [`Plan::build`] asks once per tensor,
//! checks the answers together and reports all that is wrong. What the plan needs to remember
//! between steps is in [`States`].
//!
//! ```
//! use nvfp4_recipe::{Capabilities, Model, Plan, Recipe, TransformerLayer};
//!
//! let mut model = Model::new();
//! model.nest("layers.0", &TransformerLayer::default());
//! let plan = Plan::build(&model, &"nvfp4".parse::<Recipe>()?, &Capabilities::software())?;
//! println!("{plan}");
//! # Ok::<(), nvfp4_recipe::Error>(())
//! ```
//!
//! The guide is `docs/recipes.md`. Reading order: `role.rs`, `factory.rs`, `presets.rs`,
//! `model.rs`, `plan/mod.rs`, `plan/check.rs`, `state/mod.rs`.

#![forbid(unsafe_code)]

mod accumulators;
mod attention;
mod backward;
mod config;
mod consumers;
mod decision;
mod device;
mod environment;
mod error;
mod factory;
mod fold;
mod keywords;
mod layers;
mod legacy;
mod model;
mod path;
mod plan;
mod presets;
mod problem;
mod products;
mod role;
mod rules;
mod state;
mod training;

pub use accumulators::Accumulators;
pub use attention::{AttentionMode, AttentionPrecision};
pub use backward::BackwardOverride;
pub use consumers::{Support, Use, support};
pub use decision::{Decision, Reason};
pub use device::{Capabilities, Execution, Units};
pub use error::{Error, Result};
pub use factory::Recipe;
pub use layers::{AttentionKind, HandOver, LayerKind, LayerNormMlp, MultiheadAttention, TransformerLayer};
pub use legacy::{LegacyModule, LegacyRole, LegacySlot, Read};
pub use model::{Edge, KeepInput, Model, Module, Purpose, Quantizable, WeightStorage};
pub use nvfp4::Accumulator;
pub use nvfp4::format::{
    AmaxFn, AmaxRule, AmaxRules, Arithmetic, BlockTile, ColumnSource, Conflict, Delayed, Epsilon, Family, Format, Fp8,
    Fp8Block, Fp8Code, MxTile, Mxfp8, Name, Nvfp4, QuantSpec, Reduction, Replay, ScaleStep, Split, Stored, multiply,
};
pub use path::{Glob, ModulePath};
pub use plan::{Change, Entry, Plan, PlanDiff, Saved, Transition, Warning};
pub use presets::{AttentionSlots, Preset};
pub use problem::{Found, Problem, Problems};
pub use products::{Operand, Product};
pub use role::{AttentionSlot, Consumer, ExtensionSlot, LinearSlot, Pass, Role, Site, Slot};
pub use state::{Collective, DelayedState, Group, Scales, SingleProcess, States};
pub use training::{Nvfp4Training, Scope};

/// Runs the examples of the README and of the guide to recipes.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/recipes.md")]
struct Guides;
