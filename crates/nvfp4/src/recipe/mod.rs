//! Which tensor of which layer is quantized how.
//!
//! A [`Model`] lists its modules; each tensor that they quantize has a [`Role`]. A [`Recipe`] answers each role with a
//! [`QuantSpec`], which is data. [`Plan::build`] asks once per tensor, checks the answers together and reports all that is wrong.
//! What the plan needs to remember between steps is in [`States`].
//!
//! ```
//! use nvfp4::recipe::{Capabilities, Model, Plan, Recipe, TransformerLayer};
//!
//! let mut model = Model::new();
//! model.nest("layers.0", &TransformerLayer::default());
//! let plan = Plan::build(&model, &"nvfp4".parse::<Recipe>()?, &Capabilities::software())?;
//! println!("{plan}");
//! # Ok::<(), nvfp4::Error>(())
//! ```
//!
//! The guide is `docs/recipes.md`. Reading order: `role.rs`, `format/mod.rs`, `spec.rs`, `factory.rs`, `presets.rs`, `model.rs`,
//! `plan/mod.rs`, `plan/check.rs`, `state/mod.rs`, `quantizer.rs`.

mod attention;
mod backward;
mod config;
mod consumers;
mod device;
mod environment;
mod factory;
mod fold;
mod format;
mod layers;
mod legacy;
mod model;
mod name;
mod path;
mod plan;
mod presets;
mod problem;
mod products;
mod quantizer;
mod role;
mod rules;
mod spec;
mod state;
mod text;
mod training;

pub use attention::{AttentionMode, AttentionPrecision};
pub use backward::BackwardOverride;
pub use consumers::{Support, Use, support};
pub use device::{Capabilities, Runs, Units};
pub use factory::{Because, Decision, Recipe};
pub use format::{
    AmaxRule, BlockTile, Delayed, Epsilon, Family, Format, Fp8, Fp8Block, Fp8Code, Made, MxTile, Mxfp8, Nvfp4,
    Reduction, Replay, ScaleStep, Stored,
};
pub use layers::{AttentionKind, HandOver, LayerKind, LayerNormMlp, MultiheadAttention, TransformerLayer};
pub use legacy::{LegacyModule, LegacyRole, LegacySlot, Read};
pub use model::{Edge, KeepInput, Model, Module, Purpose, Quantizable, WeightStorage};
pub use name::Name;
pub use path::{Glob, ModulePath};
pub use plan::{Change, Entry, Plan, PlanDiff, Saved, Transition, Warning};
pub use presets::{AttentionSlots, Preset};
pub use problem::{Found, Problem, Problems};
pub use products::{Arithmetic, Conflict, Operand, Product, multiply};
pub use quantizer::{Observed, SpecQuantizer};
pub use role::{AttentionSlot, Consumer, ExtensionSlot, LinearSlot, Pass, Role, Site, Slot};
pub use spec::{ColumnSource, QuantSpec, Split};
pub use state::{AmaxFn, AmaxRules, Collective, DelayedState, Group, Scales, SingleProcess, States};
pub use training::{Nvfp4Training, Scope};
