//! Ready recipes.

use super::accumulators::Accumulators;
use super::role::{AttentionSlot, LinearSlot, Pass, Role, Slot};
use super::training::{Nvfp4Training, Scope};
use crate::{Error, Result};
use nvfp4::format::keywords::{Keywords, find, list};
use nvfp4::format::{
    AmaxRule, BlockTile, ColumnSource, Delayed, Format, Fp8, Fp8Block, Fp8Code, Mxfp8, Nvfp4, QuantSpec,
};
use nvfp4::{Accumulator, GlobalScale, Quantizer};
use std::fmt;
use std::str::FromStr;

/// What attention's tensors get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AttentionSlots {
    /// Nothing: they stay in high precision.
    #[default]
    HighPrecision,
    /// What the preset gives to other tensors.
    Quantized,
}

/// A ready recipe: TransformerEngine's built-in ones and the examples that come with it, under its
/// names.
///
/// `a / b` below is row format / column format; "row" says that the column direction is made from
/// what the row direction decodes to. "Other" is what users' modules get, and attention where it is
/// quantized.
///
/// | preset | input | weight | output gradient | other |
/// |---|---|---|---|---|
/// | `high_precision` | – | – | – | – |
/// | `delayed_scaling` | FP8 delayed, E4M3 | same | E5M2 | E4M3 forward, E5M2 backward |
/// | `current_scaling` | FP8, E4M3 | same | E5M2 | E4M3 forward, E5M2 backward |
/// | `float8_block_scaling` | 1×128 | 128×128 | 1×128 | 1×128 |
/// | `mxfp8` | MXFP8 | MXFP8 | MXFP8 | MXFP8 |
/// | `nvfp4` | Hadamard | 16×16 | Hadamard, stochastic | Hadamard |
/// | `nvfp4_row_scaled` | row-scaled, Hadamard | 16×16 | Hadamard, stochastic | row-scaled forward, Hadamard |
/// | `nvfp4_4over6` | 4over6, Hadamard | 16×16, 4over6 | Hadamard, stochastic | 4over6 forward, Hadamard |
/// | `high_precision_fwd_mxfp8_bwd` | – / MXFP8 | – / MXFP8 | MXFP8 | – / MXFP8 |
/// | `mxfp8_fwd_nvfp4_bwd` | MXFP8 / NVFP4 Hadamard | MXFP8 / NVFP4, row | NVFP4 Hadamard, stochastic | MXFP8 |
/// | `nvfp4_1d_weight` | as `nvfp4` | NVFP4 / NVFP4, row | as `nvfp4` | as `nvfp4` |
/// | `mxfp8_fwd_high_precision_bwd` | MXFP8 / –, row | MXFP8 / –, row | – | MXFP8 |
/// | `nvfp4_row_scaled_fwd_mxfp8_bwd` (grouped; plain linears MXFP8) | row-scaled / MXFP8, row | NVFP4 / MXFP8, row | MXFP8 | MXFP8 |
/// | `nvfp4_row_scaled_fwd_high_precision_bwd` | row-scaled / –, row | NVFP4 / –, row | – | NVFP4 |
/// | `nvfp4_linear_fp8_dpa` | as `nvfp4` | as `nvfp4` | as `nvfp4` | as `nvfp4`; attention: S and dP FP8 delayed by one step, the rest FP8 |
///
/// Attention stays in high precision, which is what those recipes do unless told otherwise, but for
/// the last one. `NAME+attention` gives attention's tensors the "other" format too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Preset {
    base: Base,
    attention: AttentionSlots,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Base {
    HighPrecision,
    DelayedScaling,
    CurrentScaling,
    Fp8BlockScaling,
    Mxfp8,
    Nvfp4(Nvfp4Training),
    HighPrecisionForwardMxfp8Backward,
    Mxfp8ForwardNvfp4Backward,
    Nvfp4RowWeight,
    Mxfp8ForwardHighPrecisionBackward,
    Nvfp4RowScaledForwardMxfp8Backward,
    Nvfp4RowScaledForwardHighPrecisionBackward,
    Nvfp4LinearFp8Attention,
}

