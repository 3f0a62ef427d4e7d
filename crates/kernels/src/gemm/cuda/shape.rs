//! The shapes of the pipeline's kernels, and which of them a chip has.

use super::prepared::{TILE, TILE_BYTES};
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

const fn shape(instruction: Instruction, tokens: u32, rows: u32, slices: u32, stages: u32, tiles: u32) -> Shape {
    Shape { instruction, tokens, rows, slices, stages, tiles, split: 1, registers: None }
}

/// Shapes for Hopper, with as many stages as are useful. The last one is for many tokens:
/// accumulators take more than half of all registers.
const HOPPER: [Shape; 6] = {
    use Instruction::{Mma, Wgmma};
    let most = Shape { registers: Some((40, 232)), ..shape(Wgmma, 256, 2, 1, 6, 1) };
    [
        shape(Mma, 8, 1, 4, 12, 2),
        shape(Mma, 16, 1, 3, 12, 4),
        shape(Wgmma, 32, 1, 4, 16, 2),
        shape(Wgmma, 64, 1, 3, 9, 2),
        shape(Wgmma, 128, 1, 2, 6, 2),
        most,
    ]
};

/// Shapes for every other GPU.
const PORTABLE: [Shape; 5] = {
    use Instruction::Mma;
    [
        shape(Mma, 8, 1, 4, 12, 2),
        shape(Mma, 16, 1, 4, 12, 2),
        shape(Mma, 32, 1, 4, 12, 1),
        shape(Mma, 64, 2, 1, 8, 1),
        shape(Mma, 128, 2, 1, 8, 1),
    ]
};

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
    pub fn fitted(mut self, shared_memory: u32, k_tiles: usize) -> Option<Self> {
        if !k_tiles.is_multiple_of(self.tiles as usize) {
            (self.tiles, self.stages) = (self.tiles / 2, self.stages * 2);
        }
        let room = shared_memory.saturating_sub(OVERHEAD) / self.stage();
        // The filling warps of a single slice may be four.
        let least = if self.slices == 1 { 4 } else { 2 * self.slices };
        self.stages = self.stages.min(room) / self.slices * self.slices;
        (self.stages >= least).then_some(self)
    }
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

/// The properties of a GPU that the choice of a kernel depends on.
#[derive(Clone, Copy)]
pub(super) struct Chip {
    pub wgmma: bool,
    pub clusters: bool,
    pub multiprocessors: u32,
    pub shared_memory: u32,
}

impl Chip {
    pub fn of(device: Device) -> Self {
        let (capability, portable) = (device.capability(), device.portable());
        Chip {
            wgmma: capability == (9, 0) && !portable,
            clusters: capability.0 >= 9 && !portable,
            multiprocessors: device.multiprocessors(),
            shared_memory: device.properties().shared_memory,
        }
    }

    /// Bytes of shared memory for a block of a shape. On Hopper no two blocks fit on a
    /// multiprocessor: a product that starts while another one ends would put two blocks on some and
    /// none on others.
    pub fn shared_memory_of(&self, shape: &Shape) -> u32 {
        if self.wgmma { shape.shared().max(self.shared_memory / 2 + 16) } else { shape.shared() }
    }

    /// The shapes to choose from.
    pub fn shapes(&self) -> &'static [Shape] {
        if self.wgmma { &HOPPER } else { &PORTABLE }
    }
}

/// Every shape, for tests that compile them.
pub(super) fn all() -> Vec<Shape> {
    [&HOPPER[..], &PORTABLE].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shared memory of an H200.
    const H200: u32 = 232448;

    #[test]
    fn every_shape_fits_its_chip() {
        for shape in HOPPER {
            assert_eq!(shape.fitted(H200, 128), Some(shape));
        }
        // 99 KiB, as on sm_86 and sm_120.
        for shape in PORTABLE {
            assert!(shape.fitted(101376, 128).is_some(), "{shape}");
        }
    }

    #[test]
    fn a_multiprocessor_of_hopper_has_one_block() {
        let chip = Chip { wgmma: true, clusters: true, multiprocessors: 132, shared_memory: H200 };
        for shape in HOPPER {
            let shared = chip.shared_memory_of(&shape);
            assert!(shape.shared() <= shared && shared <= H200 && 2 * shared > H200, "{shape}");
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
        let shape = HOPPER[1].fitted(H200, 6).unwrap();
        assert_eq!((shape.tiles, HOPPER[1].tiles), (2, 4));
    }
}
