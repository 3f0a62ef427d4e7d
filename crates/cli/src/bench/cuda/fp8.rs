//! FP8 and MXFP8 on the GPU: the operations of [`operations_of_fp8`], everything in its memory.

use super::operations_of_fp8::{Kind, Operation, Results, Run, Scale};
use super::{Bench, POISON, Row, maxima, tbps};
use anyhow::{Context, Result, ensure};
use nvfp4_kernels::cuda::{Buffer, Device, Input, SliceMut, Stream, Values};
use nvfp4_kernels::fp8::cuda as fp8;
use nvfp4_kernels::{self as kernels, Implementation};
use nvfp4_spec::Specials;
use nvfp4_spec::fp8::{AmaxRule, Mode, ScaleVec, Scales, Scaling, Side, Tile};
use std::ops::Range;

/// The outputs of operations, those of all sets one after the other.
pub struct Outputs {
    row: Direction,
    col: Direction,
    /// The amax and the scale that operations are given, and the amax that they find.
    amax: Buffer<f32>,
    scale: Buffer<f32>,
    found: Buffer<f32>,
}

struct Direction {
    codes: Buffer<u8>,
    wide: Buffer<f32>,
    bytes: Buffer<u8>,
}

impl Outputs {
    /// For matrices of `rows` × `cols`.
    pub fn new(device: Device, rows: usize, cols: usize, sets: usize) -> Result<Self> {
        let direction = |(rows, cols): (usize, usize), mx: Tile, shape: (usize, usize)| -> Result<Direction> {
            Ok(Direction {
                codes: device.alloc(sets * rows * cols)?,
                wide: device.alloc(sets * Tile::Row128.scale_count(rows, cols)?)?,
                bytes: device.alloc(sets * mx.scale_count(shape.0, shape.1)?)?,
            })
        };
        Ok(Outputs {
            row: direction((rows, cols), Tile::Row32, (rows, cols))?,
            col: direction((cols, rows), Tile::Column32, (rows, cols))?,
            amax: device.alloc(1)?,
            scale: device.alloc(1)?,
            found: device.alloc(1)?,
        })
    }
}

impl Direction {
    /// The part of a set, as what a quantization writes: `elements` of all sets, and as many scales
    /// as the mode has for `shape`.
    fn part(
        &mut self,
        mode: &Mode,
        side: Side,
        shape: (usize, usize),
        set: usize,
        elements: Range<usize>,
    ) -> Result<fp8::Direction<'_>> {
        let count = scale_count(mode, side, shape)?;
        let range = set * count..(set + 1) * count;
        let scales = match mode.scaling {
            Scaling::Mx | Scaling::MxSquare => Scales::E8m0(self.bytes.slice_mut().range(range)),
            _ => Scales::F32(self.wide.slice_mut().range(range)),
        };
        Ok(fp8::Direction { codes: self.codes.slice_mut().range(elements), scales })
    }

    fn poison(&mut self, stream: &Stream, elements: usize) -> Result<()> {
        stream.fill_bytes(self.codes.slice_mut().range(0..elements), POISON)?;
        stream.fill_bytes(self.wide.slice_mut(), POISON)?;
        Ok(stream.fill_bytes(self.bytes.slice_mut(), POISON)?)
    }

    /// An error unless the first set begins with these results.
    fn check_equal(&self, stream: &Stream, codes: &[u8], scales: &ScaleVec) -> Result<()> {
        let got = stream.to_host(self.codes.slice().range(0..codes.len()))?;
        let wrong = got.iter().zip(codes).position(|(a, b)| a != b);
        if let Some(at) = wrong {
            anyhow::bail!("code {at} is {:#04x} instead of {:#04x}", got[at], codes[at]);
        }
        let same = match scales {
            Scales::F32(scales) => stream.to_host(self.wide.slice().range(0..scales.len()))? == *scales,
            Scales::E8m0(scales) => stream.to_host(self.bytes.slice().range(0..scales.len()))? == *scales,
        };
        ensure!(same, "scales differ");
        Ok(())
    }
}

fn scale_count(mode: &Mode, side: Side, shape: (usize, usize)) -> Result<usize> {
    let (rows, cols) = mode.shape(side, shape);
    Ok(mode.tile(side).scale_count(rows, cols)?)
}

