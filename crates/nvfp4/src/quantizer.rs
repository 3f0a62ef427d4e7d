//! A checked set of choices that turns tensors into [`QuantTensor`]s in NVFP4. Other formats: [`crate::recipe::SpecQuantizer`].

use crate::direction::{Direction, Global, Nvfp4Direction};
use crate::{Error, QuantTensor, Randomness, Result, Side, TensorRef};
use nvfp4_kernels::quantize::{self as kernel, Amax, Layout};
use nvfp4_kernels::{Implementation, Input};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{Edge, GlobalScale, Mode, Profile, Rounding as Rule, ScaleRule, Tile, area, e2m1, zeros};
use std::mem::take;

/// How a scaled value becomes a code. Random numbers are passed with each call: see [`Options`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down with a probability given by the position between the neighbours.
    Stochastic,
}

/// The randomized Hadamard transform of the column direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Transform {
    /// No transform.
    #[default]
    None,
    /// With TransformerEngine's fixed signs.
    FixedSigns,
    /// With the caller's own signs.
    Signs(Signs),
}

impl Transform {
    /// The signs; `None` for no transform.
    pub fn signs(self) -> Option<Signs> {
        match self {
            Transform::None => None,
            Transform::FixedSigns => Some(Signs::FIXED),
            Transform::Signs(signs) => Some(signs),
        }
    }
}

/// Which directions are produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Directions {
    /// Blocks along the rows.
    #[default]
    Row,
    /// Blocks along the columns: the transposed matrix.
    Column,
    /// Both, from the same values: the column direction is never made from the row direction's codes.
    Both,
}

impl Directions {
    /// Those of the two that are wanted, if any.
    pub(crate) fn of(row: bool, col: bool) -> Option<Self> {
        match (row, col) {
            (true, true) => Some(Directions::Both),
            (true, false) => Some(Directions::Row),
            (false, true) => Some(Directions::Column),
            (false, false) => None,
        }
    }

    /// Whether a side is among them.
    pub fn has(self, side: Side) -> bool {
        matches!(
            (self, side),
            (Directions::Both, _) | (Directions::Row, Side::Row) | (Directions::Column, Side::Column)
        )
    }
}

/// What to do about NaN and infinities in the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Finite {
    /// Keep the format's and the profile's behaviour: NaN and infinities become codes.
    #[default]
    Keep,
    /// Refuse the tensor, naming the index of the first bad value; and a given amax that is not finite.
    Refuse,
}

/// A checked set of choices for NVFP4. Two quantizers with the same settings are equal. Other formats, and NVFP4 too, are made by a
/// [`SpecQuantizer`](crate::recipe::SpecQuantizer).
///
/// ```
/// use nvfp4::{Directions, Quantizer, Tile, Transform};
///
/// let weights = Quantizer::builder().tile(Tile::Square16).directions(Directions::Both).build()?;
/// let gradients = Quantizer::builder().directions(Directions::Both).transform(Transform::FixedSigns).build()?;
///
/// let refused = Quantizer::builder().transform(Transform::FixedSigns).build().unwrap_err();
/// assert!(refused.to_string().contains("use `Directions::Column` or `Directions::Both`"));
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Quantizer {
    settings: QuantizerBuilder,
}

/// Settings on their way to a [`Quantizer`]; each has the default of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct QuantizerBuilder {
    pub(crate) mode: Mode,
    pub(crate) rounding: Rounding,
    pub(crate) transform: Transform,
    pub(crate) directions: Directions,
    pub(crate) layout: Layout,
    pub(crate) finite: Finite,
}

impl QuantizerBuilder {
    /// Which elements share a block scale.
    pub fn tile(mut self, tile: Tile) -> Self {
        self.mode.tile = tile;
        self
    }

    /// What the 32-bit scale belongs to.
    pub fn global_scale(mut self, global: GlobalScale) -> Self {
        self.mode.global = global;
        self
    }

    /// How a block's scale is chosen.
    pub fn scale_rule(mut self, rule: ScaleRule) -> Self {
        self.mode.rule = rule;
        self
    }

    /// How values become codes.
    pub fn rounding(mut self, rounding: Rounding) -> Self {
        self.rounding = rounding;
        self
    }

    /// The Hadamard transform of the column direction.
    pub fn transform(mut self, transform: Transform) -> Self {
        self.transform = transform;
        self
    }

    /// Which directions are produced.
    pub fn directions(mut self, directions: Directions) -> Self {
        self.directions = directions;
        self
    }

    /// What NaN and −0 become in the TransformerEngine profile.
    pub fn edge(mut self, edge: Edge) -> Self {
        self.mode.edge = edge;
        self
    }

