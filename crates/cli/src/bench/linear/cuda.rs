//! A layer in the memory of a GPU.

use super::{Labels, Part, Printer, Quantizers, Sizes, Times};
use crate::bench::median;
use anyhow::{Context, Result};
use half::bf16;
use nvfp4::cuda::{Device, Direction, Gpu, Input, Offset, Options, Product, QuantTensor, Randomness, Values};
use nvfp4::{Rounding, Side};
use nvfp4_kernels::cuda::{Buffer, Pool, Slice, Stream, time_interleaved};
use nvfp4_kernels::gemm::cuda::Cublas;
use nvfp4_recipe::LinearSlot;
use std::ops::Range;
use std::sync::Arc;

const TURNS: usize = 15;
/// Whole steps that run one after the other, at the clock which they sustain.
const STEPS: usize = 5;
/// Rows that are generated; more repeat them.
const GENERATED: usize = 4096;
/// Seed of the gradients' random numbers.
const SEED: u64 = 7;

#[derive(Clone, Copy)]
enum Work {
    Whole(usize),
    Part(usize, Part),
    Bf16,
    Bf16Part(Part),
}

pub fn run(device: Device, sizes: &[Sizes], recipes: &[Quantizers], mut printer: Printer) -> Result<()> {
    device.make_current()?;
    let cublas = Cublas::open(device)
        .map_err(|reason| crate::say::say(format_args!("without cuBLAS: {reason}")))
        .ok()
        .map(Arc::new);
    let labels = Labels { machine: device.name().to_string(), plain: "bf16", unit: "µs" };
    for &sizes in sizes {
        let gpu = Arc::new(Gpu::new(device)?);
        let mut layer = Layer::new(gpu.clone(), sizes, recipes, cublas.clone())?;
        let (times, plain) = layer.times(&gpu)?;
        printer.add(&labels, sizes, recipes, &times, plain.as_ref())?;
    }
    printer.finish()
}

/// A layer's tensors. Those of the experts stand one after the other.
struct Layer<'a> {
    gpu: Arc<Gpu>,
    sizes: Sizes,
    recipes: &'a [Quantizers],
    x: Buffer<bf16>,
    w: Buffer<bf16>,
    dy: Buffer<bf16>,
    y: Buffer<bf16>,
    dx: Buffer<bf16>,
    dw: Buffer<bf16>,
    /// What the products of each recipe multiply when they are timed by themselves.
    held: Vec<Held>,
    cublas: Option<Arc<Cublas>>,
}

/// The quantized tensors of a step, one each per expert.
struct Held {
    x: Vec<QuantTensor>,
    w: Vec<QuantTensor>,
    dy: Vec<QuantTensor>,
}

impl<'a> Layer<'a> {
    fn new(gpu: Arc<Gpu>, sizes: Sizes, recipes: &'a [Quantizers], cublas: Option<Arc<Cublas>>) -> Result<Self> {
        let Sizes { m, n, k, groups } = sizes;
        let device = gpu.stream().device();
        let mut layer = Layer {
            x: generated(gpu.stream(), m, k, 1)?,
            w: generated(gpu.stream(), groups * n, k, 2)?,
            dy: generated(gpu.stream(), m, n, 3)?,
            y: device.alloc(m * n)?,
            dx: device.alloc(m * k)?,
            dw: device.alloc(groups * n * k)?,
            gpu,
            sizes,
            recipes,
            held: Vec::new(),
            cublas,
        };
        for recipe in recipes {
            let held = Held {
                x: layer.quantize(recipe, LinearSlot::Input)?,
                w: layer.quantize(recipe, LinearSlot::Weight)?,
                dy: layer.quantize(recipe, LinearSlot::GradOutput)?,
            };
            layer.held.push(held);
        }
        Ok(layer)
    }

    fn times(&mut self, gpu: &Gpu) -> Result<(Vec<Times>, Option<Times>)> {
        // Whole steps in turns with each other, then parts with parts: steps that are compared have
        // the same neighbours.
        let (plain, recipes) = (self.cublas.is_some(), 0..self.recipes.len());
        let mut wholes: Vec<Work> = recipes.clone().map(Work::Whole).collect();
        let mut parts: Vec<Work> = recipes.flat_map(|recipe| Part::ALL.map(|part| Work::Part(recipe, part))).collect();
        if plain {
            wholes.push(Work::Bf16);
            parts.extend(Part::PRODUCTS.map(Work::Bf16Part));
        }
        let mut medians = |works: &[Work], steps: usize| -> Result<std::vec::IntoIter<f64>> {
            let times = time_interleaved(gpu.stream(), self, works, TURNS, Layer::record)?;
            let one = |time: f32| f64::from(time) / steps as f64;
            let medians = times.into_iter().map(|times| median(times.into_iter().map(one).collect()));
            Ok(medians.collect::<Vec<f64>>().into_iter())
        };
        let (mut wholes, mut parts) = (medians(&wholes, STEPS)?, medians(&parts, 1)?);
        let mut next = |of: &[Part]| -> Option<Times> {
            let parts = of.iter().map(|&part| Some((part, parts.next()?)));
            Some(Times { parts: parts.collect::<Option<_>>()?, whole: wholes.next()? })
        };
        let ours = self.recipes.iter().map(|_| next(&Part::ALL)).collect::<Option<Vec<Times>>>();
        let ours = ours.context("a time for every piece of work")?;
        Ok((ours, if plain { next(&Part::PRODUCTS) } else { None }))
    }

