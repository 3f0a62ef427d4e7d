//! The choices that say how a matrix becomes NVFP4. Each is an enum; together they are a [`Mode`].

use crate::{Error, Result};

/// Which elements share a block scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Tile {
    /// 16 consecutive elements of a row.
    #[default]
    Row16,
    /// A square of 16 × 16 elements; each of its rows stores a copy of the same scale byte.
    Square16,
}

impl Tile {
    /// Number of rows of a tile: 1 or 16.
    pub const fn height(self) -> usize {
        match self {
            Tile::Row16 => 1,
            Tile::Square16 => 16,
        }
    }
}

/// What the 32-bit scale belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum GlobalScale {
    /// One value for the whole matrix.
    #[default]
    PerTensor,
    /// One value per row of the quantized matrix ("row-scaled", per token). In the column direction
    /// a row is a column of the original.
    PerRow,
}

impl GlobalScale {
    /// How many amax values a matrix of `rows` rows has.
    pub const fn count(self, rows: usize) -> usize {
        match self {
            GlobalScale::PerTensor => 1,
            GlobalScale::PerRow => rows,
        }
    }
}

/// The largest block scale that the global scale aims at. The E4M3 cast itself saturates at 448 in
/// both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Bound {
    /// 448, the largest E4M3 value.
    #[default]
    E448,
    /// 256: leaves room for the 4over6 candidate, which is 1.5 times larger.
    E256,
}

impl Bound {
    /// The bound `E` as a number.
    pub const fn value(self) -> f32 {
        match self {
            Bound::E448 => 448.0,
            Bound::E256 => 256.0,
        }
    }

    /// `6·E`, exact: 2688 or 1536. A tensor's amax is mapped to this value.
    pub const fn six_e(self) -> f32 {
        6.0 * self.value()
    }
}

/// What 4over6 minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Metric {
    /// Sum of absolute errors.
    #[default]
    Mae,
    /// Sum of squared errors.
    Mse,
}

/// How 4over6 computes an element's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ErrorPath {
    /// In the units of the input, with a true division per element (numerics §5.2).
    #[default]
    Strict,
    /// In the units of code × scale (numerics §5.3): another rule, which rarely decides otherwise.
    Fast,
}

/// How a block's scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScaleRule {
    /// The block's largest magnitude maps to 6, the bound is 448 (numerics §3).
    #[default]
    Six,
    /// Map the block's largest magnitude to 6 or to 4, whichever gives the smaller error (numerics
    /// §5).
    FourOverSix {
        /// What is minimised.
        metric: Metric,
        /// How errors are computed.
        error: ErrorPath,
        /// The bound in the global scale.
        bound: Bound,
    },
    /// The scale byte with the smallest sum of squared errors among those around the one of `Six`:
    /// our own rule, [`mse`](mod@crate::mse), for 1×16 tiles.
    Mse,
    /// ModelOpt's sweep over all scale bytes, [`modelopt`](mod@crate::modelopt), for 1×16 tiles.
    ModelOptMse,
    /// ModelOpt's choice between 6 and 4, [`modelopt`](mod@crate::modelopt), for 1×16 tiles. Its
    /// bound is 256.
    ModelOptFourOverSix,
}

impl ScaleRule {
    /// Every scale rule.
    pub const ALL: [ScaleRule; 12] = {
        const fn four_over_six(metric: Metric, error: ErrorPath, bound: Bound) -> ScaleRule {
            ScaleRule::FourOverSix { metric, error, bound }
        }
        use {Bound::*, ErrorPath::*, Metric::*};
        [
            ScaleRule::Six,
            four_over_six(Mae, Strict, E448),
            four_over_six(Mae, Strict, E256),
            four_over_six(Mae, Fast, E448),
            four_over_six(Mae, Fast, E256),
            four_over_six(Mse, Strict, E448),
            four_over_six(Mse, Strict, E256),
            four_over_six(Mse, Fast, E448),
            four_over_six(Mse, Fast, E256),
            ScaleRule::Mse,
            ScaleRule::ModelOptMse,
            ScaleRule::ModelOptFourOverSix,
        ]
    };

    /// The bound in the global scale.
    pub const fn bound(self) -> Bound {
        match self {
            ScaleRule::Six | ScaleRule::Mse | ScaleRule::ModelOptMse => Bound::E448,
            ScaleRule::ModelOptFourOverSix => Bound::E256,
            ScaleRule::FourOverSix { bound, .. } => bound,
        }
    }

    /// Whether scales are found by trial: for 1×16 tiles, rounded to nearest.
    pub const fn is_search(self) -> bool {
        matches!(self, ScaleRule::Mse) || self.is_modelopt()
    }

    /// Whether it is one of ModelOpt's, for its profile alone.
    pub const fn is_modelopt(self) -> bool {
        matches!(self, ScaleRule::ModelOptMse | ScaleRule::ModelOptFourOverSix)
    }
}

/// How a scaled value becomes a code. The payload is where the random bits come from: a stream or
/// bytes for a matrix, sixteen bytes per row for a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding<R> {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down with a probability given by the position between the neighbours (numerics §7.3).
    Stochastic(R),
}

