//! The sums in AVX2's registers.

use super::{Sums, of_values};
use crate::Values;
use crate::avx2::Avx2;

/// The sums of all elements.
pub(super) fn differences(_: Avx2, x: &Values<'_>, y: &[f32]) -> Sums {
    // SAFETY: an Avx2 token is only made after detection.
    unsafe { compiled(x, y) }
}

#[target_feature(enable = "avx2,f16c")]
fn compiled(x: &Values<'_>, y: &[f32]) -> Sums {
    of_values(x, y)
}
