//! Memory that comes from somewhere: from the driver, from a pool, or from another framework.

use super::device::Device;
use super::error::Result;
use super::lock;
use super::memory::{Buffer, Plain, Slice, SliceMut};
use super::stream::Stream;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Bytes of a GPU's memory, and whatever owns them. What they hold at first is undefined.
pub struct Memory {
    address: u64,
    len: usize,
    owner: Box<dyn Any + Send + Sync>,
}

impl Memory {
    /// Memory of another framework, which is free again when `owner` is dropped.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` bytes of a GPU's memory, aligned to 16 bytes, which belong to `owner` alone, until it is dropped and the
    /// work that was queued by then has ended.
    pub unsafe fn from_raw(address: u64, len: usize, owner: impl Any + Send + Sync) -> Self {
        Memory { address, len, owner: Box::new(owner) }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What owns it.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// As many whole elements as it holds, to read.
    pub fn slice<T: Plain>(&self) -> Slice<'_, T> {
        // SAFETY: the owner is alive as long as the slice, and any bits are a value of `T`.
        unsafe { Slice::from_raw(self.address, self.len / size_of::<T>()) }
    }

    /// As many whole elements as it holds, to write.
    pub fn slice_mut<T: Plain>(&mut self) -> SliceMut<'_, T> {
        // SAFETY: as above; the memory is borrowed for writing, so nothing else reads it.
        unsafe { SliceMut::from_raw(self.address, self.len / size_of::<T>()) }
    }
}

impl From<Buffer<u8>> for Memory {
    fn from(buffer: Buffer<u8>) -> Self {
        Memory { address: buffer.slice().address(), len: buffer.len(), owner: Box::new(buffer) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} bytes)", self.address, self.len)
    }
}

/// Where memory comes from.
pub trait Allocator {
    /// `len` bytes for the work of one stream, aligned to 16.
    fn bytes(&self, len: usize) -> Result<Memory>;
}

/// Straight from the driver: freeing waits for all of the GPU's work.
impl Allocator for Device {
    fn bytes(&self, len: usize) -> Result<Memory> {
        Ok(self.alloc::<u8>(len)?.into())
    }
}

/// Memory for the work of one stream. What is given back is handed out again without waiting, to work that comes later in that
/// stream; clones are the same pool.
#[derive(Clone)]
pub struct Pool {
    device: Device,
    free: Arc<Mutex<BTreeMap<usize, Vec<Buffer<u8>>>>>,
}

impl Pool {
    /// An empty pool for the work of this stream alone.
    pub fn new(stream: &Stream) -> Self {
        Pool { device: stream.device(), free: Arc::default() }
    }

    /// Bytes that are free in it.
    pub fn free_bytes(&self) -> usize {
        lock(&self.free).iter().map(|(len, buffers)| len * buffers.len()).sum()
    }

    /// Gives what is free back to the driver, which waits.
    pub fn clear(&self) {
        lock(&self.free).clear();
    }
}

impl Allocator for Pool {
    fn bytes(&self, len: usize) -> Result<Memory> {
        let size = len.div_ceil(STEP) * STEP;
        let found = lock(&self.free).get_mut(&size).and_then(Vec::pop);
        let buffer = match found {
            Some(buffer) => buffer,
            None => self.device.alloc(size).or_else(|_| {
                // What is free in other sizes may make room.
                self.clear();
                self.device.alloc(size)
            })?,
        };
        let address = buffer.slice().address();
        Ok(Memory { address, len, owner: Box::new(Returning { buffer: Some(buffer), pool: self.clone() }) })
    }
}

/// Sizes are multiples of this, so that nearly equal ones share memory.
const STEP: usize = 512;

/// A buffer that goes back to its pool.
struct Returning {
    buffer: Option<Buffer<u8>>,
    pool: Pool,
}

impl Drop for Returning {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            lock(&self.pool.free).entry(buffer.len()).or_default().push(buffer);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({:?}, {} bytes free)", self.device, self.free_bytes())
    }
}
