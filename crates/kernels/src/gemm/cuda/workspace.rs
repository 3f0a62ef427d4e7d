//! Memory that products need for a while.

use crate::cuda::{Buffer, Device, Result, Stream};

/// Memory that grows as products need it and is kept between them. Of one stream: work of two at the same time would meet in it.
#[derive(Debug, Default)]
pub struct Workspace(Option<Buffer<u8>>);

impl Workspace {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Addresses of so many bytes each, at multiples of 256. What is there is undefined.
    pub(super) fn reserve<const N: usize>(&mut self, stream: &Stream, bytes: [usize; N]) -> Result<[u64; N]> {
        let mut total = 0usize;
        let offsets = bytes.map(|bytes| {
            let offset = total;
            total = total.saturating_add(bytes).saturating_add(255) / 256 * 256;
            offset
        });
        let device: Device = stream.device();
        if self.0.as_ref().is_none_or(|buffer| buffer.len() < total || buffer.device() != device) {
            // The old one first, so that there is room.
            self.0 = None;
            self.0 = Some(device.alloc(total)?);
        }
        let start = self.0.as_ref().map_or(0, |buffer| buffer.slice().address());
        Ok(offsets.map(|offset| start + offset as u64))
    }
}
