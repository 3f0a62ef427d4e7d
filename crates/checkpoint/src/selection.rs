//! Which weights a conversion quantizes, as its user chose.

use super::architecture::Architectures;
use super::names::{Pattern, Preset};
use super::rules::Rules;

/// Whether the weights that are better left alone (embeddings, output head, routers, vision) stay
/// as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DefaultSkips {
    /// They stay.
    #[default]
    On,
    /// They are quantized like any other weight.
    Off,
}

/// Whether weights that servers join share one tensor scale.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Fuse {
    /// q/k/v, gate/up and all others that are known do, inside every expert too.
    #[default]
    Auto,
    /// Every weight has its own.
    Off,
    /// Weights of one parent whose last names are in one of these lists do.
    Names(Vec<Vec<String>>),
}

/// What happens to weights of an NVFP4 source that servers join and whose tensor scales differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Differing {
    /// They keep their bytes, and `verify` reports them.
    #[default]
    Keep,
    /// They get the largest of their tensor scales; see [`nvfp4_spec::rescale`].
    Rescale,
}

/// Which weights are quantized.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Part of the model.
    pub preset: Preset,
    /// Modules to leave alone.
    pub skip: Vec<Pattern>,
    /// If not empty, only these modules.
    pub only: Vec<Pattern>,
    /// The built-in list.
    pub default_skips: DefaultSkips,
    /// Shared tensor scales.
    pub fuse: Fuse,
    /// Tensor scales that should be shared and are not.
    pub differing: Differing,
    /// Whether models that no program would load are converted.
    pub architectures: Architectures,
    /// Forms by module; NVFP4 where there are none.
    pub rules: Rules,
}
