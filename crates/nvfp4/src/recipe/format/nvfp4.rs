//! The settings of NVFP4, which are those of a quantizer.

use crate::quantizer::{Directions, Quantizer, QuantizerBuilder, Transform};
use crate::{GlobalScale, Result, Rounding};

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
