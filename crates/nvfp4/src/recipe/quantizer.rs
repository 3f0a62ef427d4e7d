//! From a spec to a quantizer: every format, in either direction.

#[cfg(feature = "cuda")]
mod cuda;

use super::format::{BlockTile, Epsilon, Format, MxTile, ScaleStep, Stored};
use super::spec::{ColumnSource, QuantSpec};
use crate::direction::{Direction, Elements, Fp8Direction, Lies, PlainDirection};
use crate::{
    Directions, Error, Finite, Fp8Code, Fp8Scales, Implementation, Options, Precision, QuantTensor, Quantizer, Result,
    Rounding, Side, TensorRef, Update,
};
use half::{bf16, f16};
use nvfp4_kernels::fp8::quantize as kernel;
use nvfp4_kernels::{Input, amax};
use nvfp4_spec::fp8::{self, AmaxRule, Mode, Scales, Scaling};
use nvfp4_spec::{Edge, Error as RuleError, area, check_len, zeros};

/// The quantizer of a spec: a format for each direction, and the scales of delayed scaling.
///
/// ```
/// use nvfp4::recipe::QuantSpec;
/// use nvfp4::{Directions, Side, TensorRef};
///
/// let x: Vec<f32> = (0..64 * 96).map(|i| (i as f32 * 0.1).sin()).collect();
/// let spec: QuantSpec = "fp8-block / nvfp4(hadamard)".parse()?;
/// let q = spec.quantizer(Directions::Both)?.quantize(&TensorRef::new(&x[..], &[64, 96])?)?;
/// assert_eq!(q.to_string(), "[64, 96] row: fp8-block(e4m3) column: nvfp4(hadamard)");
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SpecQuantizer {
    directions: Directions,
    makers: Makers,
    finite: Finite,
}

#[derive(Clone, Debug, PartialEq)]
enum Makers {
    /// Both directions in one format.
    Uniform(Maker),
    /// Each in its own, if it is made at all.
    Split { row: Option<Maker>, col: Option<Maker>, source: ColumnSource },
}

/// What makes directions of one format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Maker {
    Plain(Stored),
    Fp8(Fp8Code, Scale),
    Nvfp4(super::Nvfp4),
}

/// Where an FP8 scale comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    /// From the tensor's amax.
    Current(AmaxRule),
    /// From earlier steps.
    Delayed(f32),
    Block(BlockTile, AmaxRule),
    Mx,
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

impl QuantSpec {
    /// The quantizer of these directions. Delayed scaling needs a scale: see [`QuantSpec::quantizer_with`].
    pub fn quantizer(&self, directions: Directions) -> Result<SpecQuantizer> {
        self.quantizer_with(directions, |_| None)
    }

    /// The quantizer of these directions; `scale` gives the scale that delayed scaling has for a direction at this step. One scale serves
    /// both directions of a uniform spec. [`Plan::quantizer`](super::Plan::quantizer) takes all of this from a plan.
    pub fn quantizer_with(&self, directions: Directions, scale: impl Fn(Side) -> Option<f32>) -> Result<SpecQuantizer> {
        let makers = match self {
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
        Ok(SpecQuantizer { directions, makers, finite: Finite::Keep })
    }
}

impl SpecQuantizer {
    /// Which directions are produced.
    pub fn directions(&self) -> Directions {
        self.directions
    }

