//! Products of operands in host memory: the operands are uploaded, the outputs downloaded.

use super::super::{self as gemm, Product as HostProduct};
use super::output::Product;
use super::{Operand, gemm as on_device};
use crate::Result;
use crate::cuda::{Buffer, Device, Plain, Pool, Stream, Uploaded, Values};
use crate::dequantize::cuda as dequantize;
use crate::fp8::dequantize::cuda as fp8;
use half::{bf16, f16};
use nvfp4_spec::{Element, Precision};

/// An operand that was copied to a GPU.
pub(super) enum Copied<'a> {
    Nvfp4(dequantize::Copied<'a>),
    Fp8(fp8::Copied<'a>),
    Plain(Uploaded),
}

impl<'a> Copied<'a> {
    pub fn new(stream: &Stream, operand: gemm::Operand<'a>) -> Result<Self> {
        Ok(match operand {
            gemm::Operand::Nvfp4(view) => Copied::Nvfp4(dequantize::Copied::new(stream, view)?),
            gemm::Operand::Fp8(view) => Copied::Fp8(fp8::Copied::new(stream, view)?),
            gemm::Operand::Plain(x) => Copied::Plain(Uploaded::new(stream, &x)?),
        })
    }

    pub fn operand(&self) -> Operand<'_> {
        match self {
            Copied::Nvfp4(copied) => copied.view().into(),
            Copied::Fp8(copied) => copied.view().into(),
            Copied::Plain(x) => x.input().into(),
        }
    }
}

/// The operation on checked host memory.
pub(crate) fn on_host<T: Element>(
    device: Device,
    a: gemm::Operand<'_>,
    b: gemm::Operand<'_>,
    product: &HostProduct<'_, T>,
    out: &mut [T],
) -> Result<()> {
    // Only its precision tells which of the three types `T` is.
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
    let product = Product {
        epilogue: product.epilogue,
        accumulator: product.accumulator,
        alpha: product.alpha,
        bias: bias.as_ref().map(|bias| Values::F32(bias.slice())),
        add: c.as_ref().map(Buffer::slice).zip(add.map(|(_, beta)| beta)),
    };
    stream.fetch::<P, T>(out, |out| on_device(&stream, a.operand(), b.operand(), &product, out, &Pool))
}
