//! How finely products on the CPU are split over threads, and what vectors take at a time.

use rayon::prelude::*;
use rayon::range::Iter;

/// Products of two elements that are worth waking another thread for.
const WORTH: usize = 1 << 18;
/// How many of them take as long as decoding an element.
const DECODING: usize = 16;

/// `count` items of `products` products each, in pieces that are worth a thread. What is one piece
/// stays on the thread that asks.
pub(super) fn in_pieces(count: usize, products: usize) -> rayon::iter::MinLen<Iter<usize>> {
    (0..count).into_par_iter().with_min_len(WORTH.div_ceil(products.max(1)))
}

/// `count` rows of `cols` elements that are decoded, in pieces that are worth a thread.
pub(super) fn rows_in_pieces(count: usize, cols: usize) -> rayon::iter::MinLen<Iter<usize>> {
    in_pieces(count, cols.saturating_mul(DECODING))
}

/// The first `N` bytes of a slice, where they lie; where fewer are left, those and zeros, in `room`,
/// which is zero.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn padded<'a, const N: usize>(bytes: &'a [u8], room: &'a mut [u8; N]) -> &'a [u8; N] {
    match bytes.first_chunk() {
        Some(all) => all,
        None => {
            room[..bytes.len()].copy_from_slice(bytes);
            room
        }
    }
}
