//! Costs by measurement: the products to time, and what follows from their times.

use super::choice::{cost, library_cost};
use super::costs::{Costs, Library, NVFP4_BYTES};
use super::cublas::Cublas;
use super::prepared::tiles;
use super::shape::{Chip, Shape};
use crate::cuda::Device;

/// The way in which [`gemm_by`](super::gemm_by) computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum By {
    /// Weights are decoded in registers, by a shape of the GPU.
    Shape {
        /// Which one.
        number: usize,
        /// How many blocks share an output: 1, or 2, 4 or 8 where the GPU has clusters.
        split: u32,
    },
    /// By cuBLASLt, after operands that are not bf16 were decoded to it.
    Library,
}

/// How an operand of a [`Probe`] lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// In bf16.
    Bf16,
    /// As it was quantized.
    Nvfp4,
    /// As a [`PreparedWeight`](super::PreparedWeight).
    Prepared,
}

/// A product whose time is asked for: outputs are bf16, without bias and C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Probe {
    /// M, N and K.
    pub sizes: [usize; 3],
    /// The left operand.
    pub a: Form,
    /// The right operand.
    pub b: Form,
    /// What computes it.
    pub by: By,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measured {
    /// Everything.
    WithLibrary,
    /// What runs without cuBLASLt, which is not here: its costs stay those that ship.
    Pipeline,
}

/// The larger K, and the most rows of weights.
const LONGEST: usize = 8192;
/// Tokens that keep every multiprocessor busy for several waves.
const MANY: usize = 4096;
/// Rows of weights so few that decoding many tokens takes a good part of a product.
const FEW_WEIGHTS: usize = 1024;
/// Tokens so few that decoding weights takes a good part of a product by the library.
const FEW_TOKENS: usize = 64;

impl Costs {
    /// Measures the costs of a GPU. `time` gives the nanoseconds of each product. They should take
    /// turns, so that changes of the chip's clock affect all of them alike. Without cuBLASLt, its
    /// costs stay those that ship, and no product is by it.
    ///
    /// Check the result by [`is_plausible`](Self::is_plausible): something else that ran on the GPU
    /// may have made it useless.
    pub fn measure<E>(device: Device, time: impl FnOnce(&[Probe]) -> Result<Vec<f64>, E>) -> Result<Costs, E> {
        let measured = if Cublas::of(device).is_some() { Measured::WithLibrary } else { Measured::Pipeline };
        measure(&Chip::of(device), measured, time)
    }
}

