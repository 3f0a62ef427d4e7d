//! The settings of NVFP4.

use super::error::{Error, Result};
use super::settings::{Directions, Finite, Rounding, Transform};
use nvfp4_kernels::quantize::Layout;
use nvfp4_spec::{GlobalScale, Mode, Profile, Rounding as Rule, ScaleRule, Specials, Tile};

/// NVFP4 in one of its modes: the settings of a quantizer but for the directions.
///
/// ```
/// use nvfp4::format::Nvfp4;
/// use nvfp4::{Quantizer, Tile};
///
/// let weights = Nvfp4::new(Quantizer::builder().tile(Tile::Square16))?;
/// assert_eq!(weights.to_string(), "nvfp4(16x16)");
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Nvfp4 {
    pub(crate) mode: Mode,
    pub(crate) rounding: Rounding,
    pub(crate) transform: Transform,
    pub(crate) layout: Layout,
    pub(crate) finite: Finite,
}

impl Nvfp4 {
    /// Checks the settings against each other. The directions of the builder do not matter: a
    /// Hadamard transform acts on the column direction, as always.
    pub fn new(settings: QuantizerBuilder) -> Result<Self> {
        let format = settings.format;
        format.mode.check(&match format.rounding {
            Rounding::NearestEven => Rule::NearestEven,
            Rounding::Stochastic => Rule::Stochastic(()),
        })?;
        Ok(format)
    }

    /// The settings, to derive another format or a quantizer from; with both directions.
    pub fn settings(&self) -> QuantizerBuilder {
        QuantizerBuilder { format: *self, directions: Directions::Both }
    }

    /// What the 32-bit scale belongs to.
    pub fn global_scale(&self) -> GlobalScale {
        self.mode.global
    }

    /// How values become codes.
    pub fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// The Hadamard transform of the column direction.
    pub fn transform(&self) -> Transform {
        self.transform
    }

    /// The same format without a Hadamard transform.
    #[must_use]
    pub fn without_transform(self) -> Self {
        Nvfp4 { transform: Transform::None, ..self }
    }
}

/// Settings of NVFP4 on their way to a quantizer; each has the default of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct QuantizerBuilder {
    format: Nvfp4,
    directions: Directions,
}

impl QuantizerBuilder {
    /// Which elements share a block scale.
    pub fn tile(mut self, tile: Tile) -> Self {
        self.format.mode.tile = tile;
        self
    }

    /// What the 32-bit scale belongs to.
    pub fn global_scale(mut self, global: GlobalScale) -> Self {
        self.format.mode.global = global;
        self
    }

    /// How a block's scale is chosen.
    pub fn scale_rule(mut self, rule: ScaleRule) -> Self {
        self.format.mode.rule = rule;
        self
    }

    /// How values become codes.
    pub fn rounding(mut self, rounding: Rounding) -> Self {
        self.format.rounding = rounding;
        self
    }

    /// The Hadamard transform of the column direction.
    pub fn transform(mut self, transform: Transform) -> Self {
        self.format.transform = transform;
        self
    }

    /// Which directions are produced.
    pub fn directions(mut self, directions: Directions) -> Self {
        self.directions = directions;
        self
    }

    /// What NaN and −0 become in the TransformerEngine profile.
    pub fn specials(mut self, specials: Specials) -> Self {
        self.format.mode.specials = specials;
        self
    }

    /// Whose bytes are written.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.format.mode.profile = profile;
        self
    }

    /// How the scales are laid out.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.format.layout = layout;
        self
    }

    /// What to do about NaN and infinities.
    pub fn finite(mut self, finite: Finite) -> Self {
        self.format.finite = finite;
        self
    }

    /// Refuses tensors with NaN or infinities: short for `finite(Finite::Refuse)`.
    pub fn check_finite(self) -> Self {
        self.finite(Finite::Refuse)
    }

    /// Checks the settings against each other.
    pub(crate) fn checked(self) -> Result<(Nvfp4, Directions)> {
        let format = Nvfp4::new(self)?;
        if format.transform != Transform::None && self.directions == Directions::Row {
            return Err(Error::TransformWithoutColumn);
        }
        Ok((format, self.directions))
    }
}
