//! The choice of a kernel: shapes, and their measured costs.

use super::prepared::{TILE, TILE_BYTES, tiles};
use crate::cuda::Device;
use std::fmt;

/// The instruction that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Instruction {
    /// Of a warpgroup: Hopper's.
    Wgmma,
    /// Of a warp: every GPU's.
    Mma,
}

/// The settings of `pipeline.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub instruction: Instruction,
    pub tokens: u32,
    pub rows: u32,
    pub slices: u32,
    pub stages: u32,
    pub tiles: u32,
    pub split: u32,
    /// Registers of a thread that fills and of one that multiplies, where they are not the same.
    pub registers: Option<(u32, u32)>,
}

/// A shape to choose from, with as many stages as are useful.
struct Candidate {
    shape: Shape,
    /// Nanoseconds that a block takes for 64 columns on an H200, measured with N = K = 8192.
    step: f64,
}

const fn shape(instruction: Instruction, tokens: u32, rows: u32, slices: u32, stages: u32, tiles: u32) -> Shape {
    Shape { instruction, tokens, rows, slices, stages, tiles, split: 1, registers: None }
}

/// Shapes for Hopper. The last one is for many tokens: accumulators take more than half of all
/// registers.
const HOPPER: [Candidate; 6] = {
    use Instruction::{Mma, Wgmma};
    let most = Shape { registers: Some((40, 232)), ..shape(Wgmma, 256, 2, 1, 6, 1) };
    [
        Candidate { shape: shape(Mma, 8, 1, 4, 12, 2), step: 82.0 },
        Candidate { shape: shape(Mma, 16, 1, 3, 12, 4), step: 92.0 },
        Candidate { shape: shape(Wgmma, 32, 1, 4, 16, 2), step: 112.0 },
        Candidate { shape: shape(Wgmma, 64, 1, 3, 9, 2), step: 132.0 },
        Candidate { shape: shape(Wgmma, 128, 1, 2, 6, 2), step: 213.0 },
        Candidate { shape: most, step: 700.0 },
    ]
};

/// Shapes for every other GPU.
const PORTABLE: [Candidate; 5] = {
    use Instruction::Mma;
    [
        Candidate { shape: shape(Mma, 8, 1, 4, 12, 2), step: 100.0 },
        Candidate { shape: shape(Mma, 16, 1, 4, 12, 2), step: 130.0 },
        Candidate { shape: shape(Mma, 32, 1, 4, 12, 1), step: 200.0 },
        Candidate { shape: shape(Mma, 64, 2, 1, 8, 1), step: 650.0 },
        Candidate { shape: shape(Mma, 128, 2, 1, 8, 1), step: 1200.0 },
    ]
};

/// The most blocks that share an output.
const MOST_SPLIT: u32 = 8;
/// What sharing costs, in nanoseconds.
const SPLIT_COST: f64 = 1500.0;
/// Shared memory for barriers and alignment.
const OVERHEAD: u32 = 2048;

impl Shape {
    /// Bytes of shared memory.
    pub fn shared(&self) -> u32 {
        OVERHEAD + self.stages * self.stage()
    }

    fn stage(&self) -> u32 {
        let tokens = self.tokens * TILE as u32 * 2;
        (self.tiles * (tokens + self.rows * TILE_BYTES as u32)).next_multiple_of(1024)
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        128 * (self.rows * self.slices + 1)
    }

    /// Whether a block is persistent and computes one tile of outputs after another. A block whose
    /// sums are combined with others computes one.
    pub fn stays(&self) -> bool {
        self.slices * self.split == 1
    }

    /// Tiles of outputs.
    pub fn outputs(&self, m: usize, row_tiles: usize) -> usize {
        row_tiles.div_ceil(self.rows as usize) * m.div_ceil(self.tokens as usize)
    }

