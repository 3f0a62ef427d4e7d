//! Streams, events that time their work, and graphs that repeat it.

use super::captured;
use super::device::Device;
use super::error::{Error, Result, check};
use super::memory::{Buffer, Plain, Slice, SliceMut, is_page_locked};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUevent, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use nvfp4_spec::Element;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::{fmt, ptr};

/// A queue of asynchronous work, which runs in order. A clone is the same queue.
#[derive(Clone)]
pub struct Stream(Arc<Handle>);

struct Handle {
    device: Device,
    raw: CUstream,
    owner: Owner,
}

/// Who destroys a stream.
enum Owner {
    Us,
    Another,
    /// Another library, which keeps it while this is there.
    Kept {
        _stream: Arc<CudaStream>,
    },
}

// SAFETY: the driver lets any thread use a stream, several at once.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Stream {
    /// A stream of its own, which does not wait for the default stream.
    pub fn new(device: Device) -> Result<Stream> {
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the driver writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream(Arc::new(Handle { device, raw, owner: Owner::Us })))
    }

    /// Another framework's stream, which stays that framework's to destroy. Null is the default
    /// stream.
    ///
    /// # Safety
    ///
    /// `raw` is null or a `CUstream` of `device`'s primary context that outlives what is returned,
    /// its clones, and memory that a [`Pool`](super::Pool) gives for it.
    pub unsafe fn borrow(device: Device, raw: *mut c_void) -> Stream {
        Stream(Arc::new(Handle { device, raw: raw.cast(), owner: Owner::Another }))
    }

    /// A stream of another library that uses cudarc, with a reference to it.
    pub(super) fn kept(device: Device, stream: &Arc<CudaStream>) -> Stream {
        let owner = Owner::Kept { _stream: stream.clone() };
        Stream(Arc::new(Handle { device, raw: stream.cu_stream(), owner }))
    }

    /// The GPU it belongs to.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The driver's handle (`CUstream`).
    pub fn raw(&self) -> *mut c_void {
        self.0.raw.cast()
    }

    /// Waits until everything given so far is done. An error may be that of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.0.device.enter()?;
        // SAFETY: the stream exists.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.raw) })
    }

    /// Whether a graph is being recorded from it, by anyone.
    pub(crate) fn is_capturing(&self) -> bool {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let Ok(_current) = self.0.device.enter() else { return false };
        // SAFETY: the stream exists; the driver writes one number.
        let code = unsafe { sys::cuStreamIsCapturing(self.0.raw, &mut status) };
        // The default stream answers with an error while another one is captured.
        code != CUresult::CUDA_SUCCESS || status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Copies to the GPU. `from` may be changed as soon as this returns: pageable memory is read
    /// before that, and if the GPU reads the memory directly (page-locked memory, and on some GPUs
    /// all memory) this waits for the copy.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn upload<T: Plain>(&self, from: &[T], to: SliceMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "upload: the lengths differ");
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.0.device.enter()?;
        let (address, host) = (to.address(), from.as_ptr().cast());
        // SAFETY: both sides have that many bytes, and the host's are read before this function
        // ends: the driver stages ordinary memory that the GPU cannot read before it returns, and
        // any other is waited for below.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(address, host, to.bytes(), self.0.raw) })?;
        let late = is_page_locked(host) || self.device().properties().reads_host_memory;
        if late { self.synchronize() } else { Ok(()) }
    }

    /// Copies from the GPU, and waits: the values are there when this returns.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn download<T: Plain>(&self, from: Slice<'_, T>, to: &mut [T]) -> Result<()> {
        assert_eq!(from.len(), to.len(), "download: the lengths differ");
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.0.device.enter()?;
        let host = to.as_mut_ptr().cast();
        // SAFETY: both sides have that many bytes, any bits are a value, and the copy ends before
        // this function does.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(host, from.address(), from.bytes(), self.0.raw)
        })?;
        self.synchronize()
    }

    /// A new buffer with these values.
    pub fn to_device<T: Plain>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.0.device.alloc(values.len())?;
        self.upload(values, buffer.slice_mut())?;
        Ok(buffer)
    }

    /// The values of a slice, waited for.
    pub fn to_host<T: Plain + Default>(&self, slice: Slice<'_, T>) -> Result<Vec<T>> {
        let mut values = vec![T::default(); slice.len()];
        self.download(slice, &mut values)?;
        Ok(values)
    }

    /// Downloads what `make` writes to GPU memory into `out`. `P` and `T` are the same type; only
    /// their precisions say so.
    pub(crate) fn fetch<P: Element + Plain, T: Element>(
        &self,
        out: &mut [T],
        make: impl FnOnce(SliceMut<'_, P>) -> crate::Result<()>,
    ) -> crate::Result<()> {
        let mut buffer = self.0.device.alloc::<P>(out.len())?;
        make(buffer.slice_mut())?;
        for (out, value) in out.iter_mut().zip(self.to_host(buffer.slice())?) {
            *out = T::from_f32(value.to_f32());
        }
        Ok(())
    }

    /// Copies within the GPU. Does not wait.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn copy<T: Plain>(&self, from: Slice<'_, T>, to: SliceMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "copy: the lengths differ");
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.0.device.enter()?;
        let (source, bytes) = (from.address(), from.bytes());
        // SAFETY: both sides have that many bytes, and one is borrowed to write, so they do not
        // overlap.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), source, bytes, self.0.raw) })
    }

    /// Copies `rows` rows of `bytes` bytes within the GPU, from and to addresses with a pitch in
    /// bytes each. Does not wait.
    ///
    /// # Safety
    ///
    /// Both sides are memory of this GPU with `rows` rows and do not overlap. The memory stays
    /// allocated and is not accessed concurrently until the copy has finished.
    pub(crate) unsafe fn copy_rows(
        &self,
        (from, from_pitch): (u64, usize),
        (to, to_pitch): (u64, usize),
        bytes: usize,
        rows: usize,
    ) -> Result<()> {
        let _current = self.0.device.enter()?;
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: ptr::null(),
            srcDevice: from,
            srcArray: ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: ptr::null_mut(),
            dstDevice: to,
            dstArray: ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: bytes,
            Height: rows,
        };
        // SAFETY: the driver reads the description before it returns; the caller vouches for the
        // memory.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0.raw) })
    }

    /// Sets every byte. Does not wait.
    pub fn fill_bytes<T: Plain>(&self, to: SliceMut<'_, T>, byte: u8) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let _current = self.0.device.enter()?;
        // SAFETY: the slice has that many bytes, and any bits are a value.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to.address(), byte, to.bytes(), self.0.raw) })
    }

    /// Makes all later work of this stream wait for an event, of this stream or another.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.0.device.enter()?;
        // SAFETY: both exist.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.raw, 0) })
    }

    /// Records the work that `work` queues, instead of running it.
    ///
    /// Inside, this thread may launch kernels, fill and copy within the GPU, and take memory from a
    /// [`Pool`](super::Pool), which then is the graph's. It may not allocate otherwise, wait or load
    /// a kernel for the first time: the driver then refuses the capture, and the stream is as usable
    /// as before. So run the work once before. Nor may it
    /// [`upload`](Stream::upload): that waits for page-locked memory, and a copy of ordinary memory
    /// may be recorded with its address, which each replay would read, whatever is there by then.
    /// The default stream cannot be captured.
    pub fn capture<E: From<Error>>(
        &self,
        work: impl FnOnce(&Stream) -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        let _current = self.0.device.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists; `Capture` ends what begins here, on this thread.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.0.raw, mode) })?;
        captured::begin();
        let capture = Capture(self);
        let done = work(self);
        let ended = capture.end();
        // The error of the work says more than that of the capture.
        done?;
        let recorded = ended?;
        let mut exec = ptr::null_mut();
        // SAFETY: the recording exists; the driver writes one handle.
        check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, recorded.0, 0) })?;
        Ok(Graph { device: self.0.device, exec })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Owner::Us = self.owner
            && let Ok(_current) = self.device.enter()
        {
            // The driver finishes work in flight.
            // SAFETY: the stream is ours and destroyed once.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?}, {:?})", self.0.device, self.0.raw)
    }
}

