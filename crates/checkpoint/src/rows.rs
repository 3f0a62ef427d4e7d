//! Writes some rows of a weight, in their new form, to their place in the output.

use super::action::Action;
use super::comfyui;
use super::conversion::Conversion;
use super::eight::Arithmetic;
use super::first_not_finite;
use super::folder::Located;
use super::form::Eight;
use super::fp8;
use super::measure::Measure;
use super::mxfp4;
use super::plan::Item;
use super::shards::{Cast, Placed, RowOrder};
use super::sink::Sink;
use super::target::Target;
use super::transpose::transpose;
use super::weighing::Codes;
use super::weight::{Buffer, MX_BLOCK, Stored, sized};
use super::written::Role;
use crate::{Decoding, Error, Result};
use half::{bf16, f16};
use nvfp4::{GlobalScale, Layout, Precision};
use nvfp4_kernels::quantize::{self as kernel, Amax, Direction};
use nvfp4_kernels::{Input, Values, dequantize, gguf, gptq, rescale, weighted};
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit as ScaleUnit;
use nvfp4_spec::{BLOCK, Rounding, e4m3, e8m0};
use safetensors::Dtype;
use std::ops::Range;

/// A thread's memory.
#[derive(Default)]
pub(super) struct Memory {
    pub source: Buffer,
    pub codes: Vec<u8>,
    pub exponents: Vec<u8>,
    scales: Vec<u8>,
    /// What is known of a layer's inputs.
    moments: Vec<f32>,
    decoded: Vec<f32>,
    /// Scales of FP8.
    floats: Vec<f32>,
    bytes: Vec<u8>,
    ordered: Vec<u8>,
}

/// Elements that are decoded at a time to be measured.
const DECODED: usize = 1 << 15;

/// Some of the values.
fn part_of<'v>(values: &Values<'v>, range: Range<usize>) -> Values<'v> {
    match values {
        Values::F32(x) => Values::F32(&x[range]),
        Values::Bf16(x) => Values::Bf16(&x[range]),
        Values::F16(x) => Values::F16(&x[range]),
    }
}

/// Some rows of a weight, and where they go.
pub(super) struct Piece<'c, 'p> {
    pub item: &'c Item<'p>,
    pub rows: &'c Range<usize>,
    pub sink: &'c Sink,
    pub to: &'c Placed<'p>,
    pub codes: Codes<'c>,
}

