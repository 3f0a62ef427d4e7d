//! What one direction of a tensor can be stored as. All of it is data: comparable, hashable and printable.
//!
//! A [`Format`] describes one direction, a [`QuantSpec`] both. [`multiply`] says which two a product
//! can read together. Tensors, quantizers and recipes are built on this module; it knows none of them.

mod delayed;
mod error;
mod fp8;
pub mod keywords;
mod name;
mod nvfp4;
mod product;
mod settings;
mod side;
mod spec;
mod text;

pub use delayed::{AmaxFn, AmaxRule, AmaxRules, Delayed, Reduction};
pub use error::{Error, Result};
pub use fp8::{BlockTile, Epsilon, Fp8, Fp8Block, Fp8Code, MxTile, Mxfp8, ScaleStep};
pub use name::{Name, is_name};
pub use nvfp4::{Nvfp4, QuantizerBuilder};
pub use product::{Arithmetic, Conflict, multiply};
pub use settings::{Directions, Finite, Rounding, Transform};
pub use side::Side;
pub use spec::{ColumnSource, QuantSpec, Split};

#[cfg(feature = "cuda")]
pub(crate) use delayed::Rule;

use nvfp4_spec::Precision;
use nvfp4_spec::fp8::Tile as Fp8Tile;
use nvfp4_spec::hadamard::Signs;

/// A format: what the numbers of one direction are stored as, and by which rule they are made.
///
/// ```
/// use nvfp4::format::{Family, Format, Mxfp8};
///
/// let format: Format = "nvfp4(16x16)".parse()?;
/// assert_eq!((format.family(), format.alignment()), (Family::Nvfp4, 16));
/// assert_eq!(Format::from(Mxfp8::default()).to_string(), "mxfp8(e4m3)");
/// # Ok::<(), nvfp4::format::Error>(())
/// ```
///
/// Exhaustive on purpose: consumers match on the format without a default arm, so a new one does not
/// compile until each of them handles it.
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
    /// FP8 with one power of two per 32 values, or per square of them.
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

/// Formats that differ only in details that do not matter to a product.
///
/// Exhaustive on purpose, as [`Format`] is.
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

impl Family {
    /// That of FP8 with such tiles.
    pub(crate) fn of_fp8(tile: Fp8Tile) -> Self {
        match tile {
            Fp8Tile::Tensor => Family::Fp8,
            Fp8Tile::Row128 | Fp8Tile::Square128 => Family::Fp8Block,
            Fp8Tile::Row32 | Fp8Tile::Column32 => Family::Mxfp8,
        }
    }
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
