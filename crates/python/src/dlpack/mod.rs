//! Memory that other libraries lend us and that we lend to them, by DLPack. The only place of this
//! crate with `unsafe`.
//!
//! A tensor that is taken over ([`Tensor::of`]) is given back when it is dropped. Ours is lent out
//! ([`Lent`]) with a share in what owns it, so that it lives as long as any view of it. Libraries
//! that have a table of functions for this ([`Exchange`]) are asked through it, which is faster
//! than their methods.

mod exchange;
mod lent;

pub use exchange::Exchange;
pub use lent::{Lent, Numbers};

use nvfp4::Precision;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The version that we use.
const VERSION: Version = Version { major: 1, minor: 0 };
/// Set in `Versioned::flags` where memory must not be written.
const READ_ONLY: u64 = 1;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// 1 is the host, 2 a GPU of CUDA, 3 page-locked memory of the host, 13 memory that CUDA
    /// manages.
    pub kind: i32,
    /// Which of them.
    pub id: i32,
}

impl Device {
    /// The host.
    pub const HOST: Device = Device { kind: 1, id: 0 };
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    /// 0 signed, 1 unsigned, 2 floating point, 4 bfloat.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// 1, or the width of a vector.
    pub lanes: u16,
}

impl DataType {
    /// Bytes.
    pub const U8: DataType = DataType { code: 1, bits: 8, lanes: 1 };
    /// 16 bits without a meaning of their own.
    pub const U16: DataType = DataType { code: 1, bits: 16, lanes: 1 };
    /// 64-bit integers.
    pub const I64: DataType = DataType { code: 0, bits: 64, lanes: 1 };
    /// binary16.
    pub const F16: DataType = DataType { code: 2, bits: 16, lanes: 1 };
    /// binary32.
    pub const F32: DataType = DataType { code: 2, bits: 32, lanes: 1 };
    /// bfloat16.
    pub const BF16: DataType = DataType { code: 4, bits: 16, lanes: 1 };

    /// The name that numpy and torch have for it.
    pub fn name(self) -> &'static str {
        match self {
            DataType::U8 => "uint8",
            DataType::U16 => "uint16",
            DataType::I64 => "int64",
            DataType::F16 => "float16",
            DataType::F32 => "float32",
            DataType::BF16 => "bfloat16",
            _ => "another type",
        }
    }
}

/// `DLTensor`.
#[repr(C)]
struct Raw {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: Raw,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Raw,
}

/// Another library's tensor, given back when dropped.
pub struct Tensor {
    _owner: Owner,
    /// Where it lies.
    pub device: Device,
    /// What its elements are.
    pub dtype: DataType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Elements between neighbours of each dimension.
    pub strides: Vec<isize>,
    address: *mut u8,
}

/// Whose memory it is, which gets it back when this is dropped.
enum Owner {
    Legacy(NonNull<Legacy>),
    Versioned(NonNull<Versioned>),
    /// An object of Python, which has it back when the reference to it is dropped.
    Object(#[allow(dead_code)] Py<PyAny>),
}

// SAFETY: DLPack lets any thread read the memory and call the deleter, which takes the
// interpreter's lock if it needs that.
unsafe impl Send for Tensor {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Tensor {}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: we own the tensor since its capsule was renamed, and give it back once.
        unsafe {
            match self {
                Owner::Legacy(tensor) => {
                    if let Some(deleter) = tensor.as_ref().deleter {
                        deleter(tensor.as_ptr());
                    }
                }
                Owner::Versioned(tensor) => {
                    if let Some(deleter) = tensor.as_ref().deleter {
                        deleter(tensor.as_ptr());
                    }
                }
                Owner::Object(_) => {}
            }
        }
    }
}

impl Tensor {
    /// Takes a tensor over: from anything with `__dlpack__`, or from a capsule that nobody consumed
    /// yet. Nothing is copied and no stream waits for another: what is done with the memory belongs
    /// on the stream that its owner works on.
    pub fn of(x: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        match (x.cast::<PyCapsule>(), Exchange::of(&x.get_type())) {
            (Ok(capsule), _) => Tensor::consume(capsule),
            (_, Some(exchange)) => exchange.export(x),
            (Err(_), None) => {
                let capsule = export(x)?;
                let capsule = capsule.cast::<PyCapsule>();
                Tensor::consume(capsule.map_err(|_| PyTypeError::new_err("__dlpack__ returned no capsule"))?)
            }
        }
    }

    /// Looks at a tensor of torch for as long as the object lives.
    pub fn borrowed(x: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        match Exchange::torch(x.py())? {
            Some(exchange) => exchange.borrow(x),
            None => Tensor::of(&x.call_method0("detach")?),
        }
    }

