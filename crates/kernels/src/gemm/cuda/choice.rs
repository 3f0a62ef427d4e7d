//! The choice of a kernel, by what each is expected to take; nothing is timed.

use super::costs::{Costs, Library, NVFP4_BYTES, VALUE_BYTES};
use super::cublas::Cublas;
use super::prepared::{TILE, tiles};
use super::shape::{Chip, Shape};
use crate::cuda::Device;

/// The most blocks that share an output.
const MOST_SPLIT: u32 = 8;

/// Who chooses the shape of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The costs of the GPU.
    Fastest,
    /// The caller: a shape of the chip by its number, and how many blocks share an output.
    Given { number: usize, split: u32 },
}

impl Choice {
    /// The shape for `m` tokens and weights of the given size; `None` if the chip has none.
    pub fn shape(self, device: Device, m: usize, (rows, cols): (usize, usize)) -> Option<Shape> {
        let (chip, tiles) = (Chip::of(device), tiles(rows, cols));
        match self {
            Choice::Fastest => fastest(&chip, Costs::of(device), m, tiles).map(|(shape, _)| shape),
            Choice::Given { number, split } => {
                let shape = chip.shapes().get(number)?.fitted(chip.shared_memory, tiles.1)?;
                splits(&chip).any(|possible| possible == split).then_some(Shape { split, ..shape })
            }
        }
    }
}

/// The shape for so many groups of about `m` tokens, each with weights of so many tiles; `None` if
/// the chip has none.
pub(super) fn shape_for_groups(device: Device, (m, count): (usize, usize), tiles: (usize, usize)) -> Option<Shape> {
    fastest(&Chip::of(device), Costs::of(device), m, of_all(tiles, count)).map(|(shape, _)| shape)
}

/// The tiles of the weights of all groups: as many more rows, each group's in whole tiles.
fn of_all((row_tiles, k_tiles): (usize, usize), count: usize) -> (usize, usize) {
    (row_tiles.next_multiple_of(2) * count.max(1), k_tiles)
}

/// Nanoseconds that the launches of a product take beside its work.
const LAUNCHES: f64 = 5000.0;

/// Whether one launch for groups of so many tokens, with weights of the given size each, is expected
/// to take less time than a product after the other.
pub(super) fn prefers_one_launch(device: Device, tokens: &[usize], size: (usize, usize)) -> bool {
    one_launch(&Chip::of(device), Costs::of(device), tokens, size)
}

fn one_launch(chip: &Chip, costs: &Costs, tokens: &[usize], (rows, cols): (usize, usize)) -> bool {
    let Some(library) = costs.library else { return true };
    let before = |m: usize, rows: usize| {
        (rows as f64 * library.prepared + m as f64 * library.tokens) * cols as f64 / library.bytes
    };
    let pipeline =
        |m: usize| fastest(chip, costs, m, tiles(rows, cols)).map_or(f64::INFINITY, |(_, cost)| cost + before(m, rows));
    let bytes = |m: usize| NVFP4_BYTES * (m + rows) as f64 * cols as f64;
    let alone = |&m: &usize| library_cost(&library, chip, bytes(m), m, (rows, cols)).min(pipeline(m)) + LAUNCHES;
    let (total, count) = (tokens.iter().sum::<usize>(), tokens.len());
    let together = fastest(chip, costs, total.div_ceil(count.max(1)), of_all(tiles(rows, cols), count))
        .map_or(f64::INFINITY, |(_, cost)| cost + before(total, count * rows));
    together < tokens.iter().filter(|&&m| m > 0).map(alone).sum()
}

/// Whether cuBLASLt, after everything was decoded, is expected to take less time than the pipeline
/// for each of these products of NVFP4: M, N and K.
pub(super) fn prefers_library_for_all(device: Device, mut products: impl Iterator<Item = [usize; 3]>) -> bool {
    let bytes = |m: usize, n: usize, k: usize| NVFP4_BYTES * (m + n) as f64 * k as f64;
    products.all(|[m, n, k]| prefers_library(device, bytes(m, n, k), Before::Both, (m, (n, k))))
}

/// How many blocks may share an output.
fn splits(chip: &Chip) -> impl Iterator<Item = u32> {
    let most = if chip.clusters { MOST_SPLIT } else { 1 };
    (0..).map(|i| 1 << i).take_while(move |&split| split <= most)
}

