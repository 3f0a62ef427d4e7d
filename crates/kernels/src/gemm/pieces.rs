//! How finely products on the CPU are split over threads.

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
