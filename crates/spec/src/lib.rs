//! What the NVFP4 numbers are.
//!
//! This crate is the textbook: every numeric rule of the format is written here once, in scalar,
//! safe Rust that follows the sentence it implements. The fast implementations are twins of these
//! functions and must give the same bits. Nothing here is tuned; read it in this order:
//!
//! 1. [`mode`]: the choices (tile, global scale, scale rule, rounding, specials);
//! 2. [`e2m1`] and [`e4m3`]: the two small number formats;
//! 3. [`scale`]: the global scale and the block scale;
//! 4. [`scaling`], [`tile`] and [`block`]: a tile becomes one scale byte and its codes;
//! 5. [`four_over_six`]: choosing between two scales per block;
//! 6. [`philox`] and [`stochastic`]: randomness by position, and rounding with it;
//! 7. [`hadamard`]: the randomized Hadamard transform;
//! 8. [`matrix`]: whole matrices, both directions, and back;
//! 9. [`gemm`]: products of quantized matrices;
//! 10. [`swizzle`] and [`gguf`]: other layouts of the same bytes;
//! 11. [`profile`]: the same steps in the arithmetic of other producers; [`activation`]: under a
//!     scale that was stored before;
//! 12. [`mse`] and [`modelopt`]: a block's scale by trial; [`weighted`]: by what it does to a layer's
//!     outputs; [`gptq`]: codes by what they do to them; [`rescale`]: a block under another tensor
//!     scale;
//! 13. [`fast_math`] and [`upstream`]: two habits of TransformerEngine that exist only to reproduce
//!     its output;
//! 14. [`e5m2`], [`e8m0`] and [`fp8`]: the eight-bit formats that recipes mix with NVFP4.
//!
//! ```
//! use nvfp4_spec::matrix::{self, Matrix};
//! use nvfp4_spec::{Mode, Rounding};
//!
//! let x = Matrix::new(1, 16, &[3.0f32; 16])?;
//! let mode = Mode::default();
//! let amax = matrix::amax(&x, mode.global, mode.specials)?;
//! let q = matrix::quantize(&x, &amax, &mode, Rounding::NearestEven)?;
//! // Two codes to a byte, each 7 (which is 6), and one scale: E4M3's largest, 448.
//! assert_eq!((q.codes, q.scales, q.stored), (vec![0x77; 8], vec![0x7E], vec![3.0]));
//! # Ok::<(), nvfp4_spec::Error>(())
//! ```
//!
//! # Notation
//!
//! `fl(…)` is one IEEE-754 binary32 operation, rounded to nearest even, subnormals kept. Rust's
//! `f32` operators are exactly that and are never contracted, so an expression here has one
//! rounding per operator, in the order written. The order is part of the rule. "numerics §n" names
//! a section of `docs/numerics.md` in this repository: the same rules in prose and formulas, as
//! TransformerEngine has them (commit d0067d0da6cb).

#![forbid(unsafe_code)]

pub mod activation;
pub mod block;
pub mod e2m1;
pub mod e4m3;
pub mod e5m2;
pub mod e8m0;
mod element;
mod error;
pub mod fast_math;
pub mod four_over_six;
pub mod fp8;
pub mod gemm;
pub mod gguf;
pub mod gptq;
pub mod hadamard;
pub mod matrix;
pub mod mode;
pub mod modelopt;
pub mod mse;
pub mod philox;
pub mod profile;
pub mod rescale;
pub mod scale;
pub mod scaling;
mod small_float;
pub mod stochastic;
pub mod swizzle;
pub mod tile;
pub mod upstream;
pub mod weighted;

pub use element::{Element, Precision};
pub use error::{Error, Result, area, check_len, zeros};
pub use mode::{Bound, ErrorPath, GlobalScale, Metric, Mode, Profile, Rounding, ScaleRule, Specials, Tile};

/// Number of consecutive elements that share one block scale.
pub const BLOCK: usize = 16;

/// Runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