/// The shape that is expected to be the fastest, and the nanoseconds that it is expected to take.
fn fastest(chip: &Chip, costs: &Costs, m: usize, tiles: (usize, usize)) -> Option<(Shape, f64)> {
    let shapes = chip.shapes().iter().zip(costs.steps.iter()).filter_map(|(shape, &step)| {
        let shape = shape.fitted(chip.shared_memory, tiles.1)?;
        let costs = splits(chip).map(|split| {
            let shape = Shape { split, ..shape };
            (shape, cost(&shape, (step, costs.split), chip, m, tiles))
        });
        costs.min_by(|(_, a), (_, b)| a.total_cmp(b))
    });
    shapes.min_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// Nanoseconds of a product by a shape whose steps, and whose sharing of outputs, take so many.
pub(super) fn cost(
    shape: &Shape,
    (step, split): (f64, f64),
    chip: &Chip,
    m: usize,
    (row_tiles, k_tiles): (usize, usize),
) -> f64 {
    // Clusters do not fill the chip: each must fit within one of its partitions.
    let room = match shape.split {
        1 => chip.multiprocessors,
        2 => chip.multiprocessors - chip.multiprocessors / 32,
        _ => chip.multiprocessors * 4 / 5,
    };
    let waves = (shape.outputs(m, row_tiles) * shape.split as usize).div_ceil(room.max(1) as usize);
    let steps = k_tiles.div_ceil(shape.split as usize);
    let split = if shape.split == 1 { 0.0 } else { split };
    waves as f64 * (steps as f64 * step + split)
}

/// Whether decoding both operands of an NVFP4 product, which moves so many bytes, and a call of
/// cuBLASLt are expected to take less time than the pipeline, which has `m` tokens and weights of
/// the given size.
pub(super) fn prefers_library(device: Device, bytes: f64, before: Before, sizes: (usize, (usize, usize))) -> bool {
    prefers(&Chip::of(device), Costs::of(device), bytes, before, sizes)
}

/// What the pipeline does before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// It decodes tokens and brings weights into order.
    Both,
    /// It decodes tokens.
    Tokens,
    /// Nothing.
    Nothing,
}

fn prefers(chip: &Chip, costs: &Costs, bytes: f64, before: Before, (m, (rows, cols)): (usize, (usize, usize))) -> bool {
    let Some(library) = costs.library else { return false };
    let pipeline = pipeline_cost(chip, costs, &library, before, (m, (rows, cols)));
    library_cost(&library, chip, bytes, m, (rows, cols)) < pipeline
}

/// Nanoseconds of a product by the pipeline, with what it does before.
fn pipeline_cost(
    chip: &Chip,
    costs: &Costs,
    library: &Library,
    before: Before,
    (m, (rows, cols)): (usize, (usize, usize)),
) -> f64 {
    let (weights, tokens) = (rows as f64 * library.prepared, m as f64 * library.tokens);
    let before = match before {
        Before::Both => weights + tokens,
        Before::Tokens => tokens,
        Before::Nothing => 0.0,
    };
    let before = before * cols as f64;
    fastest(chip, costs, m, tiles(rows, cols)).map_or(f64::INFINITY, |(_, cost)| cost + before / library.bytes)
}

/// Whether an operand of NVFP4 that is quantized for one product, M × K, should be written as values:
/// whether that, decoding the other operand, N × K, and a call of cuBLASLt are expected to take less
/// time than the pipeline. Sizes and the costs of the GPU decide, not whether the other one comes as
/// values too: so its codes may be kept without changing any bits.
pub fn prefers_values(device: Device, sizes: (usize, usize, usize)) -> bool {
    // From compute capability 10.0 on, cuBLASLt multiplies codes.
    device.capability().0 < 10
        && Cublas::of(device).is_some()
        && values_win(&Chip::of(device), Costs::of(device), sizes)
}

fn values_win(chip: &Chip, costs: &Costs, (m, n, k): (usize, usize, usize)) -> bool {
    let Some(library) = costs.library else { return false };
    let whole = m.min(n) >= LEAST_SIDE && k > 0 && n.is_multiple_of(8) && k.is_multiple_of(16);
    let bytes = (VALUE_BYTES * m as f64 + NVFP4_BYTES * n as f64) * k as f64;
    let own = pipeline_cost(chip, costs, &library, Before::Both, (m, (n, k)));
    whole && library_time(&library, chip, bytes, LEAST_WAVES, (m, (n, k))) < own
}

/// The least rows and columns of outputs: fewer leave large tiles empty.
const LEAST_SIDE: usize = 256;
/// What is left of a wave's time where outputs are few: cuBLASLt takes smaller tiles, and divides K.
const LEAST_WAVES: f64 = 0.35;

/// Nanoseconds of a product by cuBLASLt, with so many bytes to decode before.
pub(super) fn library_cost(library: &Library, chip: &Chip, bytes: f64, m: usize, (rows, cols): (usize, usize)) -> f64 {
    library_time(library, chip, bytes, 1.0, (m, (rows, cols)))
}

