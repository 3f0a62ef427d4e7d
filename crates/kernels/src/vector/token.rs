//! The token that proves that the CPU has NEON.

use std::arch::is_aarch64_feature_detected;

/// Proof that this CPU has NEON, and little-endian memory; it may have dot products of bytes too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Neon {
    dotprod: bool,
}

impl Neon {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let has_all = cfg!(target_endian = "little") && is_aarch64_feature_detected!("neon");
        has_all.then(|| Neon { dotprod: is_aarch64_feature_detected!("dotprod") })
    }

    /// Whether it also proves the dot products of bytes.
    pub fn has_dotprod(self) -> bool {
        self.dotprod
    }
}
