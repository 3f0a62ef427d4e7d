//! Scratch memory of a product.

use crate::cuda::{Allocator, Memory, Result, Stream};

/// Memory for work that is queued on one stream before this is dropped. Later work of that stream
/// may reuse it.
pub(super) struct Scratch<const N: usize> {
    /// The addresses of the buffers, multiples of 256.
    pub addresses: [u64; N],
    _memory: Option<Memory>,
}

impl<const N: usize> Scratch<N> {
    /// `N` buffers of `bytes` bytes each. Their contents are undefined.
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
