//! Memory that is kept for later work of the same stream.

use super::error::Result;
use super::lock;
use super::memory::Buffer;
use super::pool::{Allocator, Memory};
use super::stream::Stream;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Memory from the driver that, once dropped, serves later work of the same stream which asks for as
/// many bytes. A capture takes what is there, so its graph allocates nothing: run the work once
/// before. The graph must not run beside other work with this memory, nor after it is freed.
///
/// All of it is freed when this and what it gave out are dropped.
#[derive(Clone, Default)]
pub struct Recycled {
    kept: Arc<Mutex<Kept>>,
}

/// What is free, by stream and number of bytes.
type Kept = HashMap<(usize, usize), Vec<Buffer<u8>>>;

/// Memory that returns when it is dropped.
struct Lent {
    buffer: Option<Buffer<u8>>,
    key: (usize, usize),
    home: Arc<Mutex<Kept>>,
    // The number of a stream is another's once it is gone.
    _stream: Stream,
}

impl Allocator for Recycled {
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory> {
        let key = (stream.raw().addr(), len);
        let kept = lock(&self.kept).get_mut(&key).and_then(Vec::pop);
        let buffer = kept.map_or_else(|| stream.device().alloc::<u8>(len), Ok)?;
        let address = buffer.slice().address();
        let owner = Lent { buffer: Some(buffer), key, home: self.kept.clone(), _stream: stream.clone() };
        // SAFETY: the buffer is the owner's alone until it is dropped; then later work of the same
        // stream has it.
        Ok(unsafe { Memory::from_raw(address, len, owner) })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            lock(&self.home).entry(self.key).or_default().push(buffer);
        }
    }
}

impl fmt::Debug for Recycled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = lock(&self.kept).iter().map(|((_, len), buffers)| len * buffers.len()).sum();
        write!(f, "Recycled({bytes} bytes free)")
    }
}
