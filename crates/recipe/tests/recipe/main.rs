//! Roles, recipes, plans and their state. Tests that pin what a test of TransformerEngine pins carry its name.

mod answers;
mod attention;
mod backward;
mod consumers;
mod defects;
mod environment;
mod finite;
mod grouped;
mod presets;
mod products;
mod quantizers;
mod roles;
mod rules;
mod saved_input;
mod specs;
mod state;
mod tools;
mod transitions;
