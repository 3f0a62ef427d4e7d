//! A weight matrix in the memory of a GPU, in the form that it has on disk.

use crate::Result;
use crate::matrix::{Elements, Matrix};
use half::{bf16, f16};
use nvfp4::cuda::{Direction, Gpu, Input, Owned, Product, Values};
use std::sync::Arc;

/// Twin of [`Matrix`].
#[derive(Debug)]
pub struct GpuMatrix {
    gpu: Arc<Gpu>,
    rows: usize,
    cols: usize,
    held: Held,
}

#[derive(Debug)]
enum Held {
    F32(Owned<f32>),
    Bf16(Owned<bf16>),
    F16(Owned<f16>),
    Nvfp4(Direction),
}

impl GpuMatrix {
    /// A copy of a matrix.
    pub fn new(gpu: &Arc<Gpu>, matrix: &Matrix) -> Result<Self> {
        let held = match matrix.elements() {
            Elements::F32(values) => Held::F32(gpu.upload(values)?),
            Elements::Bf16(values) => Held::Bf16(gpu.upload(values)?),
            Elements::F16(values) => Held::F16(gpu.upload(values)?),
            Elements::Nvfp4(direction) => Held::Nvfp4(direction.to_gpu(gpu)?),
        };
        Ok(GpuMatrix { gpu: gpu.clone(), rows: matrix.rows(), cols: matrix.cols(), held })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether it is NVFP4.
    pub fn has_codes(&self) -> bool {
        matches!(self.held, Held::Nvfp4(_))
    }

    /// Twin of [`Matrix::multiply`]: **Bounded** too. Waits.
    pub(crate) fn multiply(&self, x: &[f32], rows: usize) -> Result<Vec<f32>> {
        let x = self.gpu.upload(x)?;
        let x = Input::new(Values::F32(x.slice()), rows, self.cols)?;
        let values = match &self.held {
            Held::F32(values) => Values::F32(values.slice()),
            Held::Bf16(values) => Values::Bf16(values.slice()),
            Held::F16(values) => Values::F16(values.slice()),
            Held::Nvfp4(weights) => {
                return self
                    .fetch(rows, |out| self.gpu.matmul_plain(&x, weights, &Product::default(), out.slice_mut()));
            }
        };
        let weights = Input::new(values, self.rows, self.cols)?;
        self.fetch(rows, |out| self.gpu.matmul_plain_by_plain(&x, &weights, &Product::default(), out.slice_mut()))
    }

    /// Twin of [`Matrix::multiply_codes`]: **Bounded**, where that is exact. Waits.
    pub(crate) fn multiply_codes(&self, x: &nvfp4::Direction) -> Result<Vec<f32>> {
        let Held::Nvfp4(weights) = &self.held else { unreachable!("the caller asked whether it has codes") };
        let (x, rows) = (x.to_gpu(&self.gpu)?, x.rows());
        self.fetch(rows, |out| self.gpu.matmul(&x, weights, &Product::default(), out.slice_mut()))
    }

    /// The outputs that `product` writes, for so many rows.
    fn fetch(&self, rows: usize, product: impl FnOnce(&mut Owned<f32>) -> nvfp4::Result<()>) -> Result<Vec<f32>> {
        let mut out = self.gpu.alloc(rows * self.rows)?;
        product(&mut out)?;
        Ok(self.gpu.stream().to_host(out.slice()).map_err(nvfp4::Error::from)?)
    }
}
