//! One quantizer for every format: from a description to tensors.

mod fp8;
mod nvfp4;

use crate::direction::{Direction, Elements, Orientation, PlainDirection};
use crate::format::{
    BlockTile, ColumnSource, Directions, Epsilon, Finite, Format, Fp8Code, MxTile, Nvfp4, QuantSpec, QuantizerBuilder,
    Rounding, ScaleStep, Side, Stored,
};
use crate::{Error, Implementation, Precision, QuantTensor, Randomness, Result, TensorRef};
use half::{bf16, f16};
use nvfp4_spec::fp8::AmaxRule;

/// What a single call may add to a quantizer's settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Random numbers, for stochastic rounding.
    pub randomness: Option<Randomness<'a>>,
    /// The amax of the row direction if it is known: one value, or one per row. Values beyond it saturate.
    ///
    /// A negative one is refused, and so is one for a direction that is not written. NaN and ∞ are refused by a
    /// quantizer that checks for finite values, and otherwise taken as they are. With kernel specials NaN gives an encode
    /// scale of `f32::MAX`, so that almost every value saturates, and decodes to NaN; ∞ gives an encode scale of 1 and
    /// decodes to ∞ or NaN.
    pub row_amax: Option<&'a [f32]>,
    /// The amax of the column direction if it is known: one value, or one per column, under the same rules. With the
    /// Hadamard transform it is the amax after the transform.
    pub col_amax: Option<&'a [f32]>,
    /// How to compute; the default is the fastest on the CPU. All give the same bits.
    pub implementation: Option<Implementation>,
}

impl Options<'_> {
    /// An error if a given amax is not finite.
    fn check_amaxes(&self) -> Result<()> {
        for (side, amax) in [(Side::Row, self.row_amax), (Side::Column, self.col_amax)] {
            let bad = amax.and_then(|amax| amax.iter().position(|amax| !amax.is_finite()).map(|i| (i, amax[i])));
            if let Some((index, value)) = bad {
                return Err(Error::AmaxNotFinite { side, index, value });
            }
        }
        Ok(())
    }
}

/// Whether an update takes place, for callers who decide late (a gradient overflow, a micro-batch that changes nothing).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Update {
    /// Write the new values.
    #[default]
    Apply,
    /// Leave the tensor as it is.
    Skip,
}

/// A format for each direction, and the scales of delayed scaling. It turns tensors into
/// [`QuantTensor`]s, on the CPU and on a GPU.
///
/// ```
/// use nvfp4::format::{Mxfp8, QuantSpec};
/// use nvfp4::{Directions, Quantizer, TensorRef, Tile, Transform};
///
/// // NVFP4, from its settings.
/// let weights = Quantizer::builder().tile(Tile::Square16).directions(Directions::Both).build()?;
/// let refused = Quantizer::builder().transform(Transform::FixedSigns).build().unwrap_err();
/// assert!(refused.to_string().contains("use `Directions::Column` or `Directions::Both`"));
///
/// // Any format, from code or from recipe text.
/// let mx = Quantizer::new(Mxfp8::default(), Directions::Both)?;
/// let mixed = Quantizer::new("fp8-block / nvfp4(hadamard)".parse::<QuantSpec>()?, Directions::Both)?;
///
/// let x: Vec<f32> = (0..64 * 96).map(|i| (i as f32 * 0.1).sin()).collect();
/// let q = mixed.quantize(&TensorRef::new(&x[..], &[64, 96])?)?;
/// assert_eq!(q.to_string(), "[64, 96] row: fp8-block(e4m3) column: nvfp4(hadamard)");
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantizer {
    pub(crate) directions: Directions,
    pub(crate) makers: Makers,
    finite: Finite,
}

/// NVFP4 with the default settings, row direction.
impl Default for Quantizer {
    fn default() -> Self {
        let makers = Makers::Uniform(Maker::Nvfp4(Nvfp4::default()));
        Quantizer { directions: Directions::Row, makers, finite: Finite::Keep }
    }
}

impl QuantizerBuilder {
    /// Checks the settings against each other.
    pub fn build(self) -> Result<Quantizer> {
        let (format, directions) = self.checked()?;
        Quantizer::new(format, directions)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Makers {
    /// Both directions in one format.
    Uniform(Maker),
    /// Each in its own, if it is made at all.
    Split { row: Option<Maker>, col: Option<Maker>, source: ColumnSource },
}

/// What makes directions of one format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Maker {
    Plain(Stored),
    Fp8(Fp8Code, Scale),
    Nvfp4(Nvfp4),
}

/// Where an FP8 scale comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// From the tensor's amax.
    Current(AmaxRule),
    /// From earlier steps.
    Delayed(f32),
    Block(BlockTile, AmaxRule),
    Mx(MxTile),
}

