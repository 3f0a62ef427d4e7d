//! The orders in which two of TransformerEngine's kernels hand out random words. They exist to
//! reproduce its stochastic rounding; our own stream ([`crate::stochastic`]) goes by position.
//! Source: numerics §7.1, §7.2.

use crate::philox::{philox4x32, words};
use crate::stochastic::bytes_of;
use crate::{BLOCK, Result, area, zeros};

/// Which of TransformerEngine's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// The fallback kernel: 256 threads for a chunk of 128 × 128.
    VectorBlockwise,
    /// The tuned bf16 1×16 kernel: 128 threads for a chunk of 128 × 128, in four stages of 64 × 64.
    Tuned1d,
}

/// Which directions a kernel call writes; words for the column direction are drawn only where it is
/// written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Directions {
    /// The row direction alone.
    Row,
    /// Both.
    Both,
}

/// The random bytes of both directions, 16 per block, blocks in row-major order of each direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RandomBytes {
    /// For the matrix.
    pub row: Vec<u8>,
    /// For the transposed matrix; empty unless asked for.
    pub col: Vec<u8>,
}

/// A thread's generator: words are taken one at a time from successive Philox calls.
struct Thread {
    counter: u128,
    seed: u64,
}

impl Thread {
    /// The next four words. Every use takes four, so calls and uses stay aligned.
    fn block(&mut self) -> [u8; BLOCK] {
        let ([c0, c1], [c2, c3]) = (words(self.counter as u64), words((self.counter >> 64) as u64));
        self.counter = self.counter.wrapping_add(1);
        bytes_of(philox4x32([c0, c1, c2, c3], words(self.seed)))
    }
}

/// The bytes that a kernel draws for a `rows` × `cols` matrix. Words are drawn for blocks outside
/// the matrix too, but a matrix without elements draws none.
pub fn random_bytes(
    kernel: Kernel,
    rows: usize,
    cols: usize,
    seed: u64,
    offset: u64,
    directions: Directions,
) -> Result<RandomBytes> {
    let mut out = Grid {
        row: Blocks::new(rows, cols)?,
        col: match directions {
            Directions::Row => Blocks::new(0, 0)?,
            Directions::Both => Blocks::new(cols, rows)?,
        },
    };
    if area(rows, cols)? == 0 {
        return Ok(RandomBytes { row: out.row.bytes, col: out.col.bytes });
    }
    let threads = match kernel {
        Kernel::VectorBlockwise => 256,
        Kernel::Tuned1d => 128,
    };
    let grid_x = cols.div_ceil(128);
    for (y, x) in (0..rows.div_ceil(128)).flat_map(|y| (0..grid_x).map(move |x| (y, x))) {
        for tid in 0..threads {
            let subsequence = (tid + threads * (x + y * grid_x)) as u128;
            let mut thread = Thread { counter: (subsequence << 64) + u128::from(offset), seed };
            match kernel {
                Kernel::VectorBlockwise => vector_blockwise(&mut thread, tid, (y * 128, x * 128), directions, &mut out),
                Kernel::Tuned1d => tuned_1d(&mut thread, tid, (y * 128, x * 128), directions, &mut out),
            }
        }
    }
    Ok(RandomBytes { row: out.row.bytes, col: out.col.bytes })
}

struct Grid {
    row: Blocks,
    col: Blocks,
}

/// The bytes of a direction; writes outside it are dropped.
struct Blocks {
    rows: usize,
    blocks: usize,
    bytes: Vec<u8>,
}

impl Blocks {
    fn new(rows: usize, cols: usize) -> Result<Self> {
        let blocks = cols.div_ceil(BLOCK);
        Ok(Blocks { rows, blocks, bytes: zeros(area(area(rows, blocks)?, BLOCK)?, rows, cols)? })
    }

    fn put(&mut self, row: usize, block: usize, bytes: [u8; BLOCK]) {
        if row < self.rows && block < self.blocks {
            self.bytes[(row * self.blocks + block) * BLOCK..][..BLOCK].copy_from_slice(&bytes);
        }
    }
}

fn vector_blockwise(thread: &mut Thread, tid: usize, (r, c): (usize, usize), directions: Directions, out: &mut Grid) {
    for step in 0..4 {
        out.row.put(r + tid / 8 + 32 * step, c / BLOCK + tid % 8, thread.block());
    }
    if directions == Directions::Both {
        for (step, k) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            out.col.put(c + 2 * (tid / 8 + 32 * step) + k, r / BLOCK + tid % 8, thread.block());
        }
    }
}

fn tuned_1d(thread: &mut Thread, tid: usize, (r, c): (usize, usize), directions: Directions, out: &mut Grid) {
    let (warp, lane) = (tid / 32, tid % 32);
    for (r, c) in [(r, c), (r, c + 64), (r + 64, c), (r + 64, c + 64)] {
        for step in 0..2 {
            let mut bytes = thread.block();
            if lane >= 16 {
                bytes.rotate_left(8); // the upper half-warp serves elements 8…15 first
            }
            out.row.put(r + tid / 4 + 32 * step, c / BLOCK + tid % 4, bytes);
        }
        if directions == Directions::Both {
            for k in 0..2 {
                out.col.put(c + 2 * lane + k, r / BLOCK + (lane / 2 + warp) % 4, thread.block());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    const KERNELS: [Kernel; 2] = [Kernel::VectorBlockwise, Kernel::Tuned1d];

    #[test]
    fn every_block_of_a_ragged_matrix_draws_its_own_bytes() {
        for kernel in KERNELS {
            let both = random_bytes(kernel, 150, 130, 1, 2, Directions::Both).unwrap();
            assert_eq!((both.row.len(), both.col.len()), (150 * 9 * BLOCK, 130 * 10 * BLOCK));
            let blocks: std::collections::HashSet<_> =
                [both.row, both.col].concat().chunks(BLOCK).map(Vec::from).collect();
            assert_eq!(blocks.len(), 150 * 9 + 130 * 10);
            assert!(random_bytes(kernel, 150, 130, 1, 2, Directions::Row).unwrap().col.is_empty());
        }
    }

    #[test]
    fn huge_shapes_draw_nothing_or_are_refused() {
        for kernel in KERNELS {
            for (rows, cols) in [(1 << 62, 0), (0, 1 << 62)] {
                let none = random_bytes(kernel, rows, cols, 0, 0, Directions::Both);
                assert_eq!(none, Ok(RandomBytes { row: vec![], col: vec![] }));
            }
            for (rows, cols) in [(1 << 30, 1 << 31), (1 << 40, 1 << 40)] {
                let refused = random_bytes(kernel, rows, cols, 0, 0, Directions::Row);
                assert!(matches!(refused, Err(Error::TooLarge { .. })));
            }
        }
    }
}
