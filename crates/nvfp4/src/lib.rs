//! NVFP4 and FP8 tensors: quantize, decode, multiply and store, exact to the bit.
//!
//! A [`Quantizer`] is a checked set of choices; it turns a [`TensorRef`] (borrowed values of any rank and stride, in
//! `f32`, `bf16` or `f16`) into a [`QuantTensor`], whose directions own everything needed to use them.
//!
//! ```
//! use nvfp4::{GlobalScale, Quantizer, Side, TensorRef};
//!
//! # fn main() -> nvfp4::Result<()> {
//! let x: Vec<f32> = (0..32 * 64).map(|i| (i as f32 * 0.1).sin()).collect();
//! let w: Vec<f32> = (0..48 * 64).map(|i| (i as f32 * 0.2).cos()).collect();
//!
//! let per_token = Quantizer::builder().global_scale(GlobalScale::PerRow).build()?;
//! let x = per_token.quantize(&TensorRef::new(&x[..], &[32, 64])?)?;
//! let w = Quantizer::default().quantize(&TensorRef::new(&w[..], &[48, 64])?)?;
//!
//! let y: Vec<f32> = x.matmul(&w)?; // [32, 48], correctly rounded before the scales
//! let back: Vec<f32> = x.dequantize(Side::Row)?;
//! assert_eq!((y.len(), back.len()), (32 * 48, 32 * 64));
//! # Ok(())
//! # }
//! ```
//!
//! FP8, MXFP8 and what is not quantized are [`QuantTensor`]s too, each direction in its own format. One [`Quantizer`]
//! makes them all, from a [`Format`] or from the [`QuantSpec`] that a recipe gives a tensor.
//!
//! What the numbers are is written in [`nvfp4_spec`]; how they are computed, in [`nvfp4_kernels`].

#![forbid(unsafe_code)]

#[cfg(feature = "cuda")]
pub mod cuda;
mod direction;
mod error;
pub mod format;
mod generator;
mod matmul;
mod quantizer;
mod shape;
mod storage;
mod tensor;
mod tensor_ref;

pub use direction::{
    Array, Block, BlockRef, Direction, Elements, Fp8Description, Fp8Direction, HostMemory, MemorySpace,
    Nvfp4Description, Nvfp4Direction, Orientation, PlainDirection, PlainMatrix,
};
pub use error::{Error, Result};
pub use format::{Directions, Finite, Format, QuantSpec, QuantizerBuilder, Rounding, Side, Transform};
pub use generator::{Generator, Randomness};
pub use matmul::{
    Accumulate, Accumulator, Epilogue, Operand, PreparedWeight, Product, matmul, matmul_grouped, matmul_grouped_with,
    matmul_plain, matmul_plain_with, matmul_with,
};
pub use nvfp4_kernels::quantize::Layout;
pub use nvfp4_kernels::{Implementation, Values};
pub use nvfp4_spec::fp8::{Format as Fp8Code, ScaleVec as Fp8Scales, Tile as Fp8Tile};
pub use nvfp4_spec::hadamard::Signs;
pub use nvfp4_spec::scale::Unit;
pub use nvfp4_spec::{Bound, Element, ErrorPath, GlobalScale, Metric, Precision, Profile, ScaleRule, Specials, Tile};
pub use quantizer::{Observed, Options, Quantizer, Update};
pub use storage::{from_bytes, load, save, to_bytes};
pub use tensor::QuantTensor;
pub use tensor_ref::{TensorRef, index_of, row_stride};

/// Runs the examples of this crate's README, of the project's and of the guide to tensors. Those in
/// `docs/` are links, so that they are in the package too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/front.md")]
#[doc = include_str!("../docs/tensors.md")]
struct Guides;
