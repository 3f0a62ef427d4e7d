//! Keywords of rule files that single specs do not have.

use nvfp4::format::keywords::Keywords;
use nvfp4::{Accumulator, Finite, Transform};

/// What a whole recipe says, where a single spec says `keep-non-finite` or `check-finite`.
pub(super) const POLICIES: Keywords<Finite> = &[("keep", Finite::Keep), ("refuse", Finite::Refuse)];
pub(super) const TRANSFORMS: Keywords<Transform> = &[("none", Transform::None), ("fixed-signs", Transform::FixedSigns)];
pub(super) const ACCUMULATORS: Keywords<Accumulator> =
    &[("precise", Accumulator::Precise), ("split", Accumulator::Split), ("fast", Accumulator::Fast)];
