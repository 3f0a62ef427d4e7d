//! Matrices in the memory of a GPU.

use anyhow::Result;
use half::bf16;
use nvfp4_kernels::cuda::{Buffer, Input, Slice, Stream, Values};
use nvfp4_kernels::dequantize::cuda::View;
use nvfp4_kernels::quantize::Layout;
use nvfp4_kernels::quantize::cuda::{Amax, Direction, Written, quantize};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{BLOCK, Bound, GlobalScale, Mode, Rounding, e2m1, gemm, matrix};

/// In which form a matrix takes part in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Bf16,
    Nvfp4,
}

impl Form {
    /// Bytes of a row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Form::Bf16 => 2 * cols,
            Form::Nvfp4 => e2m1::packed_len(cols) + cols.div_ceil(BLOCK),
        }
    }
}

/// Standard normal values, in bf16 and quantized.
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    values: Buffer<bf16>,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
    amax: Buffer<f32>,
}

impl Matrix {
    pub fn new(stream: &Stream, rows: usize, cols: usize, seed: u64) -> Result<Self> {
        let device = stream.device();
        let values = stream.to_device(&crate::normal::standard::<bf16>(rows, cols, seed)?)?;
        let mut codes = device.alloc(rows * e2m1::packed_len(cols))?;
        let mut scales = device.alloc(Layout::Linear.scale_len(rows, cols)?)?;
        let mut amax = device.alloc(1)?;
        let row = Direction {
            mode: Mode::default(),
            rounding: Rounding::NearestEven,
            transform: None,
            layout: Layout::Linear,
            amax: Amax::Compute(amax.slice_mut()),
            to: Written::Codes { codes: codes.slice_mut(), scales: scales.slice_mut() },
        };
        quantize(stream, &Input::new(Values::Bf16(values.slice()), rows, cols)?, Some(row), None)?;
        Ok(Matrix { rows, cols, values, codes, scales, amax })
    }

    /// The first `rows` rows in bf16.
    pub fn values(&self, rows: usize) -> Slice<'_, bf16> {
        self.values.slice().range(0..rows * self.cols)
    }

    /// The same as an operand.
    pub fn input(&self, rows: usize) -> Result<Input<'_>> {
        Ok(Input::new(Values::Bf16(self.values(rows)), rows, self.cols)?)
    }

    /// The first `rows` rows, quantized.
    pub fn view(&self, rows: usize) -> View<'_> {
        View {
            rows,
            cols: self.cols,
            codes: self.codes.slice().range(0..rows * e2m1::packed_len(self.cols)),
            scales: self.scales.slice().range(0..rows * self.cols.div_ceil(BLOCK)),
            layout: Layout::Linear,
            stored: self.amax.slice(),
            global: GlobalScale::PerTensor,
            unit: Unit::Amax(Bound::E448),
        }
    }

    /// Row `i`, on the host.
    pub fn row(&self, stream: &Stream, i: usize, form: Form) -> Result<Row> {
        let (bytes, blocks) = (e2m1::packed_len(self.cols), self.cols.div_ceil(BLOCK));
        Ok(match form {
            Form::Bf16 => {
                let values = stream.to_host(self.values.slice().range(i * self.cols..(i + 1) * self.cols))?;
                Row::Bf16(matrix::Matrix::new(1, self.cols, &values)?)
            }
            Form::Nvfp4 => Row::Nvfp4(matrix::Quantized {
                rows: 1,
                cols: self.cols,
                codes: stream.to_host(self.codes.slice().range(i * bytes..(i + 1) * bytes))?,
                scales: stream.to_host(self.scales.slice().range(i * blocks..(i + 1) * blocks))?,
                stored: stream.to_host(self.amax.slice())?,
                global: GlobalScale::PerTensor,
                unit: Unit::Amax(Bound::E448),
            }),
        })
    }
}

/// One row on the host.
pub enum Row {
    Bf16(matrix::Matrix),
    Nvfp4(matrix::Quantized),
}

impl Row {
    pub fn operand(&self) -> gemm::Operand<'_> {
        match self {
            Row::Bf16(row) => row.into(),
            Row::Nvfp4(row) => (&row.view()).into(),
        }
    }
}