/// A quantized tensor, and what delayed scaling is to remember of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The tensor.
    pub tensor: QuantTensor,
    /// The largest magnitude that the row direction was made from, NaN left out, if its scale comes from earlier steps.
    pub row_amax: Option<f32>,
    /// That of the column direction.
    pub col_amax: Option<f32>,
}

impl Quantizer {
    /// Settings of NVFP4 to start from: TransformerEngine's bytes, 1×16 tiles, one global scale, nearest even, row direction.
    pub fn builder() -> QuantizerBuilder {
        QuantizerBuilder::default()
    }

    /// The quantizer of a format or a spec. Delayed scaling needs a scale: see [`Quantizer::with_scales`].
    pub fn new(spec: impl Into<QuantSpec>, directions: Directions) -> Result<Self> {
        Self::with_scales(&spec.into(), directions, |_| None)
    }

    /// The quantizer of a spec; `scale` gives the scale that delayed scaling has for a direction at this step. One scale serves
    /// both directions of a uniform spec. A plan of a recipe knows all of this.
    pub fn with_scales(spec: &QuantSpec, directions: Directions, scale: impl Fn(Side) -> Option<f32>) -> Result<Self> {
        let makers = match spec {
            QuantSpec::Uniform(format) => {
                let side = if directions == Directions::Column { Side::Column } else { Side::Row };
                Makers::Uniform(Maker::new(format, scale(side))?)
            }
            QuantSpec::Split(split) => {
                // The row direction may be there for the other to be made from it.
                let row = directions.has(Side::Row) || split.source() == ColumnSource::RowDequantized;
                let (row, col) = (row.then_some(split.row()), directions.has(Side::Column).then_some(split.col()));
                Makers::Split {
                    row: row.map(|format| Maker::new(format, scale(Side::Row))).transpose()?,
                    col: col.map(|format| Maker::new(format, scale(Side::Column))).transpose()?,
                    source: split.source(),
                }
            }
        };
        Ok(Quantizer { directions, makers, finite: Finite::Keep })
    }

    /// Which directions are produced.
    pub fn directions(&self) -> Directions {
        self.directions
    }

    /// The same quantizer with another answer to NaN and infinities. A tensor that is high precision in each direction is never refused; NVFP4
    /// whose spec says `check-finite` always refuses.
    #[must_use]
    pub fn with_finite(self, finite: Finite) -> Self {
        Quantizer { finite, ..self }
    }

    /// What is done about NaN and infinities.
    pub fn finite(&self) -> Finite {
        self.finite
    }

    /// Whether codes are drawn at random, so that every call needs randomness.
    pub fn rounding(&self) -> Rounding {
        if self.any(Maker::is_stochastic) { Rounding::Stochastic } else { Rounding::NearestEven }
    }

    fn any(&self, fits: impl Fn(&Maker) -> bool) -> bool {
        match &self.makers {
            Makers::Uniform(maker) => fits(maker),
            Makers::Split { row, col, .. } => [row, col].into_iter().flatten().any(fits),
        }
    }

    /// Refuses what the finite policy does, if the tensor is quantized at all.
    fn check_finite(&self, x: &TensorRef<'_>, options: &Options<'_>) -> Result<()> {
        if self.finite == Finite::Keep || !self.any(|maker| !matches!(maker, Maker::Plain(_))) {
            return Ok(());
        }
        x.check_finite()?;
        options.check_amaxes()
    }

    /// Quantizes a tensor.
    pub fn quantize(&self, x: &TensorRef<'_>) -> Result<QuantTensor> {
        self.quantize_with(x, &Options::default())
    }

    /// Quantizes a tensor with random numbers, a known amax, or an implementation that was chosen.
    ///
    /// An amax is taken by NVFP4 and by FP8 with a scale from the tensor itself; other formats refuse one.
    pub fn quantize_with(&self, x: &TensorRef<'_>, options: &Options<'_>) -> Result<QuantTensor> {
        Ok(self.observe(x, options)?.tensor)
    }

