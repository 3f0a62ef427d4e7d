//! NVFP4 operands in the memory of a GPU, and their products.

use nvfp4_kernels::Implementation;
use nvfp4_kernels::cuda::{Buffer, Plain, Pool, Stream};
use nvfp4_kernels::dequantize::cuda::View;
use nvfp4_kernels::gemm::cuda::{Operand, Product, Weights, gemm};
use nvfp4_kernels::quantize::Layout;
use nvfp4_kernels::swizzle;
use nvfp4_spec::matrix::{self, Matrix, Quantized};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{Element, GlobalScale, Mode, Rounding};

/// Uniform values of several sizes.
pub fn values<T: Element>(rows: usize, cols: usize, seed: u32) -> Vec<T> {
    let value = |i: usize| {
        let [a, b, ..] = philox4x32([i as u32, (i / 16) as u32, 0, 0], [seed, 5]);
        T::from_f32((a as f32 - b as f32) / 4294967296.0 / (1 << (b % 5)) as f32)
    };
    (0..rows * cols).map(value).collect()
}

pub fn quantized(rows: usize, cols: usize, seed: u32, mode: Mode) -> Quantized {
    let x = Matrix::new(rows, cols, &values::<f32>(rows, cols, seed)).unwrap();
    let amax = matrix::amax(&x, mode.global, mode.amax_specials()).unwrap();
    matrix::quantize(&x, &amax, &mode, Rounding::NearestEven).unwrap()
}

pub fn per(global: GlobalScale) -> Mode {
    Mode { global, ..Mode::default() }
}

/// A quantized matrix on the GPU.
pub struct Copied<'a> {
    host: &'a Quantized,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
    stored: Buffer<f32>,
    layout: Layout,
}

impl<'a> Copied<'a> {
    pub fn new(stream: &Stream, host: &'a Quantized, layout: Layout) -> Self {
        let scales = match layout {
            Layout::Linear => host.scales.clone(),
            Layout::Swizzled => {
                let mut out = vec![0; layout.scale_len(host.rows, host.cols).unwrap()];
                swizzle::swizzle(Implementation::Scalar, &host.scales, host.rows, host.cols.div_ceil(16), &mut out)
                    .unwrap();
                out
            }
        };
        let upload = |bytes: &[u8]| stream.to_device(bytes).unwrap();
        let stored = stream.to_device(&host.stored).unwrap();
        Copied { host, codes: upload(&host.codes), scales: upload(&scales), stored, layout }
    }

    pub fn view(&self) -> View<'_> {
        let Quantized { rows, cols, global, unit, .. } = *self.host;
        View {
            rows,
            cols,
            codes: self.codes.slice(),
            scales: self.scales.slice(),
            layout: self.layout,
            stored: self.stored.slice(),
            global,
            unit,
        }
    }
}

/// The product, in memory that was filled with something else.
pub fn run<'a, T: Element + Plain>(
    stream: &Stream,
    a: impl Into<Operand<'a>>,
    b: impl Into<Weights<'a>>,
    product: &Product<'_, T>,
) -> Vec<T> {
    let (a, b) = (a.into(), b.into());
    let mut out = stream.to_device(&vec![T::from_f32(77.0); a.rows() * b.rows()]).unwrap();
    gemm(stream, a, b, product, out.slice_mut(), &Pool).unwrap();
    let mut host = vec![T::default(); out.len()];
    stream.download(out.slice(), &mut host).unwrap();
    host
}

/// Whether the bits are the same; all NaNs are one.
pub fn same<T: Element>(a: &[T], b: &[T]) -> bool {
    let bits = |x: &T| if x.to_f32().is_nan() { u32::MAX } else { x.to_f32().to_bits() };
    a.iter().map(bits).eq(b.iter().map(bits))
}
