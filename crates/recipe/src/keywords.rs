//! Keywords of rule files that single specs do not have.

use super::training::Scope;
use nvfp4::format::keywords::Keywords;
use nvfp4::{Finite, Transform};

/// What a whole recipe says, where a single spec says `keep-non-finite` or `check-finite`.
pub(super) const POLICIES: Keywords<Finite> = &[("keep", Finite::Keep), ("refuse", Finite::Refuse)];
pub(super) const SCOPES: Keywords<Scope> =
    &[("none", Scope::None), ("weights", Scope::Weights), ("activations", Scope::Activations), ("all", Scope::All)];
pub(super) const TRANSFORMS: Keywords<Transform> = &[("none", Transform::None), ("fixed-signs", Transform::FixedSigns)];
