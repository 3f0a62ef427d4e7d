//! The same numbers as [`nvfp4_spec`], as operations on borrowed memory.
//!
//! Each operation has a folder: its entry point and its implementations, side by side. An entry
//! point checks shapes and lengths, then calls the [`Implementation`] asked for. All of them give
//! the same bits. The line: `error` and `input` are the bottom, `vector` (NEON under the names of
//! AVX2), `cuda`, `avx2` and `avx512` stand on them, the operations on these. This crate knows shapes, strides and buffers; it knows nothing
//! of layers or recipes.

pub mod amax;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx512;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dequantize;
pub mod differences;
#[cfg(all(test, feature = "cuda"))]
#[path = "../tests/emulated/mod.rs"]
mod emulated;
mod error;
#[cfg(feature = "cuda")]
pub mod finite;
pub mod fp8;
pub mod gemm;
pub mod gguf;
pub mod gptq;
pub mod hadamard;
mod implementation;
mod input;
#[cfg(target_arch = "x86_64")]
mod pages;
pub mod quantize;
pub mod rescale;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod scatter;
#[cfg(feature = "cuda")]
mod sources;
pub mod swizzle;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vector;
pub mod weighted;

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
#[cfg(target_arch = "aarch64")]
pub use vector::Neon;
