//! Memory that a capture has allocated. It belongs to the graph that is being recorded, and the
//! driver answers no question about it before the graph runs.

use super::device::Device;
use std::cell::RefCell;
use std::ops::Range;

/// Addresses of a GPU's memory.
type OnGpu = (usize, Range<u64>);

thread_local! {
    /// What the capture of this thread has allocated; `None` if there is no capture.
    static CAPTURED: RefCell<Option<Vec<OnGpu>>> = const { RefCell::new(None) };
}

/// Notes that this thread has begun a capture.
pub(super) fn begin() {
    CAPTURED.set(Some(Vec::new()));
}

/// Notes that it has ended.
pub(super) fn end() {
    CAPTURED.set(None);
}

/// Notes memory, if there is a capture.
pub(super) fn note(device: Device, address: u64, len: usize) {
    CAPTURED.with_borrow_mut(|captured| {
        if let Some(captured) = captured {
            captured.push((device.ordinal(), address..address + len as u64));
        }
    });
}

/// Whether the capture of this thread has allocated the memory at an address of a GPU.
pub(super) fn contains(device: Device, address: u64) -> bool {
    CAPTURED.with_borrow(|captured| {
        let ranges = captured.iter().flatten();
        ranges.into_iter().any(|(ordinal, range)| *ordinal == device.ordinal() && range.contains(&address))
    })
}