    /// The shape with as many stages as fit and steps that divide K; `None` if too few stages fit.
    fn fitted(mut self, shared_memory: u32, k_tiles: usize) -> Option<Self> {
        if !k_tiles.is_multiple_of(self.tiles as usize) {
            (self.tiles, self.stages) = (self.tiles / 2, self.stages * 2);
        }
        let room = shared_memory.saturating_sub(OVERHEAD) / self.stage();
        // The filling warps of a single slice may be four.
        let least = if self.slices == 1 { 4 } else { 2 * self.slices };
        self.stages = self.stages.min(room) / self.slices * self.slices;
        (self.stages >= least).then_some(self)
    }

    /// The shape that is expected to be the fastest for a product.
    pub fn choose(device: Device, m: usize, tiles: (usize, usize)) -> Option<Shape> {
        Shape::with_cost(&Chip::of(device), m, tiles).map(|(shape, _)| shape)
    }

    /// The same for so many groups, of `m` tokens each.
    pub fn choose_for_groups(device: Device, (m, count): (usize, usize), tiles: (usize, usize)) -> Option<Shape> {
        // Weights of many groups are as many more rows, in whole tiles.
        let (row_tiles, k_tiles) = tiles;
        let many = (row_tiles.next_multiple_of(2) * count.max(1), k_tiles);
        Shape::with_cost(&Chip::of(device), m, many).map(|(shape, _)| shape)
    }

    /// The same, and the nanoseconds that it is expected to take.
    fn with_cost(chip: &Chip, m: usize, (row_tiles, k_tiles): (usize, usize)) -> Option<(Shape, f64)> {
        let candidates: &[Candidate] = if chip.wgmma { &HOPPER } else { &PORTABLE };
        let shapes = candidates.iter().filter_map(|candidate| {
            let shape = candidate.shape.fitted(chip.shared_memory, k_tiles)?;
            let splits = (0..).map(|i| 1 << i).take_while(|&split| split == 1 || chip.clusters && split <= MOST_SPLIT);
            let costs = splits.map(|split| {
                let shape = Shape { split, ..shape };
                (shape, shape.cost(candidate.step, chip, m, (row_tiles, k_tiles)))
            });
            costs.min_by(|(_, a), (_, b)| a.total_cmp(b))
        });
        shapes.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Nanoseconds.
    fn cost(&self, step: f64, chip: &Chip, m: usize, (row_tiles, k_tiles): (usize, usize)) -> f64 {
        // Clusters do not fill the chip: each must fit within one of its partitions.
        let room = match self.split {
            1 => chip.multiprocessors,
            2 => chip.multiprocessors - chip.multiprocessors / 32,
            _ => chip.multiprocessors * 4 / 5,
        };
        let waves = (self.outputs(m, row_tiles) * self.split as usize).div_ceil(room.max(1) as usize);
        let steps = k_tiles.div_ceil(self.split as usize);
        let split = if self.split == 1 { 0.0 } else { SPLIT_COST };
        waves as f64 * (steps as f64 * step + split)
    }
}

/// What cuBLASLt's tile of 256 × 128 takes for 64 columns on an H200, in nanoseconds, measured
/// beside the last of [`HOPPER`].
const LIBRARY_STEP: f64 = 652.0;
/// Bytes that a kernel which only moves them moves in a nanosecond there.
const BYTES: f64 = 3900.0;
/// What the pipeline does before it multiplies, for each element, in bytes that would take as long:
/// it brings weights into order, and decodes tokens.
const PREPARED: f64 = 4.1;
const TOKENS: f64 = 4.9;

/// Whether decoding both operands of an NVFP4 product, which moves so many bytes, and a call of
/// cuBLASLt are expected to take less time than the pipeline, which has `m` tokens and weights of
/// the given size.
pub(super) fn prefers_library(device: Device, bytes: f64, (m, (rows, cols)): (usize, (usize, usize))) -> bool {
    let chip = Chip::of(device);
    chip.wgmma && library_cost(&chip, bytes, m, (rows, cols)) < pipeline_cost(&chip, m, (rows, cols))
}

fn library_cost(chip: &Chip, bytes: f64, m: usize, (rows, cols): (usize, usize)) -> f64 {
    // Its tiles have many shapes, so that the last wave is nearly full too.
    let waves = (m as f64 / 128.0) * (rows as f64 / 256.0) / f64::from(chip.multiprocessors);
    waves.max(1.0) * cols.div_ceil(TILE) as f64 * LIBRARY_STEP + bytes / BYTES
}

fn pipeline_cost(chip: &Chip, m: usize, (rows, cols): (usize, usize)) -> f64 {
    let before = (rows as f64 * PREPARED + m as f64 * TOKENS) * cols as f64;
    Shape::with_cost(chip, m, tiles(rows, cols)).map_or(f64::INFINITY, |(_, cost)| cost + before / BYTES)
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let instruction = match self.instruction {
            Instruction::Wgmma => "wgmma",
            Instruction::Mma => "mma.sync",
        };
        let (rows, columns) = (TILE as u32 * self.rows, TILE as u32 * self.tiles);
        write!(f, "{instruction} {}×{rows}×{columns}, {} stages", self.tokens, self.stages)?;
        if self.slices > 1 {
            write!(f, ", {} slices", self.slices)?;
        }
        if self.split > 1 {
            write!(f, ", split {}", self.split)?;
        }
        Ok(())
    }
}