    /// Whose bytes are written.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.mode.profile = profile;
        self
    }

    /// How the scales are laid out.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// What to do about NaN and infinities.
    pub fn finite(mut self, finite: Finite) -> Self {
        self.finite = finite;
        self
    }

    /// Refuses tensors with NaN or infinities: short for `finite(Finite::Refuse)`.
    pub fn check_finite(self) -> Self {
        self.finite(Finite::Refuse)
    }

    /// Checks the settings against each other.
    pub fn build(self) -> Result<Quantizer> {
        self.mode.check(&match self.rounding {
            Rounding::NearestEven => Rule::NearestEven,
            Rounding::Stochastic => Rule::Stochastic(()),
        })?;
        if self.transform != Transform::None && self.directions == Directions::Row {
            return Err(Error::TransformWithoutColumn);
        }
        Ok(Quantizer { settings: self })
    }
}

/// What a single call may add to a quantizer's settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Random numbers, for stochastic rounding.
    pub randomness: Option<Randomness<'a>>,
    /// The amax of the row direction if it is known: one value, or one per row. Values beyond it saturate.
    ///
    /// A negative one is refused, and so is one for a direction that is not written. NaN and ∞ are refused by a
    /// quantizer that checks for finite values, and otherwise taken as they are. In the kernel edge NaN gives an encode
    /// scale of `f32::MAX`, so that almost every value saturates, and decodes to NaN; ∞ gives an encode scale of 1 and
    /// decodes to ∞ or NaN.
    pub row_amax: Option<&'a [f32]>,
    /// The amax of the column direction if it is known: one value, or one per column, under the same rules. With the
    /// Hadamard transform it is the amax after the transform.
    pub col_amax: Option<&'a [f32]>,
    /// How to compute; the default is the fastest on the CPU. All give the same bits.
    pub implementation: Option<Implementation>,
}

impl Quantizer {
    /// Settings to start from: TransformerEngine's bytes, 1×16 tiles, one global scale, nearest even, row direction.
    pub fn builder() -> QuantizerBuilder {
        QuantizerBuilder::default()
    }

    /// The settings, to derive another quantizer from.
    pub fn settings(&self) -> QuantizerBuilder {
        self.settings
    }

    /// Which directions are produced.
    pub fn directions(&self) -> Directions {
        self.settings.directions
    }

    /// How values become codes; stochastic rounding needs randomness with every call.
    pub fn rounding(&self) -> Rounding {
        self.settings.rounding
    }

    /// Quantizes a tensor, rounding to nearest.
    pub fn quantize(&self, x: &TensorRef<'_>) -> Result<QuantTensor> {
        self.quantize_with(x, &Options::default())
    }

    /// Quantizes a tensor with random numbers or a known amax.
    pub fn quantize_with(&self, x: &TensorRef<'_>, options: &Options<'_>) -> Result<QuantTensor> {
        let mut row = self.directions().has(Side::Row).then(|| self.blank(x.rows(), x.cols(), None));
        let mut col = self
            .directions()
            .has(Side::Column)
            .then(|| self.blank(x.cols(), x.rows(), self.settings.transform.signs()));
        self.write(x, options, row.as_mut(), col.as_mut())?;
        Ok(QuantTensor { shape: x.shape().to_vec(), row, col })
    }

    /// A direction without bytes.
    fn blank(&self, rows: usize, cols: usize, rotation: Option<Signs>) -> Direction {
        let mode = &self.settings.mode;
        Direction::Nvfp4(Nvfp4Direction {
            rows,
            cols,
            codes: Vec::new(),
            scales: Vec::new(),
            global: Global::PerTensor(0.0),
            unit: mode.profile.unit(mode.rule.bound()),
            rotation,
            layout: self.settings.layout,
        })
    }