    fn record(&mut self, stream: &Stream, work: Work) -> Result<()> {
        match work {
            Work::Whole(recipe) => (0..STEPS).try_for_each(|_| self.step(recipe)),
            Work::Part(recipe, Part::Quantize(slot)) => self.quantize(&self.recipes[recipe], slot).map(drop),
            Work::Part(recipe, part) => {
                let held = std::mem::take(&mut self.held);
                let Held { x, w, dy } = &held[recipe];
                let done = match part {
                    Part::Forward => self.multiply(recipe, part, x, w),
                    Part::InputGradient => self.multiply(recipe, part, dy, w),
                    _ => self.multiply(recipe, part, dy, x),
                };
                self.held = held;
                done
            }
            Work::Bf16 => (0..STEPS).flat_map(|_| Part::PRODUCTS).try_for_each(|part| self.multiply_bf16(stream, part)),
            Work::Bf16Part(part) => self.multiply_bf16(stream, part),
        }
    }

    /// Forward and backward.
    fn step(&mut self, recipe: usize) -> Result<()> {
        let quantizers = &self.recipes[recipe];
        let x = self.quantize(quantizers, LinearSlot::Input)?;
        let w = self.quantize(quantizers, LinearSlot::Weight)?;
        self.multiply(recipe, Part::Forward, &x, &w)?;
        let dy = self.quantize(quantizers, LinearSlot::GradOutput)?;
        self.multiply(recipe, Part::InputGradient, &dy, &w)?;
        self.multiply(recipe, Part::WeightGradient, &dy, &x)
    }

    /// Rows of the tensors' experts.
    fn tokens(&self, group: usize) -> Range<usize> {
        let each = self.sizes.m / self.sizes.groups;
        group * each..(group + 1) * each
    }

    /// One tensor of every expert.
    fn quantize(&self, quantizers: &Quantizers, slot: LinearSlot) -> Result<Vec<QuantTensor>> {
        let (Sizes { n, k, groups, .. }, quantizer) = (self.sizes, quantizers.of(slot));
        let one = |group: usize| -> Result<QuantTensor> {
            let (values, rows, cols) = match slot {
                LinearSlot::Input => (self.x.slice(), self.tokens(group), k),
                LinearSlot::Weight => (self.w.slice(), group * n..(group + 1) * n, k),
                _ => (self.dy.slice(), self.tokens(group), n),
            };
            let values = Values::Bf16(values.range(rows.start * cols..rows.end * cols));
            let randomness = (quantizer.rounding() == Rounding::Stochastic)
                .then_some(Randomness { seed: SEED, offset: Offset::Value(2 * group as u64) });
            let options = Options { randomness, ..Options::default() };
            Ok(quantizer.observe_on(&self.gpu, &Input::new(values, rows.len(), cols)?, &options)?.tensor)
        };
        (0..groups).map(one).collect()
    }

    /// One product of every expert.
    fn multiply(&mut self, recipe: usize, part: Part, a: &[QuantTensor], b: &[QuantTensor]) -> Result<()> {
        let (Sizes { m, n, k, groups }, sums) = (self.sizes, self.recipes[recipe].accumulators);
        let (out, (a_side, b_side), each, accumulator) = match part {
            Part::Forward => (&mut self.y, (Side::Row, Side::Row), m / groups * n, sums.fprop),
            Part::InputGradient => (&mut self.dx, (Side::Row, Side::Column), m / groups * k, sums.dgrad),
            _ => (&mut self.dw, (Side::Column, Side::Column), n * k, sums.wgrad),
        };
        let product = Product { accumulator, ..Product::default() };
        let mut rest = out.slice_mut();
        let mut members = Vec::with_capacity(groups);
        for (a, b) in a.iter().zip(b) {
            let (a, b): (&Direction, &Direction) = (a.direction(a_side)?, b.direction(b_side)?);
            let (out, after) = rest.split_at(each);
            members.push((a, b, product, out));
            rest = after;
        }
        Ok(self.gpu.matmul_grouped(members)?)
    }

    /// The same product by cuBLAS. It is given the elements in the order that it likes best, rows
    /// along the sum: a time, not a gradient.
    fn multiply_bf16(&mut self, stream: &Stream, part: Part) -> Result<()> {
        let Sizes { m, n, k, groups } = self.sizes;
        let cublas = self.cublas.as_ref().context("cuBLAS is missing")?;
        let tokens = m / groups;
        let (a, b, out, shape): (Slice<'_, bf16>, Slice<'_, bf16>, &mut Buffer<bf16>, _) = match part {
            Part::Forward => (self.x.slice(), self.w.slice(), &mut self.y, (tokens, n, k)),
            Part::InputGradient => (self.dy.slice(), self.w.slice(), &mut self.dx, (tokens, k, n)),
            _ => (self.dy.slice(), self.x.slice(), &mut self.dw, (n, k, tokens)),
        };
        for group in 0..groups {
            let part = |each: usize| group * each..(group + 1) * each;
            let (a, b) = (a.range(part(shape.0 * shape.2)), b.range(part(shape.1 * shape.2)));
            let out = out.slice_mut().range(part(shape.0 * shape.1));
            cublas.matmul_bf16(stream, a, b, shape, out, &Pool)?;
        }
        Ok(())
    }
}

/// Standard normal values, whose rows repeat after [`GENERATED`].
fn generated(stream: &Stream, rows: usize, cols: usize, seed: u64) -> Result<Buffer<bf16>> {
    let some = crate::normal::standard::<bf16>(rows.min(GENERATED), cols, seed)?;
    let mut buffer = stream.device().alloc::<bf16>(rows * cols)?;
    for start in (0..rows).step_by(GENERATED) {
        let len = (rows - start).min(GENERATED) * cols;
        stream.upload(&some[..len], buffer.slice_mut().range(start * cols..start * cols + len))?;
    }
    Ok(buffer)
}
