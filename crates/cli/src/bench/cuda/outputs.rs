//! What operations write on the GPU.

use crate::bench::operations::{Buffers, POISON, Settings, Side, Source};
use anyhow::Result;
use nvfp4_kernels::cuda::{Buffer, Plain, SliceMut, Stream};
use nvfp4_kernels::dequantize::cuda::{View, dequantize};
use nvfp4_kernels::quantize::Layout;
use nvfp4_kernels::quantize::cuda::{Amax, Direction, Offset, Random, Written};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Bound, Element, GlobalScale, Rounding};
use std::ops::Range;

/// A direction's results, those of all sets one after the other.
pub struct Outputs {
    pub codes: Buffer<u8>,
    pub scales: Buffer<u8>,
    /// Elements of a set, and bytes of its scales where they are swizzled.
    pub set: (usize, usize),
    /// One for all sets.
    pub amax: Buffer<f32>,
}

impl Outputs {
    /// The part that belongs to a range of elements of the input, as what a quantization writes: a
    /// direction of `rows` rows.
    pub fn direction(
        &mut self,
        settings: &Settings,
        side: Side,
        source: Source,
        rows: usize,
        range: Range<usize>,
    ) -> Result<Direction<'_>> {
        let count = settings.mode.global.count(rows);
        let scales = match settings.layout {
            Layout::Linear => scales(&range),
            Layout::Swizzled => {
                let start = range.start / self.set.0 * self.set.1;
                start..start + Layout::Swizzled.scale_len(rows, range.len() / rows.max(1))?
            }
        };
        Ok(Direction {
            mode: settings.mode,
            rounding: match settings.rounding(side) {
                Rounding::NearestEven => Rounding::NearestEven,
                Rounding::Stochastic(stream) => Rounding::Stochastic(Random::Stream {
                    seed: stream.seed,
                    offset: Offset::Value(stream.offset),
                    first_block: stream.first_block,
                }),
            },
            transform: settings.transform(side),
            layout: settings.layout,
            amax: match source {
                Source::Given => Amax::Given(self.amax.slice().range(0..count)),
                _ => Amax::Compute(self.amax.slice_mut().range(0..count)),
            },
            to: Written::Codes {
                codes: self.codes.slice_mut().range(codes(&range)),
                scales: self.scales.slice_mut().range(scales),
            },
        })
    }

    /// Decodes what [`PLAIN`] left in the part that belongs to a range of elements of the input.
    pub fn dequantize<T: Element + Plain>(
        &self,
        stream: &Stream,
        rows: usize,
        cols: usize,
        range: Range<usize>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        let view = View {
            rows,
            cols,
            codes: self.codes.slice().range(codes(&range)),
            scales: self.scales.slice().range(scales(&range)),
            layout: Layout::Linear,
            stored: self.amax.slice().range(0..1),
            global: GlobalScale::PerTensor,
            unit: Unit::Amax(Bound::E448),
        };
        Ok(dequantize(stream, &view, out)?)
    }

    /// Overwrites where results of the size of `like` will go in the first set, and every amax.
    pub fn poison(&mut self, stream: &Stream, like: &Buffers) -> Result<()> {
        stream.fill_bytes(self.codes.slice_mut().range(0..like.codes.len()), POISON)?;
        stream.fill_bytes(self.scales.slice_mut().range(0..like.scales.len()), POISON)?;
        // NaN.
        Ok(stream.fill_bytes(self.amax.slice_mut(), 0xFF)?)
    }

    /// Gives the amaxes that the CPU found.
    pub fn give(&mut self, stream: &Stream, settings: &Settings, found: &Buffers) -> Result<()> {
        let count = found.amax_count(settings);
        Ok(stream.upload(&found.amax[..count], self.amax.slice_mut().range(0..count))?)
    }

    /// An error unless the first set begins with these results.
    pub fn check_equal(&self, stream: &Stream, settings: &Settings, expected: &Buffers) -> Result<()> {
        let mut got = expected.new_like();
        let count = expected.amax_count(settings);
        stream.download(self.codes.slice().range(0..got.codes.len()), &mut got.codes)?;
        stream.download(self.scales.slice().range(0..got.scales.len()), &mut got.scales)?;
        stream.download(self.amax.slice().range(0..count), &mut got.amax[..count])?;
        got.check_equal(expected)
    }
}

/// Where the codes and the scales of a range of elements lie.
pub fn codes(elements: &Range<usize>) -> Range<usize> {
    elements.start / 2..elements.end / 2
}

pub fn scales(elements: &Range<usize>) -> Range<usize> {
    elements.start / 16..elements.end / 16
}