    /// The same quantizer with another answer to NaN and infinities. A tensor that is high precision in each direction is never refused; NVFP4
    /// whose spec says `check-finite` always refuses.
    #[must_use]
    pub fn with_finite(self, finite: Finite) -> Self {
        SpecQuantizer { finite, ..self }
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
        if let Some((index, value)) = x.first_not_finite() {
            return Err(Error::NotFinite { index, value });
        }
        for (side, amax) in [(Side::Row, options.row_amax), (Side::Column, options.col_amax)] {
            let bad = amax.and_then(|amax| amax.iter().position(|amax| !amax.is_finite()).map(|i| (i, amax[i])));
            if let Some((index, value)) = bad {
                return Err(Error::AmaxNotFinite { side, index, value });
            }
        }
        Ok(())
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

    /// Quantizes a tensor and says what delayed scaling is to remember: [`States::observe`](super::States::observe) takes it.
    pub fn observe(&self, x: &TensorRef<'_>, options: &Options<'_>) -> Result<Observed> {
        for (side, amax) in [(Side::Row, options.row_amax), (Side::Column, options.col_amax)] {
            if amax.is_some() && !self.directions.has(side) {
                return Err(Error::UnusedAmax(side));
            }
        }
        if options.randomness.is_some() && self.rounding() == Rounding::NearestEven {
            return Err(Error::UnusedRandomness);
        }
        self.check_finite(x, options)?;
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

    /// Quantizes `x`, of the same shape, into the directions that the tensor holds. On an error nothing is changed.
    pub fn update(
        &self,
        tensor: &mut QuantTensor,
        x: &TensorRef<'_>,
        options: &Options<'_>,
        update: Update,
    ) -> Result<()> {
        tensor.check_update(x, self.directions)?;
        if update == Update::Apply {
            let mut next = self.quantize_with(x, options)?;
            let held = Directions::of(tensor.row.is_some(), tensor.col.is_some()).ok_or(Error::NoDirection)?;
            next.keep(held)?;
            *tensor = next;
        }
        Ok(())
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
                Some(scale) => return Err(Error::Spec(format!("{format}: expected a scale above 0, got {scale}"))),
                None => {
                    let fix = "give it with `quantizer_with`, or take the quantizer from a plan";
                    return Err(Error::Spec(format!("{format}: its scale comes from earlier steps; {fix}")));
                }
            },
            Format::Fp8Block(block) => {
                Maker::Fp8(block.code, Scale::Block(block.tile, rule(block.step, block.epsilon)))
            }
            Format::Mxfp8(mx) => match mx.tile {
                MxTile::Row32 => Maker::Fp8(mx.code, Scale::Mx),
                MxTile::Square32 => {
                    return Err(Error::Spec(format!(
                        "{format}: squares of 32 cannot be made yet; use mxfp8 with 1x32"
                    )));
                }
            },
            Format::Nvfp4(format) => Maker::Nvfp4(*format),
            Format::Custom(_) => {
                let fix = "quantize it with the program that knows it";
                return Err(Error::Spec(format!("{format}: not a format of this library; {fix}")));
            }
        })
    }

