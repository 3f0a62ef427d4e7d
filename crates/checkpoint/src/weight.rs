//! A weight matrix on disk, whatever it is stored as, read row by row.

use super::folder::Located;
use super::form::Eight;
use super::fp8;
use super::mxfp4_values;
use super::transpose::transpose;
use crate::{Error, Result};
use half::{bf16, f16};
use nvfp4::{GlobalScale, Layout, Unit};
use nvfp4_kernels::{Implementation, Values, dequantize};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Precision, e8m0, swizzle};
use safetensors::Dtype;
use std::ops::Range;

/// Elements that share a scale in MXFP4.
pub(super) const MX_BLOCK: usize = 32;

/// Which nibble of a byte holds the even element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nibbles {
    /// The low one.
    EvenLow,
    /// The high one.
    EvenHigh,
}

/// The order of the elements of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Row by row: outputs before inputs.
    Rows,
    /// This many matrices, one after the other, inputs before outputs, as ModelOpt has experts in
    /// one tensor.
    Experts(usize),
}

/// The tensors of an NVFP4 weight.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4<'a> {
    /// Packed codes.
    pub codes: Located<'a>,
    /// Block scales.
    pub scales: Located<'a>,
    /// The tensor scale; 1 where there is none.
    pub global: Option<Located<'a>>,
    /// The activation scale.
    pub input: Option<Located<'a>>,
    /// The order of codes in a byte.
    pub nibbles: Nibbles,
    /// The order of scales.
    pub layout: Layout,
    /// What the tensor scale means.
    pub unit: Unit,
    /// The order of rows and columns.
    pub arrangement: Arrangement,
}

/// What a weight is stored as.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// BF16, F16 or F32.
    Plain(Located<'a>),
    /// FP8, MXFP8 among it.
    Fp8 {
        /// E4M3 values.
        weight: Located<'a>,
        /// What they are multiplied by.
        scale: Located<'a>,
        /// The activation scale.
        input: Option<Located<'a>>,
        /// Which of them share a scale.
        eight: Eight,
    },
    /// MXFP4: 32 codes and a power of two.
    MxFp4 {
        /// Packed codes.
        blocks: Located<'a>,
        /// E8M0 scales.
        scales: Located<'a>,
        /// One matrix, or experts one after the other. They are stored with outputs before inputs
        /// either way; ModelOpt's form of experts has inputs before outputs.
        arrangement: Arrangement,
    },
    /// NVFP4.
    Nvfp4(Nvfp4<'a>),
}

impl<'a> Stored<'a> {
    /// The largest of its tensors.
    pub fn first(&self) -> Located<'a> {
        match *self {
            Stored::Plain(tensor) => tensor,
            Stored::Fp8 { weight, .. } => weight,
            Stored::MxFp4 { blocks, .. } => blocks,
            Stored::Nvfp4(n) => n.codes,
        }
    }

    /// Its tensors, the largest first.
    pub fn parts(&self) -> Vec<Located<'a>> {
        match *self {
            Stored::Plain(tensor) => vec![tensor],
            Stored::Fp8 { weight, scale, input, .. } => {
                [Some(weight), Some(scale), input].into_iter().flatten().collect()
            }
            Stored::MxFp4 { blocks, scales, .. } => vec![blocks, scales],
            Stored::Nvfp4(n) => [Some(n.codes), Some(n.scales), n.global, n.input].into_iter().flatten().collect(),
        }
    }
}

/// A matrix that a module multiplies by.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    /// The module's name, without `.weight`.
    pub module: String,
    /// Rows: outputs.
    pub rows: usize,
    /// Columns: inputs, which blocks run along.
    pub cols: usize,
    /// What it is stored as.
    pub stored: Stored<'a>,
}

/// Memory that is reused from one read to the next.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    scales: Vec<u8>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
    f32: Vec<f32>,
}

impl Buffer {
    /// The most bytes that an element takes here while it is read.
    pub const BYTES_PER_ELEMENT: usize = 6;
}

/// `buffer` with this length, whatever it held.
pub(super) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::default());
    &mut buffer[..]
}