    fn consume(capsule: &Bound<'_, PyCapsule>) -> PyResult<Tensor> {
        let consumed =
            "this DLPack capsule was consumed already; ask the tensor for another one, or pass the tensor itself";
        // SAFETY: the name is compared and not kept.
        let name = capsule.name()?.map(|name| unsafe { name.as_cstr() }.to_owned());
        match name.as_deref() {
            Some(name) if name == LEGACY => {
                let tensor = take::<Legacy>(capsule, LEGACY, LEGACY_USED)?;
                // SAFETY: the capsule's name says what it points to.
                Tensor::read(Owner::Legacy(tensor), unsafe { &tensor.as_ref().tensor })
            }
            Some(name) if name == VERSIONED => {
                let tensor = take::<Versioned>(capsule, VERSIONED, VERSIONED_USED)?;
                // SAFETY: the capsule's name says what it points to.
                unsafe { Tensor::versioned(tensor) }
            }
            Some(name) if name == LEGACY_USED || name == VERSIONED_USED => Err(PyValueError::new_err(consumed)),
            _ => Err(PyTypeError::new_err("expected a DLPack capsule, got one of another kind")),
        }
    }

    /// A tensor with a version.
    ///
    /// # Safety
    ///
    /// `tensor` is a `DLManagedTensorVersioned`, which becomes ours.
    unsafe fn versioned(tensor: NonNull<Versioned>) -> PyResult<Tensor> {
        let owner = Owner::Versioned(tensor);
        // SAFETY: the version, and what gives the tensor back, come first in every version.
        let Version { major, minor } = unsafe { tensor.as_ref().version };
        if major != VERSION.major {
            return Err(PyBufferError::new_err(format!("expected DLPack 1, got version {major}.{minor}")));
        }
        // SAFETY: the caller and the version say what it points to.
        Tensor::read(owner, unsafe { &tensor.as_ref().tensor })
    }

    /// What the producer says, checked.
    fn read(owner: Owner, raw: &Raw) -> PyResult<Tensor> {
        // From here on the tensor is given back whatever else is wrong with it.
        let mut tensor = Tensor {
            _owner: owner,
            device: raw.device,
            dtype: raw.dtype,
            shape: Vec::new(),
            strides: Vec::new(),
            address: raw.data.cast::<u8>().wrapping_add(raw.byte_offset as usize),
        };
        let ndim = usize::try_from(raw.ndim).map_err(|_| PyBufferError::new_err("negative number of dimensions"))?;
        // SAFETY: DLPack says that these have `ndim` elements each; only the strides may be null.
        let (shape, strides) = unsafe {
            let all = |start: *mut i64| match ndim == 0 || start.is_null() {
                true => None,
                false => Some(std::slice::from_raw_parts(start, ndim).to_vec()),
            };
            (all(raw.shape).unwrap_or_default(), all(raw.strides))
        };
        let negative = |_| PyBufferError::new_err("a negative dimension");
        tensor.shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>().map_err(negative)?;
        tensor.strides = match strides {
            Some(strides) => strides.into_iter().map(|stride| stride as isize).collect(),
            None => contiguous(&tensor.shape),
        };
        Ok(tensor)
    }

    /// How many elements the memory has, gaps included; `None` if strides are negative or too
    /// large.
    pub fn reach(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().zip(&self.strides).try_fold(1usize, |n, (&size, &stride)| {
            n.checked_add((size - 1).checked_mul(usize::try_from(stride).ok()?)?)
        })
    }

    /// The elements from the first to the last, gaps included, as numbers of a type of this size.
    ///
    /// `None` where that is no slice: memory of a GPU, negative strides, an address that is not
    /// aligned, another size.
    pub fn slice<T: bytemuck::AnyBitPattern>(&self) -> Option<&[T]> {
        let size = usize::from(self.dtype.bits) / 8 * usize::from(self.dtype.lanes);
        let reach = self.reach()?;
        if !matches!(self.device.kind, 1 | 3)
            || size != size_of::<T>()
            || reach.checked_mul(size)? > isize::MAX as usize
        {
            return None;
        }
        match (reach, self.address.is_null() || !(self.address as usize).is_multiple_of(align_of::<T>())) {
            (0, _) => Some(&[]),
            (_, true) => None,
            // SAFETY: the producer vouches for the memory between the first and the last element
            // until it is given back, which outlives `self`; any bits are a `T`, and the address is
            // aligned for it.
            (_, false) => Some(unsafe { std::slice::from_raw_parts(self.address.cast(), reach) }),
        }
    }
}

