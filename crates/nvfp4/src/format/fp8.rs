//! The settings of FP8 with scales from the tensor itself: per tensor, per 128 values, per 32 values.

use super::error::{Error, Result};

pub use nvfp4_spec::fp8::{Format as Fp8Code, ScaleValues as ScaleStep};

/// The smallest amax that a scale is made from: a number that is not negative and not infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Epsilon(u32);

impl Epsilon {
    /// No smallest amax.
    pub const ZERO: Epsilon = Epsilon(0);

    /// A smallest amax.
    pub fn new(value: f32) -> Result<Self> {
        match value.is_finite() && value >= 0.0 {
            true => Ok(Epsilon((value + 0.0).to_bits())), // adding +0 makes −0 +0, so that equal values are equal
            false => Err(Error::Setting(format!("epsilon: expected a finite number of at least 0, got {value}"))),
        }
    }

    /// The number.
    pub const fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// FP8 with one scale per tensor, made from the tensor's own amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8 {
    /// The code.
    pub code: Fp8Code,
    /// Which numbers the scale may be.
    pub step: ScaleStep,
    /// The smallest amax.
    pub epsilon: Epsilon,
}

impl Fp8 {
    /// Any scale, no smallest amax.
    pub const fn new(code: Fp8Code) -> Self {
        Fp8 { code, step: ScaleStep::Any, epsilon: Epsilon::ZERO }
    }
}

/// Which values share a scale in FP8 block scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum BlockTile {
    /// 128 consecutive values of a row.
    #[default]
    Row128,
    /// A square of 128 × 128.
    Square128,
}

/// FP8 with a binary32 scale per 128 values, or per square of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Block {
    /// The code.
    pub code: Fp8Code,
    /// Which values share a scale.
    pub tile: BlockTile,
    /// Which numbers a scale may be.
    pub step: ScaleStep,
    /// The smallest amax.
    pub epsilon: Epsilon,
}

impl Fp8Block {
    /// E4M3, powers of two, no smallest amax.
    pub const fn new(tile: BlockTile) -> Self {
        Fp8Block { code: Fp8Code::E4m3, tile, step: ScaleStep::PowersOfTwo, epsilon: Epsilon::ZERO }
    }
}

/// Which values share a scale in MXFP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MxTile {
    /// 32 consecutive values of a row.
    #[default]
    Row32,
    /// A square of 32 × 32, whose power of two is stored for each of its rows, or columns: both
    /// directions have the same codes. For weights.
    Square32,
}

/// FP8 with a power of two per 32 values, or per square of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Mxfp8 {
    /// The code.
    pub code: Fp8Code,
    /// Which values share a scale.
    pub tile: MxTile,
}
