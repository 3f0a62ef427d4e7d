//! A layer on the CPU.

use super::{Labels, Part, Printer, Quantizers, Sizes, Times};
use crate::bench::baseline::{F32, Multiply, NOT_BUILT};
use crate::bench::median;
use crate::say::say;
use anyhow::Result;
use nvfp4::{Options, Product, QuantTensor, Randomness, Rounding, Side, TensorRef, matmul};
use nvfp4_recipe::LinearSlot;
use std::time::Instant;

const TURNS: usize = 7;
/// Seed of the gradients' random numbers.
const SEED: u64 = 7;

pub fn run(sizes: &[Sizes], recipes: &[Quantizers], mut printer: Printer) -> Result<()> {
    let threads = rayon::current_num_threads();
    let labels = Labels { machine: format!("CPU, {threads} threads"), plain: "f32", unit: "ms" };
    if F32.is_none() {
        say(NOT_BUILT);
    }
    for &sizes in sizes {
        let layer = Layer::new(sizes)?;
        let mut steps: Vec<Vec<Times>> = recipes.iter().map(|_| Vec::new()).collect();
        let mut plain = Vec::new();
        for _ in 0..=TURNS {
            for (recipe, steps) in recipes.iter().zip(&mut steps) {
                steps.push(layer.step(recipe)?);
            }
            plain.extend(F32.map(|multiply| layer.plain_step(multiply)));
        }
        let times: Vec<Times> = steps.into_iter().map(medians).collect();
        let plain = F32.map(|_| medians(plain));
        printer.add(&labels, sizes, recipes, &times, plain.as_ref())?;
    }
    printer.finish()
}

/// The median of each part; the first turn does not count.
fn medians(turns: Vec<Times>) -> Times {
    let turns = &turns[1..];
    let part = |at: usize| (turns[0].parts[at].0, median(turns.iter().map(|turn| turn.parts[at].1).collect()));
    Times {
        whole: median(turns.iter().map(|turn| turn.whole).collect()),
        parts: (0..turns[0].parts.len()).map(part).collect(),
    }
}

/// A layer's tensors. Those of the experts stand one after the other.
struct Layer {
    sizes: Sizes,
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
}

impl Layer {
    fn new(sizes: Sizes) -> Result<Self> {
        let Sizes { m, n, k, groups, .. } = sizes;
        Ok(Layer {
            sizes,
            x: crate::normal::standard(m, k, 1)?,
            w: crate::normal::standard(groups * n, k, 2)?,
            dy: crate::normal::standard(m, n, 3)?,
        })
    }

    fn step(&self, recipe: &Quantizers) -> Result<Times> {
        let mut clock = Clock::new();
        let x = clock.time(Part::ALL[0], || self.quantize(recipe, LinearSlot::Input))?;
        let w = clock.time(Part::ALL[1], || self.quantize(recipe, LinearSlot::Weight))?;
        let dy = clock.time(Part::ALL[2], || self.quantize(recipe, LinearSlot::GradOutput))?;
        clock.time(Part::Forward, || multiply((&x, Side::Row), (&w, Side::Row)))?;
        clock.time(Part::InputGradient, || multiply((&dy, Side::Row), (&w, Side::Column)))?;
        clock.time(Part::WeightGradient, || multiply((&dy, Side::Column), (&x, Side::Column)))?;
        Ok(clock.times())
    }

    /// Products in binary32. Every operand has its rows along the sum: a time, not a gradient.
    fn plain_step(&self, multiply: Multiply) -> Times {
        let Sizes { m, n, k, groups, .. } = self.sizes;
        let tokens = m / groups;
        let mut clock = Clock::new();
        for (part, a, b, (rows, cols, sum)) in [
            (Part::Forward, &self.x, &self.w, (tokens, n, k)),
            (Part::InputGradient, &self.dy, &self.w, (tokens, k, n)),
            (Part::WeightGradient, &self.dy, &self.x, (n, k, tokens)),
        ] {
            let mut out = vec![0.0; rows * cols];
            clock.time(part, || {
                for (a, b) in a.chunks(rows * sum).zip(b.chunks(cols * sum)) {
                    multiply(a, b, (rows, cols, sum), &mut out);
                }
            });
        }
        clock.times()
    }

    /// One tensor of every expert.
    fn quantize(&self, recipe: &Quantizers, slot: LinearSlot) -> Result<Vec<QuantTensor>> {
        let (Sizes { m, n, k, groups, .. }, quantizer) = (self.sizes, recipe.of(slot));
        let (values, rows, cols) = match slot {
            LinearSlot::Input => (&self.x, m / groups, k),
            LinearSlot::Weight => (&self.w, n, k),
            _ => (&self.dy, m / groups, n),
        };
        let one = |(group, values): (usize, &[f32])| -> Result<QuantTensor> {
            let randomness = (quantizer.rounding() == Rounding::Stochastic)
                .then_some(Randomness::At { seed: SEED, offset: 2 * group as u64 });
            let options = Options { randomness, ..Options::default() };
            Ok(quantizer.quantize_with(&TensorRef::new(values, &[rows, cols])?, &options)?)
        };
        values.chunks(rows * cols).enumerate().map(one).collect()
    }
}

/// One product of every expert.
fn multiply((a, a_side): (&[QuantTensor], Side), (b, b_side): (&[QuantTensor], Side)) -> Result<()> {
    a.iter().zip(b).try_for_each(|(a, b)| {
        matmul::<f32>(a.direction(a_side)?, b.direction(b_side)?, &Product::default())?;
        Ok(())
    })
}

/// Times parts one after the other, in milliseconds.
struct Clock {
    start: Instant,
    parts: Vec<(Part, f64)>,
}

impl Clock {
    fn new() -> Self {
        Clock { start: Instant::now(), parts: Vec::new() }
    }

    fn time<R>(&mut self, part: Part, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.parts.push((part, start.elapsed().as_secs_f64() * 1e3));
        result
    }

    fn times(self) -> Times {
        Times { whole: self.start.elapsed().as_secs_f64() * 1e3, parts: self.parts }
    }
}
