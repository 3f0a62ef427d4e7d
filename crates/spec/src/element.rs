//! The types that tensors come in.

use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// An input or output type: `f32`, `bf16` or `f16`.
///
/// Going to binary32 is exact. Coming back is one rounding to nearest even; NaN stays NaN and
/// overflow becomes ∞. The trait is sealed: [`Element::PRECISION`] tells the type.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// Which of the three types this is.
    const PRECISION: Precision;
    /// The same value in binary32.
    fn to_f32(self) -> f32;
    /// The nearest value of this type.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const PRECISION: Precision = Precision::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const PRECISION: Precision = Precision::Bf16;
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Element for f16 {
    const PRECISION: Precision = Precision::F16;
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// An element type as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// binary16.
    F16,
}

impl Precision {
    /// `x` rounded to this type, in binary32.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Precision::F32 => x,
            Precision::Bf16 => bf16::from_f32(x).to_f32(),
            Precision::F16 => f16::from_f32(x).to_f32(),
        }
    }

    /// The largest finite value of this type.
    pub fn max(self) -> f32 {
        match self {
            Precision::F32 => f32::MAX,
            Precision::Bf16 => bf16::MAX.to_f32(),
            Precision::F16 => f16::MAX.to_f32(),
        }
    }

    /// The smallest positive normal value of this type.
    pub fn min_normal(self) -> f32 {
        match self {
            Precision::F32 => f32::MIN_POSITIVE,
            Precision::Bf16 => bf16::MIN_POSITIVE.to_f32(),
            Precision::F16 => f16::MIN_POSITIVE.to_f32(),
        }
    }
}