impl Bench {
    /// Runs an operation on the first `rows` rows, with its outputs poisoned, and compares with an
    /// implementation of the CPU.
    pub fn check_fp8(&mut self, operation: &Operation, rows: usize, reference: Implementation) -> Result<()> {
        let (shape, elements) = ((rows, self.cols), 0..rows * self.cols);
        let x = &self.host[elements.clone()];
        let mut amax = 0.0;
        let wanted = kernels::amax::Outputs { tensor: Some(&mut amax), ..Default::default() };
        let input = kernels::Input::new(kernels::Values::Bf16(x), rows, self.cols)?;
        kernels::amax::amax(reference, &input, Specials::Kernel, wanted)?;
        let mut run = Run::new(operation, reference, x, shape, amax)?;
        run.once()?;
        let Results { row, col, amax: found, bf16s, f32s } = &run.results;

        let outputs = self.fp8.as_mut().context("FP8 was not asked for")?;
        outputs.row.poison(&self.stream, elements.len())?;
        outputs.col.poison(&self.stream, elements.len())?;
        self.give_fp8(operation, amax)?;
        let (stream, mode) = (&self.stream, operation.mode(amax));
        match operation.kind {
            Kind::Rows | Kind::Both => {
                self.quantize_fp8(operation, &mode, 0, rows)?;
                let outputs = self.fp8.as_ref().context("FP8 was not asked for")?;
                outputs.row.check_equal(&self.stream, &row.codes, &row.scales).context("row direction")?;
                if let Some(col) = col {
                    outputs.col.check_equal(&self.stream, &col.codes, &col.scales).context("column direction")?;
                }
                if operation.scaling == Scale::Delayed {
                    let got = self.stream.to_host(outputs.found.slice())?[0];
                    ensure!(got.to_bits() == found.to_bits(), "amax {got} instead of {found}");
                }
            }
            Kind::DequantizeBf16 => {
                stream.fill_bytes(self.copy.slice_mut().range(elements.clone()), POISON)?;
                self.quantize_fp8(operation, &mode, 0, rows)?;
                self.dequantize_fp8(operation, &mode, 0, rows)?;
                ensure!(self.stream.to_host(self.copy.slice().range(elements))? == *bf16s, "values differ");
            }
            Kind::DequantizeF32 => {
                stream.fill_bytes(self.decoded.slice_mut().range(elements.clone()), POISON)?;
                self.quantize_fp8(operation, &mode, 0, rows)?;
                self.dequantize_fp8(operation, &mode, 0, rows)?;
                ensure!(self.stream.to_host(self.decoded.slice().range(elements))? == *f32s, "values differ");
            }
        }
        Ok(())
    }

    /// `copy` is the copy's TB/s.
    pub fn time_fp8(&mut self, operation: &Operation, copy: f64) -> Result<Row> {
        // What the operation is given.
        self.amax(0, self.rows)?;
        let amax = self.stream.to_host(self.row.amax.slice().range(0..1))?[0];
        self.give_fp8(operation, amax)?;
        let mode = operation.mode(amax);
        let decodes = matches!(operation.kind, Kind::DequantizeBf16 | Kind::DequantizeF32);
        if decodes {
            (0..self.sets).try_for_each(|set| self.quantize_fp8(operation, &mode, set, self.rows))?;
        }
        let us = self.time(|bench, set| match decodes {
            true => bench.dequantize_fp8(operation, &mode, set, bench.rows),
            false => bench.quantize_fp8(operation, &mode, set, bench.rows),
        })?;
        let bytes = least_bytes(operation, (self.rows, self.cols))?;
        let amax = match (operation.scaling, decodes) {
            (Scale::Given, false) => Some("given"),
            (Scale::Current, false) => Some("computed"),
            _ => None,
        };
        let tbps = tbps(bytes, us);
        Ok(Row { name: operation.name, us, bytes, tbps, of_copy: tbps / copy, amax })
    }

    /// Gives an operation the amax of the matrix, and the scale that follows from it.
    fn give_fp8(&mut self, operation: &Operation, amax: f32) -> Result<()> {
        let outputs = self.fp8.as_mut().context("FP8 was not asked for")?;
        self.stream.upload(&[amax], outputs.amax.slice_mut())?;
        if let Scaling::Tensor { scale } = operation.mode(amax).scaling {
            self.stream.upload(&[scale], outputs.scale.slice_mut())?;
        }
        // Of delayed scaling: no step has seen anything yet.
        Ok(self.stream.upload(&[0.0], outputs.found.slice_mut())?)
    }

