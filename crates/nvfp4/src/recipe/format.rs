//! What one direction of a tensor can be stored as. All of it is data: comparable, hashable and printable.

use super::name::Name;
use crate::quantizer::{Directions, Quantizer, QuantizerBuilder, Transform};
use crate::{Error, Precision, Result, Rounding, Side, Signs};
use nvfp4_spec::GlobalScale;
use std::num::NonZeroU32;

/// A format: what the numbers of one direction are stored as, and by which rule they are made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Not quantized.
    HighPrecision(Stored),
    /// FP8 with one scale per tensor, made from the tensor's own amax.
    Fp8(Fp8),
    /// FP8 with one scale per tensor, made from the amaxes of earlier steps.
    Delayed(Delayed),
    /// FP8 with one binary32 scale per 128 values, or per square of them.
    Fp8Block(Fp8Block),
    /// FP8 with one power of two per 32 values.
    Mxfp8(Mxfp8),
    /// NVFP4, in any of its modes.
    Nvfp4(Nvfp4),
    /// A user's own format.
    Custom(Name),
}

impl Format {
    /// High precision, in whatever type the tensor comes.
    pub const HIGH_PRECISION: Format = Format::HighPrecision(Stored::AsIs);

    /// The formats that one product can read on both sides.
    pub fn family(&self) -> Family {
        match self {
            Format::HighPrecision(_) => Family::HighPrecision,
            Format::Fp8(_) | Format::Delayed(_) => Family::Fp8,
            Format::Fp8Block(_) => Family::Fp8Block,
            Format::Mxfp8(_) => Family::Mxfp8,
            Format::Nvfp4(_) => Family::Nvfp4,
            Format::Custom(name) => Family::Custom(name.clone()),
        }
    }

    /// The Hadamard transform that a direction in this format goes through.
    pub fn rotation(&self, side: Side) -> Option<Signs> {
        match (self, side) {
            (Format::Nvfp4(format), Side::Column) => format.transform().signs(),
            _ => None,
        }
    }

    /// Whether quantizing a tensor again gives the same bytes.
    pub fn replay(&self) -> Replay {
        match self {
            Format::Delayed(_) | Format::Custom(_) => Replay::Differs,
            Format::Nvfp4(format) if format.rounding() == Rounding::Stochastic => Replay::Differs,
            _ => Replay::Same,
        }
    }

    /// How many rows of a tensor make whole blocks of the column direction.
    pub fn alignment(&self) -> usize {
        match self {
            Format::HighPrecision(_) | Format::Custom(_) => 1,
            // Products in FP8 read 16 bytes at a time.
            Format::Fp8(_) | Format::Delayed(_) => 16,
            Format::Fp8Block(_) => 128,
            Format::Mxfp8(_) => 32,
            Format::Nvfp4(_) => nvfp4_spec::BLOCK,
        }
    }
}

/// Formats that differ in details which a product does not mind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Not quantized.
    HighPrecision,
    /// FP8 with one scale per tensor, current or delayed.
    Fp8,
    /// FP8 with a scale per 128 values.
    Fp8Block,
    /// FP8 with a power of two per 32 values.
    Mxfp8,
    /// NVFP4.
    Nvfp4,
    /// A user's own.
    Custom(Name),
}

/// Whether quantizing a tensor once more gives the bytes of the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Replay {
    /// The bytes depend on the tensor alone.
    Same,
    /// They depend on random numbers, on a scale that moves on, or on a rule that this library does not know.
    Differs,
}

/// The type that an unquantized tensor is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Stored {
    /// The type it comes in.
    #[default]
    AsIs,
    /// Another one.
    Cast(Precision),
}

/// The two 8-bit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Fp8Code {
    /// 4 bits of exponent, 3 of mantissa, up to 448.
    #[default]
    E4m3,
    /// 5 bits of exponent, 2 of mantissa, up to 57344.
    E5m2,
}

impl Fp8Code {
    /// The largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Fp8Code::E4m3 => 448.0,
            Fp8Code::E5m2 => 57344.0,
        }
    }
}

/// Which numbers a scale may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleStep {
    /// Any binary32 number.
    Any,
    /// Powers of two, rounded down.
    PowerOfTwo,
}

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
            false => Err(Error::Spec(format!("epsilon: expected a finite number of at least 0, got {value}"))),
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

/// FP8 with one scale per tensor, made from the amaxes of earlier steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Delayed {
    code: Fp8Code,
    history: NonZeroU32,
    margin: u8,
    amax: AmaxRule,
    reduction: Reduction,
}

/// How the amax of a scale is taken from a history.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AmaxRule {
    /// The largest of the window.
    Max,
    /// That of the last step.
    MostRecent,
    /// A user's own rule, known by its name.
    Named(Name),
}

