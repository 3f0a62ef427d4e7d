//! What a linear layer multiplies by: weights as they are stored, and activations as they are or in
//! 4 bits.

use crate::Result;
use crate::matrix::Matrix;
use nvfp4::{GlobalScale, Options, Product, Profile, Quantizer, Side, TensorRef, matmul};
use nvfp4_kernels::gemm::baseline;
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
    /// From this largest magnitude; what is beyond it saturates.
    Amax(f32),
    /// From the largest magnitude of each row.
    PerRow,
}

/// Weights and activations in NVFP4, by ModelOpt's rules. Sums are exact.
pub struct FourBit {
    matrix: Arc<Matrix>,
    quantizer: Quantizer,
    scale: ActivationScale,
}

impl FourBit {
    /// The projection by a matrix that is NVFP4; none for others.
    pub fn new(matrix: Arc<Matrix>, scale: ActivationScale) -> Result<Option<Self>> {
        let global = match scale {
            ActivationScale::Amax(_) => GlobalScale::PerTensor,
            ActivationScale::PerRow => GlobalScale::PerRow,
        };
        let quantizer = Quantizer::builder().profile(Profile::ModelOpt).global_scale(global).build()?;
        Ok(matrix.codes().is_some().then(|| FourBit { matrix: matrix.clone(), quantizer, scale }))
    }
}

impl Projection for FourBit {
    fn outputs(&self) -> usize {
        self.matrix.rows()
    }

    fn apply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        let amax = match self.scale {
            ActivationScale::Amax(amax) => Some([amax]),
            ActivationScale::PerRow => None,
        };
        let options = Options { row_amax: amax.as_ref().map(|amax| &amax[..]), ..Options::default() };
        let x = self.quantizer.quantize_with(&TensorRef::new(x, &[rows, self.matrix.cols()])?, &options)?;
        let weights = self.matrix.codes().expect("made of a matrix that has them");
        Ok(matmul(x.direction(Side::Row)?, weights, &Product::default())?)
    }
}
