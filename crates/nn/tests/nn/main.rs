//! Modules that train: gradients, exactness, reproducibility.

mod cases;

mod accumulation;
mod attention;
mod bounds;
mod checkpoints;
mod errors;
mod finite_differences;
mod grouped;
mod identity;
mod memory;
mod presets;
mod recompute;
mod reproducible;
mod routing;
mod switch;
