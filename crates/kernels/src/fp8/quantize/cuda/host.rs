//! Quantization on a GPU of a matrix in host memory: the matrix is uploaded, the results are
//! downloaded.

use super::{Amax, Direction, Mode, Outputs, quantize};
use crate::cuda::{Buffer, Device, Stream, Uploaded};
use crate::fp8::quantize as host;
use crate::{Result, input};
use nvfp4_spec::fp8::{self, Scales};

/// The operation on memory of the host.
pub(in crate::fp8::quantize) fn on_host(
    device: Device,
    x: &input::Input<'_>,
    mode: &fp8::Mode,
    outputs: host::Outputs<'_>,
) -> Result<()> {
    let stream = Stream::new(device)?;
    let uploaded = Uploaded::new(&stream, x)?;
    let mut row = outputs.row.map(|d| Copied::new(device, d)).transpose()?;
    let mut col = outputs.col.map(|d| Copied::new(device, d)).transpose()?;
    let mut amax = outputs.amax.is_some().then(|| device.alloc(1)).transpose()?;
    let on_device = Outputs {
        row: row.as_mut().map(Copied::direction),
        col: col.as_mut().map(Copied::direction),
        amax: amax.as_mut().map(|amax| Amax::Replace(amax.slice_mut())),
    };
    quantize(&stream, &uploaded.input(), &Mode::from(*mode), on_device)?;
    for direction in [row, col].into_iter().flatten() {
        direction.finish(&stream)?;
    }
    if let Some((from, to)) = amax.zip(outputs.amax) {
        stream.download(from.slice(), std::slice::from_mut(to))?;
    }
    Ok(())
}

/// A direction of the host with its buffers on a GPU.
struct Copied<'a> {
    host: host::Direction<'a>,
    codes: Buffer<u8>,
    scales: Scales<Buffer<f32>, Buffer<u8>>,
}

impl<'a> Copied<'a> {
    fn new(device: Device, host: host::Direction<'a>) -> Result<Self> {
        let scales = match &host.scales {
            Scales::F32(scales) => Scales::F32(device.alloc(scales.len())?),
            Scales::E8m0(scales) => Scales::E8m0(device.alloc(scales.len())?),
        };
        Ok(Copied { codes: device.alloc(host.codes.len())?, scales, host })
    }

    fn direction(&mut self) -> Direction<'_> {
        let scales = match &mut self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice_mut()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice_mut()),
        };
        Direction { codes: self.codes.slice_mut(), scales }
    }

    fn finish(self, stream: &Stream) -> Result<()> {
        stream.download(self.codes.slice(), self.host.codes)?;
        match (self.scales, self.host.scales) {
            (Scales::F32(from), Scales::F32(to)) => stream.download(from.slice(), to)?,
            (Scales::E8m0(from), Scales::E8m0(to)) => stream.download(from.slice(), to)?,
            _ => unreachable!("both are of one kind"),
        }
        Ok(())
    }
}