    /// Quantizes into directions of the right shape, whose buffers are reused where they fit. On an error nothing is changed.
    pub(crate) fn write(
        &self,
        x: &TensorRef<'_>,
        options: &Options<'_>,
        row: Option<&mut Direction>,
        col: Option<&mut Direction>,
    ) -> Result<()> {
        let randomness = self.randomness(options)?;
        self.check_amax(Side::Row, row.is_some(), options.row_amax)?;
        self.check_amax(Side::Column, col.is_some(), options.col_amax)?;
        let (rule, signs) = (Rule::NearestEven, self.settings.transform.signs());
        let mut row = row
            .map(|d| Writer::new(d, self, options.row_amax, randomness.map_or(rule, |r| r.row()), None))
            .transpose()?;
        let mut col = col
            .map(|d| Writer::new(d, self, options.col_amax, randomness.map_or(rule, |r| r.col()), signs))
            .transpose()?;
        // Memory first: a tensor that is too large to quantize may be too large to look at.
        if self.settings.finite == Finite::Refuse
            && let Some((index, value)) = x.first_not_finite()
        {
            return Err(Error::NotFinite { index, value });
        }
        x.with_input(|input: &Input<'_>| {
            let implementation = options.implementation.unwrap_or_else(Implementation::best);
            let (row, col) = (row.as_mut().map(Writer::target), col.as_mut().map(Writer::target));
            Ok(kernel::quantize(implementation, input, row, col)?)
        })?;
        [row, col].into_iter().flatten().for_each(|writer| writer.finish(x));
        Ok(())
    }

    fn check_amax(&self, side: Side, written: bool, amax: Option<&[f32]>) -> Result<()> {
        let Some(amax) = amax else { return Ok(()) };
        if !written {
            return Err(Error::UnusedAmax(side));
        }
        match amax.iter().position(|a| !a.is_finite()) {
            Some(index) if self.settings.finite == Finite::Refuse => {
                Err(Error::AmaxNotFinite { side, index, value: amax[index] })
            }
            _ => Ok(()),
        }
    }

    fn randomness<'a>(&self, options: &Options<'a>) -> Result<Option<Randomness<'a>>> {
        match (self.settings.rounding, options.randomness) {
            (Rounding::NearestEven, Some(_)) => Err(Error::UnusedRandomness),
            (Rounding::Stochastic, None) => Err(Error::NoRandomness),
            (_, randomness) => Ok(randomness),
        }
    }
}

/// A direction being written. Buffers of the right length are reused; others are made new and put in its place at the end.
/// The kernel checks everything before it writes, so a refusal leaves the direction as it was.
struct Writer<'a> {
    direction: &'a mut Direction,
    fresh: Option<Buffers>,
    amax: Vec<f32>,
    given: Option<&'a [f32]>,
    mode: Mode,
    rounding: Rule<nvfp4_spec::stochastic::Random<'a>>,
    transform: Option<Signs>,
    layout: Layout,
}

struct Buffers {
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl<'a> Writer<'a> {
    fn new(
        direction: &'a mut Direction,
        quantizer: &Quantizer,
        given: Option<&'a [f32]>,
        rounding: Rule<nvfp4_spec::stochastic::Random<'a>>,
        transform: Option<Signs>,
    ) -> Result<Self> {
        let QuantizerBuilder { mode, layout, .. } = quantizer.settings;
        let (rows, cols) = (direction.rows(), direction.cols());
        let amax = zeros(mode.global.count(rows), rows, cols)?;
        let (code_len, scale_len) = (area(rows, e2m1::packed_len(cols))?, layout.scale_len(rows, cols)?);
        let fits = |d: &Nvfp4Direction| d.codes.len() == code_len && d.scales.len() == scale_len;
        let fresh = match direction.nvfp4().is_ok_and(fits) {
            true => None,
            false => Some(Buffers { codes: zeros(code_len, rows, cols)?, scales: zeros(scale_len, rows, cols)? }),
        };
        Ok(Writer { direction, fresh, amax, given, mode, rounding, transform, layout })
    }

    fn target(&mut self) -> kernel::Direction<'_> {
        let (codes, scales) = match (&mut self.fresh, &mut *self.direction) {
            (Some(fresh), _) => (&mut fresh.codes, &mut fresh.scales),
            (None, Direction::Nvfp4(d)) => (&mut d.codes, &mut d.scales),
            (None, Direction::Fp8(_) | Direction::Plain(_)) => unreachable!("only NVFP4's buffers are reused"),
        };
        kernel::Direction {
            mode: self.mode,
            rounding: self.rounding,
            transform: self.transform,
            layout: self.layout,
            amax: match self.given {
                Some(amax) => Amax::Given(amax),
                None => Amax::Compute(&mut self.amax),
            },
            codes,
            scales,
        }
    }

    fn finish(self, x: &TensorRef<'_>) {
        let precision = match self.transform {
            Some(_) => nvfp4_spec::hadamard::PRECISION,
            None => x.values().precision(),
        };
        let amax = self.given.map_or(self.amax, <[f32]>::to_vec);
        let stored = amax.iter().map(|&a| self.mode.profile.stored(a, precision)).collect();
        let buffers = match (self.fresh, &mut *self.direction) {
            (Some(fresh), _) => fresh,
            (None, Direction::Nvfp4(d)) => Buffers { codes: take(&mut d.codes), scales: take(&mut d.scales) },
            (None, Direction::Fp8(_) | Direction::Plain(_)) => unreachable!("only NVFP4's buffers are reused"),
        };
        *self.direction = Direction::Nvfp4(Nvfp4Direction {
            rows: self.direction.rows(),
            cols: self.direction.cols(),
            codes: buffers.codes,
            scales: buffers.scales,
            global: Global::from_values(self.mode.global, stored),
            unit: self.mode.profile.unit(self.mode.rule.bound()),
            rotation: self.transform,
            layout: self.layout,
        });
    }
}
