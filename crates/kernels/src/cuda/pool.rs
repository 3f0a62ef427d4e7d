//! Allocators of GPU memory: the driver, its stream-ordered pool, or another framework.

use super::captured;
use super::device::Device;
use super::error::{Error, Result, check};
use super::lock;
use super::memory::{Buffer, Place, Plain, Slice, SliceMut};
use super::stream::Stream;
use cudarc::driver::sys::{self, CUmemPool_attribute, CUmemoryPool, CUresult};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// Bytes of GPU memory and their owner. Their contents are undefined at first.
pub struct Memory {
    address: u64,
    len: usize,
    place: Place,
    owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// Memory of another framework, freed when `owner` is dropped.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` bytes of a GPU's memory, aligned to 16 bytes, which belong to
    /// `owner` alone, until it is dropped and the work that was queued by then has ended.
    pub unsafe fn from_raw(address: u64, len: usize, owner: impl Any + Send + Sync) -> Self {
        Memory { address, len, place: Place::Unknown, owner: Arc::new(owner) }
    }

    /// The same memory, which is known to lie there: nothing asks the driver about it.
    ///
    /// # Safety
    ///
    /// It does lie there.
    pub unsafe fn known(self, place: Place) -> Self {
        Memory { place, ..self }
    }

    /// Parts of it, each with the same owner.
    ///
    /// # Panics
    ///
    /// If a part does not lie within it, begins at no multiple of 16, or before the end of the part
    /// before it.
    pub fn parts<const N: usize>(self, parts: [Range<usize>; N]) -> [Memory; N] {
        let mut end = 0;
        parts.map(|part| {
            let apart = end <= part.start && part.start <= part.end && part.end <= self.len;
            assert!(apart && part.start.is_multiple_of(16), "the part {part:?} of {} bytes", self.len);
            end = part.end;
            let (address, owner) = (self.address + part.start as u64, Arc::clone(&self.owner));
            Memory { address, len: part.len(), place: self.place, owner }
        })
    }

    /// Its first bytes, with the same owner.
    ///
    /// # Panics
    ///
    /// If there are fewer than `len`.
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        Memory { len, ..self }
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
        unsafe { Slice::from_raw(self.address, self.len / size_of::<T>()).known(self.place) }
    }

    /// As many whole elements as it holds, to write.
    pub fn slice_mut<T: Plain>(&mut self) -> SliceMut<'_, T> {
        // SAFETY: as above; the memory is borrowed for writing, so nothing else reads it.
        unsafe { SliceMut::from_raw(self.address, self.len / size_of::<T>()).known(self.place) }
    }
}

impl From<Buffer<u8>> for Memory {
    fn from(buffer: Buffer<u8>) -> Self {
        let (address, place) = (buffer.slice().address(), Place::On(buffer.device().ordinal()));
        Memory { address, len: buffer.len(), place, owner: Arc::new(buffer) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} bytes)", self.address, self.len)
    }
}

/// Where memory comes from.
pub trait Allocator {
    /// `len` bytes for the work of `stream`, aligned to 16. Once dropped, they may be reused at
    /// once by later work of that stream. So no other stream may use them, unless it is made to
    /// wait.
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory>;
}

/// Memory from the driver; freeing it waits for all of the GPU's work.
impl Allocator for Device {
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory> {
        self.expect("the stream that memory is for", stream.device().ordinal())?;
        Ok(self.alloc::<u8>(len)?.into())
    }
}

/// The driver's stream-ordered memory, from one pool per GPU. Neither allocating nor dropping
/// waits: dropped memory is reused in the order of its stream. A capture records both, so a graph
/// has memory of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pool;

impl Pool {
    /// Bytes of a GPU that are free in its pool.
    pub fn free_bytes(device: Device) -> Result<usize> {
        let Some(pool) = device.pool()? else { return Ok(0) };
        let _current = device.enter()?;
        let read = |which| {
            let mut bytes = 0u64;
            // SAFETY: the pool exists; these attributes are one `cuuint64_t` each.
            check("cuMemPoolGetAttribute", unsafe {
                sys::cuMemPoolGetAttribute(pool, which, (&raw mut bytes).cast())
            })?;
            Ok(bytes as usize)
        };
        let used = read(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok(read(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?.saturating_sub(used))
    }

    /// Returns free memory to the driver, except what unfinished work has dropped.
    pub fn clear(device: Device) -> Result<()> {
        let Some(pool) = device.pool()? else { return Ok(()) };
        let _current = device.enter()?;
        // SAFETY: the pool exists.
        check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(pool, 0) })
    }
}

