//! 256-bit vectors, under the names that x86-64 gives them. There they are the instructions
//! themselves. On ARM each is two NEON registers, and [`neon`] has the same operations, so that the
//! twins in the files `avx2` are written once for both.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod token;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use std::arch::x86_64::*;
#[cfg(target_arch = "aarch64")]
pub use token::Neon;
