//! The few functions of cuBLASLt that products need, loaded at run time, and the handles that they
//! create.

use crate::cuda::{Device, Environment, Error, Result};
use libloading::Library;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::ptr;

/// An open library.
pub(super) struct Session {
    pub device: Device,
    pub api: Api,
    pub handle: *mut c_void,
}

// SAFETY: cuBLASLt's functions may be called with one handle from any number of threads, at any
// time.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    pub fn new(device: Device, api: Api) -> Result<Session> {
        let _current = device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: a context is current; cuBLASLt writes one handle.
        api.check("cublasLtCreate", unsafe { (api.create)(&mut handle) })?;
        Ok(Session { device, api, handle })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the handle is ours and destroyed once.
            unsafe { (self.api.destroy)(self.handle) };
        }
    }
}

/// A description of an operation, a matrix or a preference, destroyed when dropped.
pub(super) struct Descriptor {
    pub raw: *mut c_void,
    destroy: Destroy,
}

// SAFETY: a description belongs to no thread; it is changed by its owner alone.
unsafe impl Send for Descriptor {}

impl Descriptor {
    /// What `create` writes, to be destroyed by `destroy`.
    pub fn new(
        api: &Api,
        call: &'static str,
        destroy: Destroy,
        create: impl FnOnce(*mut *mut c_void) -> c_int,
    ) -> Result<Self> {
        let mut raw = ptr::null_mut();
        api.check(call, create(&mut raw))?;
        Ok(Descriptor { raw, destroy })
    }

