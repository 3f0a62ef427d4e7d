//! How one tensor is quantized, in both directions.

use super::error::{Error, Result};
use super::name::Name;
use super::side::Side;
use super::{Delayed, Format, Replay};

/// How a tensor is quantized. A spec is a description: quantizers and their state are made from it later, so it can be compared,
/// hashed, printed, saved and checked before there is any memory.
///
/// As text, in rule files, tables, messages and JSON:
///
/// ```text
/// spec   = format | format " / " format [" from row"]
/// format = name [ "(" option { ", " option } ")" ]
/// ```
///
/// | name | options, the default first |
/// |---|---|
/// | `high-precision` | the tensor's own type; `f32`, `bf16`, `f16` |
/// | `fp8` | `e4m3`, `e5m2`; `any-scale`, `pow2-scale`; `epsilon=0` |
/// | `fp8-delayed` | `e4m3`, `e5m2`; `history=1024`; `margin=0`; `max`, `most-recent`, `amax=NAME`; `reduced`, `local` |
/// | `fp8-block` | `e4m3`, `e5m2`; `1x128`, `128x128`; `pow2-scale`, `any-scale`; `epsilon=0` |
/// | `mxfp8` | `e4m3`, `e5m2`; `1x32`, `32x32` |
/// | `nvfp4` | `1x16`, `16x16`; `per-tensor`, `row-scaled`; `nearest`, `stochastic`; `hadamard`, `hadamard=0x0000`; `six`, `mse`, `modelopt-mse`, `modelopt-4over6`, `4over6-{mae,mse}-{strict,fast}-{448,256}`; `kernel-specials`, `reference-specials`; `transformer-engine`, `modelopt`, `llm-compressor`, `torchao`; `linear`, `swizzled`; `keep-non-finite`, `check-finite` |
/// | `custom` | the user's name for it |
///
/// `a / b` gives the row format and the column format; `from row` makes the column direction from what the row direction decodes
/// to. Printing leaves defaults out, but for the FP8 code.
///
/// ```
/// use nvfp4::format::{ColumnSource, QuantSpec};
///
/// let spec: QuantSpec = "mxfp8 / nvfp4(hadamard)".parse()?;
/// assert!(matches!(&spec, QuantSpec::Split(split) if split.source() == ColumnSource::Original));
/// assert_eq!(spec.to_string().parse::<QuantSpec>()?, spec);
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum QuantSpec {
    /// Both directions in one format, from the same values.
    Uniform(Format),
    /// Each direction in its own format.
    Split(Split),
}

/// A format for each direction. A Hadamard transform acts on the column direction alone, so the row format has none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Split {
    row: Format,
    col: Format,
    source: ColumnSource,
}

/// What the column direction is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ColumnSource {
    /// The tensor.
    #[default]
    Original,
    /// What the row direction decodes to, so that both passes see the same values.
    RowDequantized,
}

impl Split {
    /// The row direction's format.
    pub fn row(&self) -> &Format {
        &self.row
    }

    /// The column direction's format.
    #[doc(alias = "column")]
    pub fn col(&self) -> &Format {
        &self.col
    }

    /// What the column direction is made from.
    pub fn source(&self) -> ColumnSource {
        self.source
    }
}

impl QuantSpec {
    /// No quantization.
    pub const HIGH_PRECISION: QuantSpec = QuantSpec::Uniform(Format::HIGH_PRECISION);

    /// FP8 with a scale from earlier steps, one for both directions.
    pub fn delayed(config: Delayed) -> Self {
        QuantSpec::Uniform(Format::Delayed(config))
    }

    /// A user's own format.
    pub fn custom(name: Name) -> Self {
        QuantSpec::Uniform(Format::Custom(name))
    }

    /// A format for each direction; any format may stand on either side.
    pub fn split(row: Format, col: Format, source: ColumnSource) -> Result<Self> {
        if let Format::Nvfp4(format) = &row
            && format.transform().signs().is_some()
        {
            let reason = "the row format has a Hadamard transform, which acts on the column direction alone";
            return Err(Error::Setting(format!("{row} / {col}: {reason}; leave `hadamard` out of the row format")));
        }
        Ok(QuantSpec::Split(Split { row, col, source }))
    }

    /// What a direction is stored as.
    pub fn format(&self, side: Side) -> Format {
        match (self, side) {
            (QuantSpec::Uniform(Format::Nvfp4(format)), Side::Row) => Format::Nvfp4(format.without_transform()),
            (QuantSpec::Uniform(format), _) => format.clone(),
            (QuantSpec::Split(split), Side::Row) => split.row.clone(),
            (QuantSpec::Split(split), Side::Column) => split.col.clone(),
        }
    }

    /// What the column direction is made from.
    pub fn source(&self) -> ColumnSource {
        match self {
            QuantSpec::Uniform(_) => ColumnSource::Original,
            QuantSpec::Split(split) => split.source,
        }
    }

    /// Whether the column direction that is made later, from a tensor kept until then, fits the row direction that was used
    /// before. It does if it does not depend on the row direction, or if the row direction can be made again.
    ///
    /// One FP8 scale serves both directions of a uniform spec, so a delayed one, which moves on, does not fit.
    pub fn replay(&self) -> Replay {
        match self {
            QuantSpec::Uniform(Format::Delayed(_) | Format::Custom(_)) => Replay::Differs,
            QuantSpec::Uniform(_) => Replay::Same,
            QuantSpec::Split(Split { source: ColumnSource::Original, .. }) => Replay::Same,
            QuantSpec::Split(split) => split.row.replay(),
        }
    }
}

impl From<Format> for QuantSpec {
    fn from(format: Format) -> Self {
        QuantSpec::Uniform(format)
    }
}

/// A format in both directions, whichever it is.
macro_rules! uniform {
    ($($format:ident),*) => {$(
        impl From<super::$format> for Format {
            fn from(format: super::$format) -> Self {
                Format::$format(format)
            }
        }

        impl From<super::$format> for QuantSpec {
            fn from(format: super::$format) -> Self {
                QuantSpec::Uniform(format.into())
            }
        }
    )*};
}

uniform!(Fp8, Delayed, Fp8Block, Mxfp8, Nvfp4);
