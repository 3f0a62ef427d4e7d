//! A weight matrix in memory, in the form that it has on disk, decoded a panel of rows at a time.

use crate::Result;
use half::{bf16, f16};
use nvfp4::{Direction, GlobalScale, Layout, Nvfp4Description, Nvfp4Direction, Product, Values, matmul};
use nvfp4_checkpoint::{Buffer, Stored, Weight};
use nvfp4_kernels::gemm::baseline;
use nvfp4_kernels::{Implementation, dequantize};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Precision};
use rayon::prelude::*;
use std::ops::Range;

/// Rows that are read at a time, so that a weight is not in memory twice.
const PIECE: usize = 1 << 20;
/// Elements of a panel of decoded weights.
pub(crate) const PANEL: usize = 1 << 21;

/// A matrix of outputs by inputs.
#[derive(Debug)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    elements: Elements,
}

/// What it holds.
#[derive(Debug)]
pub(crate) enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    Nvfp4(Direction),
}

impl Matrix {
    /// Reads rows of a weight. NVFP4 stays codes. FP8 becomes binary32, and MXFP4, of which bf16
    /// holds every value, bf16.
    pub fn read(weight: &Weight<'_>, rows: Range<usize>) -> Result<Self> {
        let elements = match &weight.stored {
            Stored::Nvfp4(parts) => {
                let (mut codes, mut scales) = (Vec::new(), Vec::new());
                parts.codes_and_scales(rows.clone(), weight.cols, &mut codes, &mut scales)?;
                let each = (weight.rows / weight.matrices().max(1)).max(1);
                let about = Nvfp4Description {
                    rows: rows.len(),
                    cols: weight.cols,
                    global: GlobalScale::PerTensor,
                    unit: parts.unit,
                    rotation: None,
                    layout: Layout::Linear,
                };
                let stored = vec![parts.global(rows.start / each)?];
                Elements::Nvfp4(Direction::Nvfp4(Nvfp4Direction::from_parts(about, codes, scales, stored)?))
            }
            _ => Self::read_values(weight, rows.clone())?,
        };
        Ok(Matrix { rows: rows.len(), cols: weight.cols, elements })
    }

    fn read_values(weight: &Weight<'_>, rows: Range<usize>) -> Result<Elements> {
        let (mut buffer, step) = (Buffer::default(), (PIECE / weight.cols.max(1)).max(1));
        let len = rows.len() * weight.cols;
        let mut elements = match (&weight.stored, weight.precision()) {
            (Stored::MxFp4 { .. }, _) | (_, Precision::Bf16) => Elements::Bf16(Vec::with_capacity(len)),
            (_, Precision::F16) => Elements::F16(Vec::with_capacity(len)),
            (_, Precision::F32) => Elements::F32(Vec::with_capacity(len)),
        };
        for start in rows.clone().step_by(step) {
            let values = weight.values(start..rows.end.min(start + step), &mut buffer)?;
            match (&mut elements, values) {
                (Elements::Bf16(to), Values::Bf16(from)) => to.extend_from_slice(from),
                (Elements::F16(to), Values::F16(from)) => to.extend_from_slice(from),
                (Elements::F32(to), Values::F32(from)) => to.extend_from_slice(from),
                (Elements::Bf16(to), from) => to.extend((0..from.len()).map(|i| bf16::from_f32(from.get(i)))),
                (Elements::F16(to), from) => to.extend((0..from.len()).map(|i| f16::from_f32(from.get(i)))),
                (Elements::F32(to), from) => to.extend((0..from.len()).map(|i| from.get(i))),
                (Elements::Nvfp4(_), _) => unreachable!("codes are read elsewhere"),
            }
        }
        Ok(elements)
    }