/// The properties of a GPU that the choice depends on.
struct Chip {
    wgmma: bool,
    clusters: bool,
    multiprocessors: u32,
    shared_memory: u32,
}

impl Chip {
    fn of(device: Device) -> Self {
        let (capability, portable) = (device.capability(), device.portable());
        Chip {
            wgmma: capability == (9, 0) && !portable,
            clusters: capability.0 >= 9 && !portable,
            multiprocessors: device.multiprocessors(),
            shared_memory: device.properties().shared_memory,
        }
    }
}

/// Every shape, for tests that compile them.
pub(super) fn all() -> Vec<Shape> {
    HOPPER.iter().chain(&PORTABLE).map(|candidate| candidate.shape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Chip = Chip { wgmma: true, clusters: true, multiprocessors: 132, shared_memory: 232448 };

    #[test]
    fn every_shape_fits_its_chip() {
        for candidate in &HOPPER {
            assert_eq!(candidate.shape.fitted(H200.shared_memory, 128), Some(candidate.shape));
        }
        // 99 KiB, as on sm_86 and sm_120.
        for candidate in &PORTABLE {
            assert!(candidate.shape.fitted(101376, 128).is_some(), "{}", candidate.shape);
        }
    }

    /// As measured: with the weights of a training step, and those of a server that were not
    /// prepared.
    #[test]
    fn many_rows_go_to_the_library() {
        let decoded = |m: usize, rows: usize, cols: usize| 2.5625 * (m + rows) as f64 * cols as f64;
        for ((m, rows, cols), library) in [
            ((8192, 8192, 8192), true),
            ((2048, 7168, 4096), true),
            ((4096, 2048, 7168), true),
            ((64, 8192, 8192), false),
            ((16, 4096, 4096), false),
        ] {
            let costs =
                [library_cost(&H200, decoded(m, rows, cols), m, (rows, cols)), pipeline_cost(&H200, m, (rows, cols))];
            assert_eq!(costs[0] < costs[1], library, "{m} × {rows} × {cols}: {costs:?}");
        }
    }

    #[test]
    fn registers_are_only_handed_on() {
        for shape in all() {
            // Changed numbers of registers come from those that the block was started with: else
            // its threads would wait for ever.
            if let Some((fills, multiplies)) = shape.registers {
                let start = 65536 / shape.threads() / 8 * 8;
                assert!(128 * fills + (shape.threads() - 128) * multiplies <= shape.threads() * start, "{shape}");
            }
        }
    }

    #[test]
    fn a_k_of_an_odd_number_of_steps_takes_shorter_ones() {
        let shape = HOPPER[1].shape.fitted(H200.shared_memory, 6).unwrap();
        assert_eq!((shape.tiles, HOPPER[1].shape.tiles), (2, 4));
    }
}
