//! The table of functions by which a library lends its tensors, gives memory and names its stream:
//! `DLPackExchangeAPI`.

use super::lent::{Lent, free_versioned};
#[cfg(feature = "cuda")]
use super::{DataType, Device};
use super::{Owner, Raw, Tensor, VERSION, Version, Versioned};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyType};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

const NAME: &CStr = c"dlpack_exchange_api";

/// The table of a library. It lives as long as the process.
#[derive(Clone, Copy)]
pub struct Exchange(&'static Table);

type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// `DLPackExchangeAPI`, version 1.
#[repr(C)]
struct Table {
    version: Version,
    previous: *mut c_void,
    allocate: Option<unsafe extern "C" fn(*mut Raw, *mut *mut Versioned, *mut c_void, SetError) -> c_int>,
    export: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut *mut Versioned) -> c_int>,
    import: Option<unsafe extern "C" fn(*mut Versioned, *mut *mut ffi::PyObject) -> c_int>,
    borrow: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Raw) -> c_int>,
    stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: the table is never changed, and its functions may be called by any thread that is
// attached to the interpreter.
unsafe impl Sync for Table {}
// SAFETY: as above.
unsafe impl Send for Table {}

impl Exchange {
    /// The table of a class of tensors, if it has one of a version that we know.
    pub fn of(class: &Bound<'_, PyType>) -> Option<Exchange> {
        let table = class.getattr(pyo3::intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
        let table = table.cast::<PyCapsule>().ok()?.pointer_checked(Some(NAME)).ok()?.cast::<Table>();
        // SAFETY: the capsule's name says what it points to, and DLPack that it lives as long as
        // the process; the version comes first.
        let table = unsafe { table.as_ref() };
        (table.version.major == VERSION.major).then_some(Exchange(table))
    }

    /// That of `torch.Tensor`, from torch 2.10 on.
    pub fn torch(py: Python<'_>) -> PyResult<Option<Exchange>> {
        static TORCH: OnceLock<Option<Exchange>> = OnceLock::new();
        if let Some(table) = TORCH.get() {
            return Ok(*table);
        }
        let class = py.import("torch")?.getattr("Tensor")?.cast_into::<PyType>()?;
        Ok(*TORCH.get_or_init(|| Exchange::of(&class)))
    }

    /// Looks at a tensor for as long as the object lives, without taking it over. No stream waits
    /// for another.
    pub fn borrow(self, x: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let borrow = self.0.borrow.ok_or_else(|| missing("dltensor_from_py_object_no_sync"))?;
        let mut raw = MaybeUninit::<Raw>::uninit();
        // SAFETY: the object is alive, and of the class that the table came from; the library
        // writes a description, or an exception.
        if unsafe { borrow(x.as_ptr(), raw.as_mut_ptr()) } != 0 {
            return Err(PyErr::fetch(x.py()));
        }
        // SAFETY: the library has written it. Shape and strides are the object's own, which is
        // alive while they are copied; its memory is as long as the reference that is kept.
        Tensor::read(Owner::Object(x.clone().unbind()), unsafe { raw.assume_init_ref() })
    }

    /// A tensor of the library over memory that is lent.
    pub fn import<'py>(self, py: Python<'py>, lent: Lent) -> PyResult<Bound<'py, PyAny>> {
        let import = self.0.import.ok_or_else(|| missing("managed_tensor_to_py_object_no_sync"))?;
        let (managed, mut made) = (lent.managed(), ptr::null_mut());
        // SAFETY: the library takes the description over, unless it fails; then it is still ours.
        unsafe {
            if import(managed, &mut made) != 0 {
                free_versioned(managed);
                return Err(PyErr::fetch(py));
            }
            Bound::from_owned_ptr_or_err(py, made)
        }
    }

    /// Takes a tensor over. No stream waits for another.
    pub fn export(self, x: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let mut tensor = ptr::null_mut();
        let export = self.0.export.ok_or_else(|| missing("managed_tensor_from_py_object_no_sync"))?;
        // SAFETY: the object is alive, and of the class that the table came from.
        let failed = unsafe { export(x.as_ptr(), &mut tensor) } != 0;
        match NonNull::new(tensor).filter(|_| !failed) {
            // SAFETY: a tensor of version 1 that is ours.
            Some(tensor) => unsafe { Tensor::versioned(tensor) },
            None => Err(PyErr::fetch(x.py())),
        }
    }

    /// Memory of the library for the work of its current stream.
    #[cfg(feature = "cuda")]
    pub fn allocate(self, _: Python<'_>, device: Device, dtype: DataType, len: usize) -> PyResult<Tensor> {
        let mut shape = [len as i64];
        let mut like = Raw {
            data: ptr::null_mut(),
            device,
            ndim: 1,
            dtype,
            shape: shape.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let (mut tensor, mut reason) = (ptr::null_mut(), String::new());
        let allocate = self.0.allocate.ok_or_else(|| missing("managed_tensor_allocator"))?;
        // SAFETY: the library reads the description, and writes one pointer or calls `note` with
        // the reason before it returns.
        let failed = unsafe { allocate(&mut like, &mut tensor, (&raw mut reason).cast(), note) } != 0;
        match NonNull::new(tensor).filter(|_| !failed) {
            // SAFETY: a tensor of version 1 that is ours.
            Some(tensor) => unsafe { Tensor::versioned(tensor) },
            None => Err(pyo3::exceptions::PyMemoryError::new_err(format!("cannot allocate {len} bytes: {reason}"))),
        }
    }

    /// The stream that the library works on now.
    #[cfg(feature = "cuda")]
    pub fn stream(self, py: Python<'_>, device: Device) -> PyResult<*mut c_void> {
        let mut stream = ptr::null_mut();
        let current = self.0.stream.ok_or_else(|| missing("current_work_stream"))?;
        // SAFETY: the library writes one handle.
        match unsafe { current(device.kind, device.id, &mut stream) } {
            0 => Ok(stream),
            _ => Err(PyErr::fetch(py)),
        }
    }
}

fn missing(function: &str) -> PyErr {
    pyo3::exceptions::PyBufferError::new_err(format!(
        "the tensor's library has no {function}; use a newer version of it"
    ))
}

/// Keeps the reason of a failure.
#[cfg(feature = "cuda")]
unsafe extern "C" fn note(reason: *mut c_void, _kind: *const c_char, message: *const c_char) {
    // SAFETY: `Exchange::allocate` passes a string that lives until it returns; the message ends in
    // a zero.
    unsafe { *reason.cast::<String>() = CStr::from_ptr(message).to_string_lossy().into_owned() }
}
