//! Memory of a GPU: owned buffers, and borrowed slices of them or of another framework's memory.

use super::captured;
use super::device::Device;
use super::error::{Error, Result, check};
use cudarc::driver::sys::{self, CUmemorytype, CUpointer_attribute, CUresult};
use half::{bf16, f16};
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// Element types that a GPU and the CPU store alike, and for which any bits are a value.
pub trait Plain: Copy + Send + Sync + fmt::Debug + sealed::Sealed + 'static {}

mod sealed {
    /// Keeps the list of element types closed: copies rely on it.
    pub trait Sealed {}
}

macro_rules! plain {
    ($($t:ty)*) => { $(impl sealed::Sealed for $t {} impl Plain for $t {})* };
}

plain!(u8 u16 u32 u64 f32 bf16 f16);

/// Memory of a GPU, freed when dropped. What it holds at first is undefined.
///
/// Dropping waits for all earlier work of the GPU, because `cuMemFree` does. Keep a buffer alive
/// where the caller must not wait.
pub struct Buffer<T: Plain> {
    device: Device,
    address: u64,
    len: usize,
    elements: PhantomData<T>,
}

impl Device {
    /// Memory for `len` elements, aligned to 256 bytes. Not to be called while a stream is captured
    /// on this thread.
    pub fn alloc<T: Plain>(self, len: usize) -> Result<Buffer<T>> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::OutOfMemory { bytes: usize::MAX })?;
        let mut address = 0;
        if bytes > 0 {
            let _current = self.enter()?;
            // SAFETY: a context is current; the driver writes one address.
            match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(Error::OutOfMemory { bytes }),
                code => check("cuMemAlloc", code)?,
            }
        }
        Ok(Buffer { device: self, address, len, elements: PhantomData })
    }
}

impl<T: Plain> Buffer<T> {
    /// The GPU it lies on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to read.
    pub fn slice(&self) -> Slice<'_, T> {
        Slice { address: self.address, len: self.len, place: self.place(), memory: PhantomData }
    }

    /// All of it, to write.
    pub fn slice_mut(&mut self) -> SliceMut<'_, T> {
        SliceMut { address: self.address, len: self.len, place: self.place(), memory: PhantomData }
    }

    fn place(&self) -> Place {
        Place::On(self.device.ordinal())
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.address != 0
            && let Ok(_current) = self.device.enter()
        {
            // A kernel may still be using the memory: this waits for it.
            // SAFETY: the address came from `cuMemAlloc` and is freed once.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl<T: Plain> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?}, {:#x}, {} elements)", self.device, self.address, self.len)
    }
}

/// What is known about where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing: the driver is asked.
    Unknown,
    /// On the GPU with this number.
    On(usize),
}

/// Borrowed memory of a GPU, to read.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a, T: Plain> {
    address: u64,
    len: usize,
    place: Place,
    memory: PhantomData<&'a [T]>,
}

/// Borrowed memory of a GPU, to write.
#[derive(Debug)]
pub struct SliceMut<'a, T: Plain> {
    address: u64,
    len: usize,
    place: Place,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T: Plain> Slice<'a, T> {
    /// Memory of another framework. [`Slice::check`] refuses an address that is not in GPU memory.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` elements of a GPU's memory, which nothing frees or writes during
    /// `'a` or before the work that is given this slice has ended. With no elements, any address
    /// will do.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Slice { address, len, place: Place::Unknown, memory: PhantomData }
    }

    /// The same memory, which is known to lie there: [`Slice::check`] then does not ask the driver.
    ///
    /// # Safety
    ///
    /// It does lie there.
    pub unsafe fn known(self, place: Place) -> Self {
        Slice { place, ..self }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements in `range`.
    ///
    /// # Panics
    ///
    /// If the range does not lie within the slice.
    pub fn range(self, range: Range<usize>) -> Slice<'a, T> {
        let (address, len) = part::<T>(self.address, self.len, range);
        Slice { address, len, ..self }
    }

    /// An error unless this is memory of `device`; `what` names it in the message.
    pub fn check(&self, device: Device, what: &'static str) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        if let Place::On(ordinal) = self.place {
            return device.expect(what, ordinal);
        }
        if captured::contains(device, self.address) {
            return Ok(());
        }
        let _current = device.enter()?;
        match memory_type(self.address) {
            Some(CUmemorytype::CU_MEMORYTYPE_DEVICE | CUmemorytype::CU_MEMORYTYPE_UNIFIED) => {}
            _ => return Err(Error::NotDeviceMemory { what }),
        }
        let mut ordinal: i32 = -1;
        let (out, which) = ((&raw mut ordinal).cast(), CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
        // SAFETY: this attribute is one `int`; the driver looks the address up and does not follow
        // it.
        check("cuPointerGetAttribute", unsafe { sys::cuPointerGetAttribute(out, which, self.address) })?;
        device.expect(what, usize::try_from(ordinal).map_err(|_| Error::NotDeviceMemory { what })?)
    }

    /// An error unless it begins at a multiple of `need` bytes; `what` names it in the message.
    pub fn check_aligned(&self, need: usize, what: &'static str) -> Result<()> {
        if self.is_empty() || self.address.is_multiple_of(need as u64) {
            return Ok(());
        }
        Err(Error::Misaligned { what, address: self.address, need })
    }
}

