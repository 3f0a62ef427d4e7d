//! The orders in which two of TransformerEngine's kernels hand out random words. They exist to reproduce its stochastic
//! rounding; our own stream ([`crate::stochastic`]) goes by position. Source: numerics §7.1, §7.2.

use crate::BLOCK;
use crate::philox::{philox4x32, words};
use crate::stochastic::bytes_of;

/// Which of TransformerEngine's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// The fallback kernel: 256 threads for a chunk of 128 × 128.
    VectorBlockwise,
    /// The tuned bf16 1×16 kernel: 128 threads for a chunk of 128 × 128, in four stages of 64 × 64.
    Tuned1d,
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

/// The bytes that a kernel draws for a `rows` × `cols` matrix. Words are drawn for blocks outside the matrix too.
pub fn random_bytes(kernel: Kernel, rows: usize, cols: usize, seed: u64, offset: u64, columnwise: bool) -> RandomBytes {
    let mut out = Grid {
        row: Blocks::new(rows, cols),
        col: if columnwise { Blocks::new(cols, rows) } else { Blocks::new(0, 0) },
    };
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
                Kernel::VectorBlockwise => vector_blockwise(&mut thread, tid, (y * 128, x * 128), columnwise, &mut out),
                Kernel::Tuned1d => tuned_1d(&mut thread, tid, (y * 128, x * 128), columnwise, &mut out),
            }
        }
    }
    RandomBytes { row: out.row.bytes, col: out.col.bytes }
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
    fn new(rows: usize, cols: usize) -> Self {
        let blocks = cols.div_ceil(BLOCK);
        Blocks { rows, blocks, bytes: vec![0; rows * blocks * BLOCK] }
    }

    fn put(&mut self, row: usize, block: usize, bytes: [u8; BLOCK]) {
        if row < self.rows && block < self.blocks {
            self.bytes[(row * self.blocks + block) * BLOCK..][..BLOCK].copy_from_slice(&bytes);
        }
    }
}

fn vector_blockwise(thread: &mut Thread, tid: usize, (r, c): (usize, usize), columnwise: bool, out: &mut Grid) {
    for step in 0..4 {
        out.row.put(r + tid / 8 + 32 * step, c / BLOCK + tid % 8, thread.block());
    }
    if columnwise {
        for (step, k) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            out.col.put(c + 2 * (tid / 8 + 32 * step) + k, r / BLOCK + tid % 8, thread.block());
        }
    }
}

fn tuned_1d(thread: &mut Thread, tid: usize, (r, c): (usize, usize), columnwise: bool, out: &mut Grid) {
    let (warp, lane) = (tid / 32, tid % 32);
    for (r, c) in [(r, c), (r, c + 64), (r + 64, c), (r + 64, c + 64)] {
        for step in 0..2 {
            let mut bytes = thread.block();
            if lane >= 16 {
                bytes.rotate_left(8); // the upper half-warp serves elements 8…15 first
            }
            out.row.put(r + tid / 4 + 32 * step, c / BLOCK + tid % 4, bytes);
        }
        if columnwise {
            for k in 0..2 {
                out.col.put(c + 2 * lane + k, r / BLOCK + (lane / 2 + warp) % 4, thread.block());
            }
        }
    }
}
