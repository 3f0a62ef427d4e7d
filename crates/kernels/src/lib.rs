//! The same numbers as [`nvfp4_spec`], as operations on borrowed memory.
//!
//! One folder per operation, holding its entry point and, side by side, the versions that this machine may run. An entry
//! point checks shapes and lengths, then hands over to the [`Implementation`] asked for; all of them give the same bits.
//! This crate knows shapes, strides and buffers; it knows nothing of layers or recipes.

pub mod amax;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dequantize;
#[cfg(all(test, feature = "cuda"))]
#[path = "../tests/emulated/mod.rs"]
mod emulated;
mod error;
#[cfg(feature = "cuda")]
pub mod finite;
pub mod fp8;
pub mod gemm;
pub mod gguf;
pub mod hadamard;
mod implementation;
mod input;
pub mod quantize;
#[cfg(target_arch = "x86_64")]
mod scatter;
#[cfg(feature = "cuda")]
mod sources;
pub mod swizzle;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use error::{Error, Result};
pub use implementation::Implementation;
pub use input::{Elements, Input, MatrixRef, Values};
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub use sources::sources;