    fn quantize_fp8(&mut self, operation: &Operation, mode: &Mode, set: usize, rows: usize) -> Result<()> {
        let (range, shape) = (self.range(set, rows), (rows, self.cols));
        let outputs = self.fp8.as_mut().context("FP8 was not asked for")?;
        let x = Input::new(Values::Bf16(self.x.slice().range(range.clone())), rows, self.cols)?;
        if operation.scaling == Scale::Current {
            let wanted = maxima::Outputs { tensor: Some(outputs.amax.slice_mut()), ..Default::default() };
            maxima::amax(&self.stream, &x, Specials::Kernel, wanted)?;
        }
        let scaling = match operation.scaling {
            Scale::Given | Scale::Current => {
                let (amax, rule) = (outputs.amax.slice(), AmaxRule::CURRENT);
                fp8::Scaling::Tensor(fp8::Scale::OfAmax { amax, rule })
            }
            Scale::Delayed => fp8::Scaling::Tensor(fp8::Scale::Memory(outputs.scale.slice())),
            _ => fp8::Mode::from(*mode).scaling,
        };
        let both = operation.kind == Kind::Both;
        let found: &mut Buffer<f32> = &mut outputs.found;
        let wanted = fp8::Outputs {
            row: Some(outputs.row.part(mode, Side::Row, shape, set, range.clone())?),
            col: both.then(|| outputs.col.part(mode, Side::Column, shape, set, range)).transpose()?,
            amax: (operation.scaling == Scale::Delayed).then(|| fp8::Amax::Join(found.slice_mut())),
        };
        Ok(fp8::quantize(&self.stream, &x, &fp8::Mode { format: mode.format, scaling }, wanted)?)
    }

    /// Decodes what the row direction left in a set.
    fn dequantize_fp8(&mut self, operation: &Operation, mode: &Mode, set: usize, rows: usize) -> Result<()> {
        let (range, shape) = (self.range(set, rows), (rows, self.cols));
        let outputs = self.fp8.as_ref().context("FP8 was not asked for")?;
        let count = scale_count(mode, Side::Row, shape)?;
        let scales = set * count..(set + 1) * count;
        let view = fp8::View {
            rows,
            cols: self.cols,
            format: mode.format,
            tile: mode.tile(Side::Row),
            codes: outputs.row.codes.slice().range(range.clone()),
            scales: match mode.scaling {
                Scaling::Mx | Scaling::MxSquare => Scales::E8m0(outputs.row.bytes.slice().range(scales)),
                _ => Scales::F32(outputs.row.wide.slice().range(scales)),
            },
        };
        match operation.kind {
            Kind::DequantizeF32 => {
                let out: SliceMut<'_, f32> = self.decoded.slice_mut().range(range);
                fp8::dequantize(&self.stream, &view, out)?;
            }
            _ => fp8::dequantize(&self.stream, &view, self.copy.slice_mut().range(range))?,
        }
        Ok(())
    }
}

/// The bytes that an operation on a bf16 matrix cannot do without.
fn least_bytes(operation: &Operation, shape: (usize, usize)) -> Result<usize> {
    let (len, mode) = (shape.0 * shape.1, operation.mode(1.0));
    let quantized = |side| -> Result<usize> {
        let size = if mode.scaling.is_mx() { 1 } else { 4 };
        Ok(len + size * scale_count(&mode, side, shape)?)
    };
    let passes = if operation.scaling == Scale::Current { 2 } else { 1 };
    Ok(match operation.kind {
        Kind::Rows => passes * 2 * len + quantized(Side::Row)?,
        Kind::Both => passes * 2 * len + quantized(Side::Row)? + quantized(Side::Column)?,
        Kind::DequantizeBf16 => quantized(Side::Row)? + 2 * len,
        Kind::DequantizeF32 => quantized(Side::Row)? + 4 * len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fp8::select;

    /// At 16384 × 6144.
    #[test]
    fn least_bytes_count_the_matrix_the_codes_and_the_scales() {
        for (name, expected) in [
            ("quantize fp8-current amax-given", 302.0),
            ("quantize fp8-current", 503.0),
            ("quantize fp8-current both amax-given", 403.0),
            ("quantize fp8-1x128", 305.0),
            ("quantize fp8-128x128 both", 403.0),
            ("quantize mxfp8 both", 409.0),
            ("quantize mxfp8 32x32 both", 409.0),
            ("dequantize fp8-current f32", 503.0),
            ("dequantize mxfp8 bf16", 305.0),
        ] {
            let operation = *select(name).iter().find(|o| o.name == name).unwrap();
            let bytes = least_bytes(operation, (16384, 6144)).unwrap() as f64;
            assert_eq!((bytes / 1e6).round(), expected, "{name}");
        }
    }
}
