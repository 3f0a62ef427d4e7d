//! Where products are computed, and the matrices that are there.

use crate::Result;
#[cfg(feature = "cuda")]
use crate::gpu::GpuMatrix;
use crate::matrix::Matrix;
use nvfp4::Direction;
#[cfg(feature = "cuda")]
use nvfp4::cuda::Gpu;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Rows of inputs that lie in a GPU's memory at a time.
#[cfg(feature = "cuda")]
const ROWS: usize = 4096;

/// Where products with weights are computed. Everything else is computed on the CPU.
#[derive(Clone, Debug, Default)]
pub enum Place {
    /// On the CPU.
    #[default]
    Cpu,
    /// On a GPU, in whose memory weights are.
    #[cfg(feature = "cuda")]
    Gpu(Arc<Gpu>),
}

/// A matrix where it is multiplied.
#[derive(Debug)]
pub enum Placed {
    /// In the memory of the host.
    Host(Matrix),
    /// In the memory of a GPU.
    #[cfg(feature = "cuda")]
    Gpu(GpuMatrix),
}

impl Place {
    /// Rows of inputs that lie in a GPU's memory at a time, if products are computed there.
    pub(crate) fn gpu_rows(&self) -> Option<usize> {
        match self {
            Place::Cpu => None,
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => Some(ROWS),
        }
    }

    /// Takes a matrix there, in the form that it has.
    pub fn hold(&self, matrix: Matrix) -> Result<Placed> {
        match self {
            Place::Cpu => Ok(Placed::Host(matrix)),
            #[cfg(feature = "cuda")]
            Place::Gpu(gpu) => Ok(Placed::Gpu(GpuMatrix::new(gpu, &matrix)?)),
        }
    }

    /// Takes a matrix there for many products: on the CPU it is decoded once.
    pub(crate) fn hold_for_many(&self, matrix: Matrix) -> Result<Placed> {
        match self {
            Place::Cpu => Ok(Placed::Host(matrix.decoded()?)),
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => self.hold(matrix),
        }
    }
}

impl Placed {
    /// Outputs.
    pub fn rows(&self) -> usize {
        match self {
            Placed::Host(matrix) => matrix.rows(),
            #[cfg(feature = "cuda")]
            Placed::Gpu(matrix) => matrix.rows(),
        }
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        match self {
            Placed::Host(matrix) => matrix.cols(),
            #[cfg(feature = "cuda")]
            Placed::Gpu(matrix) => matrix.cols(),
        }
    }

    /// Whether it is NVFP4.
    pub fn has_codes(&self) -> bool {
        match self {
            Placed::Host(matrix) => matrix.codes().is_some(),
            #[cfg(feature = "cuda")]
            Placed::Gpu(matrix) => matrix.has_codes(),
        }
    }

    /// Rows of inputs that are multiplied at a time.
    pub(crate) fn step(&self) -> usize {
        match self {
            Placed::Host(_) => usize::MAX,
            #[cfg(feature = "cuda")]
            Placed::Gpu(_) => ROWS,
        }
    }

    /// `x · wᵀ` for rows of binary32 inputs, one after the other.
    pub(crate) fn multiply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        match self {
            Placed::Host(matrix) => matrix.multiply(x, rows),
            #[cfg(feature = "cuda")]
            Placed::Gpu(matrix) => matrix.multiply(x, rows),
        }
    }

    /// `x · wᵀ` for rows of inputs in NVFP4, where the matrix is NVFP4 too.
    pub(crate) fn multiply_codes(&self, x: &Direction) -> Result<Vec<f32>> {
        match self {
            Placed::Host(matrix) => matrix.multiply_codes(x),
            #[cfg(feature = "cuda")]
            Placed::Gpu(matrix) => matrix.multiply_codes(x),
        }
    }
}