    fn is_stochastic(&self) -> bool {
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
                    Scale::Current(_) => given_amax(options)?,
                    Scale::Delayed(_) | Scale::Block(..) | Scale::Mx => {
                        self.refuse_amaxes(options)?;
                        None
                    }
                };
                let implementation = options.implementation.unwrap_or_else(Implementation::best);
                x.with_input(|input| quantize_fp8(input, directions, (*code, *scale), given, implementation))
            }
            Maker::Nvfp4(format) => {
                let quantizer: Quantizer = format.quantizer(directions);
                let tensor = quantizer.quantize_with(x, options)?;
                Ok(Made { row: tensor.row, col: tensor.col, ..Made::default() })
            }
        }
    }

    fn format_name(&self) -> &'static str {
        match self {
            Maker::Plain(_) => "high-precision",
            Maker::Fp8(_, Scale::Current(_)) => "fp8",
            Maker::Fp8(_, Scale::Delayed(_)) => "fp8-delayed",
            Maker::Fp8(_, Scale::Block(..)) => "fp8-block",
            Maker::Fp8(_, Scale::Mx) => "mxfp8",
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

/// The amax of the whole tensor, if it is given.
fn given_amax(options: &Options<'_>) -> Result<Option<f32>> {
    let one = |amax: Option<&[f32]>| -> Result<Option<f32>> {
        let Some(amax) = amax else { return Ok(None) };
        check_len("amax", 1, amax.len())?;
        match amax[0] < 0.0 {
            true => Err(RuleError::NegativeAmax { index: 0, value: amax[0] }.into()),
            false => Ok(Some(amax[0])),
        }
    };
    match (one(options.row_amax)?, one(options.col_amax)?) {
        (Some(row), Some(col)) if row.to_bits() != col.to_bits() => Err(Error::TwoAmaxes { row, col }),
        (row, col) => Ok(row.or(col)),
    }
}

/// One buffer for both directions.
fn plain(x: &TensorRef<'_>, directions: Directions, stored: Stored) -> Result<Made> {
    let elements = x.to_elements()?.stored_as(stored);
    let row = PlainDirection::from_parts(x.rows(), x.cols(), elements, Lies::Upright)?;
    Ok(Made {
        col: directions.has(Side::Column).then(|| row.turned().into()),
        row: directions.has(Side::Row).then(|| row.into()),
        ..Made::default()
    })
}

fn quantize_fp8(
    x: &Input<'_>,
    directions: Directions,
    (code, scale): (Fp8Code, Scale),
    given: Option<f32>,
    implementation: Implementation,
) -> Result<Made> {
    let scaling = match scale {
        Scale::Current(rule) => {
            let mut found = given.unwrap_or_default();
            if given.is_none() {
                let wanted = amax::Outputs { tensor: Some(&mut found), ..Default::default() };
                amax::amax(implementation, x, Edge::Kernel, wanted)?;
            }
            Scaling::Tensor { scale: rule.tensor_scale(found, code) }
        }
        Scale::Delayed(scale) => Scaling::Tensor { scale },
        Scale::Block(BlockTile::Row128, rule) => Scaling::Row128(rule),
        Scale::Block(BlockTile::Square128, rule) => Scaling::Square128(rule),
        Scale::Mx => Scaling::Mx,
    };
    let mode = Mode { format: code, scaling };
    let blank = |side, wanted| directions.has(wanted).then(|| blank(&mode, side, x)).transpose();
    let (mut row, mut col) = (blank(fp8::Side::Row, Side::Row)?, blank(fp8::Side::Column, Side::Column)?);
    let mut found = 0.0;
    let delayed = matches!(scale, Scale::Delayed(_));
    let wanted = kernel::Outputs {
        row: row.as_mut().map(target),
        col: col.as_mut().map(target),
        amax: delayed.then_some(&mut found),
    };
    kernel::quantize(implementation, x, &mode, wanted)?;
    let seen = |side| (delayed && directions.has(side)).then_some(found);
    Ok(Made {
        row_amax: seen(Side::Row),
        col_amax: seen(Side::Column),
        row: row.map(Direction::Fp8),
        col: col.map(Direction::Fp8),
    })
}

/// A direction with room for its bytes.
fn blank(mode: &Mode, side: fp8::Side, x: &Input<'_>) -> Result<Fp8Direction> {
    let (tile, stored) = (mode.tile(side), mode.shape(side, (x.rows(), x.cols())));
    let (rows, cols) = tile.along_k(stored);
    let count = tile.scale_count(stored.0, stored.1)?;
    let scales: Fp8Scales = match mode.scaling {
        Scaling::Mx => Scales::E8m0(zeros(count, rows, cols)?),
        Scaling::Tensor { .. } | Scaling::Row128(_) | Scaling::Square128(_) => Scales::F32(zeros(count, rows, cols)?),
    };
    let codes = zeros(area(rows, cols)?, rows, cols)?;
    Fp8Direction::from_parts(rows, cols, mode.format, tile, codes, scales)
}

fn target(direction: &mut Fp8Direction) -> kernel::Direction<'_> {
    let scales = match &mut direction.scales {
        Scales::F32(scales) => Scales::F32(&mut scales[..]),
        Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
    };
    kernel::Direction { codes: &mut direction.codes, scales }
}
