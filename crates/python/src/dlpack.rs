//! Memory that other libraries lend us and that we lend to them, by DLPack. The only file of this crate with `unsafe`.
//!
//! A tensor that is taken over ([`Tensor::of`]) is given back when it is dropped. Ours is lent out ([`Lent`]) with a share in what owns it,
//! so that it lives as long as any view of it.

use nvfp4::{Precision, Values};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The version that we speak.
const VERSION: Version = Version { major: 1, minor: 0 };
/// Set in `Versioned::flags` where memory must not be written.
const READ_ONLY: u64 = 1;

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// 1 is the host, 2 a GPU of CUDA, 3 page-locked memory of the host, 13 memory that CUDA manages.
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
    owner: Owner,
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

enum Owner {
    Legacy(NonNull<Legacy>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: DLPack lets any thread read the memory and call the deleter, which takes the interpreter's lock if it needs that.
unsafe impl Send for Tensor {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: we own the tensor since its capsule was renamed, and give it back once.
        unsafe {
            match self.owner {
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
            }
        }
    }
}

impl Tensor {
    /// Takes a tensor over: from anything with `__dlpack__`, or from a capsule that nobody consumed yet. Nothing is copied and no stream
    /// waits for another: what is done with the memory belongs on the stream that its owner works on.
    pub fn of(x: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        match x.cast::<PyCapsule>() {
            Ok(capsule) => Tensor::consume(capsule),
            Err(_) => {
                let capsule = export(x)?;
                let capsule = capsule.cast::<PyCapsule>();
                Tensor::consume(capsule.map_err(|_| PyTypeError::new_err("__dlpack__ returned no capsule"))?)
            }
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
                // SAFETY: the version comes first in every version.
                let version = unsafe { tensor.as_ref().version };
                if version.major != VERSION.major {
                    let Version { major, minor } = version;
                    return Err(PyBufferError::new_err(format!("expected DLPack 1, got version {major}.{minor}")));
                }
                // SAFETY: the capsule's name and the version say what it points to.
                Tensor::read(Owner::Versioned(tensor), unsafe { &tensor.as_ref().tensor })
            }
            Some(name) if name == LEGACY_USED || name == VERSIONED_USED => Err(PyValueError::new_err(consumed)),
            _ => Err(PyTypeError::new_err("expected a DLPack capsule, got one of another kind")),
        }
    }