    /// Quantizes a tensor and says what delayed scaling is to remember: the states of a recipe take it.
    pub fn observe(&self, x: &TensorRef<'_>, options: &Options<'_>) -> Result<Observed> {
        self.check(x, options, self.directions)?;
        let made = match &self.makers {
            Makers::Uniform(maker) => maker.make(x, self.directions, options)?,
            Makers::Split { row, col, source } => {
                let made = make_split(x, options, (row.as_ref(), col.as_ref()), *source)?;
                Made { row: made.row.filter(|_| self.directions.has(Side::Row)), ..made }
            }
        };
        let Made { row, col, row_amax, col_amax } = made;
        Ok(Observed { tensor: QuantTensor { shape: x.shape().to_vec(), row, col }, row_amax, col_amax })
    }

    /// Refuses options that nothing uses, and what the finite policy refuses.
    fn check(&self, x: &TensorRef<'_>, options: &Options<'_>, written: Directions) -> Result<()> {
        let amaxes = Directions::of(options.row_amax.is_some(), options.col_amax.is_some());
        self.check_options(amaxes, options.randomness.is_some(), written)?;
        self.check_finite(x, options)
    }

    /// Refuses amaxes of directions that are not written, and random numbers that nothing draws or that are missing:
    /// on the CPU as on a GPU.
    pub(crate) fn check_options(
        &self,
        amaxes: Option<Directions>,
        randomness: bool,
        written: Directions,
    ) -> Result<()> {
        let unused = |side: &Side| amaxes.is_some_and(|amaxes| amaxes.has(*side)) && !written.has(*side);
        if let Some(side) = [Side::Row, Side::Column].into_iter().find(unused) {
            return Err(Error::UnusedAmax(side));
        }
        match (self.rounding(), randomness) {
            (Rounding::NearestEven, true) => Err(Error::UnusedRandomness),
            (Rounding::Stochastic, false) => Err(Error::NoRandomness),
            (Rounding::NearestEven, false) | (Rounding::Stochastic, true) => Ok(()),
        }
    }

    /// Quantizes `x`, of the same shape, into the directions that the tensor holds. On an error nothing is changed.
    pub fn update(
        &self,
        tensor: &mut QuantTensor,
        x: &TensorRef<'_>,
        options: &Options<'_>,
        update: Update,
    ) -> Result<()> {
        tensor.check_update(x, self.directions)?;
        if update == Update::Skip {
            return Ok(());
        }
        let held = Directions::of(tensor.row.is_some(), tensor.col.is_some()).ok_or(Error::NoDirection)?;
        self.check(x, options, held)?;
        match &self.makers {
            // Its buffers are reused.
            Makers::Uniform(Maker::Nvfp4(format)) => format.write(x, options, tensor.row.as_mut(), tensor.col.as_mut()),
            Makers::Uniform(_) | Makers::Split { .. } => {
                let mut next = self.quantize_with(x, options)?;
                next.keep(held)?;
                *tensor = next;
                Ok(())
            }
        }
    }
}

/// A direction after the other, each with what concerns it of the options.
fn make_split(
    x: &TensorRef<'_>,
    options: &Options<'_>,
    (row, col): (Option<&Maker>, Option<&Maker>),
    source: ColumnSource,
) -> Result<Made> {
    let concern = |maker: &Maker| Options {
        randomness: options.randomness.filter(|_| maker.is_stochastic()),
        row_amax: None,
        col_amax: None,
        implementation: options.implementation,
    };
    let mut made = match row {
        Some(row) => row.make(x, Directions::Row, &Options { row_amax: options.row_amax, ..concern(row) })?,
        None => Made::default(),
    };
    if let Some(col) = col {
        let options = Options { col_amax: options.col_amax, ..concern(col) };
        let second = match source {
            ColumnSource::Original => col.make(x, Directions::Column, &options)?,
            ColumnSource::RowDequantized => {
                let row = made.row.as_ref().ok_or(Error::MissingDirection(Side::Row))?;
                let decoded = decoded(row, x.values().precision(), options.implementation)?;
                col.make(&TensorRef::new(decoded.values(), x.shape())?, Directions::Column, &options)?
            }
        };
        (made.col, made.col_amax) = (second.col, second.col_amax);
    }
    Ok(made)
}