const PRESETS: Keywords<Base> = &[
    ("high_precision", Base::HighPrecision),
    ("delayed_scaling", Base::DelayedScaling),
    ("current_scaling", Base::CurrentScaling),
    ("float8_block_scaling", Base::Fp8BlockScaling),
    ("mxfp8", Base::Mxfp8),
    ("nvfp4", Base::Nvfp4(Nvfp4Training::STANDARD)),
    ("nvfp4_row_scaled", Base::Nvfp4(Nvfp4Training { activations: GlobalScale::PerRow, ..Nvfp4Training::STANDARD })),
    ("nvfp4_4over6", Base::Nvfp4(Nvfp4Training { four_over_six: Scope::All, ..Nvfp4Training::STANDARD })),
    ("high_precision_fwd_mxfp8_bwd", Base::HighPrecisionForwardMxfp8Backward),
    ("mxfp8_fwd_nvfp4_bwd", Base::Mxfp8ForwardNvfp4Backward),
    ("nvfp4_1d_weight", Base::Nvfp4RowWeight),
    ("mxfp8_fwd_high_precision_bwd", Base::Mxfp8ForwardHighPrecisionBackward),
    ("nvfp4_row_scaled_fwd_mxfp8_bwd", Base::Nvfp4RowScaledForwardMxfp8Backward),
    ("nvfp4_row_scaled_fwd_high_precision_bwd", Base::Nvfp4RowScaledForwardHighPrecisionBackward),
    ("nvfp4_linear_fp8_dpa", Base::Nvfp4LinearFp8Attention),
];

/// What the table of [`Preset`] distinguishes.
enum Operand {
    Input,
    Weight,
    GradOutput,
    Other,
}

impl Preset {
    /// The name of every preset.
    pub fn names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|(name, _)| *name)
    }

    /// The NVFP4 training recipe with its switches.
    pub const fn nvfp4(training: Nvfp4Training) -> Self {
        Preset { base: Base::Nvfp4(training), attention: AttentionSlots::HighPrecision }
    }

    /// The accumulators of its FP8 products: upstream's.
    pub(super) fn accumulators(&self) -> Accumulators {
        match self.base {
            Base::Fp8BlockScaling => Accumulators::all(Accumulator::Split),
            _ => Accumulators::default(),
        }
    }

    /// The same preset with another answer for attention.
    pub const fn with_attention(self, attention: AttentionSlots) -> Self {
        Preset { attention, ..self }
    }

    /// The same preset with these switches; `None` if it is not the training recipe as it comes.
    pub(super) fn with_training(self, training: Nvfp4Training) -> Option<Self> {
        (self.base == Base::Nvfp4(Nvfp4Training::STANDARD)).then_some(Preset { base: Base::Nvfp4(training), ..self })
    }

    /// The spec of a tensor.
    pub fn spec(&self, role: &Role) -> Result<QuantSpec> {
        let slot = role.reader();
        if let Slot::Attention(attention) = slot {
            match (self.base, self.attention) {
                (Base::Nvfp4LinearFp8Attention, _) => return fp8_attention(*attention),
                (_, AttentionSlots::HighPrecision) => return Ok(QuantSpec::HIGH_PRECISION),
                (_, AttentionSlots::Quantized) => {}
            }
        }
        Ok(self.base.spec(slot)?)
    }
}