fn measure<E>(chip: &Chip, measured: Measured, time: impl FnOnce(&[Probe]) -> Result<Vec<f64>, E>) -> Result<Costs, E> {
    let (n, k) = (LONGEST.min(64 * chip.multiprocessors as usize), LONGEST);
    let fitted = |number: usize| chip.shapes()[number].fitted(chip.shared_memory, tiles(n, k).1);
    let known: Vec<(usize, Shape)> = (0..chip.shapes().len()).filter_map(|i| Some((i, fitted(i)?))).collect();
    let shipped = Costs::shipped_for(chip);
    let (Some(&(smallest, few)), Some(&(largest, many))) = (known.first(), known.last()) else {
        return Ok(shipped.clone());
    };

    let mut probes = Vec::new();
    let mut add = |sizes, a, b, by| {
        probes.push(Probe { sizes, a, b, by });
        probes.len() - 1
    };
    use Form::{Bf16, Nvfp4, Prepared};
    let by = |number, split| By::Shape { number, split };
    // What a launch takes is in the whole time. It is nothing beside many tokens; for few of them, a
    // product with half the columns is subtracted.
    let steps: Vec<(usize, Option<usize>)> = known
        .iter()
        .map(|(number, shape)| match shape.stays() {
            true => (add([MANY, n, k], Bf16, Prepared, by(*number, 1)), None),
            false => {
                let mut product = |k| add([shape.tokens as usize, n, k], Bf16, Prepared, by(*number, 1));
                (product(k), Some(product(k / 2)))
            }
        })
        .collect();
    // Two blocks have as many steps each as one block has for half the columns. All run at once.
    let alone = [many.tokens as usize, n.min(64 * (many.rows * (chip.multiprocessors / 4).max(1)) as usize)];
    let split = chip.clusters.then(|| {
        [(1, k / 2), (2, k)].map(|(split, k)| add([alone[0], alone[1], k], Bf16, Prepared, by(largest, split)))
    });
    let library = (measured == Measured::WithLibrary).then(|| {
        let few = few.tokens as usize;
        [
            add([MANY, n, k], Bf16, Bf16, By::Library),
            add([FEW_TOKENS, n, k], Bf16, Bf16, By::Library),
            add([FEW_TOKENS, n, k], Nvfp4, Nvfp4, By::Library),
            add([few, n, k], Bf16, Prepared, by(smallest, 1)),
            add([few, n, k], Bf16, Nvfp4, by(smallest, 1)),
            add([MANY, FEW_WEIGHTS, k], Bf16, Prepared, by(largest, 1)),
            add([MANY, FEW_WEIGHTS, k], Nvfp4, Prepared, by(largest, 1)),
        ]
    });

    // Each cost is what the model of `choice.rs` has to have for these times.
    let times = time(&probes)?;
    let mut costs = shipped.clone();
    let steps_of = |shape: &Shape, probe: usize| {
        let [m, n, k] = probes[probe].sizes;
        cost(shape, (1.0, 0.0), chip, m, tiles(n, k))
    };
    for ((number, shape), (whole, half)) in known.iter().zip(steps) {
        let (time, count) = match half {
            Some(half) => (times[whole] - times[half], steps_of(shape, whole) - steps_of(shape, half)),
            None => (times[whole], steps_of(shape, whole)),
        };
        costs.steps.to_mut()[*number] = time / count;
    }
    if let Some([half, shared]) = split {
        costs.split = (times[shared] - times[half]).max(0.0);
    }
    if let Some(library) = library {
        let [all, product, decoded, prepared, reordered, plain, tokens] = library.map(|probe| times[probe]);
        let unit = Library { step: 1.0, bytes: 1.0, prepared: 0.0, tokens: 0.0 };
        let bytes = NVFP4_BYTES * ((FEW_TOKENS + n) * k) as f64 / (decoded - product);
        costs.library = Some(Library {
            step: all / library_cost(&unit, chip, 0.0, MANY, (n, k)),
            bytes,
            prepared: ((reordered - prepared) * bytes / (n * k) as f64).max(0.0),
            tokens: ((tokens - plain) * bytes / (MANY * k) as f64).max(0.0),
        });
    }
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const CHIPS: [Chip; 3] = [
        Chip { wgmma: true, clusters: true, multiprocessors: 132, shared_memory: 232448 },
        Chip { wgmma: false, clusters: false, multiprocessors: 108, shared_memory: 166912 },
        Chip { wgmma: false, clusters: true, multiprocessors: 36, shared_memory: 101376 },
    ];

    /// The nanoseconds that the model of `choice.rs` gives a product.
    fn expected(chip: &Chip, costs: &Costs, probe: &Probe) -> f64 {
        let ([m, n, k], library) = (probe.sizes, costs.library.unwrap());
        match probe.by {
            By::Library => {
                let bytes = if probe.a == Form::Nvfp4 { NVFP4_BYTES * ((m + n) * k) as f64 } else { 0.0 };
                library_cost(&library, chip, bytes, m, (n, k))
            }
            By::Shape { number, split } => {
                let shape = chip.shapes()[number].fitted(chip.shared_memory, tiles(n, k).1).unwrap();
                let shape = Shape { split, ..shape };
                let product = cost(&shape, (costs.steps[number], costs.split), chip, m, tiles(n, k));
                let weights = if probe.b == Form::Nvfp4 { (n * k) as f64 * library.prepared } else { 0.0 };
                let tokens = if probe.a == Form::Nvfp4 { (m * k) as f64 * library.tokens } else { 0.0 };
                product + (weights + tokens) / library.bytes
            }
        }
    }

    fn is_close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs()
    }

    #[test]
    fn a_chip_that_takes_what_the_model_says_has_the_costs_of_the_model() {
        for chip in &CHIPS {
            let steps: Vec<f64> = (0..chip.shapes().len()).map(|i| 77.0 * (i + 1) as f64).collect();
            let library = Library { step: 500.5, bytes: 1234.0, prepared: 3.25, tokens: 5.5 };
            let costs = Costs { steps: steps.into(), split: 999.0, library: Some(library) };
            let time = |probes: &[Probe]| -> Result<Vec<f64>, Infallible> {
                // What a launch takes shows in products with few tokens only.
                let launch = |probe: &Probe| if probe.sizes[0] < MANY { 2345.0 } else { 0.0 };
                Ok(probes.iter().map(|probe| expected(chip, &costs, probe) + launch(probe)).collect())
            };
            let Ok(found) = measure(chip, Measured::WithLibrary, time);
            let (found, mut costs) = (found.list_for(chip), costs.clone());
            // Without clusters nobody shares an output.
            costs.split = if chip.clusters { costs.split } else { Costs::shipped_for(chip).split };
            assert_eq!(found.len(), chip.shapes().len() + 5);
            for (found, expected) in found.iter().zip(costs.list_for(chip)) {
                assert!(is_close(found.value, expected.value), "{found:?} instead of {expected:?}");
            }
        }
    }

    #[test]
    fn without_the_library_its_costs_stay() {
        for chip in &CHIPS {
            let time = |probes: &[Probe]| {
                assert!(probes.iter().all(|probe| matches!(probe.by, By::Shape { .. })));
                let time = |probe: &Probe| probe.sizes.iter().product::<usize>() as f64;
                Ok::<_, Infallible>(probes.iter().map(time).collect())
            };
            let Ok(found) = measure(chip, Measured::Pipeline, time);
            assert_eq!(found.library, Costs::shipped_for(chip).library);
            assert!(found.is_plausible());
        }
    }

    /// As if something else had run on the GPU in between.
    #[test]
    fn times_that_contradict_each_other_are_not_plausible() {
        let time = |probes: &[Probe]| Ok::<_, Infallible>(vec![1000.0; probes.len()]);
        let Ok(found) = measure(&CHIPS[0], Measured::WithLibrary, time);
        assert!(!found.is_plausible(), "decoding took no time: {found:?}");
    }
}