impl Weight<'_> {
    /// Codes and exponents of some rows of an MXFP4 weight; nothing for others.
    pub(super) fn mxfp4(&self, rows: Range<usize>, codes: &mut Vec<u8>, exponents: &mut Vec<u8>) -> Result<()> {
        if let Stored::MxFp4 { blocks, scales, .. } = &self.stored {
            blocks.read((rows.start * self.cols / 2) as u64, sized(codes, rows.len() * self.cols / 2))?;
            scales.read(
                (rows.start * self.cols / MX_BLOCK) as u64,
                sized(exponents, rows.len() * self.cols / MX_BLOCK),
            )?;
        }
        Ok(())
    }

    /// How many matrices it holds, one after the other, each with a tensor scale of its own.
    pub fn matrices(&self) -> usize {
        match &self.stored {
            Stored::MxFp4 { arrangement: Arrangement::Experts(experts), .. }
            | Stored::Nvfp4(Nvfp4 { arrangement: Arrangement::Experts(experts), .. }) => *experts,
            _ => 1,
        }
    }

    /// Rows of one of them. Where there are none, the shape still says how many each would have.
    pub(super) fn matrix_rows(&self) -> usize {
        let outputs = match &self.stored {
            Stored::MxFp4 { blocks, arrangement: Arrangement::Experts(0), .. } => blocks.info.shape.get(1),
            Stored::Nvfp4(Nvfp4 { codes, arrangement: Arrangement::Experts(0), .. }) => codes.info.shape.get(2),
            _ => return self.rows / self.matrices(),
        };
        outputs.copied().unwrap_or(0)
    }

    /// Whether it is written with inputs before outputs: experts in one tensor are.
    pub(super) fn is_transposed(&self) -> bool {
        match &self.stored {
            Stored::MxFp4 { arrangement, .. } => *arrangement != Arrangement::Rows,
            Stored::Nvfp4(parts) => parts.arrangement != Arrangement::Rows,
            Stored::Plain(_) | Stored::Fp8 { .. } => false,
        }
    }

    /// Its name as users write it: the module's.
    pub fn name(&self) -> &str {
        &self.module
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.rows as u64 * self.cols as u64
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> u64 {
        self.stored.parts().iter().map(|p| p.info.len).sum()
    }

    /// The type that its values are decoded to.
    pub fn precision(&self) -> Precision {
        match &self.stored {
            Stored::Plain(t) if t.info.dtype == Dtype::BF16 => Precision::Bf16,
            Stored::Plain(t) if t.info.dtype == Dtype::F16 => Precision::F16,
            _ => Precision::F32,
        }
    }

    /// The name of the format that it is stored in.
    pub fn format(&self) -> String {
        match &self.stored {
            Stored::Plain(t) => format!("{:?}", t.info.dtype),
            Stored::Fp8 { eight: Eight::Mx, .. } => "MXFP8".to_string(),
            Stored::Fp8 { .. } => "FP8".to_string(),
            Stored::MxFp4 { .. } => "MXFP4".to_string(),
            Stored::Nvfp4(_) => "NVFP4".to_string(),
        }
    }

    /// The values of some rows.
    ///
    /// FP8 is decoded as `fl(value · scale)` in binary32; MXFP4 exactly; NVFP4 as its dialect does.
    pub fn values<'b>(&self, rows: Range<usize>, buffer: &'b mut Buffer) -> Result<Values<'b>> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(Error::out_of_range(&rows, self.rows));
        }
        let len = rows.len() * self.cols;
        match &self.stored {
            Stored::Plain(t) => {
                let at = (rows.start * self.cols * t.info.dtype.bitsize() / 8) as u64;
                match t.info.dtype {
                    Dtype::BF16 => {
                        let values = sized(&mut buffer.bf16, len);
                        t.read(at, bytemuck::cast_slice_mut(values))?;
                        Ok(Values::Bf16(values))
                    }
                    Dtype::F16 => {
                        let values = sized(&mut buffer.f16, len);
                        t.read(at, bytemuck::cast_slice_mut(values))?;
                        Ok(Values::F16(values))
                    }
                    _ => {
                        let values = sized(&mut buffer.f32, len);
                        t.read(at, bytemuck::cast_slice_mut(values))?;
                        Ok(Values::F32(values))
                    }
                }
            }
            Stored::Fp8 { weight, scale, eight, .. } => {
                let bytes = sized(&mut buffer.bytes, len);
                weight.read((rows.start * self.cols) as u64, bytes)?;
                let [_, per_row] = eight.scales(1, self.cols);
                let bands = match eight {
                    Eight::Tensor => 0..1,
                    Eight::Channel | Eight::Mx => rows.clone(),
                    Eight::Block => rows.start / Eight::BLOCK..rows.end.div_ceil(Eight::BLOCK),
                };
                let scales = read_scales(scale, bands.start * per_row, bands.len() * per_row)?;
                let values = sized(&mut buffer.f32, len);
                fp8::decode(*eight, rows.start, self.cols, bytes, &scales, values);
                Ok(Values::F32(values))
            }
            Stored::MxFp4 { blocks, scales, .. } => {
                let codes = sized(&mut buffer.bytes, len / 2);
                blocks.read((rows.start * self.cols / 2) as u64, codes)?;
                let exponents = sized(&mut buffer.scales, len / MX_BLOCK);
                scales.read((rows.start * self.cols / MX_BLOCK) as u64, exponents)?;
                let values = sized(&mut buffer.f32, len);
                mxfp4_values::decode(codes, exponents, values);
                Ok(Values::F32(values))
            }
            Stored::Nvfp4(parts) => {
                let Buffer { bytes, scales, f32: values, .. } = buffer;
                let (values, cols, matrix) = (sized(values, len), self.cols, self.matrix_rows().max(1));
                let mut start = rows.start;
                while start < rows.end {
                    let end = rows.end.min((start / matrix + 1) * matrix);
                    parts.codes_and_scales(start..end, cols, bytes, scales)?;
                    let view = View {
                        rows: end - start,
                        cols,
                        codes: bytes,
                        scales,
                        stored: &[parts.global(start / matrix)?],
                        global: GlobalScale::PerTensor,
                        unit: parts.unit,
                    };
                    let out = &mut values[(start - rows.start) * cols..(end - rows.start) * cols];
                    dequantize::dequantize(Implementation::best(), &view, out)?;
                    start = end;
                }
                Ok(Values::F32(values))
            }
        }
    }
}