impl Base {
    fn spec(self, slot: &Slot) -> nvfp4::format::Result<QuantSpec> {
        use Operand::*;
        let mxfp8 = || Format::Mxfp8(Mxfp8::default());
        let nvfp4 = || Format::Nvfp4(Nvfp4::default());
        let row_scaled = || Nvfp4::new(Quantizer::builder().global_scale(GlobalScale::PerRow)).map(Format::Nvfp4);
        let high_precision = || Format::HIGH_PRECISION;
        let training = Nvfp4Training::default();
        let code = match slot.pass() {
            Pass::Forward => Fp8Code::E4m3,
            Pass::Backward => Fp8Code::E5m2,
        };
        let (original, from_row) = (ColumnSource::Original, ColumnSource::RowDequantized);
        match (self, operand(slot)) {
            (Base::HighPrecision, _) => Ok(QuantSpec::HIGH_PRECISION),
            (Base::DelayedScaling, _) => Ok(QuantSpec::delayed(Delayed::new(code))),
            (Base::CurrentScaling, _) => Ok(Format::Fp8(Fp8::new(code)).into()),
            (Base::Fp8BlockScaling, Weight) => Ok(Format::Fp8Block(Fp8Block::new(BlockTile::Square128)).into()),
            (Base::Fp8BlockScaling, _) => Ok(Format::Fp8Block(Fp8Block::new(BlockTile::Row128)).into()),
            (Base::Mxfp8, _) => Ok(mxfp8().into()),
            (Base::Nvfp4(training), _) => training.spec(slot),

            (Base::HighPrecisionForwardMxfp8Backward, GradOutput) => Ok(mxfp8().into()),
            (Base::HighPrecisionForwardMxfp8Backward, _) => QuantSpec::split(high_precision(), mxfp8(), original),

            (Base::Mxfp8ForwardNvfp4Backward, Input) => {
                let rotated = Nvfp4::new(Quantizer::builder().transform(training.transform))?;
                QuantSpec::split(mxfp8(), Format::Nvfp4(rotated), original)
            }
            (Base::Mxfp8ForwardNvfp4Backward, Weight) => QuantSpec::split(mxfp8(), nvfp4(), from_row),
            (Base::Mxfp8ForwardNvfp4Backward, GradOutput) => training.spec(slot),
            (Base::Mxfp8ForwardNvfp4Backward, Other) => Ok(mxfp8().into()),

            (Base::Nvfp4RowWeight, Weight) => QuantSpec::split(nvfp4(), nvfp4(), from_row),
            (Base::Nvfp4RowWeight, _) => training.spec(slot),

            (Base::Mxfp8ForwardHighPrecisionBackward, Input | Weight) => {
                QuantSpec::split(mxfp8(), high_precision(), from_row)
            }
            (Base::Mxfp8ForwardHighPrecisionBackward, GradOutput) => Ok(QuantSpec::HIGH_PRECISION),
            (Base::Mxfp8ForwardHighPrecisionBackward, Other) => Ok(mxfp8().into()),

            (Base::Nvfp4RowScaledForwardMxfp8Backward, operand) => match (slot, operand) {
                (Slot::Grouped { .. }, Input) => QuantSpec::split(row_scaled()?, mxfp8(), from_row),
                (Slot::Grouped { .. }, Weight) => QuantSpec::split(nvfp4(), mxfp8(), from_row),
                _ => Ok(mxfp8().into()),
            },

            (Base::Nvfp4RowScaledForwardHighPrecisionBackward, Input) => {
                QuantSpec::split(row_scaled()?, high_precision(), from_row)
            }
            (Base::Nvfp4RowScaledForwardHighPrecisionBackward, Weight) => {
                QuantSpec::split(nvfp4(), high_precision(), from_row)
            }
            (Base::Nvfp4RowScaledForwardHighPrecisionBackward, GradOutput) => Ok(QuantSpec::HIGH_PRECISION),
            (Base::Nvfp4RowScaledForwardHighPrecisionBackward, Other) => Ok(nvfp4().into()),

            (Base::Nvfp4LinearFp8Attention, _) => training.spec(slot),
        }
    }
}

fn operand(slot: &Slot) -> Operand {
    match slot {
        Slot::Linear(slot) | Slot::Grouped { slot, .. } => match slot {
            LinearSlot::Input => Operand::Input,
            LinearSlot::Weight => Operand::Weight,
            LinearSlot::GradOutput => Operand::GradOutput,
            LinearSlot::Output | LinearSlot::GradInput => Operand::Other,
        },
        Slot::Attention(_) | Slot::Extension(_) => Operand::Other,
    }
}

/// FP8 attention: what exists only inside the kernel takes its scale from the last step.
fn fp8_attention(slot: AttentionSlot) -> Result<QuantSpec> {
    let code = match slot.pass() {
        Pass::Forward => Fp8Code::E4m3,
        Pass::Backward => Fp8Code::E5m2,
    };
    match slot {
        AttentionSlot::S | AttentionSlot::DP => {
            Ok(QuantSpec::delayed(Delayed::new(code).with_history(1)?.with_amax(AmaxRule::MostRecent)))
        }
        _ => Ok(Format::Fp8(Fp8::new(code)).into()),
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, attention) = match text.strip_suffix("+attention") {
            Some(name) => (name, AttentionSlots::Quantized),
            None => (text, AttentionSlots::HighPrecision),
        };
        let base = find(PRESETS, name).ok_or_else(|| {
            Error::Setting(format!("unknown preset '{text}'; there are {}, each also +attention", list(PRESETS)))
        })?;
        Ok(Preset { base, attention })
    }
}

impl fmt::Display for Preset {
    /// The preset's name; the training recipe with switches of its own says those.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (PRESETS.iter().find(|(_, base)| *base == self.base), self.base) {
            (Some((name, _)), _) => f.write_str(name)?,
            (None, Base::Nvfp4(training)) => training.fmt(f)?,
            (None, _) => unreachable!("only the training recipe has switches"),
        }
        match self.attention {
            AttentionSlots::HighPrecision => Ok(()),
            AttentionSlots::Quantized => f.write_str("+attention"),
        }
    }
}
