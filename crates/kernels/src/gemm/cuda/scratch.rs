//! Memory that a product needs while it runs.

use crate::cuda::{Allocator, Memory, Result, Stream};

/// Memory for the work of one stream that is queued while this is there. It goes back to where it came from when dropped, for later work
/// of that stream.
pub(super) struct Scratch<const N: usize> {
    /// Where its pieces begin, at multiples of 256.
    pub addresses: [u64; N],
    _memory: Option<Memory>,
}

impl<const N: usize> Scratch<N> {
    /// Pieces of so many bytes each. What is there is undefined.
    pub fn new(stream: &Stream, memory: &dyn Allocator, bytes: [usize; N]) -> Result<Self> {
        const ALIGNED: usize = 256;
        let mut total = 0usize;
        let offsets = bytes.map(|bytes| {
            let offset = total;
            total = total.saturating_add(bytes).saturating_add(ALIGNED - 1) / ALIGNED * ALIGNED;
            offset
        });
        if total == 0 {
            return Ok(Scratch { addresses: [0; N], _memory: None });
        }
        // Allocators align to 16.
        let memory = memory.bytes(stream, total.saturating_add(ALIGNED - 16))?;
        let start = memory.address().next_multiple_of(ALIGNED as u64);
        Ok(Scratch { addresses: offsets.map(|offset| start + offset as u64), _memory: Some(memory) })
    }
}