fn library_time(
    library: &Library,
    chip: &Chip,
    bytes: f64,
    least_waves: f64,
    (m, (rows, cols)): (usize, (usize, usize)),
) -> f64 {
    // Its tiles have many shapes, so that the last wave is nearly full too.
    let waves = (m as f64 / 128.0) * (rows as f64 / 256.0) / f64::from(chip.multiprocessors);
    waves.max(least_waves) * cols.div_ceil(TILE) as f64 * library.step + bytes / library.bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Chip = Chip { wgmma: true, clusters: true, multiprocessors: 132, shared_memory: 232448 };
    const A100: Chip = Chip { wgmma: false, clusters: false, multiprocessors: 108, shared_memory: 166912 };
    const RTX_5090: Chip = Chip { wgmma: false, clusters: true, multiprocessors: 170, shared_memory: 101376 };

    /// As measured with prepared weights of 8192 × 8192.
    #[test]
    fn prepared_weights_go_to_the_library_with_many_tokens() {
        let costs = Costs::shipped_for(&H200);
        let size = (8192, 8192);
        let prefers = |m: usize, before| prefers(&H200, costs, decoded(m, size.0, size.1), before, (m, size));
        assert!(prefers(16384, Before::Tokens) && !prefers(1024, Before::Tokens));
        assert!(!prefers(64, Before::Nothing));
    }

    /// As measured with weights of 2048 × 7168.
    #[test]
    fn experts_with_few_tokens_are_multiplied_in_one_launch() {
        let costs = Costs::shipped_for(&H200);
        let one = |each: usize, count: usize| one_launch(&H200, costs, &vec![each; count], (2048, 7168));
        assert!(one(256, 64) && one(8, 128));
        assert!(!one(4096, 4) && !one(8192, 8));
    }

    fn decoded(m: usize, rows: usize, cols: usize) -> f64 {
        NVFP4_BYTES * (m + rows) as f64 * cols as f64
    }

    /// The choice sets the last bits of a product, so it stays what it was unless somebody tunes. A
    /// line is the chip, M, N and K, then the shape, and whether NVFP4 on both sides goes to the
    /// library.
    #[test]
    fn shipped_costs_choose_what_they_always_chose() {
        let lines = include_str!("choices.txt").lines();
        for line in lines.clone() {
            let (product, expected) = line.split_once(": ").unwrap();
            let (chip, sizes) = product.split_once(' ').unwrap();
            let chip = match chip {
                "H200" => &H200,
                "A100" => &A100,
                "5090" => &RTX_5090,
                chip => panic!("{chip}"),
            };
            let sizes: Vec<usize> = sizes.split(' ').map(|size| size.parse().unwrap()).collect();
            let (m, rows, cols) = (sizes[0], sizes[1], sizes[2]);
            let costs = Costs::shipped_for(chip);
            let shape = fastest(chip, costs, m, tiles(rows, cols)).unwrap().0;
            let library = prefers(chip, costs, decoded(m, rows, cols), Before::Both, (m, (rows, cols)));
            assert_eq!(format!("{shape}{}", if library { " | library" } else { "" }), expected, "{product}");
        }
        assert_eq!(lines.count(), 81);
    }

    /// As measured: with the weights of a training step, and those of a server that were not
    /// prepared.
    #[test]
    fn many_rows_go_to_the_library() {
        for ((m, rows, cols), library) in [
            ((8192, 8192, 8192), true),
            ((2048, 7168, 4096), true),
            ((4096, 2048, 7168), true),
            ((64, 8192, 8192), false),
            ((16, 4096, 4096), false),
        ] {
            let prefers =
                prefers(&H200, Costs::shipped_for(&H200), decoded(m, rows, cols), Before::Both, (m, (rows, cols)));
            assert_eq!(prefers, library, "{m} × {rows} × {cols}");
        }
    }

    /// The products of a layer in training.
    #[test]
    fn layers_with_many_tokens_write_values() {
        let costs = Costs::shipped_for(&H200);
        for (sizes, values) in [
            ((4096, 1024, 1024), true),
            ((1024, 1024, 4096), true),
            ((4096, 4096, 4096), true),
            ((255, 4096, 4096), false),
            ((4096, 128, 4096), false),
            ((4096, 1022, 1024), false),
            ((4096, 1024, 1032), false),
        ] {
            assert_eq!(values_win(&H200, costs, sizes), values, "{sizes:?}");
        }
        assert!(!values_win(&A100, Costs::shipped_for(&A100), (4096, 4096, 4096)));
    }

    /// Other chips have no such costs until somebody measures them.
    #[test]
    fn costs_of_the_library_open_it_to_every_chip() {
        let (m, size) = (4096, (8192, 8192));
        let mut costs = Costs::shipped_for(&A100).clone();
        assert!(!prefers(&A100, &costs, decoded(m, size.0, size.1), Before::Both, (m, size)));
        costs.library = Some(Library { step: 300.0, bytes: 1300.0, prepared: 4.0, tokens: 5.0 });
        assert!(prefers(&A100, &costs, decoded(m, size.0, size.1), Before::Both, (m, size)));
    }
}
