//! A buffer that several threads write to, each its own ranges.

use std::marker::PhantomData;

/// A borrowed buffer, written range by range.
pub(crate) struct Scatter<'a, T> {
    start: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: the buffer is written through `write` alone, whose callers promise disjoint ranges.
unsafe impl<T: Send> Sync for Scatter<'_, T> {}
// SAFETY: it is a unique borrow of a slice of `T`.
unsafe impl<T: Send> Send for Scatter<'_, T> {}

impl<'a, T: Copy> Scatter<'a, T> {
    pub fn new(buffer: &'a mut [T]) -> Self {
        Scatter { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// Writes `values` from index `at` on.
    ///
    /// # Safety
    ///
    /// No other thread may write to the same elements.
    pub unsafe fn write(&self, at: usize, values: &[T]) {
        assert!(at <= self.len && values.len() <= self.len - at, "the range lies inside the buffer");
        // SAFETY: the range was checked, and the caller keeps other threads away from it.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start.add(at), values.len()) };
    }
}

#[cfg(target_arch = "x86_64")]
impl Scatter<'_, u8> {
    /// As [`Scatter::write`], but whole cache lines go past the cache. An `sfence` must follow
    /// before another thread reads them.
    ///
    /// # Safety
    ///
    /// As for [`Scatter::write`].
    pub unsafe fn stream(&self, at: usize, values: &[u8]) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
        const LINE: usize = 64;
        assert!(at <= self.len && values.len() <= self.len - at, "the range lies inside the buffer");
        let head = self.start.wrapping_add(at).align_offset(LINE).min(values.len());
        let (head, rest) = values.split_at(head);
        let (lines, tail) = rest.as_chunks::<LINE>();
        // SAFETY: the caller keeps other threads away from all of the range.
        unsafe { self.write(at, head) };
        let first = at + head.len();
        for (i, line) in lines.iter().enumerate() {
            for j in (0..LINE).step_by(16) {
                // SAFETY: the source has 16 bytes from j on.
                let part = unsafe { _mm_loadu_si128(line.as_ptr().add(j).cast()) };
                // SAFETY: the line starts at a multiple of 64 bytes and lies inside the range.
                unsafe { _mm_stream_si128(self.start.add(first + i * LINE + j).cast(), part) };
            }
        }
        // SAFETY: as for the head.
        unsafe { self.write(first + lines.len() * LINE, tail) };
    }
}
