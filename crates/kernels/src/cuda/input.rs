//! Borrowed matrices in the memory of a GPU.

use super::device::Device;
use super::memory::Slice;
use super::stream::Stream;
use super::{Buffer, Plain};
use crate::input::{self, Elements, MatrixRef};
use half::{bf16, f16};
use nvfp4_spec::Precision;

/// Elements in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// binary32.
    F32(Slice<'a, f32>),
    /// bfloat16.
    Bf16(Slice<'a, bf16>),
    /// binary16.
    F16(Slice<'a, f16>),
}

impl Values<'_> {
    /// The type of the elements.
    pub fn precision(&self) -> Precision {
        match self {
            Values::F32(_) => Precision::F32,
            Values::Bf16(_) => Precision::Bf16,
            Values::F16(_) => Precision::F16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(x) => x.len(),
            Values::Bf16(x) => x.len(),
            Values::F16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where they begin.
    pub fn address(&self) -> u64 {
        match self {
            Values::F32(x) => x.address(),
            Values::Bf16(x) => x.address(),
            Values::F16(x) => x.address(),
        }
    }

    /// An error unless they are memory of `device`, aligned to their size.
    pub(crate) fn check(&self, device: Device, what: &'static str) -> super::Result<()> {
        fn check<T: Plain>(x: &Slice<'_, T>, device: Device, what: &'static str) -> super::Result<()> {
            x.check(device, what)?;
            x.check_aligned(size_of::<T>(), what)
        }
        match self {
            Values::F32(x) => check(x, device, what),
            Values::Bf16(x) => check(x, device, what),
            Values::F16(x) => check(x, device, what),
        }
    }

    /// Elements `range`.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub(crate) fn range(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Values::F32(x) => Values::F32(x.range(range)),
            Values::Bf16(x) => Values::Bf16(x.range(range)),
            Values::F16(x) => Values::F16(x.range(range)),
        }
    }

    /// Bytes of an element.
    pub(crate) fn element_size(&self) -> usize {
        match self {
            Values::F32(_) => 4,
            Values::Bf16(_) | Values::F16(_) => 2,
        }
    }
}

/// A matrix in the memory of a GPU.
pub type Input<'a> = MatrixRef<Values<'a>>;

impl Elements for Values<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl Input<'_> {
    /// An error unless the elements are memory of `device`, aligned to their size.
    pub(crate) fn check(&self, device: Device) -> super::Result<()> {
        self.values().check(device, "input")
    }

    /// Whether every row starts at a multiple of 16 bytes.
    pub(crate) fn rows_aligned(&self) -> bool {
        // In elements: the stride of a single row may be any number, and its bytes more than can be
        // counted.
        let strides = self.rows() <= 1 || self.stride().is_multiple_of(16 / self.values().element_size());
        strides && self.values().address().is_multiple_of(16)
    }
}

/// A matrix of the host, copied to a GPU.
pub(crate) struct Uploaded {
    values: UploadedValues,
    rows: usize,
    cols: usize,
    stride: usize,
}

enum UploadedValues {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
    F16(Buffer<f16>),
}

impl Uploaded {
    pub fn new(stream: &Stream, x: &input::Input<'_>) -> super::Result<Self> {
        let values = match x.values() {
            input::Values::F32(x) => UploadedValues::F32(stream.to_device(x)?),
            input::Values::Bf16(x) => UploadedValues::Bf16(stream.to_device(x)?),
            input::Values::F16(x) => UploadedValues::F16(stream.to_device(x)?),
        };
        Ok(Uploaded { values, rows: x.rows(), cols: x.cols(), stride: x.stride() })
    }

    pub fn input(&self) -> Input<'_> {
        let values = match &self.values {
            UploadedValues::F32(x) => Values::F32(x.slice()),
            UploadedValues::Bf16(x) => Values::Bf16(x.slice()),
            UploadedValues::F16(x) => Values::F16(x.slice()),
        };
        Input::strided(values, self.rows, self.cols, self.stride).expect("as it was on the host")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aligned(address: u64, rows: usize, stride: usize) -> bool {
        // SAFETY: nothing is ever read there.
        let values = Values::Bf16(unsafe { Slice::from_raw(address, 64) });
        Input::strided(values, rows, 16, stride).unwrap().rows_aligned()
    }

    #[test]
    fn rows_are_aligned_if_the_first_one_and_the_stride_are() {
        assert!(aligned(0x1000, 2, 24) && !aligned(0x1002, 2, 24) && !aligned(0x1000, 2, 20));
        // The stride of a single row leads nowhere.
        assert!(aligned(0x1000, 1, usize::MAX) && !aligned(0x1002, 1, usize::MAX));
        assert!(aligned(0x1000, 0, usize::MAX) && aligned(0x1000, 1, 17));
    }
}