    pub fn set<T: Copy>(&self, api: &Api, call: &'static str, set: Set, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: the descriptor exists, and cuBLASLt copies `size_of::<T>()` bytes; it refuses a
        // size that is not the attribute's.
        api.check(call, unsafe { set(self.raw, attribute, ptr::from_ref(value).cast(), size_of::<T>()) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

// Numbers of cublasLt.h and library_types.h, the same in all versions.
pub(super) const R_32F: c_int = 0;
pub(super) const R_16F: c_int = 2;
pub(super) const R_16BF: c_int = 14;
pub(super) const R_8F_E4M3: c_int = 28;
pub(super) const R_8F_E5M2: c_int = 29;
pub(super) const R_4F_E2M1: c_int = 33;
pub(super) const COMPUTE_32F: c_int = 68;
pub(super) const OPERATION_POINTER_MODE: c_int = 2;
pub(super) const OPERATION_EPILOGUE: c_int = 7;
pub(super) const OPERATION_BIAS: c_int = 8;
pub(super) const OPERATION_FAST_ACCUMULATION: c_int = 25;
pub(super) const OPERATION_BIAS_TYPE: c_int = 26;
/// Of the library's left and right side.
pub(super) const OPERATION_TRANSPOSED: [c_int; 2] = [3, 4];
pub(super) const OPERATION_SCALES: [c_int; 2] = [17, 18];
pub(super) const OPERATION_SCALE_MODES: [c_int; 2] = [31, 32];
pub(super) const POINTERS_TO_GPU: i32 = 1;
pub(super) const EPILOGUE_BIAS: u32 = 4;
pub(super) const SET_OPERATION: &str = "cublasLtMatmulDescSetAttribute";
pub(super) const AS_IT_IS: i32 = 0;
pub(super) const TRANSPOSED: i32 = 1;
pub(super) const PREFERENCE_WORKSPACE: c_int = 1;
pub(super) const PREFERENCE_REDUCTION: c_int = 3;
/// Of A, B, C and D.
pub(super) const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
pub(super) const REDUCTION_COMPUTE_TYPE: u32 = 2;
pub(super) const INVALID_VALUE: c_int = 7;
pub(super) const NOT_SUPPORTED: c_int = 15;

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Default)]
#[repr(C)]
pub(super) struct Found {
    pub algorithm: Algorithm,
    pub workspace: usize,
    pub state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

pub(super) type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
pub(super) type Set = unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> c_int;
pub(super) type Heuristic = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    c_int,
    *mut Found,
    *mut c_int,
) -> c_int;
pub(super) type Matmul = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    *mut c_void,
    *const c_void,
    *const c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *const Algorithm,
    *mut c_void,
    usize,
    *mut c_void,
) -> c_int;

/// The functions of a loaded library.
#[derive(Clone, Copy)]
pub(super) struct Api {
    pub create: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    pub destroy: Destroy,
    pub version: unsafe extern "C" fn() -> usize,
    pub status_text: unsafe extern "C" fn(c_int) -> *const c_char,
    pub operation_create: unsafe extern "C" fn(*mut *mut c_void, c_int, c_int) -> c_int,
    pub operation_destroy: Destroy,
    pub operation_set: Set,
    pub layout_create: unsafe extern "C" fn(*mut *mut c_void, c_int, u64, u64, i64) -> c_int,
    pub layout_destroy: Destroy,
    pub preference_create: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    pub preference_destroy: Destroy,
    pub preference_set: Set,
    pub heuristic: Heuristic,
    pub matmul: Matmul,
}

impl Api {
    /// The functions of a library, which stays loaded until the process ends; `None` if it is
    /// missing or lacks a function.
    pub fn load(name: &OsString) -> Option<Api> {
        /// # Safety
        ///
        /// `T` is the type of the function of that name.
        unsafe fn function<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
            // SAFETY: the caller vouches for the type.
            unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
        }
        // SAFETY: cuBLASLt does nothing when loaded but set itself up. It is never unloaded.
        let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(name) }.ok()?));
        // SAFETY: these are the declarations of cublasLt.h, enumerations being as wide as `int`.
        unsafe {
            Some(Api {
                create: function(library, c"cublasLtCreate")?,
                destroy: function(library, c"cublasLtDestroy")?,
                version: function(library, c"cublasLtGetVersion")?,
                status_text: function(library, c"cublasLtGetStatusString")?,
                operation_create: function(library, c"cublasLtMatmulDescCreate")?,
                operation_destroy: function(library, c"cublasLtMatmulDescDestroy")?,
                operation_set: function(library, c"cublasLtMatmulDescSetAttribute")?,
                layout_create: function(library, c"cublasLtMatrixLayoutCreate")?,
                layout_destroy: function(library, c"cublasLtMatrixLayoutDestroy")?,
                preference_create: function(library, c"cublasLtMatmulPreferenceCreate")?,
                preference_destroy: function(library, c"cublasLtMatmulPreferenceDestroy")?,
                preference_set: function(library, c"cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: function(library, c"cublasLtMatmulAlgoGetHeuristic")?,
                matmul: function(library, c"cublasLtMatmul")?,
            })
        }
    }

    /// What a call returned, as a result.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number.
        let text = unsafe { (self.status_text)(status) };
        let text = match text.is_null() {
            true => "unknown".to_string(),
            // SAFETY: cuBLASLt gives a static string that ends in NUL.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(Error::Driver { call, code: status as u32, text })
    }
}

/// Names and paths to try: bare names for the dynamic loader first, then files in the folders that
/// the environment names.
pub(super) fn candidates() -> Vec<OsString> {
    const NAMES: &[&str] = if cfg!(windows) {
        &["cublasLt64_13.dll", "cublasLt64_12.dll"]
    } else {
        &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]
    };
    let folders = Environment::read().libraries;
    let paths = folders.iter().flat_map(|folder| NAMES.iter().map(|name| folder.join(name)));
    // The loader would say the same of a path that does not exist, only later.
    let paths = paths.filter(|path| path.exists()).map(OsString::from);
    NAMES.iter().map(OsString::from).chain(paths).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_as_large_as_cublas_writes_it() {
        assert_eq!((size_of::<Found>(), size_of::<Algorithm>()), (96, 64));
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_one_is_none() {
        for name in ["no_such_library.so", "libc.so.6"] {
            assert!(Api::load(&name.into()).is_none(), "{name}");
        }
    }

    #[test]
    fn names_come_before_folders() {
        let candidates = candidates();
        let is_name = |name: &OsString| !name.to_string_lossy().contains(std::path::MAIN_SEPARATOR);
        let names = candidates.iter().take_while(|name| is_name(name)).count();
        assert!(names >= 2 && candidates[names..].iter().all(|path| !is_name(path)), "{candidates:?}");
    }
}
