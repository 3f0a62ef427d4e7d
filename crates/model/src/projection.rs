//! What a linear layer multiplies by: weights as they are stored, and activations as they are or in
//! 4 bits.

use crate::Result;
use crate::place::Placed;
use nvfp4::{Direction, GlobalScale, Layout, Nvfp4Description, Nvfp4Direction, Profile, Quantizer, TensorRef, Unit};
use nvfp4_spec::{BLOCK, activation, e2m1};
use rayon::prelude::*;
use std::sync::Arc;

/// A matrix that hidden states are multiplied by.
pub trait Projection: Send + Sync {
    /// How many numbers come out per row.
    fn outputs(&self) -> usize;

    /// `x · wᵀ` for rows of inputs, one after the other.
    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>>;
}

/// Weights in any form, activations in binary32. Sums are binary32.
pub struct Weights(pub Arc<Placed>);

impl Projection for Weights {
    fn outputs(&self) -> usize {
        self.0.rows()
    }

    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        in_steps(&self.0, x, rows, |x, rows| self.0.multiply(x, rows))
    }
}

/// Which 32-bit scale activations are quantized with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ActivationScale {
    /// This one, by the rule for activations ([`activation`]); what is beyond it saturates.
    Stored(f32),
    /// From the largest magnitude of each row, by ModelOpt's rule for weights.
    PerRow,
}

/// Weights and activations in NVFP4. Sums are exact on a CPU, and binary32 on a GPU.
pub struct FourBit {
    matrix: Arc<Placed>,
    scale: ActivationScale,
}

impl FourBit {
    /// The projection by a matrix that is NVFP4; none for others.
    pub fn new(matrix: Arc<Placed>, scale: ActivationScale) -> Option<Self> {
        matrix.has_codes().then_some(FourBit { matrix, scale })
    }

    /// Activations in 4 bits, wherever they are multiplied.
    fn quantize(&self, x: &[f32], rows: usize) -> Result<Direction> {
        match self.scale {
            ActivationScale::Stored(scale) => stored(x, self.matrix.cols(), scale),
            ActivationScale::PerRow => {
                let per_row = GlobalScale::PerRow;
                let quantizer = Quantizer::builder().profile(Profile::ModelOpt).global_scale(per_row).build()?;
                let (x, _) = quantizer.quantize(&TensorRef::new(x, &[rows, self.matrix.cols()])?)?.into_directions();
                Ok(x.expect("a quantizer makes rows unless it is asked for columns"))
            }
        }
    }
}

impl Projection for FourBit {
    fn outputs(&self) -> usize {
        self.matrix.rows()
    }

    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        in_steps(&self.matrix, x, rows, |x, rows| self.matrix.multiply_codes(&self.quantize(x, rows)?))
    }
}

/// The outputs of all rows, as many rows at a time as the place of the matrix takes.
fn in_steps(
    matrix: &Placed,
    x: &[f32],
    rows: usize,
    product: impl Fn(&[f32], usize) -> Result<Vec<f32>>,
) -> Result<Vec<f32>> {
    if rows <= matrix.step() {
        return product(x, rows);
    }
    let mut out = Vec::with_capacity(rows * matrix.rows());
    for x in x.chunks(matrix.step() * matrix.cols()) {
        out.extend(product(x, x.len() / matrix.cols())?);
    }
    Ok(out)
}

/// Activations in 4 bits with a stored scale.
fn stored(x: &[f32], cols: usize, scale: f32) -> Result<Direction> {
    let mut codes = vec![0; x.len() / 2];
    let mut scales = vec![0; x.len() / BLOCK];
    // The number of columns is a multiple of 16: blocks of rows follow each other.
    let blocks = x.as_chunks::<BLOCK>().0;
    let part = 1 << 10;
    let parts = codes.par_chunks_mut(part * BLOCK / 2).zip(scales.par_chunks_mut(part)).zip(blocks.par_chunks(part));
    parts.for_each(|((codes, scales), blocks)| {
        for ((codes, own), block) in codes.as_chunks_mut::<{ BLOCK / 2 }>().0.iter_mut().zip(scales).zip(blocks) {
            let quantized = activation::quantize(block, scale);
            *own = quantized.scale;
            *codes = std::array::from_fn(|i| e2m1::pack(quantized.codes[0][2 * i], quantized.codes[0][2 * i + 1]));
        }
    });
    let about = Nvfp4Description {
        rows: x.len() / cols.max(1),
        cols,
        global: GlobalScale::PerTensor,
        unit: Unit::Multiplier,
        rotation: None,
        layout: Layout::Linear,
    };
    Ok(Direction::Nvfp4(Nvfp4Direction::from_parts(about, codes, scales, vec![scale])?))
}
