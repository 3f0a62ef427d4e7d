//! Streams and memory of other libraries in the same program that use cudarc too, as candle does: borrowed without a copy, kept alive by
//! their own counts.

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

/// Gives elements of another library to work that reads them and is queued on `stream`.
pub fn read<T: Plain, R>(from: &CudaSlice<T>, stream: &CudaStream, work: impl FnOnce(Slice<'_, T>) -> R) -> R {
    let len = cudarc::driver::DeviceSlice::len(from);
    let (address, _until_queued) = from.device_ptr(stream);
    // SAFETY: so many elements are there, borrowed until the work is queued; the stream then is what their owner waits for.
    work(unsafe { Slice::from_raw(address, len) })
}

/// Gives elements of another library to work that writes them and is queued on `stream`.
pub fn write<T: Plain, R>(to: &mut CudaSlice<T>, stream: &CudaStream, work: impl FnOnce(SliceMut<'_, T>) -> R) -> R {
    let len = cudarc::driver::DeviceSlice::len(to);
    let (address, _until_queued) = to.device_ptr_mut(stream);
    // SAFETY: as above, and borrowed for writing.
    work(unsafe { SliceMut::from_raw(address, len) })
}

/// Room for elements in another library's memory. What they are at first is undefined.
pub fn room<T: Plain + DeviceRepr>(stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<T>> {
    // SAFETY: any bits are a value of these types.
    unsafe { stream.alloc::<T>(len) }
        .map_err(|error| check("cuMemAllocAsync", error.0).expect_err("an error has a code that is not success"))
}

/// Memory in the order of the stream: what is given back may be used again by work that comes later in it.
impl Allocator for Arc<CudaStream> {
    fn bytes(&self, stream: &Stream, len: usize) -> Result<Memory> {
        if stream.raw() != self.cu_stream().cast() || stream.device().ordinal() != self.context().ordinal() {
            return Err(Error::OtherStream);
        }
        let room = room::<u8>(self, len)?;
        let address = room.device_ptr(self).0;
        let owner = InOrder { room: Some(room), stream: stream.clone(), from: Thread::current() };
        // SAFETY: so many bytes are there, aligned to 256, and they are the slice's alone, which is freed in the order of the stream.
        Ok(unsafe { Memory::from_raw(address, len, owner) })
    }
}

/// Memory that cudarc frees in the order of the stream that its handle names on the thread which drops it.
struct InOrder {
    room: Option<CudaSlice<u8>>,
    stream: Stream,
    from: Thread,
}

impl Drop for InOrder {
    fn drop(&mut self) {
        // Where the work runs on another thread's stream, it ends first; memory that cannot be waited for is left alone.
        if !self.from.names(&self.stream) && self.stream.device().synchronize().is_err() {
            std::mem::forget(self.room.take());
        }
    }
}
