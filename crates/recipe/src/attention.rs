//! Which arithmetic attention runs in. It follows from the formats of its tensors; there is no
//! switch for it.

use super::role::{AttentionSlot, Pass};
use nvfp4::Side;
use nvfp4::format::{Family, Format, QuantSpec};
use std::fmt;

/// What attention computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPrecision {
    /// Unquantized.
    HighPrecision,
    /// FP8 with one scale per tensor, current or delayed.
    Fp8,
    /// MXFP8.
    Mxfp8,
}

impl fmt::Display for AttentionPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AttentionPrecision::HighPrecision => "high-precision",
            AttentionPrecision::Fp8 => "fp8",
            AttentionPrecision::Mxfp8 => "mxfp8",
        })
    }
}

/// What attention computes in, in each pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionMode {
    /// In the forward pass.
    pub forward: AttentionPrecision,
    /// In the backward pass; `None` for a model that is not trained.
    pub backward: Option<AttentionPrecision>,
}

impl fmt::Display for AttentionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backward {
            Some(backward) if backward != self.forward => write!(f, "{} forward, {backward} backward", self.forward),
            _ => self.forward.fmt(f),
        }
    }
}

/// Why the formats of attention's tensors make no mode.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionConflict {
    /// Attention does not read the formats of these slots.
    Formats(Vec<AttentionSlot>),
    /// Two slots of one pass want different arithmetic.
    Mixed(AttentionSlot, AttentionSlot),
    /// The backward pass is quantized, as this slot is, and the forward pass is not.
    OnlyBackward(AttentionSlot),
}

/// The mode that the specs make. In a forward tensor's spec the row format is what the forward pass
/// reads and the column format what the backward pass reads.
pub fn derive(specs: &[(AttentionSlot, &QuantSpec)]) -> Result<AttentionMode, AttentionConflict> {
    let unread =
        |spec: &QuantSpec| [Side::Row, Side::Column].iter().any(|&side| precision(&spec.format(side)).is_none());
    let unread: Vec<AttentionSlot> = specs.iter().filter(|(_, spec)| unread(spec)).map(|(slot, _)| *slot).collect();
    if !unread.is_empty() {
        return Err(AttentionConflict::Formats(unread));
    }
    let trained = specs.iter().any(|(slot, _)| slot.pass() == Pass::Backward);
    let forward = specs.iter().filter(|(slot, _)| slot.pass() == Pass::Forward).map(|(s, spec)| (*s, *spec, Side::Row));
    let forward = one_precision(forward)?;
    let backward = specs.iter().map(|(slot, spec)| match slot.pass() {
        Pass::Forward => (*slot, *spec, Side::Column),
        Pass::Backward => (*slot, *spec, Side::Row),
    });
    let backward = if trained { Some(one_precision(backward)?) } else { None };
    match (forward, backward) {
        (AttentionPrecision::HighPrecision, Some(AttentionPrecision::Fp8 | AttentionPrecision::Mxfp8)) => {
            Err(AttentionConflict::OnlyBackward(specs[0].0))
        }
        _ => Ok(AttentionMode { forward, backward }),
    }
}

/// What attention computes in with a format; `None` if it does not read it.
fn precision(format: &Format) -> Option<AttentionPrecision> {
    match format.family() {
        Family::HighPrecision => Some(AttentionPrecision::HighPrecision),
        Family::Fp8 => Some(AttentionPrecision::Fp8),
        Family::Mxfp8 => Some(AttentionPrecision::Mxfp8),
        Family::Fp8Block | Family::Nvfp4 | Family::Custom(_) => None,
    }
}

/// The precision that all these tensors have.
fn one_precision<'a>(
    tensors: impl Iterator<Item = (AttentionSlot, &'a QuantSpec, Side)>,
) -> Result<AttentionPrecision, AttentionConflict> {
    let mut found: Option<(AttentionSlot, AttentionPrecision)> = None;
    for (slot, spec, side) in tensors {
        let Some(precision) = precision(&spec.format(side)) else { continue };
        match found {
            Some((first, other)) if other != precision => return Err(AttentionConflict::Mixed(first, slot)),
            Some(_) => {}
            None => found = Some((slot, precision)),
        }
    }
    Ok(found.map_or(AttentionPrecision::HighPrecision, |(_, precision)| precision))
}