/// A capture under way; ends it even if the work panics.
struct Capture<'a>(&'a Stream);

impl Capture<'_> {
    fn end(self) -> Result<Recorded> {
        let stream = self.0.0.raw;
        std::mem::forget(self);
        captured::end();
        let mut graph = ptr::null_mut();
        // SAFETY: the stream exists and is being captured; the driver writes one handle, or null
        // when it fails.
        let code = unsafe { sys::cuStreamEndCapture(stream, &mut graph) };
        let recorded = Recorded(graph);
        check("cuStreamEndCapture", code)?;
        Ok(recorded)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let _ = Capture(self.0).end();
    }
}

/// What a capture recorded.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the recording is ours and destroyed once; an instantiated graph does not need
            // it.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Recorded work that can be run again at the cost of one launch.
pub struct Graph {
    device: Device,
    exec: CUgraphExec,
}

// SAFETY: the driver lets any thread use a graph, one at a time: so it is not Sync.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the recorded work. Does not wait.
    ///
    /// # Safety
    ///
    /// The memory that the work was recorded with stays allocated and is not accessed concurrently
    /// until the run has finished. The graph is dropped only then.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.device.expect("the stream of a graph", stream.device().ordinal())?;
        let _current = self.device.enter()?;
        // SAFETY: both exist, and the caller vouches for the memory.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.0.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the graph is ours and destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?}, {:?})", self.device, self.exec)
    }
}

