//! A layer in the memory of a GPU.

use super::{Labels, Part, Printer, Quantizers, Sizes, Times};
use crate::bench::median;
use anyhow::{Context, Result};
use half::bf16;
use nvfp4::cuda::{
    Device, Gpu, GroupedTensor, Groups, Input, Offset, Options, Product, QuantTensor, Randomness, Values,
};
use nvfp4::{Rounding, Side};
use nvfp4_kernels::cuda::{Buffer, Recycled, Slice, Stream, time_interleaved};
use nvfp4_kernels::gemm::cuda::Cublas;
use nvfp4_recipe::LinearSlot;
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
        // Graphs that allocate take their time to do so, which frameworks with memory of their own
        // do not.
        let gpu = Arc::new(Gpu::with(Stream::new(device)?, Recycled::default()));
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
    /// Of the tokens, and of the weights.
    groups: [Arc<Groups>; 2],
    cublas: Option<Arc<Cublas>>,
    /// Of cuBLAS.
    scratch: Recycled,
}

/// The quantized tensors of a step.
struct Held {
    x: Tensor,
    w: Tensor,
    dy: Tensor,
}

/// A tensor, or those of all experts.
enum Tensor {
    One(QuantTensor),
    Experts(GroupedTensor),
}

impl<'a> Layer<'a> {
    fn new(gpu: Arc<Gpu>, sizes: Sizes, recipes: &'a [Quantizers], cublas: Option<Arc<Cublas>>) -> Result<Self> {
        let Sizes { m, n, k, groups, routed } = sizes;
        let device = gpu.stream().device();
        let tokens = if routed {
            gpu.groups_in_memory(gpu.upload(&vec![(m / groups) as u64; groups])?.slice(), m)?
        } else {
            gpu.groups(&vec![m / groups; groups])?
        };
        let mut layer = Layer {
            x: generated(gpu.stream(), m, k, 1)?,
            w: generated(gpu.stream(), groups * n, k, 2)?,
            dy: generated(gpu.stream(), m, n, 3)?,
            y: device.alloc(m * n)?,
            dx: device.alloc(m * k)?,
            dw: device.alloc(groups * n * k)?,
            groups: [tokens, gpu.groups(&vec![n; groups])?],
            gpu,
            sizes,
            recipes,
            held: Vec::new(),
            cublas,
            scratch: Recycled::default(),
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

    /// A tensor of the layer.
    fn quantize(&self, quantizers: &Quantizers, slot: LinearSlot) -> Result<Tensor> {
        let (Sizes { m, n, k, groups, routed }, quantizer) = (self.sizes, quantizers.of(slot));
        let [tokens, weights] = &self.groups;
        let (values, rows, cols, experts) = match slot {
            LinearSlot::Input => (self.x.slice(), m, k, tokens),
            LinearSlot::Weight => (self.w.slice(), groups * n, k, weights),
            _ => (self.dy.slice(), m, n, tokens),
        };
        let input = Input::new(Values::Bf16(values), rows, cols)?;
        let randomness = (quantizer.rounding() == Rounding::Stochastic)
            .then_some(Randomness { seed: SEED, offset: Offset::Value(0) });
        let options = Options { randomness, ..Options::default() };
        Ok(if groups == 1 && !routed {
            Tensor::One(quantizer.observe_on(&self.gpu, &input, &options)?.tensor)
        } else {
            Tensor::Experts(self.gpu.quantize_groups(quantizer, &input, experts, &options)?.tensor)
        })
    }

    /// A product of the layer.
    fn multiply(&mut self, recipe: usize, part: Part, a: &Tensor, b: &Tensor) -> Result<()> {
        let sums = self.recipes[recipe].accumulators;
        let (out, (a_side, b_side), accumulator) = match part {
            Part::Forward => (&mut self.y, (Side::Row, Side::Row), sums.fprop),
            Part::InputGradient => (&mut self.dx, (Side::Row, Side::Column), sums.dgrad),
            _ => (&mut self.dw, (Side::Column, Side::Column), sums.wgrad),
        };
        let product = Product { accumulator, ..Product::default() };
        match (a, b) {
            (Tensor::One(a), Tensor::One(b)) => {
                self.gpu.matmul(a.direction(a_side)?, b.direction(b_side)?, &product, out.slice_mut())?;
            }
            (Tensor::Experts(a), Tensor::Experts(b)) => {
                self.gpu.matmul_groups((a, a_side), (b, b_side), &product, out.slice_mut())?;
            }
            _ => unreachable!("a layer has experts or not"),
        }
        Ok(())
    }

    /// The same product by cuBLAS. It is given the elements in the order that it likes best, rows
    /// along the sum: a time, not a gradient.
    fn multiply_bf16(&mut self, stream: &Stream, part: Part) -> Result<()> {
        let Sizes { m, n, k, groups, .. } = self.sizes;
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
            cublas.matmul_bf16(stream, a, b, shape, out, &self.scratch)?;
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
