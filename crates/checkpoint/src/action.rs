//! What happens to a weight.

use super::form::Eight;

/// What happens to a weight.
///
/// Exhaustive on purpose: a program that shows a plan has words for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Quantized to NVFP4.
    Quantize,
    /// NVFP4 already: the same codes and scales under the target's names.
    Relabel,
    /// NVFP4 already, with another tensor scale than the weights that it is joined with: expressed
    /// with theirs.
    Rescale,
    /// Quantized to FP8, or to MXFP8.
    Eight(Eight),
    /// FP8 or MXFP8 already: the same bytes under the target's names.
    Retain(Eight),
    /// MXFP4 already: the same bytes under the target's names.
    RetainMxFp4,
    /// Decoded, because the target has no name for how it is stored, or nothing is quantized there.
    Decode(String),
    /// Copied as it is.
    Keep(String),
}

impl Action {
    /// Whether its numbers differ from those of the source, so that it has an error.
    pub(super) fn is_measured(&self) -> bool {
        matches!(self, Action::Quantize | Action::Rescale | Action::Eight(_) | Action::Decode(_))
    }

    /// Whether it is made with the amax of the whole weight.
    pub(super) fn needs_amax(&self) -> bool {
        matches!(self, Action::Quantize | Action::Eight(Eight::Tensor))
    }

    /// Whether numbers are quantized, and not taken over as they are.
    pub fn is_made(&self) -> bool {
        matches!(self, Action::Quantize | Action::Eight(_))
    }

    /// Whether the weight is quantized afterwards, in any form.
    pub fn is_quantized(&self) -> bool {
        self.is_nvfp4() || self.eight().is_some() || *self == Action::RetainMxFp4
    }

    /// Which elements share a scale, where the weight is FP8 or MXFP8 afterwards.
    pub fn eight(&self) -> Option<Eight> {
        match self {
            Action::Eight(eight) | Action::Retain(eight) => Some(*eight),
            _ => None,
        }
    }

    /// Whether the weight is NVFP4 afterwards.
    pub fn is_nvfp4(&self) -> bool {
        matches!(self, Action::Quantize | Action::Relabel | Action::Rescale)
    }
}
