//! The NVFP4 training recipe and its switches.

use super::keywords::TRANSFORMS;
use super::role::{LinearSlot, Pass, Slot};
use nvfp4::format::keywords::{ERROR_PATHS, GLOBALS, Keywords, METRICS, ROUNDINGS, TILES, unless};
use nvfp4::format::{Format, Nvfp4, QuantSpec, Result};
use nvfp4::{Bound, ErrorPath, GlobalScale, Metric, Quantizer, Rounding, ScaleRule, Tile, Transform};
use std::fmt;

/// Which forward tensors a choice is for. Gradients are never among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// None.
    None,
    /// Weights.
    Weights,
    /// All forward tensors but weights.
    Activations,
    /// Both.
    All,
}

impl Scope {
    fn weights(self) -> bool {
        matches!(self, Scope::Weights | Scope::All)
    }

    fn activations(self) -> bool {
        matches!(self, Scope::Activations | Scope::All)
    }
}

/// Training in NVFP4 as TransformerEngine does it. Weights are quantized in squares, so that both
/// passes see the same values; the column directions of inputs and gradients are
/// Hadamard-transformed, which cancels in the weight gradient; gradients are rounded
/// stochastically. Every combination of the settings is legal.
///
/// ```
/// use nvfp4::GlobalScale;
/// use nvfp4_recipe::{Nvfp4Training, Recipe, Scope};
///
/// let recipe = Recipe::from(Nvfp4Training {
///     activations: GlobalScale::PerRow,
///     four_over_six: Scope::Weights,
///     ..Nvfp4Training::default()
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nvfp4Training {
    /// The transform of everything but weights, in the column direction.
    pub transform: Transform,
    /// How gradients are rounded.
    pub gradients: Rounding,
    /// Which elements of a weight share a scale.
    pub weights: Tile,
    /// What the 32-bit scale of forward tensors other than weights belongs to.
    pub activations: GlobalScale,
    /// Which tensors choose their block scales by 4over6.
    pub four_over_six: Scope,
    /// Which of those have the bound 256; the others, and those without 4over6, have 448.
    pub bound_256: Scope,
    /// What 4over6 minimises.
    pub metric: Metric,
    /// How 4over6 computes errors.
    pub error: ErrorPath,
}

impl Default for Nvfp4Training {
    fn default() -> Self {
        Nvfp4Training::STANDARD
    }
}

impl Nvfp4Training {
    /// All of it: squares, transform, stochastic gradients; no row scaling, no 4over6.
    pub const STANDARD: Nvfp4Training = Nvfp4Training {
        transform: Transform::FixedSigns,
        gradients: Rounding::Stochastic,
        weights: Tile::Square16,
        activations: GlobalScale::PerTensor,
        four_over_six: Scope::None,
        bound_256: Scope::All,
        metric: Metric::Mae,
        error: ErrorPath::Strict,
    };

    /// The spec of a tensor.
    pub(super) fn spec(&self, slot: &Slot) -> Result<QuantSpec> {
        let settings = match (slot, slot.pass()) {
            (Slot::Linear(LinearSlot::Weight) | Slot::Grouped { slot: LinearSlot::Weight, .. }, _) => {
                Quantizer::builder().tile(self.weights).scale_rule(self.rule(Scope::weights))
            }
            (Slot::Linear(LinearSlot::GradOutput) | Slot::Grouped { slot: LinearSlot::GradOutput, .. }, _) => {
                Quantizer::builder().transform(self.transform).rounding(self.gradients)
            }
            (_, Pass::Backward) => Quantizer::builder().transform(self.transform),
            (_, Pass::Forward) => Quantizer::builder()
                .transform(self.transform)
                .global_scale(self.activations)
                .scale_rule(self.rule(Scope::activations)),
        };
        Ok(Format::Nvfp4(Nvfp4::new(settings)?).into())
    }

    fn rule(&self, among: fn(Scope) -> bool) -> ScaleRule {
        match among(self.four_over_six) {
            false => ScaleRule::Six,
            true => {
                let bound = if among(self.bound_256) { Bound::E256 } else { Bound::E448 };
                ScaleRule::FourOverSix { metric: self.metric, error: self.error, bound }
            }
        }
    }
}

/// What rule files call the scopes.
pub(super) const SCOPES: Keywords<Scope> =
    &[("none", Scope::None), ("weights", Scope::Weights), ("activations", Scope::Activations), ("all", Scope::All)];

/// `nvfp4`, and the switches that are not as usual, as a rule file writes them.
impl fmt::Display for Nvfp4Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Nvfp4Training::default();
        let transform = match self.transform {
            Transform::Signs(signs) => Some(format!("signs {:#06x}", signs.0)),
            transform => unless(default.transform, TRANSFORMS, transform),
        };
        let switches = [
            ("transform", transform),
            ("gradients", unless(default.gradients, ROUNDINGS, self.gradients)),
            ("weights", unless(default.weights, TILES, self.weights)),
            ("activations", unless(default.activations, GLOBALS, self.activations)),
            ("four-over-six", unless(default.four_over_six, SCOPES, self.four_over_six)),
            ("bound-256", unless(default.bound_256, SCOPES, self.bound_256)),
            ("metric", unless(default.metric, METRICS, self.metric)),
            ("error", unless(default.error, ERROR_PATHS, self.error)),
        ];
        let switches: Vec<String> =
            switches.into_iter().filter_map(|(key, word)| Some(format!("{key} = {}", word?))).collect();
        match switches.is_empty() {
            true => f.write_str("nvfp4"),
            false => write!(f, "nvfp4 with {}", switches.join(", ")),
        }
    }
}
