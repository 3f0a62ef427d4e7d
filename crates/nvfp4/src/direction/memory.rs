//! Where the bytes of a direction lie.

use super::PlainDirection;
use std::fmt;

/// The memory that a tensor's bytes lie in: the host's ([`HostMemory`]) or a GPU's. What the tensor is, and what is
/// checked about it, does not depend on it.
pub trait MemorySpace: private::Sealed + Copy + fmt::Debug + PartialEq {
    /// An array of bytes.
    type Bytes: Array;
    /// An array of binary32 numbers.
    type Floats: Array;
    /// A matrix that is not quantized.
    type Plain: PlainMatrix;

    /// The first number below 0, where that can be known without waiting.
    #[doc(hidden)]
    fn first_negative(floats: &Self::Floats) -> Option<(usize, f32)>;
}

/// Elements one after the other.
pub trait Array: private::Sealed + fmt::Debug {
    /// How many there are.
    fn count(&self) -> usize;
}

/// A matrix that is not quantized.
pub trait PlainMatrix: private::Sealed + fmt::Debug + fmt::Display {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Number of elements of a row.
    fn cols(&self) -> usize;
    /// Bytes that it takes.
    fn byte_len(&self) -> usize;
    /// Whether another one is in the same memory.
    fn shares(&self, other: &Self) -> bool;
}

/// The memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostMemory;

impl MemorySpace for HostMemory {
    type Bytes = Vec<u8>;
    type Floats = Vec<f32>;
    type Plain = PlainDirection;

    fn first_negative(floats: &Vec<f32>) -> Option<(usize, f32)> {
        first_negative(floats)
    }
}

pub(super) fn first_negative(floats: &[f32]) -> Option<(usize, f32)> {
    floats.iter().copied().enumerate().find(|(_, value)| *value < 0.0)
}

impl<T: fmt::Debug> Array for Vec<T> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl PlainMatrix for PlainDirection {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn byte_len(&self) -> usize {
        PlainDirection::byte_len(self)
    }

    fn shares(&self, other: &Self) -> bool {
        PlainDirection::shares(self, other)
    }
}

pub(crate) mod private {
    /// What this crate alone implements.
    pub trait Sealed {}

    impl Sealed for super::HostMemory {}
    impl<T> Sealed for Vec<T> {}
    impl Sealed for super::PlainDirection {}
}
