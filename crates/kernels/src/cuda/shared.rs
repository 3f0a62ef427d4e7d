//! Streams and memory of other libraries in the same program that also use cudarc, such as candle:
//! borrowed without a copy, kept alive by their reference counts.

use super::device::Device;
use super::error::{Error, Result, check};
use super::memory::{Plain, Slice, SliceMut};
use super::pool::{Allocator, Memory, Thread};
use super::stream::Stream;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use std::sync::Arc;

impl Stream {
    /// A stream of another library, which stays alive with it.
    pub fn shared(stream: &Arc<CudaStream>) -> Result<Stream> {
        let device = Device::open(stream.context().ordinal())?;
        Ok(Stream::kept(device, stream))
    }
}

/// Lends elements of another library to `work`, which queues reads of them on `stream`.
pub fn read<T: Plain, R>(from: &CudaSlice<T>, stream: &CudaStream, work: impl FnOnce(Slice<'_, T>) -> R) -> R {
    let len = cudarc::driver::DeviceSlice::len(from);
    let (address, _until_queued) = from.device_ptr(stream);
    // SAFETY: there are `len` elements, borrowed until the work is queued; after that their owner
    // waits for the stream.
    work(unsafe { Slice::from_raw(address, len) })
}

/// Lends elements of another library to `work`, which queues writes of them on `stream`.
pub fn write<T: Plain, R>(to: &mut CudaSlice<T>, stream: &CudaStream, work: impl FnOnce(SliceMut<'_, T>) -> R) -> R {
    let len = cudarc::driver::DeviceSlice::len(to);
    let (address, _until_queued) = to.device_ptr_mut(stream);
    // SAFETY: as above, and borrowed for writing.
    work(unsafe { SliceMut::from_raw(address, len) })
}

/// Allocates `len` elements through another library. Their contents are undefined at first.
pub fn room<T: Plain + DeviceRepr>(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<T>> {
    // SAFETY: any bits are a value of these types.
    unsafe { stream.alloc::<T>(len) }
        .map_err(|error| check("cuMemAllocAsync", error.0).expect_err("an error has a code that is not success"))
}

/// Stream-ordered memory: once dropped, it may be reused by later work of the stream.
impl Allocator for Arc<CudaStream> {
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory> {
        if stream.raw() != self.cu_stream().cast() || stream.device().ordinal() != self.context().ordinal() {
            return Err(Error::OtherStream);
        }
        let room = room::<u8>(self, len)?;
        let address = room.device_ptr(self).0;
        let owner = InOrder { room: Some(room), stream: stream.clone(), from: Thread::current() };
        // SAFETY: there are `len` bytes, aligned to 256; they belong to the slice alone, which is
        // freed in the order of the stream.
        Ok(unsafe { Memory::from_raw(address, len, owner) })
    }
}

/// Memory that cudarc frees in the order of the stream that its handle names on the thread which
/// drops it.
struct InOrder {
    room: Option<CudaSlice<u8>>,
    stream: Stream,
    from: Thread,
}

impl Drop for InOrder {
    fn drop(&mut self) {
        // Work on another thread's stream has to finish first; memory whose work cannot be waited
        // for is leaked.
        if !self.from.names(&self.stream) && self.stream.device().synchronize().is_err() {
            std::mem::forget(self.room.take());
        }
    }
}