impl<'a, T: Plain> SliceMut<'a, T> {
    /// Memory of another framework. [`SliceMut::check`] refuses an address that is not in GPU
    /// memory.
    ///
    /// # Safety
    ///
    /// As for [`Slice::from_raw`]; and nothing else reads the memory in that time either.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        SliceMut { address, len, place: Place::Unknown, memory: PhantomData }
    }

    /// See [`Slice::known`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn known(self, place: Place) -> Self {
        SliceMut { place, ..self }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same memory, to read.
    pub fn as_slice(&self) -> Slice<'_, T> {
        Slice { address: self.address, len: self.len, place: self.place, memory: PhantomData }
    }

    /// The same memory, for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_, T> {
        SliceMut { address: self.address, len: self.len, place: self.place, memory: PhantomData }
    }

    /// The elements in `range`.
    ///
    /// # Panics
    ///
    /// If the range does not lie within the slice.
    pub fn range(self, range: Range<usize>) -> SliceMut<'a, T> {
        let (address, len) = part::<T>(self.address, self.len, range);
        SliceMut { address, len, ..self }
    }

    /// The first `count` elements, and those after them.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub fn split_at(self, count: usize) -> (SliceMut<'a, T>, SliceMut<'a, T>) {
        let half = |range| {
            let (address, len) = part::<T>(self.address, self.len, range);
            SliceMut { address, len, place: self.place, memory: PhantomData }
        };
        (half(0..count), half(count..self.len))
    }

    /// See [`Slice::check`].
    pub fn check(&self, device: Device, what: &'static str) -> Result<()> {
        self.as_slice().check(device, what)
    }

    /// See [`Slice::check_aligned`].
    pub fn check_aligned(&self, need: usize, what: &'static str) -> Result<()> {
        self.as_slice().check_aligned(need, what)
    }
}

fn part<T>(address: u64, len: usize, Range { start, end }: Range<usize>) -> (u64, usize) {
    assert!(start <= end && end <= len, "the range {start}..{end} does not lie within {len} elements");
    (address + (start * size_of::<T>()) as u64, end - start)
}

/// Whether a host address is in page-locked memory: copies access that asynchronously.
pub(super) fn is_page_locked(host: *const c_void) -> bool {
    memory_type(host as u64).is_some()
}

/// What kind of memory the driver knows an address as; ordinary host memory is unknown to it. A
/// context must be current.
fn memory_type(address: u64) -> Option<CUmemorytype> {
    let mut kind: u32 = 0;
    let mut out = (&raw mut kind).cast();
    // The plural asks without an error for memory that is unknown, which a checker would report.
    let mut which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: this one attribute is an `unsigned int`; the driver looks the address up and does not
    // follow it.
    let code = unsafe { sys::cuPointerGetAttributes(1, &mut which, &mut out, address) };
    let kinds = [
        CUmemorytype::CU_MEMORYTYPE_HOST,
        CUmemorytype::CU_MEMORYTYPE_DEVICE,
        CUmemorytype::CU_MEMORYTYPE_ARRAY,
        CUmemorytype::CU_MEMORYTYPE_UNIFIED,
    ];
    kinds.into_iter().find(|&k| code == CUresult::CUDA_SUCCESS && k as u32 == kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_slice_count_in_elements() {
        // SAFETY: nothing is ever read there.
        let slice = unsafe { Slice::<u32>::from_raw(0x1000, 8) };
        let part = slice.range(2..5);
        assert_eq!((part.address(), part.len(), part.bytes()), (0x1008, 3, 12));
        assert_eq!(part.range(3..3).len(), 0);
        assert_eq!(part.check_aligned(8, "x"), Ok(()));
        let error = slice.range(1..2).check_aligned(16, "x").unwrap_err();
        assert_eq!(error.to_string(), "x: expected an address that is a multiple of 16, got 0x1004");
        // SAFETY: as above.
        assert_eq!(unsafe { SliceMut::<u8>::from_raw(3, 0) }.check_aligned(16, "x"), Ok(()), "an empty one is aligned");
    }

    #[test]
    #[should_panic = "the range 3..9 does not lie within 8 elements"]
    fn a_part_beyond_the_end_is_refused() {
        // SAFETY: nothing is ever read there.
        unsafe { Slice::<u32>::from_raw(0x1000, 8) }.range(3..9);
    }
}
