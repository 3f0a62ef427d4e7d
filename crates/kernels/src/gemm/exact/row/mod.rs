//! The product for few rows of A: B's rows are read once, and nothing is unpacked to memory.
//!
//! Each lane of a vector takes a block of a row of B: one vector the first four bytes of each, one
//! the other four. Their low nibbles are even elements, their high nibbles odd ones; A's are put
//! into the same order beforehand, and dot products add up to a block's sum in its lane.

mod avx2;

pub(super) use avx2::{integers_of, terms_of};

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

use super::BLOCK;
use super::scales::{RUN, Range};
use nvfp4_spec::matrix::View;

/// Blocks that are worked on at a time, a lane each.
const LANES: usize = 8;
/// The block that each lane takes, as `words` of the kernel leaves them.
const ORDER: [usize; LANES] = [0, 1, 4, 5, 2, 3, 6, 7];

/// Some blocks of a row of A in the order of B's nibbles, a lane each.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group {
    values: [[[i8; 4]; LANES]; 4],
    /// What undoes the shift of B's values.
    offsets: [i32; LANES],
    /// Half of that, in both halves of a word.
    halves: [i32; LANES],
    scales: [f32; LANES],
    /// Scales as integers of the row, in both halves of a word; where it has them.
    integers: [u32; LANES],
}

/// A row of A; what is missing of the last blocks is zero.
pub(super) struct Row {
    groups: Vec<Group>,
    pub range: Range,
}

impl Row {
    pub fn new(a: &View<'_>, i: usize) -> Self {
        let range = Range::of(a.scale_row(i));
        let ranges = vec![range; a.scale_row(i).len().div_ceil(RUN)];
        let steps: Vec<super::Step> = super::steps(a, i, &ranges).collect();
        let group = |some: &[super::Step]| {
            let mut group = Group {
                values: [[[0; 4]; LANES]; 4],
                offsets: [0; LANES],
                halves: [0; LANES],
                scales: [0.0; LANES],
                integers: [0; LANES],
            };
            for (lane, &block) in ORDER.iter().enumerate() {
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
        Row { groups: steps.chunks(LANES).map(group).collect(), range }
    }
}