impl Nvfp4<'_> {
    /// The tensor scale of one of its matrices, as it is stored.
    pub fn global(&self, matrix: usize) -> Result<f32> {
        match self.global {
            None => Ok(1.0),
            // Several matrices may share one scale.
            Some(tensor) if tensor.info.len == 4 => float(&tensor, 0),
            Some(tensor) => float(&tensor, matrix),
        }
    }

    /// The tensor scales of all matrices of the weight that it belongs to.
    pub fn globals(&self, weight: &Weight<'_>) -> Result<Vec<f32>> {
        let count = weight.matrices();
        match self.global {
            // At once: a file may hold millions of small matrices.
            Some(tensor) if tensor.info.len != 4 => read_floats(&tensor, 0, count),
            _ => Ok(vec![self.global(0)?; count]),
        }
    }

    /// The activation scale as it is stored; a tensor of 0 experts has none.
    pub fn input(&self) -> Result<Option<f32>> {
        self.input.filter(|t| t.info.len > 0).map(|t| float(&t, 0)).transpose()
    }

    /// Bytes of some rows of a part that has `width` bytes for each, read from where inputs come
    /// before outputs.
    fn transposed(&self, part: &Located<'_>, rows: Range<usize>, width: usize, bytes: &mut Vec<u8>) -> Result<()> {
        let Arrangement::Experts(experts) = self.arrangement else { return Ok(()) };
        let (outputs, out) = (part.info.len as usize / (experts * width).max(1), sized(bytes, rows.len() * width));
        let (mut start, mut columns) = (rows.start, Vec::new());
        while start < rows.end {
            let (matrix, first) = (start / outputs, start % outputs);
            let count = (outputs - first).min(rows.end - start);
            let at = |column: usize| ((matrix * width + column) * outputs + first) as u64;
            let columns = sized(&mut columns, count * width);
            match count == outputs {
                true => part.read(at(0), columns)?,
                false => {
                    (0..width).try_for_each(|c| part.read(at(c), &mut columns[c * count..(c + 1) * count]))?;
                }
            }
            let to = &mut out[(start - rows.start) * width..][..count * width];
            transpose(columns, width, count, 1, to);
            start += count;
        }
        Ok(())
    }

    /// Codes (even element in the low nibble) and scales (row by row) of some rows.
    pub fn codes_and_scales(
        &self,
        rows: Range<usize>,
        cols: usize,
        codes: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) -> Result<()> {
        let end = rows.end.checked_mul(cols / 2).and_then(|bytes| u64::try_from(bytes).ok());
        if rows.start > rows.end || end.is_none_or(|end| end > self.codes.info.len) {
            let range = format!("it does not hold the rows {}..{} of {cols} columns", rows.start, rows.end);
            return Err(self.codes.wrong(range));
        }
        if self.arrangement != Arrangement::Rows {
            self.transposed(&self.codes, rows.clone(), cols / 2, codes)?;
            return self.transposed(&self.scales, rows, cols / BLOCK, scales);
        }
        let bytes = sized(codes, rows.len() * cols / 2);
        self.codes.read((rows.start * cols / 2) as u64, bytes)?;
        if self.nibbles == Nibbles::EvenHigh {
            bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
        }
        let blocks = cols / BLOCK;
        match self.layout {
            Layout::Linear => self.scales.read((rows.start * blocks) as u64, sized(scales, rows.len() * blocks))?,
            Layout::Swizzled => {
                // Whole tiles of 128 rows follow each other.
                let tile_row = swizzle::len(swizzle::TILE_ROWS, blocks)?;
                let tiles = rows.start / swizzle::TILE_ROWS..rows.end.div_ceil(swizzle::TILE_ROWS);
                let mut swizzled = vec![0; tiles.len() * tile_row];
                self.scales.read((tiles.start * tile_row) as u64, &mut swizzled)?;
                let first = tiles.start * swizzle::TILE_ROWS;
                let out = sized(scales, rows.len() * blocks);
                for (r, out) in rows.zip(out.chunks_exact_mut(blocks)) {
                    out.iter_mut().enumerate().for_each(|(c, s)| *s = swizzled[swizzle::offset(r - first, c, blocks)]);
                }
            }
        }
        Ok(())
    }
}