impl Conversion<'_, '_> {
    /// Writes some rows of a weight. Returns their error where their numbers are not the source's.
    pub fn write_rows(&self, piece: &Piece<'_, '_>, memory: &mut Memory) -> Result<Measure> {
        let Piece { item, rows, .. } = *piece;
        let weight = &item.weight;
        match (&item.action, &weight.stored) {
            (Action::Keep(_), Stored::Plain(tensor)) => {
                let row = weight.cols * tensor.info.dtype.bitsize() / 8;
                copy(tensor, &(rows.start * row..rows.end * row), piece.sink, piece.to, memory)?;
                Ok(Measure::default())
            }
            (Action::Keep(_) | Action::Decode(_), _) => self.decode(piece, memory),
            (Action::Eight(eight), _) => self.eight(piece, *eight, memory),
            // Its scales are written with the numbers of the whole weight.
            (Action::Retain(_) | Action::RetainMxFp4, stored) => {
                let row = if item.action == Action::RetainMxFp4 { weight.cols / 2 } else { weight.cols };
                let (at, len) = ((rows.start * row) as u64, rows.len() * row);
                stored.first().read(at, sized(&mut memory.bytes, len))?;
                piece.sink.write_at(&memory.bytes, piece.to.offsets[&Role::Codes] + at)?;
                Ok(Measure::default())
            }
            (Action::Relabel, Stored::Nvfp4(source)) => {
                source.codes_and_scales(rows.clone(), weight.cols, &mut memory.codes, &mut memory.scales)?;
                self.emit(piece, memory)?;
                Ok(Measure::default())
            }
            (Action::Quantize | Action::Relabel | Action::Rescale, _) => {
                let mut buffer = std::mem::take(&mut memory.source);
                let values = weight.values(rows.clone(), &mut buffer)?;
                let (stored, unit) = match &weight.stored {
                    Stored::MxFp4 { .. } => (self.cast(item, rows, memory)?, ScaleUnit::Multiplier),
                    Stored::Nvfp4(source) => {
                        source.codes_and_scales(rows.clone(), weight.cols, &mut memory.codes, &mut memory.scales)?;
                        let matrix = rows.start / weight.matrix_rows();
                        let shared = self.rescaled(item).expect("a rescaled weight is in a rescaled group");
                        let (from, to) = (source.global(matrix)?, shared[matrix]);
                        rescale::rescale(
                            self.settings.implementation,
                            &mut memory.codes,
                            &mut memory.scales,
                            from,
                            to,
                            source.unit,
                        )?;
                        (to, source.unit)
                    }
                    _ => {
                        let (amax, profile) = (self.amax(item), self.mode.profile);
                        self.quantize(piece, &values, amax, memory)?;
                        (
                            profile.stored(amax, self.mode.rule.bound(), weight.precision()),
                            profile.unit(self.mode.rule.bound()),
                        )
                    }
                };
                self.emit(piece, memory)?;
                let mut measure = self.measure(&values, (rows.len(), weight.cols), stored, unit, memory)?;
                if matches!(piece.codes, Codes::Unfactored) {
                    measure.unfactored = measure.elements;
                }
                memory.source = buffer;
                Ok(measure)
            }
        }
    }

    /// Rows in FP8.
    fn eight(&self, piece: &Piece<'_, '_>, eight: Eight, memory: &mut Memory) -> Result<Measure> {
        let Piece { item, rows, sink, to, .. } = *piece;
        let weight = &item.weight;
        let Memory { source, codes, floats, decoded, bytes, .. } = memory;
        let values = weight.values(rows.clone(), source)?;
        if (0..values.len()).any(|i| !values.get(i).is_finite()) {
            return Err(first_not_finite(weight, rows.start, &values));
        }
        let rules = Arithmetic::new(self.settings.target, weight, eight);
        let tensor = if eight == Eight::Tensor { rules.scale(self.amax(item)) } else { 1.0 };
        rules.quantize(&values, weight.cols, tensor, codes, floats);
        sink.write_at(codes, to.offsets[&Role::Codes] + (rows.start * weight.cols) as u64)?;
        rules.stored(floats, bytes);
        let [before, wide] = eight.scales(rows.start, weight.cols);
        let before = if eight == Eight::Tensor { 0 } else { before * wide };
        // Every piece of a tensor has the same scale.
        sink.write_at(bytes, to.offsets[&Role::Scales] + (before * rules.scale_bytes()) as u64)?;
        let decoded = sized(decoded, values.len());
        fp8::decode(eight, rows.start, weight.cols, codes, floats, decoded);
        Ok(Measure::of(&values, decoded))
    }

    /// The error of the codes and scales that are in memory.
    fn measure(
        &self,
        values: &Values<'_>,
        (rows, cols): (usize, usize),
        stored: f32,
        unit: ScaleUnit,
        memory: &mut Memory,
    ) -> Result<Measure> {
        let Memory { codes, scales, decoded, .. } = memory;
        // On a CPU a few rows at a time, which stay in its cache.
        let step = match self.settings.implementation.is_gpu() {
            true => rows,
            false => (DECODED / cols.max(1)).max(1),
        };
        let mut measure = Measure::default();
        for first in (0..rows).step_by(step.max(1)) {
            let rows = step.min(rows - first);
            let decoded = sized(decoded, rows * cols);
            let codes = &codes[first * cols / 2..][..rows * cols / 2];
            let scales = &scales[first * cols / BLOCK..][..rows * cols / BLOCK];
            let view = View { rows, cols, codes, scales, stored: &[stored], global: GlobalScale::PerTensor, unit };
            dequantize::dequantize(self.settings.implementation, &view, decoded)?;
            measure.add(&Measure::of(&part_of(values, first * cols..(first + rows) * cols), decoded));
        }
        Ok(measure)
    }