    /// What the producer says, checked.
    fn read(owner: Owner, raw: &Raw) -> PyResult<Tensor> {
        // From here on the tensor is given back whatever else is wrong with it.
        let mut tensor = Tensor {
            owner,
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

    /// The address of the first element.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// How many elements the memory has, gaps included; `None` if strides are negative or too large.
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
    /// `None` where that is no slice: memory of a GPU, negative strides, an address that is not aligned, another size.
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
            // SAFETY: the producer vouches for the memory between the first and the last element until it is given back, which outlives
            // `self`; any bits are a `T`, and the address is aligned for it.
            (_, false) => Some(unsafe { std::slice::from_raw_parts(self.address.cast(), reach) }),
        }
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

/// Asks a tensor for its capsule: of version 1, which may be read-only, or of whatever version an older library has.
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

/// Numbers of ours.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// Codes, or scales of a byte.
    Bytes(&'a [u8]),
    /// Anything else.
    Values(Values<'a>),
}

impl Numbers<'_> {
    fn len(&self) -> usize {
        match self {
            Numbers::Bytes(bytes) => bytes.len(),
            Numbers::Values(values) => values.len(),
        }
    }

    fn address(&self) -> *mut u8 {
        match self {
            Numbers::Bytes(x) => x.as_ptr().cast_mut(),
            Numbers::Values(Values::F32(x)) => x.as_ptr().cast_mut().cast(),
            Numbers::Values(Values::Bf16(x)) => x.as_ptr().cast_mut().cast(),
            Numbers::Values(Values::F16(x)) => x.as_ptr().cast_mut().cast(),
        }
    }

    fn dtype(&self) -> DataType {
        match self {
            Numbers::Bytes(_) => DataType::U8,
            Numbers::Values(values) => values.precision().into(),
        }
    }
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

/// Memory of ours to lend out: an object with `__dlpack__`.
#[pyclass(frozen, module = "nvfp4._nvfp4", name = "_Lent")]
pub struct Lent {
    owner: Arc<dyn Any + Send + Sync>,
    address: *mut u8,
    dtype: DataType,
    shape: Vec<i64>,
    access: Access,
}

/// What borrowers may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// Read it: it is part of something.
    Read,
    /// Change it: nobody else has it.
    Write,
}

// SAFETY: the memory is not changed while it is lent out, and its owner can be dropped by any thread.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// What a capsule of ours keeps alive.
struct Context {
    _owner: Arc<dyn Any + Send + Sync>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Lent {
    /// A view of numbers inside `owner`, which `part` finds, with a shape.
    pub fn new<O: Any + Send + Sync, E>(
        owner: Arc<O>,
        part: impl FnOnce(&O) -> Result<(Numbers<'_>, Vec<usize>), E>,
    ) -> Result<Lent, E> {
        let (numbers, shape) = part(&owner)?;
        assert_eq!(numbers.len(), shape.iter().product::<usize>(), "a view has the elements of its shape");
        let (address, dtype) = (numbers.address(), numbers.dtype());
        Ok(Lent::at(owner, address, dtype, &shape, Access::Read))
    }

    /// Numbers that nobody else has.
    pub fn owned<T: bytemuck::NoUninit + Send + Sync>(mut values: Vec<T>, dtype: DataType, shape: &[usize]) -> Lent {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "an array has the elements of its shape");
        assert_eq!(size_of::<T>() * 8, usize::from(dtype.bits), "and their size");
        // The numbers stay where they are when the vector moves.
        let address = values.as_mut_ptr().cast();
        Lent::at(Arc::new(values), address, dtype, shape, Access::Write)
    }

    fn at(
        owner: Arc<dyn Any + Send + Sync>,
        address: *mut u8,
        dtype: DataType,
        shape: &[usize],
        access: Access,
    ) -> Lent {
        Lent { owner, address, dtype, shape: shape.iter().map(|&size| size as i64).collect(), access }
    }

    /// What its elements are.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The same bits as elements of another type of the same size.
    pub fn cast(self, dtype: DataType) -> Lent {
        assert_eq!(self.dtype.bits, dtype.bits, "a cast keeps the size of elements");
        Lent { dtype, ..self }
    }

    fn raw(&self, context: &mut Context) -> Raw {
        Raw {
            data: self.address.cast(),
            device: Device::HOST,
            ndim: context.shape.len() as i32,
            dtype: self.dtype,
            shape: context.shape.as_mut_ptr(),
            strides: context.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }

    fn context(&self) -> Box<Context> {
        let shape: Vec<usize> = self.shape.iter().map(|&size| size as usize).collect();
        let strides = contiguous(&shape).into_iter().map(|stride| stride as i64).collect();
        Box::new(Context { _owner: Arc::clone(&self.owner), shape: self.shape.clone(), strides })
    }
}

#[pymethods]
impl Lent {
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream; // memory of the host has none
        if dl_device.is_some_and(|(kind, _)| kind != Device::HOST.kind) || copy == Some(true) {
            return Err(PyBufferError::new_err("only a view in the host's memory is lent out; copy it yourself"));
        }
        let mut context = self.context();
        let tensor = self.raw(&mut context);
        let context = Box::into_raw(context).cast();
        let (pointer, name, destructor): (*mut c_void, &CStr, ffi::PyCapsule_Destructor) = match max_version {
            Some((major, _)) if major >= VERSION.major => {
                let flags = if self.access == Access::Read { READ_ONLY } else { 0 };
                let managed = Versioned { version: VERSION, context, deleter: Some(free_versioned), flags, tensor };
                (Box::into_raw(Box::new(managed)).cast(), VERSIONED, drop_versioned)
            }
            _ => {
                let managed = Legacy { tensor, context, deleter: Some(free_legacy) };
                (Box::into_raw(Box::new(managed)).cast(), LEGACY, drop_legacy)
            }
        };
        // SAFETY: the pointer is not null, and name and destructor live for ever. A new reference or null comes back.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor))) }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (Device::HOST.kind, Device::HOST.id)
    }
}

/// Frees what [`Lent::__dlpack__`] made.
unsafe extern "C" fn free_legacy(tensor: *mut Legacy) {
    // SAFETY: a consumer calls this once, with what it got from us.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.context.cast::<Context>()));
    }
}

/// Frees what [`Lent::__dlpack__`] made.
unsafe extern "C" fn free_versioned(tensor: *mut Versioned) {
    // SAFETY: a consumer calls this once, with what it got from us.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.context.cast::<Context>()));
    }
}

/// Frees a capsule's tensor, unless somebody consumed it.
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this once, for a capsule that is going; under its first name it points to what we put there.
    unsafe {
        let tensor = unconsumed(capsule, LEGACY);
        if !tensor.is_null() {
            free_legacy(tensor.cast());
        }
    }
}

/// Frees a capsule's tensor, unless somebody consumed it.
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_legacy`.
    unsafe {
        let tensor = unconsumed(capsule, VERSIONED);
        if !tensor.is_null() {
            free_versioned(tensor.cast());
        }
    }
}

/// What a capsule points to if it still has its name.
///
/// # Safety
///
/// `capsule` is a capsule.
unsafe fn unconsumed(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: the caller gives a capsule; asking for the pointer under its own name sets no error.
    unsafe {
        match ffi::PyCapsule_IsValid(capsule, name.as_ptr()) {
            1 => ffi::PyCapsule_GetPointer(capsule, name.as_ptr()),
            _ => ptr::null_mut(),
        }
    }
}
