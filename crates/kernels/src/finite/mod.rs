//! The first number on a GPU that is NaN or infinite. The CPU checks its numbers where it reads
//! them.

pub mod cuda;

pub use cuda::{ALL_FINITE, decode, first_not_finite};