/// A mark in a stream, with the time at which the GPU passed it.
pub struct Event {
    device: Device,
    raw: CUevent,
}

// SAFETY: the driver lets any thread use an event, several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A mark that is not set yet.
    pub fn new(device: Device) -> Result<Event> {
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: a context is current; the driver writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { device, raw })
    }

    /// Sets the mark after everything given to the stream so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.expect("the stream of an event", stream.device().ordinal())?;
        let _current = self.device.enter()?;
        // SAFETY: both exist.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.0.raw) })
    }

    /// Waits until the GPU has passed the mark.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: the event exists.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Microseconds from `start` to this mark, both recorded; waits for this one.
    pub fn elapsed_us(&self, start: &Event) -> Result<f32> {
        self.synchronize()?;
        let elapsed_time = elapsed_time()?;
        let _current = self.device.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events exist; the driver writes one number.
        check("cuEventElapsedTime", unsafe { elapsed_time(&mut milliseconds, start.raw, self.raw) })?;
        Ok(milliseconds * 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the event is ours and destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?}, {:?})", self.device, self.raw)
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

/// `cuEventElapsedTime` as CUDA 12.0 had it. cudarc calls the second version, and panics where the
/// driver is older than 12.8; this one is in every driver that is let in.
fn elapsed_time() -> Result<ElapsedTime> {
    static FOUND: OnceLock<ElapsedTime> = OnceLock::new();
    if let Some(&found) = FOUND.get() {
        return Ok(found);
    }
    let (name, mut address) = (c"cuEventElapsedTime", ptr::null_mut());
    // SAFETY: an event exists, so the driver is initialised; it writes one address, and no status
    // where it gets null.
    let code = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut address, 12000, 0, ptr::null_mut()) };
    check("cuGetProcAddress", code)?;
    // SAFETY: null is `None`, and what the driver gives under that name and version has that
    // signature.
    let found = unsafe { std::mem::transmute::<*mut c_void, Option<ElapsedTime>>(address) };
    let missing = || Error::Driver { call: "cuEventElapsedTime", code: 500, text: "the driver lacks it".to_string() };
    let found = found.ok_or_else(missing)?;
    Ok(*FOUND.get_or_init(|| found))
}
