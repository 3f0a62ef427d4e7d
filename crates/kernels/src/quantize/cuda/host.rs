//! Quantization on a GPU of a matrix in host memory: the matrix is uploaded, the results are
//! downloaded.

use super::{Amax, Direction, Offset, Random, Written, quantize};
use crate::cuda::{Buffer, Device, Stream, Uploaded};
use crate::quantize as host;
use crate::{Result, input};
use nvfp4_spec::Rounding;
use nvfp4_spec::stochastic;

/// The operation on memory of the host.
pub(in crate::quantize) fn on_host(
    device: Device,
    x: &input::Input<'_>,
    row: Option<host::Direction<'_>>,
    col: Option<host::Direction<'_>>,
) -> Result<()> {
    let stream = Stream::new(device)?;
    let uploaded = Uploaded::new(&stream, x)?;
    let mut row = row.map(|d| Copied::new(&stream, d)).transpose()?;
    let mut col = col.map(|d| Copied::new(&stream, d)).transpose()?;
    let directions = (row.as_mut().map(Copied::direction), col.as_mut().map(Copied::direction));
    quantize(&stream, &uploaded.input(), directions.0, directions.1)?;
    for direction in [row, col].into_iter().flatten() {
        direction.finish(&stream)?;
    }
    Ok(())
}

/// A direction of the host with its buffers on a GPU.
struct Copied<'a> {
    host: host::Direction<'a>,
    amax: Buffer<f32>,
    random: Option<Buffer<u8>>,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
}

impl<'a> Copied<'a> {
    fn new(stream: &Stream, host: host::Direction<'a>) -> Result<Self> {
        let device = stream.device();
        let random = match host.rounding {
            Rounding::Stochastic(stochastic::Random::Bytes(bytes)) => Some(stream.to_device(bytes)?),
            _ => None,
        };
        let amax = match &host.amax {
            host::Amax::Given(amax) => stream.to_device(amax)?,
            host::Amax::Compute(amax) => device.alloc(amax.len())?,
        };
        let (codes, scales) = (device.alloc(host.codes.len())?, device.alloc(host.scales.len())?);
        Ok(Copied { host, amax, random, codes, scales })
    }

    fn direction(&mut self) -> Direction<'_> {
        Direction {
            mode: self.host.mode,
            rounding: match (self.host.rounding, &self.random) {
                (Rounding::Stochastic(stochastic::Random::Stream(s)), _) => Rounding::Stochastic(Random::Stream {
                    seed: s.seed,
                    offset: Offset::Value(s.offset),
                    first_block: s.first_block,
                }),
                (_, Some(bytes)) => Rounding::Stochastic(Random::Bytes(bytes.slice())),
                (_, None) => Rounding::NearestEven,
            },
            transform: self.host.transform,
            layout: self.host.layout,
            amax: match &self.host.amax {
                host::Amax::Given(_) => Amax::Given(self.amax.slice()),
                host::Amax::Compute(_) => Amax::Compute(self.amax.slice_mut()),
            },
            to: Written::Codes { codes: self.codes.slice_mut(), scales: self.scales.slice_mut() },
        }
    }

    fn finish(self, stream: &Stream) -> Result<()> {
        stream.download(self.codes.slice(), self.host.codes)?;
        stream.download(self.scales.slice(), self.host.scales)?;
        if let host::Amax::Compute(amax) = self.host.amax {
            stream.download(self.amax.slice(), amax)?;
        }
        Ok(())
    }
}
