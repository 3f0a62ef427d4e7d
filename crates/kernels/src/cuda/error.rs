//! Results of the driver as errors.

use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;

pub use crate::error::cuda::{Error, Result, Version};

/// What a driver call returned, as a result.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(Error::NoDriver),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(Error::NoDevice),
        _ => Err(Error::Driver { call, code: code as u32, text: describe(code) }),
    }
}

/// The driver's own words for a code.
fn describe(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the code came from the driver, so the library is loaded; it writes one pointer.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    match known {
        // SAFETY: on success the driver gives a static string that ends in NUL.
        true => format!("{} ({code:?})", unsafe { CStr::from_ptr(text) }.to_string_lossy()),
        false => format!("{code:?}"),
    }
}
