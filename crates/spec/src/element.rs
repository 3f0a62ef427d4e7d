//! The types that tensors come in.

use half::{bf16, f16};

/// An input or output type: `f32`, `bf16` or `f16`.
///
/// Going to binary32 is exact. Coming back is one rounding to nearest even; NaN stays NaN and overflow becomes ∞.
pub trait Element: Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// The same value in binary32.
    fn to_f32(self) -> f32;
    /// The nearest value of this type.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}
