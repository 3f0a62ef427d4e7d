//! Delayed scaling with scales and amaxes in GPU memory. The host needs no faster version:
//! [`nvfp4_spec::fp8::delayed`].

pub mod cuda;
