//! Modules that train: gradients, exactness, reproducibility.

mod cases;

mod accumulation;
mod attention;
mod bf16;
mod bounds;
mod checkpoints;
mod errors;
mod finite_differences;
mod grouped;
mod identity;
mod learning;
mod memory;
mod presets;
mod recompute;
mod reproducible;
mod routing;
mod stored;
mod switch;