/// Whether workers agree on an amax before they make a scale of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduction {
    /// The largest among all workers.
    Max,
    /// Each worker's own.
    Local,
}

impl Delayed {
    /// The longest history.
    pub const MAX_HISTORY: u32 = 1 << 20;
    /// The largest margin: a maximum shrunk by it is still a normal number.
    pub const MAX_MARGIN: u8 = 126;

    /// A history of 1024 steps, its maximum, no margin, amaxes shared by all workers.
    pub fn new(code: Fp8Code) -> Self {
        let history = NonZeroU32::new(1024).expect("1024 is not 0");
        Delayed { code, history, margin: 0, amax: AmaxRule::Max, reduction: Reduction::Max }
    }

    /// How many steps are remembered, the one under way included.
    pub fn with_history(self, steps: u32) -> Result<Self> {
        match NonZeroU32::new(steps).filter(|_| steps <= Self::MAX_HISTORY) {
            Some(history) => Ok(Delayed { history, ..self }),
            None => Err(Error::Spec(format!("history: expected 1 to {} steps, got {steps}", Self::MAX_HISTORY))),
        }
    }

    /// Scales aim at the code's maximum divided by 2 to this power.
    pub fn with_margin(self, margin: u32) -> Result<Self> {
        match u8::try_from(margin).ok().filter(|&margin| margin <= Self::MAX_MARGIN) {
            Some(margin) => Ok(Delayed { margin, ..self }),
            None => Err(Error::Spec(format!("margin: expected at most {}, got {margin}", Self::MAX_MARGIN))),
        }
    }

    /// How the amax is taken from the history.
    pub fn with_amax(self, amax: AmaxRule) -> Self {
        Delayed { amax, ..self }
    }

    /// Whether workers agree on the amax.
    pub fn with_reduction(self, reduction: Reduction) -> Self {
        Delayed { reduction, ..self }
    }

    /// The code.
    pub fn code(&self) -> Fp8Code {
        self.code
    }

    /// How many steps are remembered.
    pub fn history(&self) -> usize {
        self.history.get() as usize
    }

    /// The power of two that the code's maximum is divided by.
    pub fn margin(&self) -> u8 {
        self.margin
    }

    /// How the amax is taken from the history.
    pub fn amax(&self) -> &AmaxRule {
        &self.amax
    }

    /// Whether workers agree on the amax.
    pub fn reduction(&self) -> Reduction {
        self.reduction
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
        Fp8Block { code: Fp8Code::E4m3, tile, step: ScaleStep::PowerOfTwo, epsilon: Epsilon::ZERO }
    }
}

/// Which values share a scale in MXFP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MxTile {
    /// 32 consecutive values of a row.
    #[default]
    Row32,
    /// A square of 32 × 32.
    Square32,
}

/// FP8 with a power of two per 32 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Mxfp8 {
    /// The code.
    pub code: Fp8Code,
    /// Which values share a scale.
    pub tile: MxTile,
}

/// NVFP4 in one of its modes: the settings of a [`Quantizer`] but for the directions, which depend on what is asked for.
///
/// ```
/// use nvfp4::recipe::Nvfp4;
/// use nvfp4::{Quantizer, Tile};
///
/// let weights = Nvfp4::new(Quantizer::builder().tile(Tile::Square16))?;
/// assert_eq!(weights.to_string(), "nvfp4(16x16)");
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nvfp4 {
    settings: QuantizerBuilder,
}

impl Default for Nvfp4 {
    fn default() -> Self {
        Nvfp4 { settings: Quantizer::builder().directions(Directions::Both) }
    }
}

impl Nvfp4 {
    /// Checks the settings against each other. A Hadamard transform acts on the column direction, as always.
    pub fn new(settings: QuantizerBuilder) -> Result<Self> {
        let settings = settings.directions(Directions::Both);
        settings.build()?;
        Ok(Nvfp4 { settings })
    }

    /// The quantizer for these directions.
    pub fn quantizer(&self, directions: Directions) -> Quantizer {
        let settings = match directions {
            Directions::Row => self.without_transform().settings,
            Directions::Column | Directions::Both => self.settings,
        };
        settings.directions(directions).build().expect("checked when the format was made")
    }

    /// The settings, with both directions.
    pub fn settings(&self) -> QuantizerBuilder {
        self.settings
    }

    /// What the 32-bit scale belongs to.
    pub fn global_scale(&self) -> GlobalScale {
        self.settings.mode.global
    }

    /// How values become codes.
    pub fn rounding(&self) -> Rounding {
        self.settings.rounding
    }

    /// The Hadamard transform of the column direction.
    pub fn transform(&self) -> Transform {
        self.settings.transform
    }

    /// The same format without a Hadamard transform.
    pub fn without_transform(self) -> Self {
        Nvfp4 { settings: self.settings.transform(Transform::None) }
    }
}
