//! The tables' sums in AVX2's registers.

use super::{Packed, Rescaling};
use crate::avx2::Avx2;

/// [`super::by_table`].
pub(super) fn by_table(_: Avx2, codes: &mut [Packed], scales: &mut [u8], change: Rescaling) {
    // SAFETY: an Avx2 token is only made after detection.
    unsafe { compiled(codes, scales, change) }
}

#[target_feature(enable = "avx2")]
fn compiled(codes: &mut [Packed], scales: &mut [u8], change: Rescaling) {
    super::by_table(codes, scales, change);
}