    /// A matrix of binary32 numbers, outputs by inputs.
    pub fn new(values: Vec<f32>, cols: usize) -> Self {
        Matrix { rows: values.len() / cols.max(1), cols, elements: Elements::F32(values) }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> usize {
        match &self.elements {
            Elements::F32(values) => 4 * values.len(),
            Elements::Bf16(values) => 2 * values.len(),
            Elements::F16(values) => 2 * values.len(),
            Elements::Nvfp4(direction) => direction.byte_len(),
        }
    }

    /// Its codes, where it is NVFP4.
    pub fn codes(&self) -> Option<&Direction> {
        match &self.elements {
            Elements::Nvfp4(direction) => Some(direction),
            _ => None,
        }
    }

    /// What it holds.
    #[cfg(feature = "cuda")]
    pub(crate) fn elements(&self) -> &Elements {
        &self.elements
    }

    /// The same matrix of binary32 numbers, for many products.
    pub(crate) fn decoded(self) -> Result<Self> {
        if let Elements::F32(_) = self.elements {
            return Ok(self);
        }
        let mut values = vec![0.0; self.rows * self.cols];
        self.panel(0..self.rows, &mut values)?;
        Ok(Matrix { elements: Elements::F32(values), ..self })
    }

    /// `x · wᵀ` for rows of binary32 inputs, one after the other. **Bounded**.
    pub(crate) fn multiply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        let (outputs, cols) = (self.rows, self.cols);
        let mut out = vec![0.0; rows * outputs];
        if let Elements::F32(values) = &self.elements {
            baseline::f32(x, values, (rows, outputs, cols), &mut out);
            return Ok(out);
        }
        let step = (PANEL / cols.max(1)).clamp(1, outputs.max(1));
        let (mut panel, mut part) = (Vec::new(), Vec::new());
        for start in (0..outputs).step_by(step) {
            let count = step.min(outputs - start);
            panel.resize(count * cols, 0.0);
            self.panel(start..start + count, &mut panel)?;
            if count == outputs {
                baseline::f32(x, &panel, (rows, count, cols), &mut out);
                break;
            }
            part.resize(rows * count, 0.0);
            baseline::f32(x, &panel, (rows, count, cols), &mut part);
            for (to, from) in out.chunks_exact_mut(outputs).zip(part.chunks_exact(count)) {
                to[start..start + count].copy_from_slice(from);
            }
        }
        Ok(out)
    }

    /// `x · wᵀ` for rows of inputs in NVFP4, where the matrix is NVFP4 too. **Exact**.
    pub(crate) fn multiply_codes(&self, x: &Direction) -> Result<Vec<f32>> {
        let weights = self.codes().expect("the caller asked whether it has them");
        Ok(matmul(x, weights, &Product::default())?)
    }

    /// The values of some rows.
    pub fn panel(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let (at, count) = (rows.start * self.cols..rows.end * self.cols, rows.len());
        match &self.elements {
            Elements::F32(values) => out.copy_from_slice(&values[at]),
            Elements::Bf16(values) => convert(&values[at], out, |x| f32::from_bits(u32::from(x.to_bits()) << 16)),
            Elements::F16(values) => convert(&values[at], out, f16::to_f32),
            Elements::Nvfp4(direction) => {
                let parts = direction.nvfp4()?;
                let (bytes, blocks) = (self.cols / 2, self.cols / BLOCK);
                let view = View {
                    rows: count,
                    cols: self.cols,
                    codes: &parts.codes()[rows.start * bytes..rows.end * bytes],
                    scales: &parts.scales()[rows.start * blocks..rows.end * blocks],
                    stored: parts.stored(),
                    global: GlobalScale::PerTensor,
                    unit: parts.unit(),
                };
                dequantize::dequantize(Implementation::best(), &view, out)?;
            }
        }
        Ok(())
    }
}

fn convert<T: Copy + Sync>(from: &[T], to: &mut [f32], each: impl Fn(T) -> f32 + Sync) {
    let chunk = 1 << 14;
    to.par_chunks_mut(chunk).zip(from.par_chunks(chunk)).for_each(|(to, from)| {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = each(from));
    });
}