#[cfg(feature = "cuda")]
impl Tensor {
    /// The elements from the first to the last in a GPU's memory, gaps included, as numbers of a
    /// type of this size. `None` where that is no slice.
    pub fn device_slice<T: nvfp4::cuda::Plain>(&self) -> Option<nvfp4::cuda::Slice<'_, T>> {
        let size = usize::from(self.dtype.bits) / 8 * usize::from(self.dtype.lanes);
        let reach = self.reach()?;
        if !matches!(self.device.kind, 2 | 13) || size != size_of::<T>() || !self.address.addr().is_multiple_of(size) {
            return None;
        }
        // SAFETY: the producer vouches for the memory until it is given back, and gives it back to
        // the stream that the work is queued on. It says where the memory lies.
        Some(unsafe { nvfp4::cuda::Slice::from_raw(self.address.addr() as u64, reach).known(self.on_gpu()) })
    }

    /// On which GPU it lies. Memory that CUDA manages is on none in particular.
    fn on_gpu(&self) -> nvfp4::cuda::Place {
        match (self.device.kind, usize::try_from(self.device.id)) {
            (2, Ok(id)) => nvfp4::cuda::Place::On(id),
            _ => nvfp4::cuda::Place::Unknown,
        }
    }

    /// The numbers of a tensor in a GPU's memory, which lie row by row, to write: for what callers
    /// pass to be written, as `out` is elsewhere.
    pub fn device_slice_mut<T: nvfp4::cuda::Plain>(&mut self) -> Option<nvfp4::cuda::SliceMut<'_, T>> {
        let dense = self.reach() == Some(self.shape.iter().product());
        let (address, len) = self.device_slice::<T>().filter(|_| dense).map(|slice| (slice.address(), slice.len()))?;
        // SAFETY: the producer vouches for the memory; callers hand the numbers over to be written
        // by the work that is queued next, and whoever reads them on that stream reads them after.
        Some(unsafe { nvfp4::cuda::SliceMut::from_raw(address, len).known(self.on_gpu()) })
    }

    /// The memory of a tensor that lies row by row, with the tensor as its owner; `None` if it is
    /// not aligned to 16 bytes.
    ///
    /// What is made from memory that others see too is only read.
    pub fn into_memory(self) -> Option<nvfp4::cuda::Memory> {
        let size = usize::from(self.dtype.bits) / 8 * usize::from(self.dtype.lanes);
        let (address, len) = (self.address.addr() as u64, self.reach()?.checked_mul(size)?);
        let whole = self.reach()? == self.shape.iter().product::<usize>();
        if !matches!(self.device.kind, 2 | 13) || !whole || (len > 0 && !address.is_multiple_of(16)) {
            return None;
        }
        let place = self.on_gpu();
        // SAFETY: the producer vouches for the memory until the tensor is dropped, after which it
        // goes back to the stream's own allocator. It says where the memory lies.
        Some(unsafe { nvfp4::cuda::Memory::from_raw(address, len, self).known(place) })
    }
}

/// A library's stream, which that library destroys.
#[cfg(feature = "cuda")]
pub fn borrow_stream(device: nvfp4::cuda::Device, raw: *mut c_void) -> nvfp4::cuda::Stream {
    // SAFETY: libraries hand out streams of the primary context that live as long as the process;
    // `Exchange::stream` is where it came from.
    unsafe { nvfp4::cuda::Stream::borrow(device, raw) }
}

/// A tensor of torch over memory that is lent.
pub fn show<'py>(py: Python<'py>, lent: Lent) -> PyResult<Bound<'py, PyAny>> {
    match Exchange::torch(py)? {
        Some(exchange) => exchange.import(py, lent),
        None => py.import("torch")?.call_method1("from_dlpack", (Bound::new(py, lent)?,)),
    }
}

/// Row-major strides.
fn contiguous(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(isize::try_from(shape[d]).unwrap_or(isize::MAX));
    }
    strides
}

/// Makes a capsule's tensor ours: whoever finds the new name leaves it alone.
fn take<T>(capsule: &Bound<'_, PyCapsule>, name: &CStr, used: &'static CStr) -> PyResult<NonNull<T>> {
    let tensor = capsule.pointer_checked(Some(name))?.cast::<T>();
    // SAFETY: the capsule is alive, and the name lives for ever.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } {
        0 => Ok(tensor),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

/// Asks a tensor for its capsule: of version 1, which may be read-only, or of whatever version an
/// older library has.
fn export<'py>(x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let method = x.getattr(pyo3::intern!(py, "__dlpack__")).map_err(|_| {
        let kind = x.get_type().name().map_or("object".to_string(), |name| name.to_string());
        PyTypeError::new_err(format!(
            "expected a numpy array, a torch tensor or anything else with __dlpack__, got {kind}"
        ))
    })?;
    let kwargs = PyDict::new(py);
    kwargs.set_item("max_version", (VERSION.major, VERSION.minor))?;
    method.call((), Some(&kwargs)).or_else(|error| match error.is_instance_of::<PyTypeError>(py) {
        true => method.call0(),
        false => Err(error),
    })
}

impl From<Precision> for DataType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => DataType::F32,
            Precision::Bf16 => DataType::BF16,
            Precision::F16 => DataType::F16,
        }
    }
}
