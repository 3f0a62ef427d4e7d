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