/// A number of a tensor of F32.
fn float(tensor: &Located<'_>, i: usize) -> Result<f32> {
    let mut bytes = [0; 4];
    tensor.read(4 * i as u64, &mut bytes)?;
    Ok(f32::from_le_bytes(bytes))
}

/// The only number of a tensor of floats.
pub(super) fn number(tensor: &Located<'_>) -> Result<f32> {
    Ok(read_floats(tensor, 0, 1)?[0])
}

/// Scales of FP8: floats, or powers of two in a byte.
fn read_scales(tensor: &Located<'_>, from: usize, len: usize) -> Result<Vec<f32>> {
    if !matches!(tensor.info.dtype, Dtype::U8 | Dtype::F8_E8M0) {
        return read_floats(tensor, from, len);
    }
    let mut bytes = vec![0; len];
    tensor.read(from as u64, &mut bytes)?;
    Ok(bytes.into_iter().map(e8m0::decode).collect())
}

/// Elements of a tensor of floats.
fn read_floats(tensor: &Located<'_>, from: usize, len: usize) -> Result<Vec<f32>> {
    let size = tensor.info.dtype.bitsize() / 8;
    let mut bytes = vec![0; len * size];
    tensor.read((from * size) as u64, &mut bytes)?;
    Ok(match size {
        2 if tensor.info.dtype == Dtype::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect()
        }
        2 => bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    })
}