/// What the row direction stands for, in the type that the tensor came in.
fn decoded(row: &Direction, precision: Precision, implementation: Option<Implementation>) -> Result<Elements> {
    let implementation = implementation.unwrap_or_else(Implementation::best);
    Ok(match precision {
        Precision::F32 => Elements::F32(row.dequantize_with::<f32>(implementation)?),
        Precision::Bf16 => Elements::Bf16(row.dequantize_with::<bf16>(implementation)?),
        Precision::F16 => Elements::F16(row.dequantize_with::<f16>(implementation)?),
    })
}

/// What a maker made.
#[derive(Default)]
struct Made {
    row: Option<Direction>,
    col: Option<Direction>,
    row_amax: Option<f32>,
    col_amax: Option<f32>,
}

impl Maker {
    fn new(format: &Format, scale: Option<f32>) -> Result<Self> {
        let rule = |step: ScaleStep, epsilon: Epsilon| AmaxRule { values: step, epsilon: epsilon.value() };
        Ok(match format {
            Format::HighPrecision(stored) => Maker::Plain(*stored),
            Format::Fp8(fp8) => Maker::Fp8(fp8.code, Scale::Current(rule(fp8.step, fp8.epsilon))),
            Format::Delayed(delayed) => match scale {
                Some(scale) if scale.is_finite() && scale > 0.0 => Maker::Fp8(delayed.code(), Scale::Delayed(scale)),
                Some(scale) => return Err(Error::setting(format!("{format}: expected a scale above 0, got {scale}"))),
                None => {
                    let fix = "give it with `Quantizer::with_scales`, or take the quantizer from a plan";
                    return Err(Error::setting(format!("{format}: its scale comes from earlier steps; {fix}")));
                }
            },
            Format::Fp8Block(block) => {
                Maker::Fp8(block.code, Scale::Block(block.tile, rule(block.step, block.epsilon)))
            }
            Format::Mxfp8(mx) => Maker::Fp8(mx.code, Scale::Mx(mx.tile)),
            Format::Nvfp4(format) => Maker::Nvfp4(*format),
            Format::Custom(_) => {
                let fix = "quantize it with the program that knows it";
                return Err(Error::setting(format!("{format}: not a format of this library; {fix}")));
            }
        })
    }

    pub(crate) fn is_stochastic(&self) -> bool {
        matches!(self, Maker::Nvfp4(format) if format.rounding() == Rounding::Stochastic)
    }

    fn make(&self, x: &TensorRef<'_>, directions: Directions, options: &Options<'_>) -> Result<Made> {
        match self {
            Maker::Plain(stored) => {
                self.refuse_amaxes(options)?;
                plain(x, directions, *stored)
            }
            Maker::Fp8(code, scale) => {
                let given = match scale {
                    Scale::Current(_) => fp8::given_amax(options)?,
                    Scale::Delayed(_) | Scale::Block(..) | Scale::Mx(_) => {
                        self.refuse_amaxes(options)?;
                        None
                    }
                };
                let implementation = options.implementation.unwrap_or_else(Implementation::best);
                x.with_input(|input| fp8::quantize(input, directions, (*code, *scale), given, implementation))
            }
            Maker::Nvfp4(format) => {
                let (row, col) = format.quantize(x, directions, options)?;
                Ok(Made { row, col, ..Made::default() })
            }
        }
    }

    pub(crate) fn format_name(&self) -> &'static str {
        match self {
            Maker::Plain(_) => "high-precision",
            Maker::Fp8(_, Scale::Current(_)) => "fp8",
            Maker::Fp8(_, Scale::Delayed(_)) => "fp8-delayed",
            Maker::Fp8(_, Scale::Block(..)) => "fp8-block",
            Maker::Fp8(_, Scale::Mx(_)) => "mxfp8",
            Maker::Nvfp4(_) => "nvfp4",
        }
    }

    fn refuse_amaxes(&self, options: &Options<'_>) -> Result<()> {
        for (side, amax) in [(Side::Row, options.row_amax), (Side::Column, options.col_amax)] {
            if amax.is_some() {
                return Err(Error::NoAmax { side, format: self.format_name().to_string() });
            }
        }
        Ok(())
    }
}

/// One buffer for both directions.
fn plain(x: &TensorRef<'_>, directions: Directions, stored: Stored) -> Result<Made> {
    let elements = x.to_elements()?.stored_as(stored);
    let row = PlainDirection::from_parts(x.rows(), x.cols(), elements, Orientation::RowMajor)?;
    Ok(Made {
        col: directions.has(Side::Column).then(|| row.turned().into()),
        row: directions.has(Side::Row).then(|| row.into()),
        ..Made::default()
    })
}