    /// Writes the codes and scales that are in memory, as the target has them.
    fn emit(&self, piece: &Piece<'_, '_>, memory: &mut Memory) -> Result<()> {
        let Piece { item, rows, sink, to, .. } = *piece;
        let (cols, count) = (item.weight.cols, rows.len());
        let Memory { codes, scales, bytes, ordered, .. } = memory;
        if let Some(&start) = to.offsets.get(&Role::Blocks) {
            let row = nvfp4_spec::gguf::packed_len(1, cols)?;
            gguf::pack(self.settings.implementation, codes, scales, count, cols, sized(bytes, count * row))
                .map_err(|error| scale_not_held(piece, error))?;
            let at = start + (rows.start * row) as u64;
            return sink.write_at(in_order(to.order, bytes, row, ordered), at);
        }
        if self.settings.target == Target::ComfyUi {
            comfyui::swap(codes, ordered);
            sink.write_at(ordered, to.offsets[&Role::Codes] + (rows.start * cols / 2) as u64)?;
            comfyui::tile(self.settings.implementation, (count, cols), scales, bytes)?;
            let [before, wide] = comfyui::scales(rows.start, cols);
            return sink.write_at(bytes, to.offsets[&Role::Scales] + (before * wide) as u64);
        }
        for (role, bytes, row) in [(Role::Codes, &*codes, cols / 2), (Role::Scales, &*scales, cols / BLOCK)] {
            let start = to.offsets[&role];
            match item.weight.is_transposed() {
                true => write_transposed(piece, bytes, 1, start, ordered)?,
                false => sink.write_at(bytes, start + (rows.start * row) as u64)?,
            }
        }
        Ok(())
    }

