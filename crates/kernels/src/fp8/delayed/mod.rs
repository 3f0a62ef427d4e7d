//! Delayed scaling where scales and amaxes lie in a GPU's memory. On the host there is nothing to make fast:
//! [`nvfp4_spec::fp8::delayed`].

pub mod cuda;
