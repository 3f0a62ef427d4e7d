//! What a linear layer multiplies by: weights as they are stored, and activations as they are or in
//! 4 bits.

use crate::Result;
use crate::matrix::Matrix;
use nvfp4::{
    Direction, GlobalScale, Layout, Nvfp4Description, Nvfp4Direction, Product, Profile, Quantizer, Side, TensorRef,
    Unit, matmul,
};
use nvfp4_kernels::gemm::baseline;
use nvfp4_spec::{BLOCK, activation, e2m1};
use rayon::prelude::*;
use std::sync::Arc;

/// Elements of a panel of decoded weights.
pub(crate) const PANEL: usize = 1 << 21;

/// A matrix that hidden states are multiplied by.
pub trait Projection: Send + Sync {
    /// How many numbers come out per row.
    fn outputs(&self) -> usize;

    /// `x · wᵀ` for rows of inputs, one after the other.
    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>>;
}

/// Weights in any form, activations in binary32. Sums are binary32.
pub struct Weights(pub Arc<Matrix>);

impl Projection for Weights {
    fn outputs(&self) -> usize {
        self.0.rows()
    }

    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        let (matrix, outputs) = (&*self.0, self.0.rows());
        let mut out = vec![0.0; rows * outputs];
        let step = (PANEL / matrix.cols().max(1)).clamp(1, outputs.max(1));
        let (mut panel, mut part) = (Vec::new(), Vec::new());
        for start in (0..outputs).step_by(step) {
            let count = step.min(outputs - start);
            panel.resize(count * matrix.cols(), 0.0);
            matrix.panel(start..start + count, &mut panel)?;
            if count == outputs {
                baseline::f32(x, &panel, (rows, count, matrix.cols()), &mut out);
                break;
            }
            part.resize(rows * count, 0.0);
            baseline::f32(x, &panel, (rows, count, matrix.cols()), &mut part);
            for (to, from) in out.chunks_exact_mut(outputs).zip(part.chunks_exact(count)) {
                to[start..start + count].copy_from_slice(from);
            }
        }
        Ok(out)
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

/// Weights and activations in NVFP4. Sums are exact.
pub struct FourBit {
    matrix: Arc<Matrix>,
    scale: ActivationScale,
}

impl FourBit {
    /// The projection by a matrix that is NVFP4; none for others.
    pub fn new(matrix: Arc<Matrix>, scale: ActivationScale) -> Option<Self> {
        matrix.codes().is_some().then_some(FourBit { matrix, scale })
    }
}

impl Projection for FourBit {
    fn outputs(&self) -> usize {
        self.matrix.rows()
    }

    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        let weights = self.matrix.codes().expect("made of a matrix that has them");
        match self.scale {
            ActivationScale::Stored(scale) => {
                Ok(matmul(&stored(x, self.matrix.cols(), scale)?, weights, &Product::default())?)
            }
            ActivationScale::PerRow => {
                let per_row = GlobalScale::PerRow;
                let quantizer = Quantizer::builder().profile(Profile::ModelOpt).global_scale(per_row).build()?;
                let x = quantizer.quantize(&TensorRef::new(x, &[rows, self.matrix.cols()])?)?;
                Ok(matmul(x.direction(Side::Row)?, weights, &Product::default())?)
            }
        }
    }
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
