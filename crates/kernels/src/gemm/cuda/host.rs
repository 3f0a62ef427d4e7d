//! Products of operands in the memory of the host: copied there and back.

use super::super::{self as gemm, Product as HostProduct};
use super::output::Product;
use super::{Operand, Weights, Workspace, gemm as on_device};
use crate::Result;
use crate::cuda::{Buffer, Device, Plain, Stream, Uploaded};
use crate::dequantize::cuda::View;
use crate::fp8::cuda as fp8_cuda;
use crate::quantize::Layout;
use half::{bf16, f16};
use nvfp4_spec::fp8::{self, Scales};
use nvfp4_spec::{Element, Precision, matrix};

/// An operand that was copied to a GPU.
enum Copied<'a> {
    Nvfp4 { view: matrix::View<'a>, codes: Buffer<u8>, scales: Buffer<u8>, stored: Buffer<f32> },
    Fp8 { view: fp8::View<'a>, codes: Buffer<u8>, scales: Scales<Buffer<f32>, Buffer<u8>> },
    Plain(Uploaded),
}

impl<'a> Copied<'a> {
    fn new(stream: &Stream, operand: gemm::Operand<'a>) -> Result<Self> {
        Ok(match operand {
            gemm::Operand::Nvfp4(view) => {
                let (codes, scales) = (stream.to_device(view.codes)?, stream.to_device(view.scales)?);
                Copied::Nvfp4 { view, codes, scales, stored: stream.to_device(view.stored)? }
            }
            gemm::Operand::Fp8(view) => {
                let scales = match view.scales {
                    Scales::F32(scales) => Scales::F32(stream.to_device(scales)?),
                    Scales::E8m0(scales) => Scales::E8m0(stream.to_device(scales)?),
                };
                Copied::Fp8 { view, codes: stream.to_device(view.codes)?, scales }
            }
            gemm::Operand::Plain(x) => Copied::Plain(Uploaded::new(stream, &x)?),
        })
    }

    fn operand(&self) -> Operand<'_> {
        match self {
            Copied::Nvfp4 { view, codes, scales, stored } => Operand::Nvfp4(View {
                rows: view.rows,
                cols: view.cols,
                codes: codes.slice(),
                scales: scales.slice(),
                layout: Layout::Linear,
                stored: stored.slice(),
                global: view.global,
                unit: view.unit,
            }),
            Copied::Fp8 { view: fp8::View { rows, cols, format, tile, .. }, codes, scales } => {
                let scales = match scales {
                    Scales::F32(scales) => Scales::F32(scales.slice()),
                    Scales::E8m0(scales) => Scales::E8m0(scales.slice()),
                };
                let (rows, cols, format, tile) = (*rows, *cols, *format, *tile);
                Operand::Fp8(fp8_cuda::View { rows, cols, format, tile, codes: codes.slice(), scales })
            }
            Copied::Plain(x) => Operand::Plain(x.input()),
        }
    }
}

/// The operation on memory of the host, which was checked.
pub(crate) fn on_host<T: Element>(
    device: Device,
    a: gemm::Operand<'_>,
    b: gemm::Operand<'_>,
    product: &HostProduct<'_, T>,
    out: &mut [T],
) -> Result<()> {
    // Which of the three types `T` is, only its precision tells.
    match T::PRECISION {
        Precision::F32 => typed::<f32, T>(device, a, b, product, out),
        Precision::Bf16 => typed::<bf16, T>(device, a, b, product, out),
        Precision::F16 => typed::<f16, T>(device, a, b, product, out),
    }
}

fn typed<P: Element + Plain, T: Element>(
    device: Device,
    a: gemm::Operand<'_>,
    b: gemm::Operand<'_>,
    product: &HostProduct<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let stream = Stream::new(device)?;
    let (a, b) = (Copied::new(&stream, a)?, Copied::new(&stream, b)?);
    let bias = product.bias.map(|bias| stream.to_device(bias)).transpose()?;
    let add = product.add.filter(|&(_, beta)| beta != 0.0);
    let c = add.map(|(c, _)| {
        let c: Vec<P> = c.iter().map(|c| P::from_f32(c.to_f32())).collect();
        stream.to_device(&c)
    });
    let c = c.transpose()?;
    let mut buffer = device.alloc::<P>(out.len())?;
    let product = Product {
        epilogue: product.epilogue,
        alpha: product.alpha,
        bias: bias.as_ref().map(Buffer::slice),
        add: c.as_ref().map(Buffer::slice).zip(add.map(|(_, beta)| beta)),
    };
    let right = match b.operand() {
        Operand::Nvfp4(view) => Weights::Nvfp4(view),
        Operand::Fp8(view) => Weights::Fp8(view),
        Operand::Plain(x) => Weights::Plain(x),
    };
    on_device(&stream, a.operand(), right, &product, buffer.slice_mut(), &mut Workspace::new())?;
    for (out, value) in out.iter_mut().zip(stream.to_host(buffer.slice())?) {
        *out = T::from_f32(value.to_f32());
    }
    Ok(())
}
