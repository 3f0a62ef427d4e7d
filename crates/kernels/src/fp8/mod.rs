//! FP8 and MXFP8 beside NVFP4: the rules of [`nvfp4_spec::fp8`] on borrowed memory.

#[cfg(feature = "cuda")]
pub mod delayed;
pub mod dequantize;
#[cfg(all(test, feature = "cuda"))]
#[path = "../../tests/emulated/fp8.rs"]
mod emulated;
pub mod quantize;

/// The operations on a GPU's memory.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use super::delayed::cuda::{Entry, update};
    pub use super::dequantize::cuda::{ScaleRef, View, dequantize};
    pub use super::quantize::cuda::{
        Amax, Direction, Mode, Outputs, Scale, ScaleMut, Scaling, grouped_shape, quantize, quantize_grouped,
    };
}
