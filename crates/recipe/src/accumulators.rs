//! How precisely a GPU adds the products of FP8 operands.

use super::keywords::ACCUMULATORS;
use nvfp4::Accumulator;
use nvfp4::format::keywords::keyword;
use std::fmt;

/// The accumulators of a linear layer's three products, where both operands are FP8: those of
/// TransformerEngine's `MMParams.use_split_accumulator`. Other formats are added in binary32.
///
/// ```
/// use nvfp4_recipe::{Accumulator, Accumulators, Recipe};
///
/// let recipe: Recipe = "current_scaling".parse()?;
/// assert_eq!(recipe.accumulators().to_string(), "fprop fast, dgrad split, wgrad split");
/// let precise = recipe.with_accumulators(Accumulators::all(Accumulator::Precise));
/// assert_ne!(precise, recipe);
/// # Ok::<(), nvfp4_recipe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Accumulators {
    /// Of `y = x·wᵀ`.
    pub fprop: Accumulator,
    /// Of `dx = dy·w`.
    pub dgrad: Accumulator,
    /// Of `dw = dyᵀ·x`.
    pub wgrad: Accumulator,
}

impl Accumulators {
    /// The same for all three.
    pub const fn all(accumulator: Accumulator) -> Self {
        Accumulators { fprop: accumulator, dgrad: accumulator, wgrad: accumulator }
    }

    /// The first one that is not precise, or `Precise`.
    pub(super) fn reduced(self) -> Accumulator {
        let all = [self.fprop, self.dgrad, self.wgrad];
        all.into_iter().find(|&one| one != Accumulator::Precise).unwrap_or_default()
    }
}

/// TransformerEngine's: fast in the forward pass, split in the backward pass.
impl Default for Accumulators {
    fn default() -> Self {
        Accumulators { fprop: Accumulator::Fast, ..Accumulators::all(Accumulator::Split) }
    }
}

impl fmt::Display for Accumulators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [fprop, dgrad, wgrad] = [self.fprop, self.dgrad, self.wgrad].map(|one| keyword(ACCUMULATORS, one));
        write!(f, "fprop {fprop}, dgrad {dgrad}, wgrad {wgrad}")
    }
}