impl Allocator for Pool {
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory> {
        let device = stream.device();
        let Some(pool) = device.pool()? else { return device.bytes(stream, len) };
        let _current = device.enter()?;
        let (mut address, raw) = (0, stream.raw().cast());
        // SAFETY: pool and stream exist; the driver writes one address. Of nothing it has none.
        match unsafe { sys::cuMemAllocFromPoolAsync(&mut address, len.max(1), pool, raw) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(Error::OutOfMemory { bytes: len }),
            code => check("cuMemAllocFromPoolAsync", code)?,
        }
        captured::note(device, address, len);
        let owner = InOrder { address, stream: stream.clone(), from: Thread::current() };
        Ok(Memory { address, len, place: Place::On(device.ordinal()), owner: Arc::new(owner) })
    }
}

/// Memory that is freed in the order of a stream.
struct InOrder {
    address: u64,
    stream: Stream,
    from: Thread,
}

impl Drop for InOrder {
    fn drop(&mut self) {
        let Ok(_current) = self.stream.device().enter() else { return };
        if self.from.names(&self.stream) {
            // SAFETY: the address came from the pool and is freed once; the stream is kept alive.
            unsafe { sys::cuMemFreeAsync(self.address, self.stream.raw().cast()) };
        } else {
            // SAFETY: as above. This waits for all work.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// The thread that allocated memory. One driver handle means the default stream of whichever thread
/// uses it; if another thread drops the memory, that is not in the order of the work.
pub(super) struct Thread(ThreadId);

impl Thread {
    pub fn current() -> Self {
        Thread(std::thread::current().id())
    }

    /// Whether the handle of `stream` names the same stream on the thread that runs now.
    pub fn names(&self, stream: &Stream) -> bool {
        const PER_THREAD: usize = 2;
        stream.raw().addr() != PER_THREAD || std::thread::current().id() == self.0
    }
}

impl Device {
    /// The pool of this GPU; `None` if the driver does not support pools for it.
    fn pool(self) -> Result<Option<CUmemoryPool>> {
        static POOLS: Mutex<BTreeMap<usize, RawPool>> = Mutex::new(BTreeMap::new());
        let mut pools = lock(&POOLS);
        if let Some(pool) = pools.get(&self.ordinal()) {
            return Ok(pool.0);
        }
        let pool = self.new_pool()?;
        pools.insert(self.ordinal(), RawPool(pool));
        Ok(pool)
    }

    fn new_pool(self) -> Result<Option<CUmemoryPool>> {
        let _current = self.enter()?;
        // SAFETY: a description of zeros is that of no particular pool; what it says is filled in.
        let mut description: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        description.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        description.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        description.location.id = self.ordinal() as i32;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the driver reads the description and writes one handle.
        match unsafe { sys::cuMemPoolCreate(&mut pool, &description) } {
            CUresult::CUDA_ERROR_NOT_SUPPORTED => return Ok(None),
            code => check("cuMemPoolCreate", code)?,
        }
        let (mut all, keep) = (u64::MAX, CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
        // Otherwise every synchronization would return all free memory to the driver.
        // SAFETY: the pool exists; this attribute is one `cuuint64_t`.
        check("cuMemPoolSetAttribute", unsafe { sys::cuMemPoolSetAttribute(pool, keep, (&raw mut all).cast()) })?;
        Ok(Some(pool))
    }
}

/// The driver's handle of a pool.
struct RawPool(Option<CUmemoryPool>);

// SAFETY: the driver lets any thread use a pool, several at once.
unsafe impl Send for RawPool {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_memory_share_its_owner() {
        let owner = Arc::new(());
        // SAFETY: nothing is ever read there.
        let memory = unsafe { Memory::from_raw(0x1000, 64, Arc::clone(&owner)) };
        let [codes, scales] = memory.parts([0..5, 16..64]);
        assert_eq!((codes.address(), codes.len()), (0x1000, 5));
        assert_eq!((scales.address(), scales.slice::<f32>().len()), (0x1010, 12));
        drop(codes);
        assert_eq!(Arc::strong_count(&owner), 2, "the other part still has it");
        drop(scales);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    #[should_panic = "the part 16..80 of 64 bytes"]
    fn a_part_beyond_the_end_is_refused() {
        // SAFETY: nothing is ever read there.
        unsafe { Memory::from_raw(0x1000, 64, ()) }.parts([0..16, 16..80]);
    }
}
