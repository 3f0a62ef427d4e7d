//! The product for few rows of A: B's rows are read once, and nothing is unpacked to memory.
//!
//! Each lane of a vector takes a block of a row of B: one vector the first four bytes of each, one
//! the other four. Their low nibbles are even elements, their high nibbles odd ones; A's are put
//! into the same order beforehand, and dot products add up to a block's sum in its lane.

mod avx2;

/// Calls a function with an array of the rows, one to four, and other arguments.
macro_rules! for_few_rows {
    ($rows:expr, $call:ident($($argument:expr),*)) => {
        match $rows {
            // SAFETY: a token is only made after detection.
            [one] => unsafe { $call([one], $($argument),*) },
            // SAFETY: as above.
            [one, two] => unsafe { $call([one, two], $($argument),*) },
            // SAFETY: as above.
            [one, two, three] => unsafe { $call([one, two, three], $($argument),*) },
            // SAFETY: as above.
            [one, two, three, four] => unsafe { $call([one, two, three, four], $($argument),*) },
            _ => unreachable!("one to four rows"),
        }
    };
}
pub(in super::super) use for_few_rows;

use super::scales::{RUN, Range};
use super::{BLOCK, FEW};
use nvfp4_spec::matrix::View;
use std::ops::Range as Blocks;

/// Some blocks of a row of A in the order of B's nibbles, a lane each.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group<const L: usize> {
    values: [[[i8; 4]; L]; 4],
    /// What undoes the shift of B's values.
    offsets: [i32; L],
    /// Half of that, in both halves of a word.
    halves: [i32; L],
    scales: [f32; L],
    /// Scales as integers of the row, in both halves of a word; where it has them.
    integers: [u32; L],
}

/// A row of A; what is missing of the last blocks is zero.
pub(super) struct Row<const L: usize> {
    groups: Vec<Group<L>>,
    pub range: Range,
}

impl<const L: usize> Row<L> {
    pub fn new<K: Kernel<L>>(_: K, a: &View<'_>, i: usize) -> Self {
        let range = Range::of(a.scale_row(i));
        let ranges = vec![range; a.scale_row(i).len().div_ceil(RUN)];
        let steps: Vec<super::Step> = super::steps(a, i, &ranges).collect();
        let group = |some: &[super::Step]| {
            let mut group =
                Group { values: [[[0; 4]; L]; 4], offsets: [0; L], halves: [0; L], scales: [0.0; L], integers: [0; L] };
            for (lane, &block) in K::ORDER.iter().enumerate() {
                let Some(step) = some.get(block) else { continue };
                for e in 0..BLOCK {
                    // Elements 0, 2, 4, 6; 1, 3, 5, 7; 8, 10, …; 9, 11, …
                    group.values[e / 8 * 2 + e % 2][lane][e % 8 / 2] = step.values[e / 4].to_le_bytes()[e % 4] as i8;
                }
                (group.offsets[lane], group.halves[lane]) = (step.offset, step.halves);
                (group.scales[lane], group.integers[lane]) = (step.scale, step.integer);
            }
            group
        };
        Row { groups: steps.chunks(L).map(group).collect(), range }
    }
}

/// A kernel: the sums of a row of B with a few rows of A.
pub(super) trait Kernel<const L: usize>: Copy + Sync {
    /// The block that each lane takes.
    const ORDER: [usize; L];

    /// The sums over all blocks, where the scales of both sides have integers that fit.
    fn integers(self, rows: &[Row<L>], codes: &[u8], scales: &[u8], range: Range, out: &mut [f64; FEW]);

    /// The sums over some blocks, from a multiple of `L` on, term by term; exact where binary64 is.
    fn terms(self, rows: &[Row<L>], codes: &[u8], scales: &[u8], blocks: Blocks<usize>, out: &mut [f64; FEW]);
}
