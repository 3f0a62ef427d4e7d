//! Our memory, lent to other libraries.

use super::{DataType, Device, LEGACY, Legacy, READ_ONLY, Raw, VERSION, VERSIONED, Versioned, contiguous};
use nvfp4::Values;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

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

/// Memory of ours to lend out: an object with `__dlpack__`.
#[pyclass(frozen, module = "nvfp4._nvfp4", name = "_Lent")]
pub struct Lent {
    owner: Arc<dyn Any + Send + Sync>,
    address: *mut u8,
    dtype: DataType,
    shape: Vec<i64>,
    access: Access,
    device: Device,
}

/// What borrowers may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// Read it: it is part of something.
    Read,
    /// Change it: nobody else has it.
    Write,
}

// SAFETY: the memory is not changed while it is lent out, and its owner can be dropped by any
// thread.
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
        let shape = shape.iter().map(|&size| size as i64).collect();
        Lent { owner, address, dtype, shape, access, device: Device::HOST }
    }

    /// Memory of a GPU inside `owner`, which `part` finds, with a shape.
    #[cfg(feature = "cuda")]
    pub fn on_gpu<O: Any + Send + Sync, E>(
        owner: Arc<O>,
        id: i32,
        part: impl FnOnce(&O) -> Result<(&nvfp4::cuda::Memory, DataType, Vec<usize>), E>,
    ) -> Result<Lent, E> {
        let (memory, dtype, shape) = part(&owner)?;
        let bytes = shape.iter().product::<usize>() * usize::from(dtype.bits) / 8;
        assert_eq!(memory.len(), bytes, "a view has the bytes of its shape");
        let address = ptr::with_exposed_provenance_mut(memory.address() as usize);
        Ok(Lent { device: Device { kind: 2, id }, ..Lent::at(owner, address, dtype, &shape, Access::Write) })
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

    /// As libraries take it over; [`free_versioned`] frees it.
    pub(super) fn managed(&self) -> *mut Versioned {
        let mut context = self.context();
        let tensor = self.raw(&mut context);
        let context = Box::into_raw(context).cast();
        let flags = if self.access == Access::Read { READ_ONLY } else { 0 };
        Box::into_raw(Box::new(Versioned { version: VERSION, context, deleter: Some(free_versioned), flags, tensor }))
    }

    fn raw(&self, context: &mut Context) -> Raw {
        Raw {
            data: self.address.cast(),
            device: self.device,
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
        // Memory of the host has no stream. On a GPU, who uses it on another stream than it was
        // made on makes that one wait, as with any tensor of torch.
        let _ = stream;
        if dl_device.is_some_and(|(kind, _)| kind != self.device.kind) || copy == Some(true) {
            return Err(PyBufferError::new_err("only a view where the memory lies is lent out; copy it yourself"));
        }
        let (pointer, name, destructor): (*mut c_void, &CStr, ffi::PyCapsule_Destructor) = match max_version {
            Some((major, _)) if major >= VERSION.major => (self.managed().cast(), VERSIONED, drop_versioned),
            _ => {
                let mut context = self.context();
                let tensor = self.raw(&mut context);
                let context = Box::into_raw(context).cast();
                let managed = Legacy { tensor, context, deleter: Some(free_legacy) };
                (Box::into_raw(Box::new(managed)).cast(), LEGACY, drop_legacy)
            }
        };
        // SAFETY: the pointer is not null, and name and destructor live for ever. A new reference
        // or null comes back.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor))) }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind, self.device.id)
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
pub(super) unsafe extern "C" fn free_versioned(tensor: *mut Versioned) {
    // SAFETY: a consumer calls this once, with what it got from us.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.context.cast::<Context>()));
    }
}

/// Frees a capsule's tensor, unless somebody consumed it.
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this once, for a capsule that is going; under its first name it
    // points to what we put there.
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