/// What NaN and −0 become (numerics §1.4). Everything else is the same in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Specials {
    /// As TransformerEngine's CUDA kernels: −0 keeps its sign, NaN becomes +6 and is invisible to
    /// every amax.
    #[default]
    Kernel,
    /// As TransformerEngine's Python reference: −0 and NaN become code 0, and NaN takes over the
    /// amax.
    Reference,
}

impl Specials {
    /// `min(x, f32::MAX)`, the guard against infinite scales. NaN becomes `f32::MAX` in the kernel
    /// specials (C's `fminf`) and stays NaN with reference specials.
    pub fn min_with_max(self, x: f32) -> f32 {
        match self {
            Specials::Kernel => x.min(f32::MAX),
            Specials::Reference if x.is_nan() => x,
            Specials::Reference => x.min(f32::MAX),
        }
    }
}

/// Whose bytes are written; [`profile`](mod@crate::profile) has the arithmetic of each.
///
/// Exhaustive on purpose: every kernel matches on the profile without a default arm, so a new one
/// does not compile until each of them handles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// NVIDIA TransformerEngine, in every mode. The only profile with 4over6 and a choice of
    /// [`Specials`].
    #[default]
    TransformerEngine,
    /// NVIDIA ModelOpt's checkpoints.
    ModelOpt,
    /// llm-compressor's (compressed-tensors') checkpoints.
    LlmCompressor,
    /// torchao's `NVFP4Tensor`.
    TorchAo,
}

impl Profile {
    /// What −0 becomes as a code, and NaN outside ModelOpt.
    pub fn code_specials(self, specials: Specials) -> Specials {
        match self {
            Profile::TransformerEngine => specials,
            Profile::ModelOpt | Profile::LlmCompressor => Specials::Reference,
            Profile::TorchAo => Specials::Kernel,
        }
    }

    /// How amax treats NaN: TransformerEngine has a choice, the others let NaN win.
    pub fn amax_specials(self, specials: Specials) -> Specials {
        match self {
            Profile::TransformerEngine => specials,
            Profile::ModelOpt | Profile::LlmCompressor | Profile::TorchAo => Specials::Reference,
        }
    }
}

/// How a matrix is quantized in one direction, rounding aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Mode {
    /// Which elements share a block scale.
    pub tile: Tile,
    /// What the 32-bit scale belongs to.
    pub global: GlobalScale,
    /// How a block's scale is chosen.
    pub rule: ScaleRule,
    /// What NaN and −0 become.
    pub specials: Specials,
    /// Whose arithmetic.
    pub profile: Profile,
}

impl Mode {
    /// Refuses the combinations that have no meaning, whatever the randomness.
    pub fn check<R>(&self, rounding: &Rounding<R>) -> Result<()> {
        if self.tile == Tile::Square16 && self.global == GlobalScale::PerRow {
            return Err(Error::Combination(
                "16×16 tiles with a per-row global scale: a tile spans 16 rows but has one block scale; \
                 use 1×16 tiles or a per-tensor global scale",
            ));
        }
        if matches!(rounding, Rounding::Stochastic(_)) {
            let reason = match self.rule {
                ScaleRule::Six => None,
                ScaleRule::FourOverSix { .. } => Some(
                    "4over6 with stochastic rounding: the error to minimise would be random; \
                     use nearest-even rounding or the rule `Six`",
                ),
                ScaleRule::Mse | ScaleRule::ModelOptMse | ScaleRule::ModelOptFourOverSix => Some(
                    "a search of scales with stochastic rounding: the error to minimise would be random; \
                     use nearest-even rounding or the rule `Six`",
                ),
            };
            reason.map_or(Ok(()), |reason| Err(Error::Combination(reason)))?;
        }
        if self.rule.is_search() && self.tile == Tile::Square16 {
            return Err(Error::Combination(
                "a search of scales with 16×16 tiles: it is for the blocks of a row; \
                 use 1×16 tiles, or the rule `Six` or 4over6",
            ));
        }
        if self.rule.is_modelopt() && self.profile != Profile::ModelOpt {
            return Err(Error::Combination(
                "a search of ModelOpt's with another producer's profile: only ModelOpt has the rule; \
                 use the profile `ModelOpt` or the rule `Mse`",
            ));
        }
        if self.profile != Profile::TransformerEngine {
            if matches!(self.rule, ScaleRule::FourOverSix { .. }) {
                return Err(Error::Combination(
                    "4over6 with another producer's profile: only TransformerEngine has the rule; \
                     use the profile `TransformerEngine` or the rule `Six`",
                ));
            }
            if self.specials != Specials::Kernel {
                return Err(Error::Combination(
                    "the specials `Reference` with another producer's profile: it decides NaN and −0 itself; \
                     leave the specials at `Kernel` or use the profile `TransformerEngine`",
                ));
            }
        }
        Ok(())
    }

    /// How amax treats NaN in this mode.
    pub fn amax_specials(&self) -> Specials {
        self.profile.amax_specials(self.specials)
    }
}