    /// Rows in the type of decoded weights, or in F32 where the target wants that. Returns what
    /// rounding did to them.
    fn decode(&self, piece: &Piece<'_, '_>, memory: &mut Memory) -> Result<Measure> {
        let Piece { item, rows, sink, to, .. } = *piece;
        let (weight, start) = (&item.weight, to.offsets[&Role::Whole]);
        let precision = match to.cast {
            Cast::None => self.settings.target.decoded(),
            Cast::F32 => Precision::F32,
        };
        let Memory { source, decoded, bytes, ordered, .. } = memory;
        let values = weight.values(rows.clone(), source)?;
        decoded.clear();
        decoded.extend((0..values.len()).map(|i| precision.round(values.get(i))));
        if let Some(at) = (0..values.len()).find(|&i| decoded[i].is_infinite() && values.get(i).is_finite()) {
            return Err(Error::WeightDoesNotFit {
                module: weight.module.clone(),
                row: rows.start + at / weight.cols,
                col: at % weight.cols,
                value: values.get(at),
                precision,
                decoding: match self.settings.target {
                    Target::Plain(_) => Decoding::All,
                    _ => Decoding::Rest,
                },
            });
        }
        bytes.clear();
        match precision {
            Precision::F32 => bytes.extend(decoded.iter().flat_map(|x| x.to_le_bytes())),
            Precision::Bf16 => bytes.extend(decoded.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
            Precision::F16 => bytes.extend(decoded.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        }
        let size = if precision == Precision::F32 { 4 } else { 2 };
        if weight.is_transposed() {
            write_transposed(piece, bytes, size, start, ordered)?;
        } else {
            let row = weight.cols * size;
            sink.write_at(in_order(to.order, bytes, row, ordered), start + (rows.start * row) as u64)?;
        }
        Ok(Measure::of(&values, decoded))
    }

    /// Rows of MXFP4 become the same codes with other scales, in memory. Returns their tensor
    /// scale.
    fn cast(&self, item: &Item<'_>, rows: &Range<usize>, memory: &mut Memory) -> Result<f32> {
        let weight = &item.weight;
        let Memory { codes, exponents, scales, .. } = memory;
        weight.mxfp4(rows.clone(), codes, exponents)?;
        if let Some(at) = exponents.iter().position(|&e| e == e8m0::NAN_BYTE) {
            let blocks = weight.cols / MX_BLOCK;
            let (row, col) = (rows.start + at / blocks, at % blocks * MX_BLOCK);
            return Err(Error::WeightNotFinite { module: weight.module.clone(), row, col, value: f32::NAN });
        }
        let top = self.found(item, rows.start / weight.matrix_rows());
        mxfp4::cast(codes, exponents, top, sized(scales, rows.len() * weight.cols / BLOCK));
        Ok(mxfp4::scale(top))
    }

    /// Codes and scales of some rows, in memory.
    fn quantize(&self, piece: &Piece<'_, '_>, values: &Values<'_>, amax: f32, memory: &mut Memory) -> Result<()> {
        let (rows, cols) = (piece.rows.len(), piece.item.weight.cols);
        let Memory { codes, scales, moments, .. } = memory;
        let (codes, scales) = (sized(codes, rows * cols / 2), sized(scales, rows * cols / BLOCK));
        let input = Input::new(*values, rows, cols)?;
        match self.weighing.weighting(piece.item, moments)? {
            Some(weighting) => weighted::quantize(&input, amax, &self.mode, weighting, codes, scales)?,
            None => {
                let direction = Direction {
                    mode: self.mode,
                    rounding: Rounding::NearestEven,
                    transform: None,
                    layout: Layout::Linear,
                    amax: Amax::Given(&[amax]),
                    codes,
                    scales,
                };
                kernel::quantize(self.settings.implementation, &input, Some(direction), None)?;
            }
        }
        if let Codes::Mended(factor) = piece.codes {
            gptq::codes(&input, amax, &self.mode, factor, &memory.scales, &mut memory.codes)?;
        }
        Ok(())
    }

    /// The rows of a weight in pieces of bounded size, each within one matrix, and of whole heads
    /// where they are reordered.
    pub fn pieces(&self, item: &Item<'_>, order: RowOrder) -> impl Iterator<Item = Range<usize>> + use<> {
        let weight = &item.weight;
        // GPTQ has rows in memory once more, and a factor.
        let share = if self.weighing.hessian_of(item).is_some() { 3 } else { 1 };
        let rows = (self.settings.piece() / share / weight.cols.max(1)).max(1);
        let rows = match order {
            // A block of FP8 is made as a whole.
            RowOrder::AsStored if item.action == Action::Eight(Eight::Block) => {
                (rows / Eight::BLOCK).max(1) * Eight::BLOCK
            }
            // So are scales in tiles.
            RowOrder::AsStored if self.settings.target == Target::ComfyUi && item.action.is_quantized() => {
                (rows / comfyui::ROWS).max(1) * comfyui::ROWS
            }
            RowOrder::AsStored => rows,
            RowOrder::Interleaved(head) => (rows / head).max(1) * head,
        };
        let matrix = weight.matrix_rows();
        // A weight without columns may claim any number of rows, and has nothing to write.
        (0..if weight.elements() == 0 { 0 } else { weight.matrices() })
            .flat_map(move |m| ranges(matrix, rows).map(move |r| m * matrix + r.start..m * matrix + r.end))
    }

    /// The bytes of another tensor in pieces.
    pub fn byte_pieces(&self, tensor: &Located<'_>, order: RowOrder) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = tensor.info.len as usize;
        // Elements have at most 8 bytes, and what is reordered is one number per row.
        ranges(len, if order == RowOrder::AsStored { self.settings.piece() * 2 } else { len.max(1) })
    }
}

/// The error of packing, with the weight and the place of a block scale that GGUF cannot hold.
fn scale_not_held(piece: &Piece<'_, '_>, error: nvfp4_kernels::Error) -> Error {
    let nvfp4_kernels::Error::Rule(nvfp4_spec::Error::ScaleByte { index, byte }) = error else {
        return error.into();
    };
    let (weight, blocks) = (&piece.item.weight, piece.item.weight.cols / BLOCK);
    let (row, block) = (piece.rows.start + index / blocks, index % blocks);
    Error::Refused(format!(
        "weight '{}' has the block scale {} (byte {byte:#04x}) at row {row}, block {block}; GGUF has \
         only finite scales that are not negative: repair the checkpoint, and start over",
        weight.module,
        e4m3::decode(byte)
    ))
}

/// Copies a range of a tensor's bytes, in F32 where the target wants that, and in its order.
pub(super) fn copy(
    tensor: &Located<'_>,
    range: &Range<usize>,
    sink: &Sink,
    to: &Placed<'_>,
    memory: &mut Memory,
) -> Result<()> {
    let Memory { bytes, ordered, codes: wide, .. } = memory;
    tensor.read(range.start as u64, sized(bytes, range.len()))?;
    let size = tensor.info.dtype.bitsize() / 8;
    let (bytes, out) = match to.cast {
        Cast::None => (bytes, size),
        Cast::F32 => {
            widen(tensor.info.dtype, bytes, wide);
            (wide, 4)
        }
    };
    let cols = if let [_, cols] = tensor.info.shape[..] { cols } else { 1 };
    // Types of less than a byte are not cast.
    let at = if to.cast == Cast::None { range.start } else { range.start / size * out };
    sink.write_at(in_order(to.order, bytes, cols * out, ordered), to.offsets[&Role::Whole] + at as u64)
}

/// Floats as F32.
fn widen(dtype: Dtype, bytes: &[u8], wide: &mut Vec<u8>) {
    wide.clear();
    match dtype {
        Dtype::BF16 => {
            wide.extend(bytes.as_chunks().0.iter().flat_map(|&b| bf16::from_le_bytes(b).to_f32().to_le_bytes()))
        }
        Dtype::F16 => {
            wide.extend(bytes.as_chunks().0.iter().flat_map(|&b| f16::from_le_bytes(b).to_f32().to_le_bytes()))
        }
        _ => wide.extend_from_slice(bytes),
    }
}

/// Rows of `row` bytes in the order of the target. Of a head with halves a and b, the order is a₀
/// b₀ a₁ b₁ ….
fn in_order<'m>(order: RowOrder, bytes: &'m [u8], row: usize, ordered: &'m mut Vec<u8>) -> &'m [u8] {
    let RowOrder::Interleaved(head) = order else { return bytes };
    ordered.clear();
    for head in bytes.chunks_exact(head * row) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            ordered.extend_from_slice(a);
            ordered.extend_from_slice(b);
        }
    }
    ordered
}

/// Writes rows (of one matrix, in elements of `size` bytes) as columns: where inputs come before
/// outputs.
fn write_transposed(
    piece: &Piece<'_, '_>,
    bytes: &[u8],
    size: usize,
    start: u64,
    transposed: &mut Vec<u8>,
) -> Result<()> {
    let Piece { item, rows, sink, .. } = *piece;
    let (outputs, count) = (item.weight.matrix_rows(), rows.len());
    let width = bytes.len() / size / count.max(1);
    let transposed = sized(transposed, bytes.len());
    transpose(bytes, count, width, size, transposed);
    let (matrix, first) = (rows.start / outputs, rows.start % outputs);
    let at = |column: usize| start + (((matrix * width + column) * outputs + first) * size) as u64;
    match count == outputs {
        true => sink.write_at(transposed, at(0))?,
        false => (0..width).try_for_each(|c| sink.write_at(&transposed[c * count * size..][..count * size], at(c)))?,
    }
    Ok(())
}

/// `0..len` in ranges of `step`.
fn ranges(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step.max(1)).map(move |start| start..(start + step).min(len))
}
